"""The assignments of a node: the plan of an identity, its end, replacement and sweeping."""

from __future__ import annotations

import pytest

from ratelimitd.model import US_PER_S
from ratelimitd.rules.assignments import (
    MAX_EXPIRE_TIME,
    Assigned,
    Assignment,
    Assignments,
    assigned_of,
)

NOW_US = 1_000 * US_PER_S


def _assigned(*of: tuple[str, bytes, str, int]) -> Assignments:
    assignments = Assignments()
    for one in of:
        assignments.put(*one)
    return assignments


def _all_steps(assignments: Assignments, other: Assignments) -> None:
    for _ in assignments.replace(other):
        pass


def test_identity_has_its_assigned_plan() -> None:
    assignments = _assigned(("user", b"a", "pro", 0), ("user", b"b", "free", 2_000))
    assert assignments.plan_of("user", b"a", NOW_US) == ("pro", 0)
    assert assignments.plan_of("user", b"b", NOW_US) == ("free", 2_000)
    assert len(assignments) == 2


def test_other_types_and_identifiers_are_unassigned() -> None:
    assignments = _assigned(("user", b"a", "pro", 0))
    assert assignments.plan_of("api_key", b"a", NOW_US) is None
    assert assignments.plan_of("user", b"b", NOW_US) is None


def test_assignment_ends_at_the_second_of_its_end() -> None:
    assignments = _assigned(("user", b"a", "pro", 2_000))
    assert assignments.plan_of("user", b"a", 2_000 * US_PER_S - 1) == ("pro", 2_000)
    assert assignments.plan_of("user", b"a", 2_000 * US_PER_S) is None


def test_latest_end_is_stored_with_any_number_of_plans() -> None:
    plans = [f"plan-{number}" for number in range(5_000)]
    assignments = _assigned(*(("user", plan.encode(), plan, MAX_EXPIRE_TIME) for plan in plans))
    for plan in plans:
        assert assignments.plan_of("user", plan.encode(), NOW_US) == (plan, MAX_EXPIRE_TIME)


def test_any_number_of_plans_that_never_end_is_distinguished() -> None:
    plans = [f"plan-{number}" for number in range(300)]
    assignments = _assigned(*(("user", plan.encode(), plan, 0) for plan in plans))
    for plan in plans:
        assert assignments.plan_of("user", plan.encode(), NOW_US) == (plan, 0)


def test_later_assignment_replaces_the_former() -> None:
    assignments = _assigned(("user", b"a", "pro", 2_000), ("user", b"a", "free", 0))
    assert assignments.plan_of("user", b"a", NOW_US) == ("free", 0)
    assert len(assignments) == 1


def test_removed_assignment_is_gone_and_removing_an_unknown_one_is_ignored() -> None:
    assignments = _assigned(("user", b"a", "pro", 0), ("user", b"b", "pro", 0))
    assignments.remove("user", b"a")
    assignments.remove("user", b"a")
    assignments.remove("ip", b"a")
    assert assignments.plan_of("user", b"a", NOW_US) is None
    assert len(assignments) == 1


def test_types_are_those_with_assignments() -> None:
    assignments = _assigned(
        ("user", b"a", "pro", 0), ("user", b"b", "pro", 0), ("ip", b"c", "x", 0)
    )
    assert assignments.has_type("user")
    assert assignments.types == {"user": 2, "ip": 1}
    assignments.remove("ip", b"c")
    assert not assignments.has_type("ip")
    assert assignments.types == {"user": 2}


def test_only_changes_of_the_types_are_notified() -> None:
    told = []
    assignments = Assignments()
    assignments.on_types_changed = lambda: told.append(dict(assignments.types))
    assignments.put("user", b"a", "pro", 0)
    assignments.put("user", b"b", "pro", 0)
    assignments.put("user", b"a", "free", 0)
    assignments.remove("user", b"a")
    assert told == [{"user": 1}]
    assignments.remove("user", b"b")
    assert told == [{"user": 1}, {}]


def test_replaced_content_is_in_force_at_the_first_step() -> None:
    told = []
    assignments = _assigned(("user", b"a", "pro", 0), ("user", b"b", "pro", 0))
    assignments.on_types_changed = lambda: told.append(dict(assignments.types))
    steps = assignments.replace(_assigned(("ip", b"1.1.1.1", "free", 0)))
    next(steps)
    assert assignments.plan_of("ip", b"1.1.1.1", NOW_US) == ("free", 0)
    assert assignments.plan_of("user", b"a", NOW_US) is None
    assert (len(assignments), told) == (1, [{"ip": 1}])
    assert sum(1 for _ in steps) > 100, "the old content is freed in steps"


def test_replacement_with_the_same_types_is_not_notified() -> None:
    told = []
    assignments = _assigned(("user", b"a", "pro", 0))
    assignments.on_types_changed = lambda: told.append(1)
    _all_steps(assignments, _assigned(("user", b"b", "free", 0)))
    assert assignments.plan_of("user", b"b", NOW_US) == ("free", 0)
    assert not told


def test_expired_assignments_are_swept_in_steps() -> None:
    identifiers = [str(number).encode() for number in range(1_000)]
    assignments = _assigned(
        *(("user", one, "pro", 900) for one in identifiers), ("ip", b"b", "x", 0)
    )
    told = []
    assignments.on_types_changed = lambda: told.append(1)
    assignments.sweep(NOW_US, 100_000)
    assert 1 < len(assignments) < 1_001
    assignments.sweep(NOW_US, 1_000_000)
    assert assignments.types == {"ip": 1}
    assert told == [1]


def test_unexpired_assignments_are_not_swept() -> None:
    assignments = _assigned(("user", b"a", "pro", 1_001), ("user", b"b", "pro", 0))
    assignments.sweep(NOW_US, 1_000_000)
    assert len(assignments) == 2


def test_holders_of_plans_are_counted() -> None:
    assignments = _assigned(
        ("user", b"a", "pro", 0), ("user", b"b", "pro", 900), ("ip", b"c", "x", 0)
    )
    assert assignments.plans == {"pro": 2, "x": 1}
    assignments.put("user", b"a", "free", 0)
    assignments.remove("ip", b"c")
    assert assignments.plans == {"pro": 1, "free": 1}
    assignments.sweep(NOW_US, 1_000_000)
    assert assignments.plans == {"free": 1}
    _all_steps(assignments, _assigned(("ip", b"1.1.1.1", "y", 0)))
    assert assignments.plans == {"y": 1}


def test_iteration_yields_all_and_tolerates_changes() -> None:
    wanted = {Assigned("user", b"%d" % number, f"p{number}", number) for number in range(1_000)}
    assignments = _assigned(*wanted)
    found = assignments.items()
    first = next(found)
    _all_steps(assignments, _assigned(("ip", b"1.1.1.1", "y", 0)))
    assert {first, *found} == wanted


def test_etags_distinguish_versions() -> None:
    one = Assignment("user", b"a", "pro")
    etags = {
        one.with_etag(1).etag,
        one.with_etag(2).etag,
        one._replace(plan="free").with_etag(1).etag,
        one._replace(note="n").with_etag(1).etag,
        one._replace(expire_time=1).with_etag(1).etag,
    }
    assert len(etags) == 5
    assert one.with_etag(1).etag == one.with_etag(1).with_etag(1).etag


@pytest.mark.parametrize(
    "row",
    [
        ("user", b"a", "pro", "0"),
        ("user", b"a", "pro", -1),
        ("user", b"a", "pro", MAX_EXPIRE_TIME + 1),
        ("user", b"a", "Pro", 0),
        ("user", b"a", b"pro", 0),
        ("user", b"", "pro", 0),
        ("user", b"a" * 257, "pro", 0),
        ("user", "a", "pro", 0),
        ("user", b"\xff", "pro", 0),
        ("user", b"\xed\xb3\xbf", "pro", 0),
        ("ip+user", b"a", "pro", 0),
        (None, b"a", "pro", 0),
    ],
)
def test_invalid_stored_row_is_no_assignment(row: tuple[object, ...]) -> None:
    assert assigned_of(row) is None
    for identifier in (b"a", "caf\u00e9".encode()):
        assert assigned_of(("user", identifier, "pro", 0)) == Assigned("user", identifier, "pro", 0)


def test_number_of_an_unused_plan_is_reused_without_affecting_iterations() -> None:
    assignments = _assigned(("user", b"a", "pro", 0), ("user", b"b", "free", 7))
    found = assignments.items()
    first = next(found)
    assignments.remove("user", b"a")
    assignments.put("user", b"c", "blocked", 0)
    assignments.put("user", b"b", "free", 0)
    assert {first, *found} == {Assigned("user", b"a", "pro", 0), Assigned("user", b"b", "free", 7)}
    assert assignments.plan_of("user", b"c", NOW_US) == ("blocked", 0)
    assert assignments.plan_of("user", b"b", NOW_US) == ("free", 0)
    assert assignments.plan_of("user", b"a", NOW_US) is None
    assert assignments.plans == {"blocked": 1, "free": 1}


def test_identifiers_that_contain_each_other_are_distinct() -> None:
    """All of them are in one shard, as if they had the same hash."""
    identifiers = [
        "a",
        "aa",
        "ab",
        "1",
        "a\x00",
        "0",
        "\x00",
        "10",
        "caf\u00e9",
        "\u00e9",
        "\U0010ffff",
    ]

    class Colliding(bytes):
        def __hash__(self) -> int:
            return 7

    keys = [Colliding(identifier.encode()) for identifier in identifiers]
    assignments = _assigned(*(("user", key, f"p{key.hex()}", 0) for key in keys[::2]))
    for number, key in enumerate(keys):
        expected = None if number % 2 else (f"p{key.hex()}", 0)
        assert assignments.plan_of("user", key, NOW_US) == expected
    for key in keys:
        assignments.remove("user", key)
    assert len(assignments) == 0
