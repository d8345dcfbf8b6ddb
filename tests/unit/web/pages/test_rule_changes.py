from dataclasses import replace

import pytest

from ratelimitd.model import Algorithm, IdentifierType, Rule
from ratelimitd.rules.book import RuleBook
from ratelimitd.web.pages.rule_changes import (
    consequences,
    differences,
    fields_differences,
    fields_of,
    summary,
)

ORDERS = Rule("1", "/orders", IdentifierType.USER, 1_000, 60, Algorithm.TOKEN_BUCKET)
EVERYWHERE = Rule("2", "*", IdentifierType.USER, 5, 3_600, Algorithm.FIXED_WINDOW)
ALONE = RuleBook.of([ORDERS], 1)
BOTH = RuleBook.of([ORDERS, EVERYWHERE], 2)


def said(before, after, book=ALONE):
    return " ".join(consequences(before, after, book))


def test_only_what_differs_is_changed():
    changed = [row for row in differences(ORDERS, replace(ORDERS, limit=7)) if row.changed]
    assert changed == [("Limit", "1\u202f000", "7")]
    assert not any(row.changed for row in differences(ORDERS, ORDERS))


def test_a_new_rule_has_nothing_before_and_a_deleted_one_nothing_after():
    assert [row.after for row in differences(None, ORDERS)] == [
        "/orders", "user", "1\u202f000", "1 min (60 s)", "token_bucket", "yes",
    ]  # fmt: skip
    assert {row.after for row in differences(ORDERS, None)} == {""}


def test_fields_of_any_kind_can_be_shown():
    rows = fields_differences({"limit": None, "window_seconds": "x", "enabled": False}, {})
    assert [(row.label, row.before) for row in rows if row.before] == [
        ("Window", "x"),
        ("Enabled", "no"),
    ]
    assert fields_of(None) is None


def test_a_window_of_seconds_is_not_said_twice():
    [window] = [
        row.before
        for row in differences(replace(ORDERS, window_seconds=59), None)
        if row.label == "Window"
    ]
    assert window == "59 s"


def test_a_higher_limit_is_more_at_once():
    text = said(ORDERS, replace(ORDERS, limit=1_500))
    assert "spent stays spent" in text
    assert "500 more at once" in text


def test_a_lower_limit_caps_what_was_spent():
    text = said(ORDERS, replace(ORDERS, limit=10))
    assert "counts as the new limit at most" in text
    assert "one window of 1 min" in text


@pytest.mark.parametrize(
    "after",
    [replace(ORDERS, window_seconds=1), replace(ORDERS, algorithm=Algorithm.SLIDING_WINDOW)],
    ids=["window", "algorithm"],
)
def test_another_window_or_algorithm_starts_afresh(after):
    assert "All buckets start afresh" in said(ORDERS, after)


def test_what_is_disabled_or_deleted_leaves_its_checks_to_the_next_rule():
    for after in (None, replace(ORDERS, enabled=False)):
        assert "From now on: no rule, so they are all allowed." in said(ORDERS, after)
        assert "From now on: the rule of * (5 in 1 h, fixed window)." in said(ORDERS, after, BOTH)
        assert "a rule that comes back" in said(ORDERS, after)
    text = said(EVERYWHERE, None, BOTH)
    assert "every endpoint without an enabled rule of its own" in text
    assert "no rule, so they are all allowed" in text


def test_what_is_created_or_enabled_takes_its_checks_over():
    carts = replace(ORDERS, id="3", endpoint="/carts")
    assert "Checks of user on /carts are decided by this rule from now on." in said(None, carts)
    assert "Until now: the rule of *" in said(None, carts, BOTH)
    disabled = replace(ORDERS, enabled=False)
    assert "Until now: no rule" in said(disabled, ORDERS, RuleBook.of([disabled], 1))


def test_another_endpoint_or_type_is_an_end_and_a_beginning():
    text = said(ORDERS, replace(ORDERS, endpoint="/carts"), BOTH)
    assert "on /orders are no longer decided" in text
    assert "on /carts are decided by this rule from now on" in text
    assert "does not count under the new ones" in text


def test_what_nobody_notices_is_said_to_be_so():
    assert said(ORDERS, ORDERS) == "Nothing changes."
    disabled = replace(ORDERS, enabled=False)
    for before, after in (
        (None, disabled),
        (disabled, None),
        (disabled, replace(disabled, limit=1)),
    ):
        assert "nothing changes for callers" in said(before, after)


def test_a_rule_in_a_few_words():
    assert summary(ORDERS) == "1\u202f000 in 1 min, token bucket"
