"""How long a caller waits: the header ``grpc-timeout``, as a number of seconds. Never reads a clock."""

from __future__ import annotations

from typing import Final

MAX_DIGITS: Final = 8
"""gRPC over HTTP/2, "Timeout": at most eight digits, so that no sum of it and a clock overflows anywhere."""

_UNIT_S: Final = {
    ord("H"): 3_600.0,
    ord("M"): 60.0,
    ord("S"): 1.0,
    ord("m"): 1e-3,
    ord("u"): 1e-6,
    ord("n"): 1e-9,
}


_UNITS: Final = frozenset(bytes((unit,)) for unit in _UNIT_S)
_DIGITS: Final = b"0123456789"
_ZERO: Final = ord("0")


def is_positive_timeout(value: bytes) -> bool:
    """Whether a value surely leaves time: for the many calls whose deadline nobody looks at, in half the time.

    False says nothing, for a value with leading zeros may do so, too.
    """
    return (
        value.lstrip(_DIGITS) in _UNITS and 1 < len(value) <= MAX_DIGITS + 1 and value[0] != _ZERO
    )


def parse_timeout_s(value: bytes) -> float:
    """The seconds that a value such as ``b"250m"`` stands for; zero is one.

    Raises:
        ValueError: it is not up to eight ASCII digits and a unit.
    """
    digits = value[:-1]
    if not digits.isdigit() or len(digits) > MAX_DIGITS or value[-1] not in _UNIT_S:
        message = "no timeout"
        raise ValueError(message)
    return int(digits) * _UNIT_S[value[-1]]
