import inspect

import pytest

from ratelimitd import errors
from ratelimitd.errors import (
    CheckInvalidError,
    FieldViolation,
    InvalidInputError,
    RateLimitdError,
    RuleInvalidError,
    RuleNotFoundError,
)

ERRORS = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, Exception)
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_every_error_belongs_to_the_one_tree_and_says_so_in_its_name(error):
    assert issubclass(error, RateLimitdError)
    assert error.__name__.endswith("Error")


def test_invalid_input_names_every_violated_field_at_once():
    limit = FieldViolation("rate_limit.limit", "must be positive")
    window = FieldViolation("rate_limit.window_seconds", "must be positive")
    error = RuleInvalidError(limit, window)
    assert error.violations == (limit, window)
    assert (
        str(error)
        == "rate_limit.limit: must be positive; rate_limit.window_seconds: must be positive"
    )


def test_malformed_checks_and_rules_are_both_invalid_input():
    assert issubclass(CheckInvalidError, InvalidInputError)
    assert issubclass(RuleInvalidError, InvalidInputError)
    assert not issubclass(CheckInvalidError, RuleInvalidError)


def test_an_unknown_rule_is_named():
    error = RuleNotFoundError("7c9e")
    assert error.rule_id == "7c9e"
    assert str(error) == "no rule has the id '7c9e'"
