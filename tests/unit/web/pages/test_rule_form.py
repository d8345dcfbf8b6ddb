import pytest

from ratelimitd.model import INT32_MAX, Algorithm, IdentifierType
from ratelimitd.web.pages.rule_form import RuleForm, whole_number

FIELDS = {
    "endpoint": "/orders",
    "identifier_type": "user",
    "limit": " 10 ",
    "window_seconds": "60",
    "algorithm": "fixed_window",
    "enabled": "on",
}


def test_form_becomes_a_rule():
    found = RuleForm.of_fields(FIELDS).checked()
    assert (found.endpoint, found.identifier_type) == ("/orders", IdentifierType.USER)
    assert found.algorithm is Algorithm.FIXED_WINDOW
    assert (found.limit, found.window_seconds, found.enabled) == (10, 60, True)


def test_unticked_box_is_a_disabled_rule():
    fields = {name: text for name, text in FIELDS.items() if name != "enabled"}
    rule = RuleForm.of_fields(fields).checked()
    assert rule.enabled is RuleForm.of_rule(rule).enabled is False


def test_spaces_around_an_endpoint_are_kept():
    assert RuleForm.of_fields({**FIELDS, "endpoint": " /a "}).checked().endpoint == " /a "


def test_each_invalid_field_is_named():
    errors = RuleForm.of_fields({}).errors()
    assert set(errors) == {"endpoint", "identifier_type", "limit", "window_seconds", "algorithm"}
    assert errors["limit"] == "the limit must be a whole number"
    assert RuleForm.of_fields(FIELDS).errors() == {}


@pytest.mark.parametrize(
    ("typed", "problem"),
    [
        ("0", "the limit must be positive"),
        ("-1", "the limit must be positive"),
        (str(INT32_MAX + 1), f"the limit must be at most {INT32_MAX}"),
        ("9" * 5_000, "the limit must be a whole number"),
        ("1.5", "the limit must be a whole number"),
        ("1_000", "the limit must be a whole number"),
        ("١", "the limit must be a whole number"),  # noqa: RUF001 -- a digit, in Arabic
        ("<b>", "the limit must be a whole number"),
    ],
    ids=repr,
)
def test_limit_is_a_whole_number_within_bounds(typed, problem):
    assert RuleForm.of_fields({**FIELDS, "limit": typed}).errors() == {"limit": problem}


def test_window_may_be_a_duration():
    lines = {"more": "day 100 1d fixed_window", "plans": "pro a 9 2h token_bucket"}
    rule = RuleForm.of_fields({**FIELDS, **lines, "window_seconds": " 1m "}).checked()
    limits = (*rule.limits, *rule.plans[0].limits)
    assert [limit.window_seconds for limit in limits] == [60, 86_400, 7_200]
    for typed in ("1w", "0m", "1 m", "9999999999d"):
        form = RuleForm.of_fields({**FIELDS, "window_seconds": typed})
        assert set(form.errors()) == {"window_seconds"}


def test_empty_form_suggests_common_values():
    form = RuleForm()
    assert (form.identifier_type, form.window_seconds, form.enabled) == ("user", "60", True)


def test_whole_number_may_have_a_sign():
    assert (whole_number("+7"), whole_number("-7"), whole_number("7a")) == (7, -7, "7a")
