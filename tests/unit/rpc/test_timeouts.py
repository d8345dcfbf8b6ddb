"""Deadlines as callers write them."""

import pytest

from ratelimitd.rpc.messages import is_positive_timeout, parse_timeout_s


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (b"1H", 3600.0),
        (b"2M", 120.0),
        (b"3S", 3.0),
        (b"250m", 0.25),
        (b"5u", 5e-6),
        (b"7n", 7e-9),
        (b"0S", 0.0),
        (b"00000001S", 1.0),
        (b"99999999H", 99_999_999 * 3600.0),
    ],
)
def test_a_timeout_is_up_to_eight_digits_and_a_unit(value, seconds):
    assert parse_timeout_s(value) == pytest.approx(seconds)
    assert is_positive_timeout(value) is not value.startswith(b"0")


@pytest.mark.parametrize(
    "value", [b"", b"S", b"1", b"-1S", b"+1S", b" 1S", b"1 S", b"1s", b"1.5S", b"123456789S", b"1\xb2S"]
)  # fmt: skip
def test_anything_else_is_none(value):
    with pytest.raises(ValueError, match="no timeout"):
        parse_timeout_s(value)
    assert not is_positive_timeout(value)
