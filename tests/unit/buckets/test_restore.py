import shutil
import tracemalloc

import pytest

from ratelimitd.buckets import snapshot_format
from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.buckets.restore import base_path, log_path, restore
from ratelimitd.buckets.snapshot_format import latest_us, pack, tick_of, unpack
from ratelimitd.buckets.table import LATE_US
from ratelimitd.model import MAX_WAIT_MS, Algorithm, IdentifierType, Rule
from tests.outcomes import NAMED_DECIDE

T = 1_700_006_400_000_000
SECOND = 1_000_000
SECRET = b"k" * 32
KEYS, HEADER = BucketKeys(SECRET), snapshot_format.header(SECRET)
RULE = Rule(
    "1", "/e", IdentifierType.USER, limit=10, window_seconds=60, algorithm=Algorithm.FIXED_WINDOW
)
LOG_RULE = Rule(
    "2", "/e", IdentifierType.USER, limit=10, window_seconds=60, algorithm=Algorithm.SLIDING_WINDOW
)


def bucket(count, at_us=T):
    return pack((count, at_us), RULE, 77)


def log_bucket(count, at_us=T):
    return pack(NAMED_DECIDE[LOG_RULE.algorithm](None, LOG_RULE, at_us, count).state, LOG_RULE, 77)


def states(**buckets):
    return snapshot_format.encode_values(
        (KEYS.stored(name.encode()), value) for name, value in buckets.items()
    )


def resets(*names):
    return snapshot_format.encode_resets(KEYS.stored(name.encode()) for name in names)


def write(path, *parts, header=HEADER):
    path.write_bytes(header + b"".join(parts))
    return path


def read(directory, now_us=T):
    return restore(directory, KEYS, HEADER, now_us)


def held(restored, *names):
    """Return the content of the buckets: spent of a state, (time, …) of a log."""
    values = [restored.buckets.get(name.encode()) for name in names]
    return [value if value is None else unpack(value)[0] for value in values]


class TestFiles:
    def test_an_empty_directory_begins_with_number_one(self, tmp_path):
        restored = read(tmp_path)
        assert (len(restored.buckets), restored.read, restored.torn) == (0, [], [])
        assert restored.next_number == 1

    def test_file_names_have_the_same_length_and_sort_by_number(self, tmp_path):
        assert base_path(tmp_path, 7).name == "buckets-00000007.base"
        assert log_path(tmp_path, 12).name == "buckets-00000012.log"

    def test_the_newest_base_and_the_logs_from_its_number_on_are_read(self, tmp_path):
        paths = {
            name: tmp_path / f"buckets-0000000{name}"
            for name in ("1.log", "2.base", "2.log", "3.log", "4.base", "4.log", "5.log", "6.tmp")
        }
        for path in paths.values():
            write(path, states(ada=bucket(1)))
        restored = read(tmp_path)
        assert restored.read == [paths["4.base"], paths["4.log"], paths["5.log"]]
        assert set(tmp_path.iterdir()) == set(restored.read)
        assert restored.next_number == 6

    def test_superseded_files_and_empty_logs_are_removed(self, tmp_path):
        """Otherwise a node that repeatedly crashes before its first base would fill the directory."""
        write(log_path(tmp_path, 1), states(ada=bucket(1)))
        write(base_path(tmp_path, 2))
        write(log_path(tmp_path, 2), states(ada=bucket(2)))
        write(log_path(tmp_path, 3))
        log_path(tmp_path, 4).touch()
        base_path(tmp_path, 5).with_suffix(".tmp").touch()
        restored = read(tmp_path)
        assert held(restored, "ada") == [2]
        assert sorted(tmp_path.iterdir()) == [base_path(tmp_path, 2), log_path(tmp_path, 2)]
        assert restored.read == sorted(tmp_path.iterdir())
        assert restored.next_number == 5

    def test_other_files_are_left_alone(self, tmp_path):
        for name in ("lock", "buckets-1.log", "buckets-00000001.log.foreign", "rules.json"):
            (tmp_path / name).touch()
        assert read(tmp_path).next_number == 1
        assert len(list(tmp_path.iterdir())) == 4


class TestOrder:
    def test_the_latest_value_of_a_bucket_is_restored(self, tmp_path):
        write(log_path(tmp_path, 1), states(ada=bucket(1)), states(ada=bucket(2), bob=bucket(5)))
        write(log_path(tmp_path, 2), states(ada=bucket(3)))
        assert held(read(tmp_path), "ada", "bob", "eve") == [3, 5, None]

    def test_a_reset_drops_earlier_values_and_not_later_ones(self, tmp_path):
        write(log_path(tmp_path, 1), states(ada=bucket(1), bob=bucket(2)), resets("ada", "bob"))
        write(log_path(tmp_path, 2), states(bob=bucket(3)))
        assert held(read(tmp_path), "ada", "bob") == [None, 3]

    def test_logs_override_their_base_and_older_files_are_ignored(self, tmp_path):
        write(log_path(tmp_path, 1), states(ada=bucket(9), old=bucket(9)))
        write(base_path(tmp_path, 2), states(ada=bucket(1), bob=bucket(1), eve=bucket(1)))
        write(log_path(tmp_path, 2), states(ada=bucket(2)), resets("eve"))
        assert held(read(tmp_path), "ada", "bob", "eve", "old") == [2, 1, None, None]

    def test_chunks_of_an_unknown_kind_are_skipped(self, tmp_path, reports):
        unknown = snapshot_format._encode(b"Z", [b"whatever"])
        write(log_path(tmp_path, 1), states(ada=bucket(1)), unknown, states(bob=bucket(2)))
        restored = read(tmp_path)
        assert held(restored, "ada", "bob") == [1, 2]
        assert reports == []

    def test_restored_buckets_are_older_than_any_used_since(self, tmp_path):
        write(log_path(tmp_path, 1), states(ada=bucket(1), bob=log_bucket(1)))
        restored = read(tmp_path)
        assert {tick_of(restored.buckets.get(name)) for name in (b"ada", b"bob")} == {0}


class TestTime:
    def test_expired_buckets_are_dropped_after_the_tolerance_of_timestamps(self, tmp_path):
        write(log_path(tmp_path, 1), states(ada=bucket(1), bob=log_bucket(1)))
        assert len(read(tmp_path, T + 60 * SECOND + LATE_US - 1).buckets) == 2
        assert len(read(tmp_path, T + 60 * SECOND + LATE_US).buckets) == 0

    def test_times_from_the_future_are_set_to_now(self, tmp_path):
        """I8."""
        ahead_us = T + 3600 * SECOND
        write(log_path(tmp_path, 1), states(ada=bucket(4, ahead_us), bob=log_bucket(4, ahead_us)))
        restored = read(tmp_path)
        ada, bob = restored.buckets.get(b"ada"), restored.buckets.get(b"bob")
        assert (latest_us(ada), latest_us(bob)) == (T, T)
        log_outcome = NAMED_DECIDE[LOG_RULE.algorithm](unpack(bob), LOG_RULE, T, 1)
        assert (unpack(ada)[0], log_outcome.remaining) == (4, 5)

    def test_a_waiting_charge_ahead_of_the_clock_is_kept(self, tmp_path):
        ahead_us = T + MAX_WAIT_MS * 1_000
        write(log_path(tmp_path, 1), states(ada=bucket(4, ahead_us), bob=bucket(4, ahead_us + 1)))
        restored = read(tmp_path).buckets
        assert [latest_us(restored.get(name)) for name in (b"ada", b"bob")] == [ahead_us, T]

    def test_with_callers_time_everything_is_kept_unchanged(self, tmp_path):
        values = {"ada": bucket(1, 5), "bob": bucket(2, T + 3600 * SECOND)}
        write(log_path(tmp_path, 1), states(**values))
        restored = restore(tmp_path, KEYS, HEADER, None)
        assert latest_us(restored.buckets.get(b"ada")) == 5
        assert latest_us(restored.buckets.get(b"bob")) == T + 3600 * SECOND


class TestDamage:
    def test_a_log_truncated_at_any_byte_is_restored_up_to_the_last_complete_chunk(
        self, tmp_path, reports
    ):
        parts = [
            (states(ada=bucket(1)), [1, None, None]),
            (states(bob=log_bucket(2)), [1, T, None]),
            (resets("ada"), [None, T, None]),
            (states(ada=bucket(3), eve=bucket(5)), [3, T, 5]),
            (resets("bob", "eve"), [3, None, None]),
        ]
        whole = HEADER + b"".join(chunk for chunk, _ in parts)
        expected, end = {len(HEADER): [None] * 3}, len(HEADER)
        for chunk, holds in parts:
            expected[end := end + len(chunk)] = holds
        for cut in range(len(whole) + 1):
            directory = tmp_path / str(cut)
            directory.mkdir()
            path = log_path(directory, 1)
            path.write_bytes(whole[:cut])
            restored = read(directory)
            last_whole = max((end for end in expected if end <= cut), default=len(HEADER))
            values = [restored.buckets.get(name) for name in (b"ada", b"bob", b"eve")]
            found = [
                value if value is None else latest_us(value) if is_bytes else unpack(value)[0]
                for value, is_bytes in zip(values, (False, True, False), strict=True)
            ]
            assert found == expected[last_whole]
            torn, holds_something = cut > last_whole, cut > len(HEADER)
            assert restored.torn == [path] * torn
            assert restored.read == [path] * (holds_something and not torn)
            assert path.exists() == holds_something
            assert ["torn" in report for report in reports] == [True] * torn
            reports.clear()

    def test_a_log_that_ends_in_zeros_is_torn(self, tmp_path, reports):
        path = write(log_path(tmp_path, 1), states(ada=bucket(1)), bytes(4096))
        restored = read(tmp_path)
        assert held(restored, "ada") == [1]
        assert (restored.torn, restored.read) == ([path], [])
        assert reports == ["buckets-00000001.log is torn: its last 4096 bytes were ignored"]

    def test_a_file_is_not_read_into_memory_as_a_whole(self, tmp_path):
        path = write(log_path(tmp_path, 1), *[states(ada=bucket(1))] * 50_000)
        tracemalloc.start()
        try:
            assert held(read(tmp_path), "ada") == [1]
            assert tracemalloc.get_traced_memory()[1] < path.stat().st_size / 4
        finally:
            tracemalloc.stop()

    def test_logs_after_a_torn_one_are_restored(self, tmp_path, reports):
        torn = write(log_path(tmp_path, 1), states(ada=bucket(1)), states(bob=bucket(2))[:-3])
        write(log_path(tmp_path, 2), states(eve=bucket(3)))
        restored = read(tmp_path)
        assert held(restored, "ada", "bob", "eve") == [1, None, 3]
        assert restored.torn == [torn]
        assert restored.read == [log_path(tmp_path, 2)]
        assert reports == ["buckets-00000001.log is torn: its last 48 bytes were ignored"]

    @pytest.mark.parametrize(
        "content",
        [
            snapshot_format.header(b"another secret") + states(ada=bucket(1)),
            b"PK\x03\x04",
            b"\0" * 100,
        ],
        ids=["another secret", "another program", "zeros"],
    )
    def test_a_foreign_file_is_set_aside_unchanged_and_reported(self, tmp_path, reports, content):
        log_path(tmp_path, 1).write_bytes(content)
        write(log_path(tmp_path, 2), states(bob=bucket(2)))
        restored = read(tmp_path)
        assert held(restored, "ada", "bob") == [None, 2]
        assert (tmp_path / "buckets-00000001.log.foreign").read_bytes() == content
        assert not log_path(tmp_path, 1).exists()
        assert restored.read == [log_path(tmp_path, 2)]
        (report,) = reports
        assert "buckets-00000001.log" in report

    def test_the_newest_three_earlier_foreign_files_are_kept(self, tmp_path, reports):
        """This happens when the rule database, and so the secret, is new at every start."""
        for number in range(1, 9):
            write(log_path(tmp_path, number), header=b"PK")
            read(tmp_path)
            assert not log_path(tmp_path, number).exists()
        assert [path.name for path in sorted(tmp_path.iterdir())] == [
            f"buckets-0000000{number}.log.foreign" for number in (5, 6, 7, 8)
        ]

    def test_files_set_aside_together_are_all_kept(self, tmp_path, reports):
        write(base_path(tmp_path, 1), header=b"PK")
        for number in range(1, 9):
            write(log_path(tmp_path, number), header=b"PK")
        read(tmp_path)
        assert len(list(tmp_path.glob("*.foreign"))) == 9
        read(tmp_path)
        assert len(list(tmp_path.glob("*.foreign"))) == 9

    def test_a_file_that_cannot_be_read_is_reported_and_kept(self, tmp_path, reports):
        log_path(tmp_path, 1).mkdir()
        write(log_path(tmp_path, 2), states(bob=bucket(2)))
        restored = read(tmp_path)
        assert held(restored, "bob") == [2]
        assert log_path(tmp_path, 1) not in restored.read + restored.torn
        assert reports == [
            "buckets-00000001.log cannot be read (Is a directory); its buckets start afresh"
        ]

    def test_reading_again_finds_the_same(self, tmp_path):
        write(base_path(tmp_path, 1), states(ada=bucket(1), bob=log_bucket(2)))
        write(log_path(tmp_path, 1), states(ada=bucket(3)), resets("bob"), b"torn")
        copy = shutil.copytree(tmp_path, tmp_path / "copy")
        assert contents(read(tmp_path)) == contents(read(tmp_path)) == contents(read(copy))


def contents(restored):
    return dict(
        item
        for index in range(restored.buckets.shard_count)
        for item in restored.buckets.items(index)
    )
