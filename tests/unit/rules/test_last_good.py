import asyncio
import json

import pytest

from ratelimitd.model import Algorithm, IdentifierType
from ratelimitd.rules.book import RuleBook
from ratelimitd.rules.last_good import (
    BOOK_FILE,
    RULES_PER_STEP,
    WRITE_DELAY_S,
    LastGoodBook,
)
from ratelimitd.rules.store import RuleDraft
from ratelimitd.rules.validation import validated

ENDPOINTS = ("/orders", "*", "/é😀", '/"quoted"')


def book_of(*endpoints, revision=7):
    rules = (
        validated(
            RuleDraft(endpoint, "ip", n, 60, "sliding_window", enabled=n % 2 == 0),
            rule_id=f"0b1f2c3d-0000-4000-8000-{n:012}",
            revision=n,
        )
        for n, endpoint in enumerate(endpoints, 1)
    )
    return RuleBook.of(rules, revision)


class Pause:
    """A sleep that lasts until :meth:`end`."""

    def __init__(self):
        self.asked_s = []
        self._ends = asyncio.Event()

    async def __call__(self, seconds):
        self.asked_s.append(seconds)
        await self._ends.wait()

    def end(self):
        self._ends.set()


async def stored(directory, book):
    last_good = LastGoodBook(directory)
    last_good.offer(book)
    await last_good.close()
    return directory / BOOK_FILE


async def test_a_book_comes_back_as_it_was(tmp_path, reports):
    book = book_of(*ENDPOINTS)
    await stored(tmp_path, book)
    found = await LastGoodBook(tmp_path).load()
    assert reports == []
    assert found is not None
    assert found.revision == 7
    assert set(found.rules()) == set(book.rules())
    disabled, everywhere = found.candidates("/é😀", IdentifierType.IP)
    assert (disabled.enabled, everywhere.enabled) == (False, True)
    assert {type(rule.algorithm) for rule in found.rules()} == {Algorithm}


async def test_an_empty_book_comes_back_too(tmp_path):
    await stored(tmp_path, RuleBook.empty(3))
    found = await LastGoodBook(tmp_path).load()
    assert found is not None
    assert (len(found), found.revision) == (0, 3)


async def test_a_book_of_many_turns_comes_back_whole(tmp_path):
    count = 3 * RULES_PER_STEP + 1
    await stored(tmp_path, book_of(*(f"/{n}" for n in range(count))))
    found = await LastGoodBook(tmp_path).load()
    assert found is not None
    assert len(found) == count


async def test_no_file_is_no_book_and_nothing_to_report(tmp_path, reports):
    assert await LastGoodBook(tmp_path).load() is None
    assert reports == []


async def test_a_file_cut_anywhere_is_set_aside_and_never_half_used(tmp_path, reports):
    path = await stored(tmp_path, book_of(*ENDPOINTS))
    whole = path.read_bytes()
    for size in range(len(whole) - 1):
        path.write_bytes(whole[:size])
        assert await LastGoodBook(tmp_path).load() is None, size
        assert reports.pop().startswith("the last good rule book was set aside: ")
        assert not path.exists()
        assert path.with_name(f"{BOOK_FILE}.bad").read_bytes() == whole[:size]


async def test_a_changed_byte_is_found(tmp_path, reports):
    path = await stored(tmp_path, book_of("/orders"))
    path.write_bytes(path.read_bytes().replace(b",60,", b",61,"))
    assert await LastGoodBook(tmp_path).load() is None
    assert reports == ["the last good rule book was set aside: its checksum is wrong"]


@pytest.mark.parametrize(
    "foreign",
    [
        b"",
        b"\x00" * 100_000,
        b"rules: []\n",
        b"[1, 2]\n",
        b'{"format":"another 1","revision":1}\n',
        b'{"format":"ratelimitd rule book 1","revision":"1"}\n',
    ],
    ids=["empty", "zeros", "yaml", "a list", "another format", "no revision"],
)
async def test_a_foreign_file_is_set_aside(tmp_path, reports, foreign):
    (tmp_path / BOOK_FILE).write_bytes(foreign)
    assert await LastGoodBook(tmp_path).load() is None
    assert reports == ["the last good rule book was set aside: it has another format"]


@pytest.mark.parametrize("line", [b"[]", b"7", b"nonsense", json.dumps([None] * 8).encode()])
async def test_a_line_that_is_no_rule_condemns_the_file(tmp_path, reports, line):
    path = await stored(tmp_path, book_of("/orders"))
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], line, lines[2]]))
    assert await LastGoodBook(tmp_path).load() is None
    assert reports == ["the last good rule book was set aside: a line of it is no rule"]


async def test_a_file_that_cannot_be_opened_is_reported_and_stays(tmp_path, reports):
    (tmp_path / BOOK_FILE).mkdir()
    assert await LastGoodBook(tmp_path).load() is None
    assert reports == ["the last good rule book cannot be read: Is a directory"]
    assert (tmp_path / BOOK_FILE).exists()


async def test_a_bad_file_that_cannot_be_renamed_is_reported(tmp_path, reports):
    (tmp_path / BOOK_FILE).write_bytes(b"x")
    (tmp_path / f"{BOOK_FILE}.bad").mkdir()
    assert await LastGoodBook(tmp_path).load() is None
    assert reports[0] == "the unusable rule book cannot be renamed: Is a directory"


async def test_a_book_is_written_after_a_pause_and_only_the_newest_of_it(tmp_path):
    pause = Pause()
    last_good = LastGoodBook(tmp_path, sleep=pause)
    for revision in (1, 2, 3):
        last_good.offer(book_of("/orders", revision=revision))
    await asyncio.sleep(0)
    assert not (tmp_path / BOOK_FILE).exists()
    pause.end()
    assert last_good._writer is not None
    await last_good._writer
    found = await LastGoodBook(tmp_path).load()
    assert found is not None
    assert found.revision == 3
    assert pause.asked_s == [WRITE_DELAY_S]


async def test_closing_writes_at_once_what_waits_and_does_so_once(tmp_path):
    last_good = LastGoodBook(tmp_path, sleep=Pause())
    last_good.offer(book_of("/orders", revision=1))
    await asyncio.sleep(0)
    await last_good.close()
    before = (tmp_path / BOOK_FILE).stat().st_ino
    await last_good.close()
    assert (tmp_path / BOOK_FILE).stat().st_ino == before


async def test_closing_without_a_book_writes_nothing(tmp_path):
    await LastGoodBook(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


async def test_a_later_book_replaces_the_file_whole(tmp_path):
    await stored(tmp_path, book_of("/orders", revision=1))
    with (tmp_path / BOOK_FILE).open("rb") as reader:
        old = reader.read(10)
        await stored(tmp_path, book_of("/carts", revision=2))
        assert old + reader.read() != (tmp_path / BOOK_FILE).read_bytes()
    assert [entry.name for entry in tmp_path.iterdir()] == [BOOK_FILE]


async def test_a_book_that_cannot_be_written_is_reported_and_the_next_one_tried(tmp_path, reports):
    directory = tmp_path / "state"
    last_good = LastGoodBook(directory, sleep=lambda _s: asyncio.sleep(0))
    last_good.offer(book_of("/orders", revision=1))
    assert last_good._writer is not None
    await last_good._writer
    assert reports == ["the last good rule book cannot be written: No such file or directory"]
    directory.mkdir()
    last_good.offer(book_of("/orders", revision=2))
    await last_good.close()
    assert [entry.name for entry in directory.iterdir()] == [BOOK_FILE]
