import dataclasses
import json
from typing import Any

import pytest

from ratelimitd.errors import RuleInvalidError
from ratelimitd.model import Algorithm, Calendar, Enforcement, IdentifierType, Period, Rule
from ratelimitd.rules.store import (
    FIRST_LIMIT,
    LimitDraft,
    PlanDraft,
    RuleChanges,
    RuleDraft,
    SkippedRow,
)
from ratelimitd.rules.validation import RuleRow, canonical_id, etag_of, rule_from_row, validated

ID = "0b1f2c3d-0000-4000-8000-00000000000a"
DRAFT = RuleDraft("/orders", "user", 10, 60, "token_bucket")
MUST_BE_TYPE = (
    "must be one of user, ip, api_key, several joined by +, or all"
    " (the node's setting IDENTIFIER_TYPES declares others)"
)
ROW = RuleRow(ID, "/orders", "user", 10, 60, "token_bucket", True, 3)


def violations(draft):
    with pytest.raises(RuleInvalidError) as caught:
        validated(draft, rule_id=ID, revision=1, types=tuple(IdentifierType))
    return {violation.field: violation.description for violation in caught.value.violations}


def test_valid_draft_becomes_the_requested_rule():
    rule = validated(DRAFT, rule_id=ID, revision=3)
    assert rule == Rule(
        ID,
        "/orders",
        IdentifierType.USER,
        limit=10,
        window_seconds=60,
        algorithm=Algorithm.TOKEN_BUCKET,
        enabled=True,
        etag=rule.etag,
        revision=3,
    )
    assert rule.algorithm is Algorithm.TOKEN_BUCKET


def test_combined_types_have_at_most_255_characters():
    types = tuple(letter * 31 for letter in "abcdefgh")
    longest = "+".join(types)
    assert len(longest) == 255
    assert validated(
        dataclasses.replace(DRAFT, identifier_type=longest), rule_id=ID, revision=1, types=types
    )


def test_a_wrong_type_is_told_the_declared_ones():
    wrong = dataclasses.replace(DRAFT, identifier_type="org")
    with pytest.raises(RuleInvalidError, match=r"must be one of user, tenant, several"):
        validated(wrong, rule_id=ID, revision=1, types=("user", "tenant"))


def test_all_violations_are_reported_in_the_contracts_order():
    not_a_bool: Any = None
    draft = RuleDraft("", "nobody", 0, -1, "leaky", enabled=not_a_bool, id="7")
    assert list(violations(draft)) == [
        "rate_limit.id",
        "rate_limit.endpoint",
        "rate_limit.identifier_type",
        "rate_limit.limit",
        "rate_limit.window_seconds",
        "rate_limit.algorithm",
        "rate_limit.enabled",
    ]


@pytest.mark.parametrize(
    ("field", "value", "description"),
    [
        ("limit", 0, "the limit must be positive"),
        ("limit", -5, "the limit must be positive"),
        ("limit", 2**31, "the limit must be at most 2147483647"),
        ("limit", 1.5, "the limit must be a whole number"),
        ("limit", True, "the limit must be a whole number"),
        ("window_seconds", 0, "the window must be positive"),
        ("window_seconds", 2**31, "the window must be at most 2147483647"),
        (
            "window_seconds",
            "60",
            "the window must be a whole number of seconds, or a duration such as 30s, 1m, 12h or 1d",
        ),
        ("endpoint", "", "the endpoint must not be empty; * is the global rule"),
        ("endpoint", "/" + "x" * 255, "the endpoint must be at most 255 characters"),
        ("endpoint", "/a\nb", "the endpoint must not contain control characters"),
        ("endpoint", "/a\x00", "the endpoint must not contain control characters"),
        ("endpoint", "/a\x9f", "the endpoint must not contain control characters"),
        ("endpoint", "/a\ud800", "the endpoint must be valid Unicode"),
        *(
            ("identifier_type", wrong, MUST_BE_TYPE)
            for wrong in ("", "User", "u" * 33, "ip+ip", "user+ip", "all+ip", "ip+", "ip+group")
        ),
        ("identifier_type", "u" * 256, "the identifier type must be at most 255 characters"),
    ],
)
def test_violation_describes_the_error(field, value, description):
    draft = dataclasses.replace(DRAFT, **{field: value})
    assert violations(draft) == {f"rate_limit.{field}": description}


@pytest.mark.parametrize("algorithm", ["", "TOKEN_BUCKET", "leaky_bucket", None])
def test_unsupported_algorithm_is_refused_with_the_supported_ones(algorithm):
    found = violations(dataclasses.replace(DRAFT, algorithm=algorithm))
    assert found == {
        "rate_limit.algorithm": "unsupported algorithm: use one of token_bucket, sliding_window, fixed_window,"
        " concurrency"
    }


@pytest.mark.parametrize(
    "change",
    [
        {"limit": 1},
        {"limit": 2**31 - 1},
        {"window_seconds": 2**31 - 1},
        {"endpoint": "*"},
        {"endpoint": "é" * 255},
        {"id": ID.upper()},
        {"enabled": False},
    ],
)
def test_extremes_are_valid(change):
    validated(dataclasses.replace(DRAFT, **change), rule_id=ID, revision=1)


@pytest.mark.parametrize(
    "bad_id", ["7", f"{{{ID}}}", ID.replace("-", ""), ID + "\n", f"urn:uuid:{ID}"]
)
def test_id_must_be_a_hyphenated_uuid(bad_id):
    assert violations(dataclasses.replace(DRAFT, id=bad_id)) == {
        "rate_limit.id": "the id must be a UUID"
    }
    with pytest.raises(RuleInvalidError) as caught:
        canonical_id(bad_id, "id")
    assert caught.value.violations == (("id", "the id must be a UUID"),)


def test_id_has_one_spelling():
    assert canonical_id(ID.upper(), "id") == ID


def test_no_message_repeats_the_input():
    draft = RuleDraft("/s3cret\n", "s3cret", 10, 60, "s3cret", id="s3cret")
    with pytest.raises(RuleInvalidError) as caught:
        validated(draft, rule_id=ID, revision=1)
    assert "s3cret" not in str(caught.value)


def test_valid_row_becomes_the_same_rule_as_its_draft():
    assert rule_from_row(ROW) == validated(DRAFT, rule_id=ID, revision=3)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("limit", None, "limit: the limit must be a whole number"),
        ("limit", 0, "limit: the limit must be positive"),
        ("limit", 2**62, "limit: the limit must be at most 2147483647"),
        ("endpoint", b"/orders", "endpoint: the endpoint must not be empty; * is the global rule"),
        ("endpoint", "/\udcff", "endpoint: the endpoint must be valid Unicode"),
        (
            "identifier_type",
            None,
            f"identifier_type: {MUST_BE_TYPE}",
        ),
        ("enabled", None, "enabled: enabled must be true or false"),
        ("revision", None, "revision: the revision must be a whole number"),
    ],
)
def test_invalid_row_yields_a_reason_instead_of_an_exception(field, value, reason):
    assert rule_from_row(ROW._replace(**{field: value})) == SkippedRow(ID, reason)


@pytest.mark.parametrize("bad_id", [None, 7, b"\xff", "", "seven"])
def test_row_without_a_usable_id_is_skipped(bad_id):
    assert rule_from_row(ROW._replace(id=bad_id)) == SkippedRow("", "id: the id must be a UUID")


@pytest.mark.parametrize("field", RuleRow._fields)
def test_etag_depends_on_every_column(field):
    assert etag_of(ROW) != etag_of(ROW._replace(**{field: "other"}))


def test_invalid_text_has_an_etag():
    assert etag_of(ROW._replace(endpoint="\udcff"))


def test_row_and_rule_hold_the_same():
    assert RuleRow.of(validated(DRAFT, rule_id=ID, revision=3)) == ROW


def test_row_as_a_draft_has_every_field_but_the_id():
    assert ROW.draft() == DRAFT


WHOLE_DRAFT = RuleDraft("/orders", "user", 10, 60, "token_bucket", enabled=True, id="x")


def test_changes_replace_exactly_the_named_fields():
    changed = RuleChanges(limit=20, enabled=False).apply(WHOLE_DRAFT)
    assert changed == RuleDraft("/orders", "user", 20, 60, "token_bucket", enabled=False, id="x")


def test_no_changes_leave_the_draft_unchanged():
    assert RuleChanges().apply(WHOLE_DRAFT) == WHOLE_DRAFT


def test_zero_is_a_change():
    changed = RuleChanges("", "", 0, 0, "", enabled=False).apply(WHOLE_DRAFT)
    assert changed == RuleDraft("", "", 0, 0, "", enabled=False, id="x")


FIRST = LimitDraft("", 10, 60, "token_bucket")
DAY = LimitDraft("day", 1_000, 86_400, "fixed_window")
SEVERAL = dataclasses.replace(DRAFT, limits=(FIRST, DAY))


WEEK = LimitDraft("week", 1, 604_800, "token_bucket")


class TestPlans:
    PRO = PlanDraft("pro", (dataclasses.replace(FIRST, limit=100), DAY))

    def test_plans_are_stored_and_read_back(self):
        rule = validated(dataclasses.replace(DRAFT, plans=(self.PRO,)), rule_id=ID, revision=3)
        [(name, limits)] = rule.plans
        assert (name, [limit.limit for limit in limits]) == ("pro", [100, 1_000])
        assert (limits[0].name, limits[0].revision, rule.has_list) == ("default", 3, False)
        assert rule_from_row(RuleRow.of(rule)) == rule
        plain = validated(DRAFT, rule_id=ID, revision=3)
        assert rule.etag != plain.etag
        listed = validated(dataclasses.replace(SEVERAL, plans=(self.PRO,)), rule_id=ID, revision=3)
        assert rule_from_row(RuleRow.of(listed)) == listed
        assert (rule.limits_of("pro"), rule.limits_of("gold")) == (limits, (rule,))

    def test_rule_for_everybody_has_no_plans(self):
        rule = dataclasses.replace(DRAFT, identifier_type="all", plans=(self.PRO,))
        assert violations(rule) == {
            "rate_limit.plans": "a rule for all has no plans: plans are assigned to single identities"
        }

    @pytest.mark.parametrize(
        ("plans", "field"),
        [
            ((PlanDraft("unlimited", (DAY,)),), "plans[unlimited]"),
            ((PlanDraft("blocked", (DAY,)),), "plans[blocked]"),
            ((PlanDraft("p" * 33, (DAY,)),), "plans"),
            ((PlanDraft("pro", ()),), "plans[pro].limits"),
            ((PlanDraft("pro", (DAY, dataclasses.replace(DAY, name=""))),), "plans[pro].limits[1].name"),
            ((PlanDraft("pro", (DAY, DAY)),), "plans[pro].limits[1].name"),
            ((PlanDraft("pro", (dataclasses.replace(DAY, burst=1),)),), "plans[pro].limits[0].burst"),
            ((PlanDraft("pro", (dataclasses.replace(DAY, enforcement=7),)),), "plans[pro].limits[0].enforcement"),
            (tuple(PlanDraft(f"p{n:02}", (DAY,)) for n in range(33)), "plans"),
        ],
    )  # fmt: skip
    def test_errors_are_reported(self, plans, field):
        found = violations(dataclasses.replace(DRAFT, plans=plans))
        assert list(found) == [f"rate_limit.{field}"]

    @pytest.mark.parametrize(
        "text", ["", "[]", "7", '{"a":7}', '{"a":[7]}', '{"a":[{}]}', "[" * 100_000, b"\xff", 8]
    )
    def test_invalid_stored_plans_are_an_invalid_row(self, text):
        skipped = rule_from_row(ROW._replace(plans=text))
        assert skipped == SkippedRow(ID, "plans: must be lists of limits by the name of a plan")

    def test_the_longest_lists_are_read_and_longer_ones_are_not_parsed(self):
        limits = tuple(dataclasses.replace(DAY, name=f"l{n}") for n in range(8))
        plans = tuple(PlanDraft(f"p{n:02}", limits) for n in range(32))
        own = (FIRST, *limits[1:])
        rule = validated(
            dataclasses.replace(DRAFT, limits=own, plans=plans), rule_id=ID, revision=3
        )
        row = RuleRow.of(rule)
        assert rule_from_row(row) == rule
        skipped = rule_from_row(row._replace(plans=row.plans + "{"))
        assert skipped == SkippedRow(ID, "limits, plans: a rule has at most 8 limits and 32 plans")


class TestSeveralLimits:
    def test_list_becomes_the_limits_of_the_rule(self):
        rule = validated(SEVERAL, rule_id=ID, revision=3)
        assert [dataclasses.astuple(limit)[:6] for limit in rule.more] == [
            (1_000, 86_400, Algorithm.FIXED_WINDOW, "day", Enforcement.ENFORCE, 3)
        ]
        assert (rule.name, rule.limit, rule.has_list) == ("default", 10, True)
        assert rule.more[0].algorithm is Algorithm.FIXED_WINDOW

    def test_rule_with_a_list_is_stored_and_read_back(self):
        rule = validated(SEVERAL, rule_id=ID, revision=3)
        row = RuleRow.of(rule)
        assert rule_from_row(row) == rule
        assert json.loads(row.limits)[0] == {"name": "default"}
        named = validated(
            dataclasses.replace(DRAFT, limits=(dataclasses.replace(FIRST, name="burst"),)),
            rule_id=ID,
            revision=3,
        )
        assert (named.name, named.more) == ("burst", ())
        assert rule_from_row(RuleRow.of(named)) == named
        assert len({named.etag, rule.etag, validated(DRAFT, rule_id=ID, revision=3).etag}) == 3

    @pytest.mark.parametrize("burst", [1, 10, (2**31 - 1) // 6])
    def test_burst_is_stored_and_read_back(self, burst):
        more = dataclasses.replace(WEEK, burst=3_550)
        first = dataclasses.replace(FIRST, burst=burst)
        rule = validated(dataclasses.replace(DRAFT, limits=(first,)), rule_id=ID, revision=3)
        assert (rule.burst, rule.capacity, rule.has_list) == (burst, burst, True)
        assert rule_from_row(RuleRow.of(rule)) == rule
        both = validated(dataclasses.replace(DRAFT, limits=(FIRST, more)), rule_id=ID, revision=3)
        assert [limit.capacity for limit in both.limits] == [10, 3_550]
        assert rule_from_row(RuleRow.of(both)) == both

    def test_edit_of_the_first_limit_keeps_its_burst_and_validates_both(self):
        draft = dataclasses.replace(DRAFT, limits=(dataclasses.replace(FIRST, burst=7),))
        rule = validated(RuleChanges(limit=5).apply(draft), rule_id=ID, revision=3)
        assert (rule.limit, rule.burst) == (5, 7)
        windowed = RuleChanges(algorithm="fixed_window").apply(draft)
        assert violations(windowed) == {
            "rate_limit.limits[0].burst": "only a token_bucket has a burst"
        }

    @pytest.mark.parametrize("place", [0, 1])
    def test_limit_that_only_observes_is_stored_and_read_back(self, place):
        limits = [FIRST, DAY][: place + 1]
        limits[place] = dataclasses.replace(limits[place], enforcement="observe")
        draft = dataclasses.replace(DRAFT, limits=tuple(limits))
        rule = validated(draft, rule_id=ID, revision=3)
        assert rule.has_list
        assert rule.limits[place].enforcement is Enforcement.OBSERVE
        assert rule_from_row(RuleRow.of(rule)) == rule

    def test_one_unnamed_limit_is_stored_as_before_lists(self):
        rule = validated(dataclasses.replace(DRAFT, limits=(FIRST,)), rule_id=ID, revision=3)
        assert RuleRow.of(rule) == ROW
        assert rule == rule_from_row(ROW)
        assert not rule.has_list

    @pytest.mark.parametrize(
        ("limits", "fields"),
        [
            ([FIRST, *[DAY] * 8], ["limits"]),
            ([dataclasses.replace(FIRST, limit=11)], ["limit"]),
            ([dataclasses.replace(FIRST, window_seconds=1)], ["window_seconds"]),
            ([dataclasses.replace(FIRST, algorithm="fixed_window")], ["algorithm"]),
            ([FIRST, DAY, DAY], ["limits[2].name"]),
            ([dataclasses.replace(FIRST, limit=0)], ["limit", "limits[0].limit"]),
            ([FIRST, dataclasses.replace(DAY, name="default")], ["limits[1].name"]),
            ([dataclasses.replace(FIRST, enforcement=7), DAY], ["limits[0].enforcement"]),
            ([FIRST, dataclasses.replace(DAY, enforcement="deny")], ["limits[1].enforcement"]),
            ([FIRST, dataclasses.replace(DAY, name="")], ["limits[1].name"]),
            ([dataclasses.replace(FIRST, name="Burst")], ["limits[0].name"]),
            ([FIRST, dataclasses.replace(DAY, name="d" * 33)], ["limits[1].name"]),
            ([FIRST, dataclasses.replace(DAY, name="day\n")], ["limits[1].name"]),
            ([dataclasses.replace(FIRST, burst=-1)], ["limits[0].burst"]),
            ([dataclasses.replace(FIRST, burst=True)], ["limits[0].burst"]),
            ([dataclasses.replace(FIRST, burst=False)], ["limits[0].burst"]),
            ([dataclasses.replace(FIRST, burst="7")], ["limits[0].burst"]),
            ([dataclasses.replace(FIRST, burst=2**31)], ["limits[0].burst"]),
            ([dataclasses.replace(FIRST, burst=(2**31 - 1) // 6 + 1)], ["limits[0].burst"]),
            ([FIRST, dataclasses.replace(DAY, burst=1)], ["limits[1].burst"]),
            ([FIRST, LimitDraft("b", 1, 1, "sliding_window", 5)], ["limits[1].burst"]),
            ([FIRST, dataclasses.replace(WEEK, burst=3_551)], ["limits[1].burst"]),
            ([FIRST, LimitDraft("b", 0, 1, "token_bucket", 7)], ["limits[1].limit"]),
            (
                [FIRST, LimitDraft("day", 0, 2**31, "leaky")],
                ["limits[1].limit", "limits[1].window_seconds", "limits[1].algorithm"],
            ),
        ],
    )
    def test_errors_in_a_list_are_reported_by_place(self, limits, fields):
        draft = dataclasses.replace(DRAFT, limits=tuple(limits))
        assert list(violations(draft)) == [f"rate_limit.{field}" for field in fields]

    @pytest.mark.parametrize(
        ("fields", "calendar", "nominal"),
        [
            ({"period": "day"}, Calendar(Period.DAY, "UTC"), 86_400),
            ({"period": "week", "time_zone": "Asia/Tokyo"}, Calendar(Period.WEEK, "Asia/Tokyo"), 604_800),
            ({"period": "month"}, Calendar(Period.MONTH, "UTC", 1), 2_592_000),
            ({"period": "month", "anchor_day": 31}, Calendar(Period.MONTH, "UTC", 31), 2_592_000),
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("place", [0, 1])
    def test_calendar_is_stored_and_read_back(self, place, fields, calendar, nominal):
        name = "a" if place else ""  # a calendar alone makes a list, too
        limit = LimitDraft(name, 10, None, "fixed_window", **fields).completed()
        limits = [FIRST, limit] if place else [limit]
        first = {name: getattr(limits[0], name) for name in FIRST_LIMIT}
        draft = dataclasses.replace(DRAFT, **first, limits=tuple(limits))
        rule = validated(draft, rule_id=ID, revision=3)
        assert (rule.limits[place].calendar, rule.limits[place].window_seconds) == (
            calendar,
            nominal,
        )
        assert rule.has_list
        assert rule_from_row(RuleRow.of(rule)) == rule

    @pytest.mark.parametrize(
        ("fields", "wrong"),
        [
            ({"algorithm": "token_bucket"}, ["period"]),
            ({"algorithm": "sliding_window"}, ["period"]),
            ({"period": "year", "window_seconds": 1}, ["period"]),
            ({"period": 4, "window_seconds": 1}, ["period"]),
            ({"window_seconds": 86_400}, ["window_seconds"]),
            ({"time_zone": "Mars/Olympus"}, ["time_zone"]),
            ({"time_zone": 7}, ["time_zone"]),
            ({"time_zone": ""}, ["time_zone"]),
            ({"time_zone": "../zones"}, ["time_zone"]),
            ({"time_zone": "europe/berlin"}, ["time_zone"]),
            ({"anchor_day": 0}, ["anchor_day"]),
            ({"anchor_day": 32}, ["anchor_day"]),
            ({"anchor_day": True}, ["anchor_day"]),
            ({"anchor_day": "1"}, ["anchor_day"]),
            ({"period": "day", "anchor_day": 1}, ["anchor_day"]),
            ({"period": "week", "anchor_day": 1}, ["anchor_day"]),
            ({"period": None, "window_seconds": 1, "time_zone": "UTC"}, ["time_zone"]),
            ({"period": None, "window_seconds": 1, "anchor_day": 1}, ["anchor_day"]),
        ],
    )
    def test_errors_in_a_calendar_are_reported(self, fields, wrong):
        month = LimitDraft("month", 1, None, "fixed_window", period="month")
        limit = dataclasses.replace(month, **fields).completed()
        draft = dataclasses.replace(DRAFT, limits=(FIRST, limit))
        assert list(violations(draft)) == [f"rate_limit.limits[1].{field}" for field in wrong]

    def test_eight_limits_with_the_longest_names_are_valid(self):
        more = [dataclasses.replace(DAY, name=f"{number}" * 32) for number in range(7)]
        draft = dataclasses.replace(DRAFT, limits=(FIRST, *more))
        assert len(validated(draft, rule_id=ID, revision=1).limits) == 8

    @pytest.mark.parametrize(
        "text",
        ["", "[]", "7", "[7]", '[{"name":"a"},{}]', '[{"name":"a","color":1}]', "[" * 100_000, b"\xff", 8],
    )  # fmt: skip
    def test_invalid_stored_list_is_an_invalid_row(self, text):
        skipped = rule_from_row(ROW._replace(limits=text))
        assert skipped == SkippedRow(ID, "limits: must be a list of limits")

    def test_changes_of_the_first_limit_change_it_in_the_list(self):
        changed = RuleChanges(limit=5).apply(SEVERAL)
        assert changed.limits == (dataclasses.replace(FIRST, limit=5), DAY)
        assert changed.limit == 5

    def test_new_list_sets_the_fields_of_its_first_limit(self):
        changed = RuleChanges(limits=(DAY,)).apply(DRAFT)
        assert (changed.limit, changed.window_seconds, changed.algorithm) == (
            1_000, 86_400, "fixed_window",
        )  # fmt: skip
        assert RuleChanges(limits=(DAY,), limit=3).apply(DRAFT).limit == 3

    def test_empty_list_leaves_the_first_limit(self):
        changed = RuleChanges(limits=()).apply(SEVERAL)
        assert changed == DRAFT
