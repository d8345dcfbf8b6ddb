from datetime import UTC, datetime

import pytest

from ratelimitd.errors import StoreUnavailableError
from ratelimitd.rules.store import AuditEntry, RuleChanges, RuleDraft
from ratelimitd.web.pages.audit import AuditTrail

ORDERS = RuleDraft("/orders", "user", 10, 60, "token_bucket")


@pytest.fixture
def trail(store):
    return AuditTrail(store)


async def test_changes_come_newest_first_with_the_changed_fields(store, trail):
    rule = await store.create(ORDERS, "alice")
    await store.update(rule.id, RuleChanges(limit=20, enabled=False), "", "bob")
    newest, oldest = (await trail.page(rule.id, None)).changes
    assert (newest.entry.actor, newest.entry.action, newest.rule) == (
        "bob",
        "update",
        "/orders user",
    )
    assert newest.differences == [("Limit", "10", "20"), ("Enabled", "yes", "no")]
    assert (oldest.entry.action, len(oldest.differences)) == ("create", 6)


async def test_deleted_rule_is_named_by_its_former_content(store, trail):
    rule = await store.create(ORDERS, "me")
    await store.delete(rule.id, "", "me")
    newest = (await trail.page("", None)).changes[0]
    assert (newest.rule, newest.differences[0]) == ("/orders user", ("Endpoint", "/orders", ""))


async def test_stored_rule_is_the_result_of_its_last_change(store, trail):
    rule = await store.create(ORDERS, "me")
    assert await trail.stored(rule.id) == rule
    changed = await store.update(rule.id, RuleChanges(limit=20), "", "me")
    assert await trail.stored(rule.id) == changed
    await store.delete(rule.id, "", "me")
    assert await trail.stored(rule.id) is None
    assert await trail.stored("nobody") is None


class Reader:
    def __init__(self, *entries, error=None):
        self.entries = entries
        self.error = error

    async def audit(self, rule_id, before, size, wanted):
        if self.error:
            raise self.error
        return self.entries


async def test_unavailable_store_is_reported(caplog):
    trail = AuditTrail(Reader(error=StoreUnavailableError("the rule database is away")))
    assert await trail.page("", None) == ([], 0, True)
    assert await trail.stored("1") is None
    assert "the audit trail cannot be read: the rule database is away" in caplog.text


async def test_row_with_invalid_fields_is_shown_without_a_rule():
    at = datetime(2023, 11, 15, tzinfo=UTC)
    trail = AuditTrail(Reader(AuditEntry(1, at, "me", "update", "x", None, {"limit": "<b>"})))
    [change] = (await trail.page("", None)).changes
    assert (change.rule, change.differences) == ("", [("Limit", "", "<b>")])
    assert await trail.stored("x") is None


async def test_row_without_any_rule_is_shown():
    at = datetime(2023, 11, 15, tzinfo=UTC)
    trail = AuditTrail(Reader(AuditEntry(1, at, "me", "delete", "x", None, None)))
    assert (await trail.page("", None)).changes[0].differences == []


async def test_whole_set_is_one_change_and_one_for_each_of_its_rules(store, trail):
    rule = await store.create(ORDERS, "me")
    wanted = [
        RuleDraft("/orders", "user", 20, 60, "token_bucket"),
        RuleDraft("/b", "ip", 1, 1, "fixed_window"),
    ]
    await store.apply(wanted, "ops", prune=True, dry_run=False, since=0)
    newest, oldest = (await trail.page("", None)).changes
    assert (newest.counts, newest.differences) == ("1 created, 1 updated", ())
    assert (oldest.counts, oldest.rule) == ("", "/orders user")
    of_rule = (await trail.page(rule.id, None)).changes[0]
    assert (of_rule.entry.action, of_rule.entry.actor) == ("update", "ops")
    assert of_rule.differences == [("Limit", "10", "20")]
    stored = await trail.stored(rule.id)
    assert stored
    assert (stored.limit, stored.revision) == (20, 2)
