from dataclasses import replace

import pytest

from ratelimitd.model import (
    Algorithm,
    Calendar,
    Enforcement,
    IdentifierType,
    Limit,
    Period,
    Plan,
    Rule,
)
from ratelimitd.rules.book import RuleBook
from ratelimitd.web.pages.rule_changes import (
    consequences,
    differences,
    fields_differences,
    summary,
)
from ratelimitd.web.pages.rule_form import RuleForm

ORDERS = Rule(
    "1",
    "/orders",
    IdentifierType.USER,
    limit=1_000,
    window_seconds=60,
    algorithm=Algorithm.TOKEN_BUCKET,
)
EVERYWHERE = Rule(
    "2", "*", IdentifierType.USER, limit=5, window_seconds=3_600, algorithm=Algorithm.FIXED_WINDOW
)
ALONE = RuleBook.of([ORDERS], 1)
BOTH = RuleBook.of([ORDERS, EVERYWHERE], 2)


def said(before, after, book=ALONE):
    return " ".join(consequences(before, after, book))


def test_only_different_fields_are_changed():
    changed = [row for row in differences(ORDERS, replace(ORDERS, limit=7)) if row.changed]
    assert changed == [("Limit", "1\u202f000", "7")]
    assert not any(row.changed for row in differences(ORDERS, ORDERS))


def test_new_rule_has_nothing_before_and_deleted_one_nothing_after():
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


def test_window_in_seconds_is_not_repeated():
    [window] = [
        row.before
        for row in differences(replace(ORDERS, window_seconds=59), None)
        if row.label == "Window"
    ]
    assert window == "59 s"


def test_higher_limit_allows_more_at_once():
    text = said(ORDERS, replace(ORDERS, limit=1_500))
    assert "spent stays spent" in text
    assert "500 more at once" in text


def test_lower_limit_caps_spent_tokens():
    text = said(ORDERS, replace(ORDERS, limit=10))
    assert "counts as the new limit at most" in text
    assert "one window of 1 min" in text


@pytest.mark.parametrize(
    "after",
    [replace(ORDERS, window_seconds=1), replace(ORDERS, algorithm=Algorithm.SLIDING_WINDOW)],
    ids=["window", "algorithm"],
)
def test_other_window_or_algorithm_starts_afresh(after):
    assert "All buckets start full" in said(ORDERS, after)


def test_disabled_or_deleted_rule_leaves_its_checks_to_the_next_rule():
    for after in (None, replace(ORDERS, enabled=False)):
        assert "From now on: no rule, so they are all allowed." in said(ORDERS, after)
        assert "From now on: the rule of * (5 in 1 h, fixed window)." in said(ORDERS, after, BOTH)
        assert "a rule that comes back" in said(ORDERS, after)
    text = said(EVERYWHERE, None, BOTH)
    assert "every endpoint without an enabled rule of its own" in text
    assert "no rule, so they are all allowed" in text


def test_created_or_enabled_rule_takes_over_its_checks():
    carts = replace(ORDERS, id="3", endpoint="/carts")
    assert "Checks of user on /carts are decided by this rule from now on." in said(None, carts)
    assert "Until now: the rule of *" in said(None, carts, BOTH)
    disabled = replace(ORDERS, enabled=False)
    assert "Until now: no rule" in said(disabled, ORDERS, RuleBook.of([disabled], 1))
    pattern = replace(ORDERS, id="4", endpoint="/carts/*")
    assert "on /carts/*, the name of one endpoint and no pattern, are" in said(None, pattern)
    over_all = replace(ORDERS, id="4", endpoint="**")
    assert "Until now: no rule over all endpoints; the rules of" in said(None, over_all, BOTH)


def test_moved_rule_ends_in_one_place_and_begins_in_the_other():
    text = said(ORDERS, replace(ORDERS, endpoint="/carts"), BOTH)
    assert "on /orders are no longer decided" in text
    assert "on /carts are decided by this rule from now on" in text
    assert "does not count under the new ones" in text


def test_change_without_effect_is_described_as_such():
    assert said(ORDERS, ORDERS) == "Nothing changes."
    disabled = replace(ORDERS, enabled=False)
    for before, after in (
        (None, disabled),
        (disabled, None),
        (disabled, replace(disabled, limit=1)),
    ):
        assert "nothing changes for callers" in said(before, after)


DAY = Limit(
    limit=10_000, window_seconds=86_400, algorithm=Algorithm.FIXED_WINDOW, name="day", revision=3
)
SEVERAL = replace(ORDERS, more=(DAY,))


def changed(before, after):
    return [tuple(row) for row in differences(before, after) if row.changed]


class TestSeveralLimits:
    def test_each_of_several_limits_is_a_row(self):
        assert changed(ORDERS, SEVERAL) == [
            ("Limit default", "", "the first"),
            ("Limit day", "", "10\u202f000 in 1 d, fixed window"),
        ]
        assert changed(ORDERS, replace(ORDERS, name="s")) == [("Limit s", "", "the first")]
        assert not any("Limit " in row.label for row in differences(ORDERS, ORDERS))
        hour = replace(DAY, name="hour", window_seconds=3_600)
        assert changed(SEVERAL, replace(SEVERAL, more=(replace(DAY, limit=7), hour))) == [
            ("Limit day", "10\u202f000 in 1 d, fixed window", "7 in 1 d, fixed window"),
            ("Limit hour", "", "10\u202f000 in 1 h, fixed window"),
        ]
        assert changed(SEVERAL, replace(SEVERAL, more=(replace(DAY, name="d"),))) == [
            ("Limit day", "10\u202f000 in 1 d, fixed window", ""),
            ("Limit d", "", "10\u202f000 in 1 d, fixed window"),
        ]

    def test_changed_order_of_limits_is_reported(self):
        hour = replace(DAY, name="hour", window_seconds=3_600)
        one, other = replace(ORDERS, more=(DAY, hour)), replace(ORDERS, more=(hour, DAY))
        assert changed(one, other) == [
            ("Order of limits", "default, day, hour", "default, hour, day")
        ]
        assert said(one, other).startswith("Every limit stays as it is.")
        assert changed(one, replace(one, more=(hour,))) == [
            ("Limit day", "10\u202f000 in 1 d, fixed window", "")
        ]

    @pytest.mark.parametrize("stored", ["x", "[]", "7", '[{"name":"a"},{"name":"b"}]', "[7]"])
    def test_invalid_stored_list_is_shown_unchanged(self, stored):
        [row] = [row for row in fields_differences({"limits": stored}, {}) if row.before]
        assert row.before == stored

    def test_effect_on_each_limit_is_described(self):
        assert said(ORDERS, SEVERAL) == (
            "day: 10\u202f000 in 1 d, fixed window from now on, and all buckets are full."
        )
        assert said(SEVERAL, ORDERS) == "The limit day is removed."
        assert (
            said(SEVERAL, replace(SEVERAL, more=(replace(DAY, limit=10_001, revision=4),)))
            == "day: What was spent stays spent, and everybody has 1 more at once."
        )
        assert said(SEVERAL, replace(SEVERAL, window_seconds=7)).startswith("default: All buckets")
        assert said(SEVERAL, SEVERAL) == "Nothing changes."

    def test_only_changed_lists_are_described(self):
        free = (Plan("free", (DAY,)),)
        before = replace(SEVERAL, plans=free)
        stored = replace(DAY, revision=9)
        for after, text in (
            (replace(before, limit=1_001), "default: What was spent stays spent, and everybody"),
            (replace(before, plans=(Plan("free", (replace(DAY, limit=9),)),)), "Plan free: day: "),
            (replace(before, plans=()), "The plan free has the rule's own limits."),
        ):
            [sentence] = consequences(before, replace(after, more=(stored,)), ALONE)
            assert sentence.startswith(text)

    def test_observed_limit_is_described_kept_and_promoted(self):
        observed = replace(SEVERAL, more=(replace(DAY, enforcement=Enforcement.OBSERVE),))
        assert said(observed, SEVERAL) == "day denies from now on, and keeps what it counted."
        assert (
            said(SEVERAL, observed) == "day only observes from now on, and keeps what it counted."
        )
        form = RuleForm.of_rule(observed)
        assert form.more == "day 10000 86400 fixed_window observe"
        assert form.checked().more[0].enforcement is Enforcement.OBSERVE
        first = replace(ORDERS, enforcement=Enforcement.OBSERVE)
        assert RuleForm.of_rule(first).observe
        assert RuleForm.of_rule(first).checked().enforcement is Enforcement.OBSERVE
        [row] = [row for row in differences(None, first) if row.label.startswith("Limit ")]
        assert row[::2] == ("Limit default", "the first, observed")

    def test_promotion_form_has_the_candidate_first_and_enforced(self):
        candidate = replace(
            DAY, algorithm=Algorithm.TOKEN_BUCKET, burst=20_000, enforcement=Enforcement.OBSERVE
        )
        hour = replace(DAY, name="hour", window_seconds=3_600)
        rule = replace(ORDERS, more=(candidate, hour))
        form = RuleForm.promoting(rule, "day")
        assert form is not None
        assert [replace(limit, revision=3) for limit in form.checked().limits] == [
            replace(form.checked(), revision=3), hour,
        ]  # fmt: skip
        after = form.checked()
        assert (after.name, after.limit, after.enforcement) == ("day", 10_000, Enforcement.ENFORCE)
        assert (after.algorithm, after.burst) == (Algorithm.TOKEN_BUCKET, 20_000)
        assert "day denies from now on, and keeps what it counted." in said(rule, after)
        only = replace(ORDERS, enforcement=Enforcement.OBSERVE)
        alone = RuleForm.promoting(only, "default")
        assert alone is not None
        assert not alone.checked().has_list
        for name in ("hour", "default", ""):
            assert RuleForm.promoting(rule, name) is None

    def test_calendar_is_described_kept_and_edited(self):
        month = replace(
            DAY, window_seconds=2_592_000, calendar=Calendar(Period.MONTH, "Europe/Berlin", 15)
        )
        rule = replace(ORDERS, algorithm=Algorithm.FIXED_WINDOW, more=(month,))
        form = RuleForm.of_rule(rule)
        assert form.more == "day 10000 month fixed_window zone=Europe/Berlin anchor=15"
        assert [replace(limit, revision=3) for limit in form.checked().more] == [month]
        row = differences(None, rule)[-2]
        assert row.after == "10\u202f000 in a month from day 15 (Europe/Berlin), fixed window"
        candidate = replace(rule, more=(replace(month, enforcement=Enforcement.OBSERVE),))
        promoted = RuleForm.promoting(candidate, "day").checked()
        assert (promoted.name, promoted.calendar, promoted.more) == ("day", month.calendar, ())
        week = replace(month, calendar=Calendar(Period.WEEK, "UTC"), window_seconds=604_800)
        assert RuleForm.of_rule(replace(rule, more=(week,))).checked().more[0].calendar == (
            Period.WEEK, "UTC", 1,
        )  # fmt: skip
        assert said(rule, replace(rule, more=(week,))).startswith("day: All buckets start full")
        lower = said(rule, replace(rule, more=(replace(month, limit=1),)))
        assert lower.startswith("day: What was spent stays spent, but counts as the new limit")

    def test_calendar_of_the_first_limit_has_its_own_fields(self):
        rule = replace(
            ORDERS,
            algorithm=Algorithm.FIXED_WINDOW,
            window_seconds=2_592_000,
            calendar=Calendar(Period.MONTH, "Europe/Berlin", 15),
        )
        form = RuleForm.of_rule(rule)
        assert (form.window_seconds, form.period, form.time_zone, form.anchor_day) == (
            "", "month", "Europe/Berlin", "15",
        )  # fmt: skip
        assert form.checked().calendar == rule.calendar
        unnamed = form._replace(name="", window_seconds="60", time_zone="", anchor_day="")
        assert unnamed.checked().calendar == Calendar(Period.MONTH, "UTC", 1)
        assert form._replace(period="day", anchor_day="").checked().window_seconds == 86_400
        [row] = [row for row in differences(None, rule) if row.label == "Limit default"]
        assert row.after == "the first, a month from day 15 (Europe/Berlin)"
        assert said(rule, replace(rule, calendar=Calendar(Period.MONTH, "UTC"))).startswith(
            "default: All buckets start full"
        )

    @pytest.mark.parametrize(
        ("changed", "field", "text"),
        [
            (
                {"period": "day"},
                "period",
                "only a limit with the algorithm fixed_window has a period",
            ),
            ({"period": "year"}, "period", "use one of day, week, month"),
            ({"time_zone": "UTC"}, "time_zone", "only a limit with a period"),
            ({"anchor_day": "0"}, "anchor_day", "only the period month"),
            (
                {"period": "month", "anchor_day": "0"},
                "anchor_day",
                "the anchor day must be 1 to 31",
            ),
            (
                {"period": "month", "anchor_day": "x"},
                "anchor_day",
                "the anchor day must be 1 to 31",
            ),
            ({"period": "day", "time_zone": "Berlin"}, "time_zone", "unknown time zone"),
            ({"period": "day", "window_seconds": "61"}, "window_seconds", "the window of a day"),
            (
                {"more": "a 1 day token_bucket"},
                "more",
                "line 1: only a limit with the algorithm fixed_window has a period",
            ),
            ({"more": "a 1 month fixed_window anchor=0"}, "more", "line 1: the anchor day must be"),
            ({"more": "a 1 day fixed_window zone=X"}, "more", "line 1: unknown time zone"),
        ],
    )
    def test_errors_in_a_calendar_are_reported_at_their_fields(self, changed, field, text):
        algorithm = "token_bucket" if "algorithm" in text else "fixed_window"
        errors = RuleForm.of_rule(ORDERS)._replace(algorithm=algorithm, **changed).errors()
        assert list(errors) == [field]
        assert errors[field].startswith(text)

    def test_form_keeps_the_content_of_a_rule(self):
        form = RuleForm.of_rule(SEVERAL)
        assert form.more == "day 10000 86400 fixed_window"
        rule = form.checked()
        assert [replace(limit, revision=3) for limit in rule.more] == [DAY]
        assert RuleForm.of_rule(ORDERS)[-8:] == ("", "", False, "", "", "", "", "")

    @pytest.mark.parametrize(
        ("changed", "field", "text"),
        [
            ({"more": "day 1 1"}, "more", "line 1: unsupported algorithm"),
            ({"more": "day 1 1 fixed_window now"}, "more", "line 1: use one of enforce, observe"),
            ({"more": "day many 1 fixed_window"}, "more", "line 1: the limit must be a whole"),
            (
                {"more": "a 1 1 fixed_window\na 1 1 fixed_window"},
                "more",
                "line 2: the name must be",
            ),
            ({"more": "a 1 1 fixed_window\n" * 8}, "more", "a rule has at most 8 limits"),
            ({"name": "Burst"}, "name", "the name must be"),
            ({"burst": "much"}, "burst", "the burst must be a whole number"),
            (
                {"burst": "5", "algorithm": "fixed_window"},
                "burst",
                "only a token_bucket has a burst",
            ),
            (
                {"more": "a 1 1 fixed_window burst=5"},
                "more",
                "line 1: only a token_bucket has a burst",
            ),
            ({"more": "a 1 1 token_bucket burst="}, "more", "line 1: the burst must be a whole"),
        ],
    )
    def test_errors_in_a_form_are_reported_at_their_fields(self, changed, field, text):
        errors = RuleForm.of_rule(ORDERS)._replace(**changed).errors()
        assert list(errors) == [field]
        assert errors[field].startswith(text)


class TestPlans:
    PRO = Plan("pro", (replace(DAY, revision=0),))
    WITH = replace(ORDERS, plans=(PRO,))

    def test_edit_describes_the_limits_of_each_plan(self):
        [row] = [row for row in differences(ORDERS, self.WITH) if row.changed]
        assert (row.label, row.after) == (
            "Plans",
            "pro: day 10\u202f000 in 1 d, fixed window",
        )
        assert said(ORDERS, self.WITH).startswith(
            "Identities assigned to the plan pro have their own limits"
        )
        assert said(self.WITH, ORDERS) == "The plan pro has the rule's own limits."
        more = replace(ORDERS, plans=(Plan("pro", (replace(DAY, limit=10_001),)),))
        assert said(self.WITH, more).startswith("Plan pro: day: What was spent stays spent, and")
        assert summary(self.WITH).endswith("; plans pro")

    def test_form_keeps_plans(self):
        form = RuleForm.of_rule(self.WITH)
        assert form.plans == "pro day 10000 86400 fixed_window"
        assert form.checked().plans == (self.PRO,)
        assert RuleForm.of_fields(form._asdict()).plans == form.plans

    @pytest.mark.parametrize(
        ("plans", "text"),
        [
            ("pro day 1 1", "plan pro, its line 1: unsupported algorithm"),
            ("pro", "plan pro, its line 1: the limit must be a whole number"),
            ("blocked day 1 1 fixed_window", "plan blocked: blocked is reserved"),
            ("Pro day 1 1 fixed_window", "the name 'Pro' must be"),
            (
                "pro day 1 1 fixed_window timezone=UTC",
                "plan pro, its line 1: use one of enforce, observe, and before it only burst=, zone=,",
            ),
        ],
    )
    def test_errors_in_plans_are_reported_at_the_field(self, plans, text):
        errors = RuleForm.of_rule(ORDERS)._replace(plans=plans).errors()
        assert list(errors) == ["plans"]
        assert errors["plans"].startswith(text)


class TestBurst:
    WITH = replace(ORDERS, burst=5_000)

    def test_burst_is_shown_beside_its_limit(self):
        assert summary(self.WITH) == "1\u202f000 in 1 min, token bucket, burst 5\u202f000"
        [row] = [row for row in differences(ORDERS, self.WITH) if row.changed]
        assert (row.label, row.after) == ("Limit default", "the first, burst 5\u202f000")
        more = replace(ORDERS, more=(replace(self.WITH, name="more"),))
        assert changed(ORDERS, more)[1:] == [
            ("Limit more", "", "1\u202f000 in 1 min, token bucket, burst 5\u202f000")
        ]

    @pytest.mark.parametrize(
        ("before", "after", "what"),
        [
            ({}, {"burst": 5_000}, "and everybody has 4\u202f000 more at once."),
            ({"burst": 5_000}, {"burst": 5_000, "limit": 500},
             "and is refilled by 500 in 1 min from now on."),
            ({"burst": 5_000}, {"burst": 3_000},
             "but counts as the new burst at most: callers that spent more may wait, at most 3 min."),
            ({"burst": 5_000}, {},
             "but counts as the new limit at most: callers that spent more may wait, at most one window of 1 min."),
        ],
    )  # fmt: skip
    def test_edit_describes_the_effect_on_spent_tokens(self, before, after, what):
        was, will = replace(ORDERS, **before), replace(ORDERS, **after)
        assert said(was, will) == f"default: What was spent stays spent, {what}"

    def test_form_keeps_the_burst_on_every_line(self):
        more = replace(self.WITH, name="more", burst=7, enforcement=Enforcement.OBSERVE, revision=0)
        rule = replace(self.WITH, more=(more,))
        form = RuleForm.of_rule(rule)
        assert form.burst == "5000"
        assert form.more == "more 1000 60 token_bucket burst=7 observe"
        checked = form.checked()
        assert [limit.burst for limit in checked.limits] == [5_000, 7]
        assert checked.more[0].enforcement is Enforcement.OBSERVE
