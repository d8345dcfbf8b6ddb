import asyncio
import json
from contextlib import AsyncExitStack
from hashlib import blake2b

import pytest

from ratelimitd.errors import StartupError, StoreUnavailableError
from ratelimitd.model import Algorithm, IdentifierType
from ratelimitd.rules.assignments import Assignments
from ratelimitd.rules.book import RuleBook
from ratelimitd.rules.last_good import (
    ASSIGNMENTS_PER_S,
    BOOK_FILE,
    FINGERPRINT_NAME,
    KEY_FILE,
    KEY_NAME,
    WRITE_DELAY_S,
    BucketKey,
    LastGoodBook,
    require_same_key,
)
from ratelimitd.rules.store import LimitDraft, RuleDraft
from ratelimitd.rules.validation import validated
from tests.rule_stores import rules_with_many_plans, store_at

MANY = 400
"""Rules or assignments: more than one step encodes."""

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


async def stored(directory, book, assignments=None):
    last_good = LastGoodBook(directory)
    last_good.offer(book, assignments or Assignments())
    await last_good.close()
    return directory / BOOK_FILE


async def test_book_is_restored_unchanged(tmp_path, reports):
    book = book_of(*ENDPOINTS)
    await stored(tmp_path, book)
    found = (await LastGoodBook(tmp_path).load()).book
    assert reports == []
    assert found.revision == 7
    assert set(found.rules()) == set(book.rules())
    disabled, everywhere = found.candidates("/é😀", IdentifierType.IP)
    assert (disabled.enabled, everywhere.enabled) == (False, True)
    assert {type(rule.algorithm) for rule in found.rules()} == {Algorithm}


async def test_empty_book_is_restored(tmp_path):
    await stored(tmp_path, RuleBook.of([], 3))
    found = (await LastGoodBook(tmp_path).load()).book
    assert (len(found), found.revision) == (0, 3)


async def test_large_book_is_restored_whole(tmp_path):
    await stored(tmp_path, book_of(*(f"/{n}" for n in range(MANY))))
    found = (await LastGoodBook(tmp_path).load()).book
    assert len(found) == MANY


async def test_rules_of_many_limits_are_written_one_after_the_other(tmp_path, monkeypatch):
    written, to_thread = [], asyncio.to_thread

    def noted(function, *arguments):
        written.extend(one for one in arguments if isinstance(one, bytes))
        return to_thread(function, *arguments)

    monkeypatch.setattr(asyncio, "to_thread", noted)
    drafts = rules_with_many_plans(5)
    rules = [validated(draft, rule_id=draft.id, revision=1) for draft in drafts]
    await stored(tmp_path, RuleBook.of(rules, 1))
    assert [step.count(b"\n") for step in written] == [1] * (1 + 5 + 1)


async def test_only_a_book_of_an_edited_database_is_content(tmp_path):
    last_good = LastGoodBook(tmp_path)
    assert not last_good.was_edited()
    await stored(tmp_path, RuleBook.of([], 0))
    assert not last_good.was_edited()
    path = await stored(tmp_path, RuleBook.of([], 3))
    assert last_good.was_edited()
    path.write_bytes(b"not ours")
    assert not last_good.was_edited()


async def test_file_that_cannot_be_read_counts_as_content(tmp_path):
    (tmp_path / BOOK_FILE).mkdir()
    assert LastGoodBook(tmp_path).was_edited()


async def test_missing_file_is_no_book_and_not_reported(tmp_path, reports):
    assert await LastGoodBook(tmp_path).load() is None
    assert reports == []


async def test_truncated_file_is_set_aside_and_never_partly_used(tmp_path, reports):
    path = await stored(tmp_path, book_of(*ENDPOINTS))
    whole = path.read_bytes()
    for size in range(len(whole) - 1):
        path.write_bytes(whole[:size])
        assert await LastGoodBook(tmp_path).load() is None, size
        assert reports.pop().startswith("the last good rule book was set aside: ")
        assert not path.exists()
        assert path.with_name(f"{BOOK_FILE}.bad").read_bytes() == whole[:size]


async def test_changed_byte_is_detected(tmp_path, reports):
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
        b'{"format":[],"revision":1}\n',
        b"[" * 1_020 + b"\n",
    ],
    ids=["empty", "zeros", "yaml", "a list", "another format", "no revision", "list", "nested"],
)
async def test_foreign_file_is_set_aside(tmp_path, reports, foreign):
    (tmp_path / BOOK_FILE).write_bytes(foreign)
    assert await LastGoodBook(tmp_path).load() is None
    assert reports == ["the last good rule book was set aside: it has another format"]


@pytest.mark.parametrize(
    "line", [b"[]", b"7", b"nonsense", b"[" * 10_000, json.dumps([None] * 8).encode()]
)
async def test_invalid_rule_line_invalidates_the_file(tmp_path, reports, line):
    path = await stored(tmp_path, book_of("/orders"))
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], line, lines[2]]))
    assert await LastGoodBook(tmp_path).load() is None
    assert reports == ["the last good rule book was set aside: a line of it is not a valid rule"]


async def test_unreadable_file_is_reported_and_stays(tmp_path, reports):
    (tmp_path / BOOK_FILE).mkdir()
    assert await LastGoodBook(tmp_path).load() is None
    assert reports == ["the last good rule book cannot be read: Is a directory"]
    assert (tmp_path / BOOK_FILE).exists()


async def test_bad_file_that_cannot_be_renamed_is_reported(tmp_path, reports):
    (tmp_path / BOOK_FILE).write_bytes(b"x")
    (tmp_path / f"{BOOK_FILE}.bad").mkdir()
    assert await LastGoodBook(tmp_path).load() is None
    assert reports[0] == "the unusable rule book cannot be renamed: Is a directory"


async def test_only_the_newest_book_is_written_after_the_delay(tmp_path):
    pause = Pause()
    last_good = LastGoodBook(tmp_path, sleep=pause)
    for revision in (1, 2, 3):
        last_good.offer(book_of("/orders", revision=revision), Assignments())
    await asyncio.sleep(0)
    assert not (tmp_path / BOOK_FILE).exists()
    pause.end()
    await last_good._writer
    found = (await LastGoodBook(tmp_path).load()).book
    assert found.revision == 3
    assert pause.asked_s == [WRITE_DELAY_S]


async def test_close_writes_the_pending_book_once(tmp_path):
    last_good = LastGoodBook(tmp_path, sleep=Pause())
    last_good.offer(book_of("/orders", revision=1), Assignments())
    await asyncio.sleep(0)
    await last_good.close()
    before = (tmp_path / BOOK_FILE).stat().st_ino
    await last_good.close()
    assert (tmp_path / BOOK_FILE).stat().st_ino == before


async def test_close_without_a_book_writes_nothing(tmp_path):
    await LastGoodBook(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


async def test_later_book_replaces_the_file_atomically(tmp_path):
    await stored(tmp_path, book_of("/orders", revision=1))
    with (tmp_path / BOOK_FILE).open("rb") as reader:
        old = reader.read(10)
        await stored(tmp_path, book_of("/carts", revision=2))
        assert old + reader.read() != (tmp_path / BOOK_FILE).read_bytes()
    assert [entry.name for entry in tmp_path.iterdir()] == [BOOK_FILE]


async def test_file_is_private_even_beside_a_leftover_temporary_one(tmp_path):
    left_over = tmp_path / f"{BOOK_FILE}.tmp"
    left_over.write_bytes(b"half")
    left_over.chmod(0o644)
    path = await stored(tmp_path, book_of("/orders"), assigned(1))
    assert path.stat().st_mode & 0o777 == 0o600


async def test_failed_write_is_reported_and_tried_again_until_it_succeeds(tmp_path, reports):
    directory = tmp_path / "state"

    async def sleep(delay_s):
        assert delay_s == WRITE_DELAY_S
        if len(reports) == 2:
            directory.mkdir()

    last_good = LastGoodBook(directory, sleep=sleep)
    last_good.offer(book_of("/orders", revision=1), Assignments())
    await last_good._writer
    assert reports == ["the last good rule book cannot be written: No such file or directory"] * 2
    assert (await LastGoodBook(directory).load()).book.revision == 1
    assert [entry.name for entry in directory.iterdir()] == [BOOK_FILE]


async def test_close_tries_a_failed_write_once_more(tmp_path, reports):
    last_good = LastGoodBook(tmp_path / "away", sleep=Pause())
    last_good.offer(book_of("/orders", revision=1), Assignments())
    await asyncio.sleep(0)
    await last_good.close()
    assert len(reports) == 1


@pytest.fixture
def key(tmp_path):
    """Create the key for one start after another in one state directory."""
    return lambda: BucketKey(tmp_path)


async def test_stores_key_is_used_and_copied_privately(key, store, tmp_path, reports):
    stored = await store.secret(KEY_NAME)
    new = key()
    await new.settle(store)
    assert new.use() == stored == (tmp_path / KEY_FILE).read_bytes()
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.glob("bucket*")) == [KEY_FILE]
    assert reports == []


async def test_copy_is_used_without_the_store(key, store):
    first = key()
    await first.settle(store)
    used = first.use()
    assert key().use() == used


async def test_key_made_without_the_store_is_kept_and_stored(key, store, reports):
    made = key().use()
    later = key()
    assert later.use() == made
    await later.settle(store)
    assert await store.secret(KEY_NAME) == made
    assert reports == []


async def test_different_key_in_the_store_wins_at_the_start_and_is_reported(key, store, reports):
    key().use()
    stored = await store.secret(KEY_NAME)
    new = key()
    await new.settle(store)
    assert new.use() == stored == key().use()
    assert len(reports) == 1
    assert "another bucket key than the state directory" in reports[0]


async def test_different_key_in_the_store_is_only_reported_once_the_node_serves(
    key, store, reports
):
    stored = await store.secret(KEY_NAME)
    serving = key()
    used = serving.use()
    await serving.settle(store)
    assert serving.use() == used != stored
    assert len(reports) == 1
    assert "the next start takes the database's" in reports[0]


async def test_unavailable_store_changes_nothing(key, store, tmp_path):
    (tmp_path / "rules.db").rename(tmp_path / "away.db")
    new = key()
    with pytest.raises(StoreUnavailableError):
        await new.settle(store)
    assert len(new.use()) == 32


@pytest.mark.parametrize("content", [b"", b"x" * 31, b"x" * 33])
def test_invalid_copy_is_reported_and_replaced(key, tmp_path, reports, content):
    (tmp_path / KEY_FILE).write_bytes(content)
    used = key().use()
    assert reports == ["the copy of the bucket key is not a key and is replaced"]
    assert key().use() == used != content


def test_copy_that_cannot_be_read_or_written_is_reported_and_not_fatal(key, tmp_path, reports):
    (tmp_path / KEY_FILE).mkdir()
    assert len(key().use()) == 32
    assert [line.partition(":")[0] for line in reports] == [
        "the copy of the bucket key cannot be read",
        "the bucket key cannot be copied to the state directory",
    ]


def test_leftover_temporary_file_is_replaced(key, tmp_path):
    left_over = tmp_path / f"{KEY_FILE}.tmp"
    left_over.write_bytes(b"half")
    left_over.chmod(0o644)
    used = key().use()
    assert (tmp_path / KEY_FILE).read_bytes() == used
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600


GIVEN = b"a secret of sixteen bytes and more"


async def test_nodes_with_the_same_given_or_stored_key_are_accepted(store):
    await require_same_key(store, GIVEN)
    await require_same_key(store, GIVEN)
    fingerprint = await store.secret(FINGERPRINT_NAME)
    assert len(fingerprint) == 32
    assert GIVEN not in fingerprint


async def test_nodes_without_a_key_setting_are_accepted(store):
    await require_same_key(store, b"")
    await require_same_key(store, b"")
    await require_same_key(store, await store.secret(KEY_NAME))


@pytest.mark.parametrize(("first", "second"), [(GIVEN, GIVEN + b"2"), (GIVEN, b""), (b"", GIVEN)])
async def test_node_with_another_key_is_refused_by_setting_name(store, first, second):
    await require_same_key(store, first)
    with pytest.raises(StartupError, match=r"^KEY_SECRET differs from that of the other nodes"):
        await require_same_key(store, second)
    await require_same_key(store, first)


async def test_one_of_racing_nodes_with_different_keys_starts(postgresql_url):
    async with AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(store_at(postgresql_url)) for _ in range(4)]
        results = await asyncio.gather(
            *(require_same_key(store, GIVEN + bytes([n])) for n, store in enumerate(stores)),
            return_exceptions=True,
        )
    assert sorted(map(type, results), key=str) == [type(None), *[StartupError] * 3]


async def test_rule_with_several_limits_and_older_files_are_restored(
    tmp_path,
):
    limits = (LimitDraft("", 1, 60, "sliding_window"), LimitDraft("day", 9, 90, "fixed_window"))
    draft = RuleDraft("/orders", "ip", 1, 60, "sliding_window", limits=limits)
    rule = validated(draft, rule_id="0b1f2c3d-0000-4000-8000-000000000001", revision=1)
    path = await stored(tmp_path, RuleBook.of([rule], 7))
    found = (await LastGoodBook(tmp_path).load()).book
    assert list(found.rules()) == [rule]

    await stored(tmp_path, book_of("/orders"))
    header, line, _ = path.read_bytes().splitlines(keepends=True)
    older = json.dumps(json.loads(line)[:8]).encode() + b"\n"
    checksum = json.dumps({"blake2b": blake2b(header + older).hexdigest()}).encode()
    path.write_bytes(header + older + checksum + b"\n")
    found = (await LastGoodBook(tmp_path).load()).book
    assert list(found.rules()) == list(book_of("/orders").rules())


def assigned(count, plan="pro"):
    assignments = Assignments()
    for number in range(count):
        assignments.put("user", b"%05d" % number, plan, number)
    return assignments


async def test_assignments_with_any_identifier_are_restored(tmp_path):
    assignments = assigned(MANY)
    for identifier in (b"nul\x00", "caf\u00e9".encode(), b'"', b"i" * 256):
        assignments.put("tenant", identifier, "blocked", 0)
    await stored(tmp_path, book_of(*ENDPOINTS), assignments)
    found = await LastGoodBook(tmp_path).load()
    assert len(found.book) == len(ENDPOINTS)
    assert set(found.assignments.items()) == set(assignments.items())


async def test_older_file_without_assignments_is_read_and_new_files_have_another_format(
    tmp_path,
):
    path = await stored(tmp_path, book_of("/orders"))
    assert json.loads(path.read_bytes().splitlines()[0])["format"] == "ratelimitd rule book 1"
    found = await LastGoodBook(tmp_path).load()
    assert len(found.assignments) == 0
    path = await stored(tmp_path, book_of("/orders"), assigned(1))
    assert json.loads(path.read_bytes().splitlines()[0])["format"] == "ratelimitd rule book 2"


async def test_invalid_assignment_line_invalidates_the_file(tmp_path, reports):
    path = await stored(tmp_path, book_of(), assigned(1))
    header, line, _ = path.read_bytes().splitlines(keepends=True)
    for wrong in (
        ["user", "a", "No Plan", 0],
        ["user", "", "pro", 0],
        [1, "a", "pro", 0],
        ["u", "a", "pro", -1],
        ["u", "\udcff", "pro", 0],
    ):
        line = json.dumps(wrong).encode() + b"\n"
        checksum = json.dumps({"blake2b": blake2b(header + line).hexdigest()}).encode()
        path.write_bytes(header + line + checksum + b"\n")
        assert await LastGoodBook(tmp_path).load() is None
        assert reports.pop().endswith("a line of it is not a valid rule")


async def test_delay_before_writing_grows_with_the_number_of_assignments(tmp_path):
    pause = Pause()
    last_good = LastGoodBook(tmp_path, sleep=pause)
    last_good.offer(book_of(), assigned(ASSIGNMENTS_PER_S // 10))
    for _ in range(3):
        await asyncio.sleep(0)
    assert pause.asked_s == [WRITE_DELAY_S + 0.1]
    await last_good.close()
