"""Cases as they can be run on a server's own clock: which ones, with which checks, and when each is to be sent.

No check arrives exactly when it is due. So check n of a case, counted from 0, is sent n tolerances after its time, and
has to be answered within one tolerance: whatever is to be over by its time then is. What would be answered otherwise
somewhere in that span is left out: a check, where it is denied – that leaves the bucket as it is (I6) – or else the
whole case. The algorithms themselves say what would be. Pure: never reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from ratelimitd.algorithms import DECIDE
from ratelimitd.conformance.answers import Answer
from ratelimitd.conformance.cases import Case, Step
from ratelimitd.model import US_PER_S, Algorithm

TOLERANCE_S: Final = 1
"""Times are told in whole seconds: one that is a moment late may be the next."""


class Due(NamedTuple):
    """A check that is to be sent at ``at_us``, in µs since the Unix epoch, and what it has to be answered then."""

    at_us: int
    cost: int
    expected: Answer


def left_out(case: Case, longest_us: int, tolerance_us: int) -> str:
    """Why a case cannot be run in real time, empty when it can."""
    if case.goes_back:
        return "its time goes back"
    if _duration_us(case) > longest_us:
        return "it takes longer"
    if not _certain(case, tolerance_us):
        return "it depends on moments"
    return ""


def timetable(case: Case, not_before_us: int, tolerance_us: int) -> list[Due]:
    """The checks of a case that can be run, with the first at ``not_before_us`` or as soon after as its time allows.

    Times of reset are told in whole seconds, and fixed windows begin at multiples of their length: all are moved
    by whole seconds, and by whole windows.
    """
    grid_us = _grid_us(case)
    moved_us = -((case.steps[0].at_us - not_before_us) // grid_us) * grid_us
    return [
        Due(at_us + moved_us, step.cost, step.expected.later(moved_us // US_PER_S))
        for at_us, step in _sent(_certain(case, tolerance_us), tolerance_us)
    ]


def _grid_us(case: Case) -> int:
    return (case.window_seconds if case.algorithm is Algorithm.FIXED_WINDOW else 1) * US_PER_S


def _duration_us(case: Case) -> int:
    """How long the case takes at most, with the wait for its beginning."""
    return case.steps[-1].at_us - case.steps[0].at_us + _grid_us(case)


def _sent(steps: Iterable[Step], tolerance_us: int) -> Iterator[tuple[int, Step]]:
    return ((step.at_us + number * tolerance_us, step) for number, step in enumerate(steps))


def _certain(case: Case, tolerance_us: int) -> Sequence[Step]:
    """The checks that are answered alike whenever they arrive in their span; empty where that cannot be had."""
    steps: Sequence[Step] = case.steps
    while doubtful := _doubtful(case, steps, tolerance_us):
        kept = [
            step
            for number, step in enumerate(steps)
            if number not in doubtful or step.expected.allowed
        ]
        if len(kept) == len(steps):
            return ()
        steps = kept
    return steps


def _doubtful(case: Case, steps: Sequence[Step], tolerance_us: int) -> set[int]:
    """The numbers of the checks that would be answered otherwise by some order of early and late arrivals."""
    decide, rule = DECIDE[case.algorithm], case.rule("/")
    doubtful = set[int]()
    for late in _lateness(len(steps)):
        state: Any = None
        for number, (sent_us, step) in enumerate(_sent(steps, tolerance_us)):
            at_us = sent_us + (tolerance_us if number in late else 0)
            allowed, remaining, reset, retry, reason, state = decide(state, rule, at_us, step.cost)
            fields = (rule.limit, rule.window_seconds)
            told = Answer(allowed, remaining, reset, retry, reason.name, *fields)
            if step.expected.differences(told, tolerance_s=TOLERANCE_S):
                doubtful.add(number)
    return doubtful


def _lateness(count: int) -> Iterator[range | set[int]]:
    """Who may be late: nobody, all, one alone, all but one, all up to one, all after one."""
    everybody = set(range(count))
    for number in range(count + 1):
        yield {number}
        yield everybody - {number}
        yield range(number)
        yield range(number, count)
