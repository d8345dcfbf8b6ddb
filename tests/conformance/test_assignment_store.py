"""What every store of assignments promises, the same tests for each of them."""

import time

import pytest

from ratelimitd.errors import (
    AssignmentConflictError,
    AssignmentNotFoundError,
    AssignmentsFullError,
)
from ratelimitd.model import US_PER_S
from ratelimitd.rules.assignments import Assigned, Assignment
from ratelimitd.rules.store import AssignmentQuery, RuleDraft

ME = "admin@test"
DAY_S = 86_400
NOBODY = ("user", b"nobody")


def pro(identifier, plan="pro", **fields):
    return Assignment("user", identifier, plan, **fields)


async def listed(store, after=None, size=100, **query):
    found = await store.assignments.assignments(AssignmentQuery(**query), after, size)
    return [one.identity for one in found]


async def test_an_assignment_is_what_was_asked_for_with_an_etag(store):
    wanted = pro(b"a\x00\xc3\xa9", expire_time=1_800_000_000, note="until the trial ends")
    [assigned] = await store.assignments.assign_all([wanted], ME)
    assert assigned._replace(etag="") == wanted
    assert assigned.etag
    assert await store.assignments.assignment(wanted.identity) == assigned


async def test_a_second_assignment_takes_the_place_of_the_first_and_has_another_etag(store):
    [first] = await store.assignments.assign_all([pro(b"a")], ME)
    [second] = await store.assignments.assign_all([pro(b"a", "free")], ME)
    assert (second.plan, second.etag != first.etag) == ("free", True)
    assert await listed(store) == [("user", b"a")]


async def test_assigning_what_is_assigned_changes_nothing(store):
    [first] = await store.assignments.assign_all([pro(b"a")], ME)
    assert await store.assignments.assign_all([pro(b"a")], ME) == [first]
    assert await store.revision() == 1
    [noted] = await store.assignments.assign_all([pro(b"a")._replace(note="why")], ME)
    assert (noted.note, noted.etag != first.etag) == ("why", True)


async def test_an_etag_of_another_version_is_refused(store):
    [first] = await store.assignments.assign_all([pro(b"a")], ME)
    await store.assignments.assign_all([pro(b"a", "free", etag=first.etag)], ME)
    with pytest.raises(AssignmentConflictError):
        await store.assignments.assign_all([pro(b"b"), pro(b"a", etag=first.etag)], ME)
    with pytest.raises(AssignmentConflictError):
        await store.assignments.assign_all([pro(b"new", etag=first.etag)], ME)
    with pytest.raises(AssignmentConflictError):
        await store.assignments.unassign(("user", b"a"), first.etag, ME)
    assert await listed(store, plan="free") == await listed(store) == [("user", b"a")]
    assert await store.revision() == 2


async def test_what_is_unassigned_is_gone_and_cannot_be_unassigned_again(store):
    [first] = await store.assignments.assign_all([pro(b"a")], ME)
    await store.assignments.unassign(first.identity, first.etag, ME)
    assert await listed(store) == []
    for call in (
        store.assignments.assignment(first.identity),
        store.assignments.unassign(first.identity, "", ME),
    ):
        with pytest.raises(AssignmentNotFoundError):
            await call


async def test_pages_are_in_the_order_of_type_and_the_bytes_of_identifiers(store):
    identities = [("ip", b"10.0.0.1"), ("user", b"A"), ("user", b"a"), ("user", b"\xc3\xa9")]
    await store.assignments.assign_all([Assignment(*one, "pro") for one in identities[::-1]], ME)
    assert await listed(store) == identities
    assert await listed(store, size=2) == identities[:2]
    assert await listed(store, after=identities[1], size=2) == identities[2:]
    assert await listed(store, after=identities[3]) == []


async def test_a_listing_selects_by_plan_type_and_prefix(store):
    await store.assignments.assign_all(
        [
            pro(b"a1"),
            pro(b"a2", "free"),
            pro(b"b1"),
            pro("\U0010ffff".encode()),
            Assignment("ip", b"::1", "pro"),
        ],
        ME,
    )
    assert await listed(store, plan="free") == [("user", b"a2")]
    assert await listed(store, identifier_type="ip") == [("ip", b"::1")]
    assert await listed(store, identifier_type="user", prefix=b"a") == [
        ("user", b"a1"),
        ("user", b"a2"),
    ]
    assert await listed(store, identifier_type="user", prefix=b"\xf4\x8f") == [
        ("user", "\U0010ffff".encode())
    ]
    assert await listed(store, identifier_type="user", prefix=b"\xff") == []
    assert await listed(store, plan="pro", identifier_type="user", prefix=b"a") == [("user", b"a1")]


async def test_what_has_expired_is_as_good_as_absent(store, clock):
    until = clock.now_us() // US_PER_S + 60
    [first] = await store.assignments.assign_all([pro(b"a", expire_time=until)], ME)
    clock.advance(seconds=60)
    assert await listed(store) == []
    with pytest.raises(AssignmentNotFoundError):
        await store.assignments.assignment(first.identity)
    with pytest.raises(AssignmentNotFoundError):
        await store.assignments.unassign(first.identity, "", ME)
    [second] = await store.assignments.assign_all([pro(b"a")], ME)
    [newest, _] = await store.audit("", None, 10)
    assert (newest.action, newest.before) == ("create", None)
    assert second.etag != first.etag


async def test_what_expired_long_ago_makes_room_in_a_full_store(open_store, clock):
    async with open_store(max_assignments=3) as store:
        until = clock.now_us() // US_PER_S + 60
        await store.assignments.assign_all([pro(b"a", expire_time=until), pro(b"b"), pro(b"c")], ME)
        with pytest.raises(AssignmentsFullError, match="there are 3 assignments"):
            await store.assignments.assign_all([pro(b"b", "free"), pro(b"d")], ME)
        assert (await store.assignments.assignment(("user", b"b"))).plan == "pro"
        await store.assignments.assign_all([pro(b"b", "free")], ME)
        clock.advance(seconds=60 + DAY_S)
        await store.assignments.assign_all([pro(b"d")], ME)
        with pytest.raises(AssignmentsFullError):
            await store.assignments.assign_all([pro(b"e")], ME)
        await store.assignments.unassign(("user", b"d"), "", ME)
        await store.assignments.assign_all([pro(b"e")], ME)


async def test_a_node_whose_clock_is_ahead_deletes_nothing_that_is_in_force(store, clock):
    until = int(time.time()) + 30 * DAY_S
    await store.assignments.assign_all([pro(b"a", expire_time=until)], ME)
    ahead_us = 20 * 365 * DAY_S * US_PER_S
    clock.step(us=ahead_us)
    await store.assignments.assign_all([pro(b"b")], ME)
    clock.step(us=-ahead_us)
    assert await listed(store) == [("user", b"a"), ("user", b"b")]


async def test_each_change_is_in_the_audit_trail_with_who_and_what(store):
    await store.create(RuleDraft("/a", "user", 1, 1, "fixed_window"), ME)
    await store.assignments.assign_all([pro(b"a"), pro(b"b")], ME)
    await store.assignments.assign_all([pro(b"a", "free", note="n")], ME)
    await store.assignments.unassign(("user", b"a"), "", "ops")
    entries = await store.audit("", None, 10)
    assert [(one.revision, one.action, one.actor) for one in entries] == [
        (5, "delete", "ops"),
        (4, "update", ME),
        (3, "create", ME),
        (2, "create", ME),
        (1, "create", ME),
    ]
    before = {"identifier_type": "user", "identifier": "a", "plan": "pro", "expire_time": 0}
    assert entries[1].before == {**before, "note": ""}
    assert entries[1].after == entries[0].before == {**before, "plan": "free", "note": "n"}
    assert (entries[0].after, entries[0].rule_id) == (None, "")
    assert await store.audit(entries[4].rule_id, None, 10) == entries[4:]


async def test_changes_since_a_revision_are_told_with_those_of_rules(store, clock):
    until = clock.now_us() // US_PER_S + 60
    rule = await store.create(RuleDraft("/a", "user", 1, 1, "fixed_window"), ME)
    await store.assignments.assign_all([pro(b"a"), pro(b"b", expire_time=until)], ME)
    await store.assignments.unassign(("user", b"a"), "", ME)
    await store.assignments.assign_all([Assignment("ip", b"::1", "free")], ME)
    since = await store.changes_since(1)
    assert (since.revision, since.changed, since.removed_ids) == (5, [], [])
    assert since.unassigned == [("user", b"a")]
    assert sorted(since.assigned) == [
        Assigned("ip", b"::1", "free", 0),
        Assigned("user", b"b", "pro", until),
    ]
    assert (await store.changes_since(4)).assigned == [Assigned("ip", b"::1", "free", 0)]
    clock.advance(seconds=60)
    whole = await store.changes_since(None)
    assert (whole.full, list(whole.changed)) == (True, [rule])
    assert whole.assignments is not None
    assert list(whole.assignments.items()) == [Assigned("ip", b"::1", "free", 0)]


async def test_many_are_assigned_in_one_transaction_and_read_whole(store):
    many = [pro(b"%04d" % number) for number in range(1_000)]
    assert len(await store.assignments.assign_all(many, ME)) == 1_000
    assert await store.revision() == 1_000
    assert await listed(store, size=2_000) == [one.identity for one in many]
    whole = await store.changes_since(None)
    assert whole.assignments is not None
    assert len(whole.assignments) == 1_000
