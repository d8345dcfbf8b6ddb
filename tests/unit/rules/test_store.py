from ratelimitd.rules.store import RuleChanges, RuleDraft

DRAFT = RuleDraft("/orders", "user", 10, 60, "token_bucket", enabled=True, id="x")


def test_changes_replace_exactly_the_named_fields():
    changed = RuleChanges(limit=20, enabled=False).apply(DRAFT)
    assert changed == RuleDraft("/orders", "user", 20, 60, "token_bucket", enabled=False, id="x")


def test_no_changes_leave_the_draft_as_it_is():
    assert RuleChanges().apply(DRAFT) == DRAFT


def test_a_fields_zero_is_a_change():
    changed = RuleChanges("", "", 0, 0, "", enabled=False).apply(DRAFT)
    assert changed == RuleDraft("", "", 0, 0, "", enabled=False, id="x")
