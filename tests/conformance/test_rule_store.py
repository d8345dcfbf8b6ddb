"""What every rule store promises, the same tests for each of them."""

import asyncio
import re
from dataclasses import replace
from datetime import timedelta

import pytest

from ratelimitd.errors import (
    RuleConflictError,
    RuleExistsError,
    RuleInvalidError,
    RuleNotFoundError,
    RulesFullError,
)
from ratelimitd.model import Algorithm, Calendar, IdentifierType, Period
from ratelimitd.rules.assignments import Assignment
from ratelimitd.rules.store import AuditFilter, LimitDraft, PlanDraft, RuleChanges, RuleDraft

ORDERS = RuleDraft("/orders", "user", 10, 60, "token_bucket")
CARTS = RuleDraft("/carts", "user", 20, 60, "fixed_window")
UNKNOWN_ID = "0b1f2c3d-0000-4000-8000-00000000000a"
ME = "admin@test"


async def ids(store, *selection):
    return [rule.id for rule in await store.page(*(selection or ("", "", None, 100)))]


async def test_a_new_store_is_empty_at_revision_zero(store):
    assert await store.revision() == 0
    assert await store.page("", "", None, 10) == []
    assert (await store.changes_since(None))[:5] == (0, [], (), [], True)


async def test_a_created_rule_is_what_was_asked_for_with_an_id_and_an_etag(store):
    rule = await store.create(ORDERS, ME)
    assert (rule.endpoint, rule.identifier_type) == ("/orders", IdentifierType.USER)
    assert (rule.limit, rule.window_seconds, rule.enabled) == (10, 60, True)
    assert rule.algorithm is Algorithm.TOKEN_BUCKET
    assert rule.revision == await store.revision() == 1
    assert rule.etag
    assert list(await store.page("", "", None, 10)) == [rule]


async def test_an_id_of_the_callers_choice_is_kept_in_its_one_spelling(store):
    draft = RuleDraft("/orders", "user", 10, 60, "token_bucket", id=UNKNOWN_ID.upper())
    assert (await store.create(draft, ME)).id == UNKNOWN_ID


async def test_a_duplicate_pair_is_refused_with_the_id_of_its_rule(store):
    rule = await store.create(ORDERS, ME)
    with pytest.raises(RuleExistsError, match=f"endpoint and identifier type.*{rule.id}"):
        await store.create(ORDERS, ME)
    assert await store.revision() == 1


async def test_a_duplicate_id_is_refused_as_such(store):
    rule = await store.create(ORDERS, ME)
    with pytest.raises(RuleExistsError, match="with the id"):
        await store.create(RuleDraft("/new", "ip", 1, 1, "fixed_window", id=rule.id.upper()), ME)


async def test_a_malformed_rule_changes_nothing_and_names_every_field(store):
    with pytest.raises(RuleInvalidError) as caught:
        await store.create(RuleDraft("", "user", 0, 0, "x"), ME)
    assert len(caught.value.violations) == 4
    assert await store.revision() == 0


async def test_a_full_store_refuses_one_more(open_store):
    async with open_store(max_rules=1) as store:
        rule = await store.create(ORDERS, ME)
        with pytest.raises(RulesFullError):
            await store.create(CARTS, ME)
        await store.delete(rule.id, "", ME)
        await store.create(CARTS, ME)


async def test_a_new_store_is_filled_with_all_rules_at_once_each_a_revision_of_its_own(open_store):
    drafts = [RuleDraft(f"/{n:03}", "user", 1, 1, "fixed_window") for n in range(300)]
    async with open_store() as store, open_store() as other:
        assert await store.create_all(drafts, ME) == 300
        assert await store.revision() == 300
        rules = await other.page("", "", None, 1000)
        assert [rule.endpoint for rule in rules] == [draft.endpoint for draft in drafts]
        assert [rule.revision for rule in rules] == list(range(1, 301))
        again = await store.create(CARTS, ME)
        assert again.revision == 301


async def test_a_store_that_ever_held_a_rule_is_not_filled(store):
    rule = await store.create(ORDERS, ME)
    assert await store.create_all([CARTS], ME) == 0
    await store.delete(rule.id, "", ME)
    assert await store.create_all([CARTS], ME) == 0
    assert await ids(store) == []


@pytest.mark.parametrize(
    ("last", "error"),
    [
        (CARTS, RulesFullError),
        (RuleDraft("", "user", 0, 1, "x"), RuleInvalidError),
        (RuleDraft("/0", "user", 9, 9, "fixed_window"), RuleExistsError),
    ],
)
async def test_rules_of_which_one_is_refused_leave_a_new_store_new(open_store, last, error):
    drafts = [RuleDraft(f"/{n}", "user", 1, 1, "fixed_window") for n in range(200)]
    async with open_store(max_rules=200 if error is RulesFullError else 201) as store:
        with pytest.raises(error):
            await store.create_all([*drafts, last], ME)
        assert (await store.revision(), await ids(store)) == (0, [])
        assert await store.create_all(drafts, ME) == 200


async def test_an_update_changes_exactly_the_named_fields(store):
    before = await store.create(ORDERS, ME)
    after = await store.update(before.id.upper(), RuleChanges(limit=99), "", ME)
    assert (after.limit, after.window_seconds, after.endpoint) == (99, 60, "/orders")
    assert after.revision == await store.revision() == 2
    assert after.etag != before.etag
    assert list(await store.page("", "", None, 10)) == [after]


async def test_an_update_that_changes_nothing_succeeds_and_moves_nothing(store):
    before = await store.create(ORDERS, ME)
    after = await store.update(before.id, RuleChanges(limit=10, enabled=True), before.etag, ME)
    assert after == before
    assert after.etag == before.etag
    assert await store.revision() == 1


async def test_an_update_is_validated_as_a_whole_and_leaves_the_rule_when_refused(store):
    before = await store.create(ORDERS, ME)
    with pytest.raises(RuleInvalidError) as caught:
        await store.update(before.id, RuleChanges(limit=0, window_seconds=0), "", ME)
    assert [v.field for v in caught.value.violations] == [
        "rate_limit.limit",
        "rate_limit.window_seconds",
    ]
    assert list(await store.page("", "", None, 10)) == [before]
    assert await store.revision() == 1


async def test_an_update_may_not_take_the_pair_of_another_rule(store):
    await store.create(ORDERS, ME)
    carts = await store.create(CARTS, ME)
    with pytest.raises(RuleExistsError):
        await store.update(carts.id, RuleChanges(endpoint="/orders"), "", ME)
    moved = await store.update(carts.id, RuleChanges(identifier_type="ip"), "", ME)
    assert (moved.endpoint, moved.identifier_type) == ("/carts", "ip")


async def test_an_etag_that_is_not_the_rules_stops_update_and_delete(store):
    first = await store.create(ORDERS, ME)
    second = await store.update(first.id, RuleChanges(limit=11), first.etag, ME)
    with pytest.raises(RuleConflictError):
        await store.update(first.id, RuleChanges(limit=12), first.etag, ME)
    with pytest.raises(RuleConflictError):
        await store.delete(first.id, first.etag, ME)
    await store.delete(first.id.upper(), second.etag, ME)
    assert await ids(store) == []


async def test_a_value_that_comes_back_has_another_etag_than_before(store):
    first = await store.create(ORDERS, ME)
    await store.update(first.id, RuleChanges(limit=11), "", ME)
    third = await store.update(first.id, RuleChanges(limit=10), "", ME)
    assert third.etag != first.etag


async def test_an_unknown_rule_can_be_neither_updated_nor_deleted(store):
    with pytest.raises(RuleNotFoundError):
        await store.update(UNKNOWN_ID, RuleChanges(limit=1), "", ME)
    with pytest.raises(RuleNotFoundError):
        await store.delete(UNKNOWN_ID, "", ME)
    assert await store.revision() == 0


async def test_an_id_that_is_no_uuid_is_malformed_in_its_own_field(store):
    with pytest.raises(RuleInvalidError, match=re.escape("rate_limit.id")):
        await store.update("7", RuleChanges(limit=1), "", ME)
    with pytest.raises(RuleInvalidError, match=r"^id:"):
        await store.delete("7", "", ME)


async def test_pages_follow_the_bytes_of_endpoint_then_identifier_type(store):
    pairs = [
        ("*", "user"),
        ("/B", "user"),
        ("/a", "api_key"),
        ("/a", "user"),
        ("/é", "ip"),
        ("/😀", "ip"),
    ]
    for endpoint, identifier_type in reversed(pairs):
        await store.create(RuleDraft(endpoint, identifier_type, 1, 1, "fixed_window"), ME)
    seen, after = [], None
    while page := await store.page("", "", after, 2):
        assert len(page) == 2
        seen += [(rule.endpoint, rule.identifier_type) for rule in page]
        after = seen[-1]
    assert seen == pairs
    assert seen == sorted(seen, key=lambda pair: (pair[0].encode(), pair[1]))


async def test_a_page_selects_by_endpoint_and_identifier_type(store):
    orders, carts = await store.create(ORDERS, ME), await store.create(CARTS, ME)
    by_ip = await store.create(RuleDraft("/orders", "ip", 1, 1, "fixed_window"), ME)
    assert await ids(store, "/orders", "", None, 10) == [by_ip.id, orders.id]
    assert await ids(store, "", "user", None, 10) == [carts.id, orders.id]
    assert await ids(store, "/orders", "user", None, 10) == [orders.id]
    assert await ids(store, "/order", "", None, 10) == []


async def test_changes_since_a_revision_are_what_happened_after_it(store):
    orders, carts = await store.create(ORDERS, ME), await store.create(CARTS, ME)
    orders = await store.update(orders.id, RuleChanges(limit=11), "", ME)
    await store.delete(carts.id, "", ME)
    assert (await store.changes_since(2))[:5] == (4, [orders], [carts.id], [], False)
    assert (await store.changes_since(3))[:5] == (4, [], [carts.id], [], False)
    assert (await store.changes_since(4))[:5] == (4, [], [], [], False)
    assert (await store.changes_since(None))[:5] == (4, [orders], (), [], True)


async def test_a_rule_deleted_and_made_again_under_its_id_is_both_removed_and_changed(store):
    first = await store.create(ORDERS, ME)
    await store.delete(first.id, "", ME)
    again = await store.create(RuleDraft("/new", "ip", 1, 1, "fixed_window", id=first.id), ME)
    assert (await store.changes_since(1))[:5] == (3, [again], [first.id], [], False)


async def test_a_revision_the_store_never_reached_means_everything_anew(store):
    orders = await store.create(ORDERS, ME)
    assert (await store.changes_since(9))[:5] == (1, [orders], (), [], True)


async def test_a_secret_is_made_once_and_differs_by_name(store):
    secret = await store.secret("key")
    assert len(secret) == 32
    assert await store.secret("key") == secret
    assert await store.secret("other") != secret


async def test_a_secret_may_be_proposed_as_long_as_there_is_none(store):
    assert await store.secret("key", b"p" * 32) == b"p" * 32
    assert await store.secret("key", b"q" * 32) == b"p" * 32


async def test_what_was_written_outlives_the_store(open_store):
    async with open_store() as store:
        rule, secret = await store.create(ORDERS, ME), await store.secret("key")
    async with open_store() as store:
        assert list(await store.page("", "", None, 10)) == [rule]
        assert await store.secret("key") == secret


async def test_concurrent_writers_get_revisions_of_their_own_and_lose_nothing(open_store):
    async with open_store() as one, open_store() as two:
        drafts = [RuleDraft(f"/{n}", "user", 1, 1, "fixed_window") for n in range(20)]
        created = await asyncio.gather(
            *((one, two)[n % 2].create(draft, ME) for n, draft in enumerate(drafts))
        )
        assert sorted(rule.revision for rule in created) == list(range(1, 21))
        assert set(await ids(two)) == {rule.id for rule in created}


async def test_of_concurrent_updates_with_one_etag_exactly_one_wins(open_store):
    async with open_store() as one, open_store() as two:
        rule = await one.create(ORDERS, ME)
        results = await asyncio.gather(
            *(
                store.update(rule.id, RuleChanges(limit=100 + n), rule.etag, ME)
                for n, store in enumerate((one, two, one, two))
            ),
            return_exceptions=True,
        )
        assert sum(isinstance(result, RuleConflictError) for result in results) == 3
        assert await one.revision() == 2


@pytest.mark.parametrize("turns", [*range(12), 20, 30, 50, 80])
async def test_a_write_that_is_cancelled_is_whole_or_nothing(store, turns):
    write = asyncio.create_task(store.create(ORDERS, ME))
    for _ in range(turns):
        await asyncio.sleep(0)
    write.cancel()
    await asyncio.gather(write, return_exceptions=True)
    revision, rules = await store.revision(), await ids(store)
    assert revision == len(rules)
    await store.create(CARTS, ME)  # no lock and no connection was left behind
    assert await store.revision() == revision + 1


async def test_closing_twice_does_no_harm(store):
    await store.close()
    await store.close()


async def test_changes_are_read_newest_first_with_who_when_and_what(store, clock):
    rule = await store.create(ORDERS, ME)
    await store.create(CARTS, "bob@test")
    await store.update(rule.id, RuleChanges(limit=20), "", "alice")
    await store.delete(rule.id, "", "bob")
    entries = await store.audit("", None, 10)
    assert [(entry.revision, entry.actor, entry.action) for entry in entries] == [
        (4, "bob", "delete"),
        (3, "alice", "update"),
        (2, "bob@test", "create"),
        (1, ME, "create"),
    ]
    deleted, updated, _, created = entries
    assert (deleted.after, created.before) == (None, None)
    assert (updated.before["limit"], updated.after["limit"]) == (10, 20)
    assert deleted.before == updated.after
    assert {entry.rule_id for entry in (deleted, updated, created)} == {rule.id}
    assert {entry.at.timestamp() for entry in entries} == {clock.now_us() / 1_000_000}


async def test_changes_can_be_those_of_one_rule_a_page_at_a_time(store):
    rule = await store.create(ORDERS, ME)
    await store.create(CARTS, ME)
    for limit in (1, 2, 3):
        await store.update(rule.id, RuleChanges(limit=limit), "", ME)

    async def revisions(*page):
        return [entry.revision for entry in await store.audit(rule.id, *page)]

    assert await revisions(None, 2) == [5, 4]
    assert await revisions(4, 2) == [3, 1]
    assert await revisions(1, 2) == []
    assert await store.audit(UNKNOWN_ID, None, 2) == []


FIRST = LimitDraft("", 10, 60, "token_bucket")
DAY = LimitDraft("day", 1_000, 86_400, "fixed_window")


async def test_a_burst_is_kept_and_told_by_the_audit_trail(store):
    first = LimitDraft("", 10, 60, "token_bucket", 50)
    rule = await store.create(
        replace(ORDERS, limit=10, window_seconds=60, algorithm="token_bucket", limits=(first,)), ME
    )
    assert (rule.burst, rule.capacity) == (50, 50)
    changed = await store.update(rule.id, RuleChanges(limit=20), "", ME)
    assert (changed.limit, changed.burst) == (20, 50)
    assert [one.burst for one in (await store.changes_since(None)).changed] == [50]
    newest, _ = await store.audit(rule.id, None, 10)
    assert '"burst":50' in newest.after["limits"]


async def test_plans_of_a_rule_are_kept_and_edited(store):
    plain = await store.create(ORDERS, ME)
    plans = (PlanDraft("free", (DAY,)), PlanDraft("pro", (FIRST, DAY)))
    rule = await store.update(plain.id, RuleChanges(plans=plans), "", ME)
    assert [(plan.name, len(plan.limits)) for plan in rule.plans] == [("free", 1), ("pro", 2)]
    assert (await store.changes_since(None)).changed == [rule]
    assert (await store.update(rule.id, RuleChanges(plans=plans), rule.etag, ME)) == rule
    assert (await store.update(rule.id, RuleChanges(limit=7), "", ME)).plans[1].name == "pro"
    gone = await store.update(rule.id, RuleChanges(plans=(), limit=ORDERS.limit), "", ME)
    assert gone.plans == ()
    newest, _, edited, created = await store.audit(rule.id, None, 10)
    assert "plans" not in newest.after
    assert "plans" not in created.after
    assert '"free"' in edited.after["plans"]


async def test_a_rule_with_several_limits_is_kept_and_its_list_edited(store):
    rule = await store.create(replace(ORDERS, limits=(FIRST, DAY)), ME)
    assert [(limit.name, limit.limit) for limit in rule.limits] == [("default", 10), ("day", 1_000)]
    assert list(await store.page("", "", None, 10)) == [rule]
    same = await store.update(rule.id, RuleChanges(limits=(FIRST, DAY)), "", ME)
    assert same == rule
    changed = await store.update(rule.id, RuleChanges(limit=20), rule.etag, ME)
    assert [limit.limit for limit in changed.limits] == [20, 1_000]
    assert changed.more[0].revision == changed.revision == 2
    (_, (of_feed,), *_) = await store.changes_since(1)
    assert of_feed == changed
    shorter = await store.update(rule.id, RuleChanges(limits=()), "", ME)
    assert (shorter.limit, shorter.more) == (20, ())
    newest, older, oldest = await store.audit("", None, 10)
    assert "limits" not in newest.after
    assert newest.before["limits"] == older.after["limits"] == oldest.after["limits"]


async def test_a_calendar_is_kept_and_edited(store):
    month = LimitDraft("month", 1_000, None, "fixed_window", period="month", anchor_day=15)
    rule = await store.create(replace(ORDERS, limits=(FIRST, month.completed())), ME)
    assert rule.more[0].calendar == Calendar(Period.MONTH, "UTC", 15)
    assert list(await store.page("", "", None, 10)) == [rule]
    assert (
        await store.update(rule.id, RuleChanges(limits=(FIRST, month.completed())), "", ME) == rule
    )
    berlin = replace(month, time_zone="Europe/Berlin").completed()
    changed = await store.update(rule.id, RuleChanges(limits=(FIRST, berlin)), rule.etag, ME)
    assert changed.more[0].calendar == Calendar(Period.MONTH, "Europe/Berlin", 15)
    (_, (of_feed,), *_) = await store.changes_since(1)
    assert of_feed == changed


async def test_a_rule_is_for_types_that_are_declared(open_store):
    async with open_store() as store:
        for wrong in ("tenant", "tenant+user"):
            with pytest.raises(RuleInvalidError, match="identifier_type"):
                await store.create(replace(ORDERS, identifier_type=wrong), ME)
    async with open_store(types=("user", "tenant")) as store:
        rule = await store.create(replace(ORDERS, identifier_type="tenant+user"), ME)
        await store.create(replace(ORDERS, identifier_type="all", endpoint="**"), ME)
    async with open_store() as store:
        assert (await store.update(rule.id, RuleChanges(limit=5), "", ME)).limit == 5
        with pytest.raises(RuleInvalidError, match="identifier_type"):
            await store.update(rule.id, RuleChanges(identifier_type="org"), "", ME)
        assert len(await store.page("", "", None, 10)) == 2


async def test_changes_can_be_filtered_by_who_what_and_when(store):
    rule = await store.create(ORDERS, "alice@10.0.0.1")
    await store.create(CARTS, "Bob_")
    await store.update(rule.id, RuleChanges(limit=20), "", "bob%")
    now = (await store.audit("", None, 1))[0].at

    async def found(**fields):
        wanted = AuditFilter(**fields)
        return [entry.revision for entry in await store.audit("", None, 10, wanted)]

    assert await found() == [3, 2, 1]
    assert await found(actor="BOB") == [3, 2]
    assert await found(actor="b_") == [2]
    assert await found(actor="b%") == [3]
    assert await found(action="create") == [2, 1]
    assert await found(text=ORDERS.endpoint.upper()) == [3, 1]
    assert await found(since=now) == [3, 2, 1]
    assert await found(until=now) == []
    assert await found(since=now + timedelta(seconds=1)) == []
    assert await found(actor="bob", action="create", text="carts") == [2]
    await store.update(rule.id, RuleChanges(endpoint="/ÄPFEL"), "", "spiffe://x/ÄNNE")
    for name in ("ÄNNE", "Änne"):
        assert await found(actor=name) == [4]
    for name in ("/ÄPFEL", "/Äpfel"):
        assert await found(text=name) == [4]
    assert await found(text="/äpfel") == []


async def test_a_set_of_rules_is_found_by_each_of_its_rules_and_an_assignment_by_none(store):
    rule = await store.create(ORDERS, ME)
    await store.apply([replace(ORDERS, limit=20), CARTS], ME, prune=False, dry_run=False, since=0)
    await store.assignments.assign_all([Assignment("user", b"carts", "carts", note="carts")], ME)

    async def found(text, rule_id=""):
        entries = await store.audit(rule_id, None, 10, AuditFilter(text=text))
        return [entry.revision for entry in entries]

    assert await found("carts") == [2]
    assert await found("orders") == [2, 1]
    assert await found("orders", rule.id) == [2, 1]
    assert await found("carts", rule.id) == []


async def test_one_rule_is_read_by_its_id_in_any_spelling(store):
    rule = await store.create(ORDERS, ME)
    await store.create(CARTS, ME)
    assert await store.rule(rule.id.upper()) == rule
    with pytest.raises(RuleNotFoundError):
        await store.rule(UNKNOWN_ID)
    with pytest.raises(RuleInvalidError, match="id: the id must be a UUID"):
        await store.rule("1")
