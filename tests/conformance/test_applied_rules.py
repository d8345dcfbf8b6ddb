"""A whole set of rules in every store: one transaction, one revision, one entry of the audit trail."""

import asyncio
import uuid
from dataclasses import replace

import pytest

from ratelimitd.errors import RuleBookConflictError, RuleInvalidError, RulesFullError
from ratelimitd.model import Identity
from ratelimitd.rules.assignments import Assignment
from ratelimitd.rules.book import RuleBook
from ratelimitd.rules.sql.applying import PER_STEP
from ratelimitd.rules.store import LimitDraft, PlanDraft, RuleChanges, RuleDraft
from tests.rule_stores import successor

ME = "admin@test"
IDS = [str(uuid.UUID(int=number)) for number in range(4)]
ALICE: Identity = ("user", b"alice")


def draft(endpoint, limit=10, **fields):
    return RuleDraft(endpoint, "user", limit, 60, "token_bucket", **fields)


async def apply(store, *drafts, prune=False, dry_run=False, since=0):
    return await store.apply(drafts, ME, prune=prune, dry_run=dry_run, since=since)


async def stored(store):
    return {rule.endpoint: rule for rule in await store.page("", "", None, 1_000)}


async def test_a_set_is_one_revision_and_one_entry_of_the_audit_trail(store):
    await apply(store, draft("/a"), draft("/b"), draft("/c"))
    first = await stored(store)
    applied = await apply(store, draft("/b", 20), draft("/new"), draft("/a"), prune=True)
    assert applied.revision == await store.revision() == 2
    assert applied.counts == {"update": 1, "create": 1, "": 1, "delete": 1}
    assert [(one.action, one.rule_id) for one in applied.changes[::2]] == [
        ("update", first["/b"].id),
        ("delete", first["/c"].id),
    ]
    now = await stored(store)
    assert {endpoint: rule.limit for endpoint, rule in now.items()} == {
        "/a": 10, "/b": 20, "/new": 10,
    }  # fmt: skip
    assert now["/a"] == first["/a"]
    assert (now["/b"].id, now["/b"].revision) == (first["/b"].id, 2)
    [entry, _] = await store.audit("", None, 10)
    assert (entry.revision, entry.actor, entry.action, entry.rule_id) == (2, ME, "apply", "")
    assert (entry.before, entry.after) == (None, {"created": 1, "updated": 1, "deleted": 1})


async def test_the_trail_of_one_rule_has_what_a_set_changed_of_it_among_its_own(store):
    rule = await store.create(draft("/a"), ME)
    await apply(store, draft("/a", 20), draft("/b"))
    await apply(store, prune=True)
    entries = await store.audit(rule.id, None, 10)
    assert [(entry.revision, entry.action, entry.rule_id) for entry in entries] == [
        (3, "delete", rule.id),
        (2, "update", rule.id),
        (1, "create", rule.id),
    ]
    assert [(entry.before or {}).get("limit") for entry in entries] == [20, 10, None]
    assert {entry.actor for entry in entries} == {ME}
    assert await store.audit(rule.id, 3, 1) == entries[1:2]


async def test_a_node_hears_of_everything_that_a_set_changed_and_removed(store):
    await apply(store, *(draft(f"/{n}") for n in range(3)))
    before = await store.changes_since(None)
    await apply(store, draft("/1", 5), draft("/new"), prune=True)
    since = await store.changes_since(before.revision)
    assert not since.full
    assert len(since.removed_ids) == 2
    book = successor(RuleBook.empty(), before.changed, (), before.revision)
    book = successor(book, since.changed, since.removed_ids, since.revision)
    assert {rule.endpoint: rule.limit for rule in book.rules()} == {"/1": 5, "/new": 10}


async def test_rules_trade_their_places(store):
    await apply(store, *(draft(f"/{n}", id=IDS[n]) for n in range(3)))
    await apply(store, *(draft(f"/{(n + 1) % 3}", id=IDS[n]) for n in range(3)))
    assert {rule.endpoint: rule.id for rule in (await stored(store)).values()} == {
        "/1": IDS[0], "/2": IDS[1], "/0": IDS[2],
    }  # fmt: skip


async def test_a_rule_moves_beside_one_whose_endpoint_is_its_id(store):
    await apply(store, draft("/a", id=IDS[0]), draft(IDS[0]))
    await apply(store, draft("/b", id=IDS[0]))
    assert set(await stored(store)) == {"/b", IDS[0]}


async def test_limits_and_plans_are_compared_as_they_are_stored(store):
    limits = (
        LimitDraft("", 10, 60, "token_bucket"),
        LimitDraft("month", 9, None, "fixed_window", period="month").completed(),
    )
    plans = (PlanDraft("pro", limits),)
    whole = draft("/a", limits=limits, plans=plans)
    assert (await apply(store, whole)).counts == {"create": 1}
    assert (await apply(store, whole)).counts == {"": 1}
    assert (await apply(store, replace(whole, plans=()))).counts == {"update": 1}


async def test_what_changes_nothing_moves_no_revision_and_leaves_no_entry(store):
    await apply(store, draft("/a"))
    for options in ({}, {"prune": True}, {"dry_run": True}):
        applied = await apply(store, draft("/a"), **options)
        assert (applied.revision, applied.changes) == (1, [])
    assert len(await store.audit("", None, 10)) == await store.revision() == 1


async def test_a_dry_run_says_the_same_and_writes_nothing(store):
    await apply(store, draft("/a"), draft("/b"))
    before = await stored(store)
    applied = await apply(store, draft("/a", 5), draft("/c"), prune=True, dry_run=True)
    assert (applied.revision, applied.counts) == (1, {"update": 1, "create": 1, "delete": 1})
    assert [one.rule_id for one in applied.changes] == [before["/a"].id, "", before["/b"].id]
    assert await stored(store) == before
    assert await store.revision() == 1


async def test_a_set_with_a_wrong_rule_changes_nothing(store):
    rule = await store.create(draft("/a"), ME)
    wrong = draft("/w", limit=0)
    undeclared = replace(draft("/u"), identifier_type="tenant")
    for drafts, field in (
        ([draft("/b"), wrong], "rate_limits[1].limit"),
        ([draft("/b"), undeclared], "rate_limits[1].identifier_type"),
        ([draft("/a", id=IDS[1])], "rate_limits[0].id"),
    ):
        with pytest.raises(RuleInvalidError) as refused:
            await apply(store, *drafts)
        assert [violation.field for violation in refused.value.violations] == [field]
    assert await stored(store) == {"/a": rule}
    assert await store.revision() == 1


async def test_a_set_made_for_an_earlier_state_of_the_rules_is_refused(store):
    rule = await store.create(draft("/a"), ME)
    with pytest.raises(RuleBookConflictError, match=r"rate_limits\[0\]\.etag"):
        await apply(store, draft("/a", 5, etag="stale"))
    await apply(store, draft("/a", 5, etag=rule.etag), since=1)
    for since in (1, 3):
        with pytest.raises(RuleBookConflictError, match="the revision is 2 now"):
            await apply(store, draft("/a", 6), since=since)
    await apply(store, prune=True, since=2)
    with pytest.raises(RuleBookConflictError, match="rules were changed after 2"):
        await apply(store, draft("/b"), since=2, dry_run=True)


async def test_assignments_do_not_count_as_changes_of_rules(store):
    await store.create(draft("/a"), ME)
    await store.assignments.assign_all([Assignment(*ALICE, "pro")], ME)
    assert (await apply(store, draft("/a", 5), since=1)).revision == 3


async def test_a_store_does_not_get_fuller_than_it_may(open_store):
    async with open_store(max_rules=2) as store:
        await apply(store, draft("/a"), draft("/b"))
        with pytest.raises(RulesFullError):
            await apply(store, draft("/c"))
        await apply(store, draft("/c"), draft("/d"), prune=True)
        assert set(await stored(store)) == {"/c", "/d"}


async def test_a_set_of_many_steps_is_whole_and_lets_the_loop_run(store):
    number = 3 * PER_STEP + 1
    turns = 0

    async def count():
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count())
    await apply(store, *(draft(f"/{n:04}") for n in range(number)))
    await apply(store, *(draft(f"/{n:04}", 5) for n in range(number)))
    counting.cancel()
    assert turns > 20
    assert {rule.limit for rule in (await stored(store)).values()} == {5}
    applied = await apply(store, prune=True)
    assert applied.counts == {"delete": number}
    assert await stored(store) == {}


async def test_rules_go_back_to_every_earlier_revision_in_a_new_one(store):
    first = await store.create(draft("/a"), ME)
    books = [await stored(store)]
    for change in (
        store.update(first.id, RuleChanges(limit=11), "", ME),
        apply(store, draft("/a", 5), draft("/b"), draft("/c")),
        store.assignments.assign_all([Assignment(*ALICE, "pro")], ME),
        store.update(first.id, RuleChanges(endpoint="/d"), "", ME),
        apply(store, draft("/c", 9), draft("/a"), prune=True),
        apply(store, prune=True),
        store.create(draft("/a", 99, id=first.id), ME),
    ):
        await change
        books.append(await stored(store))
    last = len(books)
    for to in (1, 6, 3, 7, 5, 4, 2, last):
        revision = await store.revision()
        reverted = await store.revert(to, ME, dry_run=False, since=0)
        assert reverted.revision == await store.revision() == revision + 1
        assert {
            rule.endpoint: (rule.id, rule.limit) for rule in (await stored(store)).values()
        } == {rule.endpoint: (rule.id, rule.limit) for rule in books[to - 1].values()}
    again = await store.revert(last, ME, dry_run=False, since=0)
    assert (again.changes, again.revision) == ([], revision + 1)
    assert await store.assignments.assignment(ALICE)


async def test_a_dry_run_of_going_back_changes_nothing(store):
    await apply(store, draft("/a"), draft("/b"))
    await apply(store, draft("/b", 5), draft("/c"), prune=True)
    before = await stored(store)
    reverted = await store.revert(1, ME, dry_run=True, since=2)
    assert [one.action for one in reverted.changes] == ["create", "update", "delete"]
    assert (await stored(store), await store.revision()) == (before, 2)
    with pytest.raises(RuleBookConflictError):
        await store.revert(1, ME, dry_run=True, since=1)


async def test_there_is_no_going_back_to_a_revision_to_come(store):
    await store.create(draft("/a"), ME)
    with pytest.raises(RuleInvalidError, match="as_of: there is no such revision: the newest is 1"):
        await store.revert(2, ME, dry_run=False, since=0)
