import inspect

import pytest

from ratelimitd import errors
from ratelimitd.errors import (
    BreakerOpenError,
    CheckInvalidError,
    FieldViolation,
    InvalidInputError,
    RateLimitdError,
    RuleInvalidError,
    RuleNotFoundError,
    StoreSlowError,
    StoreUnavailableError,
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
    assert error.name == "7c9e"
    assert str(error) == "no rule has the id '7c9e'"


def test_a_rule_that_was_asked_for_by_its_place_is_named_by_it():
    error = RuleNotFoundError("/orders", "user")
    assert error.name == "/orders"
    assert str(error) == "no rule is for the endpoint '/orders' and the identifier type user"


def test_an_open_breaker_tells_when_the_shared_state_is_asked_again():
    error = BreakerOpenError(2_000_000)
    assert error.retry_after_us == 2_000_000
    assert str(error) == "the circuit breaker of the shared state is open"


def test_a_slow_store_is_one_that_is_away_and_says_for_how_long_it_was_waited():
    slow = StoreSlowError("too slow")
    assert isinstance(slow, StoreUnavailableError)
    assert str(slow) == "too slow"
