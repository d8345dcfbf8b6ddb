"""Rules of one limit, and what an algorithm says of them, with names: tests are read more often than they are run."""

from array import array
from typing import NamedTuple

from ratelimitd.algorithms import DECIDE
from ratelimitd.model import Algorithm, IdentifierType, Reason, Rule


def rule_of(algorithm: Algorithm, limit: int = 10, window_seconds: int = 10) -> Rule:
    """A rule of this algorithm."""
    return Rule(
        "r",
        "/a",
        IdentifierType.USER,
        limit=limit,
        window_seconds=window_seconds,
        algorithm=algorithm,
    )


class Outcome(NamedTuple):
    """A :data:`ratelimitd.model.Outcome`, and equal to it."""

    allowed: bool
    remaining: int
    reset_time: int
    retry_after: int
    reason: Reason
    state: tuple[int, int] | bytes | None


def named(judge):
    """``judge``, which returns an outcome, with names for its parts."""
    return lambda *arguments: Outcome._make(judge(*arguments))


NAMED_DECIDE = {algorithm: named(decide) for algorithm, decide in DECIDE.items()}


def runs_of(log: bytes) -> list[tuple[int, int]]:
    """The runs of a sliding window's log: (time in µs, tokens), ascending."""
    cells = array("q", log)
    size = len(cells) // 2
    times, sums = cells[:size], cells[size:]
    return [(times[run], sums[run + 1] - sums[run]) for run in range(size)]
