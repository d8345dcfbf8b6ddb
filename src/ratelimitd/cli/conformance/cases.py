"""The vectors: cases with a virtual clock, one file per algorithm, in ``vectors/`` beside this module.

Never changes them: they are what was agreed on, and other implementations are held against the same files.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from ratelimitd.algorithms import DECIDE
from ratelimitd.cli.client_options import CliError, Target
from ratelimitd.model import US_PER_S, Algorithm, IdentifierType, Rule
from ratelimiter.v1 import ratelimiter_pb2 as pb

if TYPE_CHECKING:
    from ratelimitd_client import NodeClient


class Answer(NamedTuple):
    """The fields of a ``RateLimitResponse`` that a case decides, by their names; ``reason`` by that of its value."""

    allowed: bool
    remaining_tokens: int
    reset_time: int
    retry_after_seconds: int
    reason: str
    limit: int
    window_seconds: int

    @classmethod
    def of(cls, response: pb.RateLimitResponse) -> Self:
        """What a server answered; a reason of a later release is shown by its number."""
        known = response.reason in pb.Reason.values()
        return cls(
            response.allowed,
            response.remaining_tokens,
            response.reset_time,
            response.retry_after_seconds,
            pb.Reason.Name(response.reason) if known else str(response.reason),
            response.limit,
            response.window_seconds,
        )

    def later(self, seconds: int) -> Self:
        """What the same check has to be answered when everything happens so many seconds later."""
        return self._replace(reset_time=self.reset_time + seconds)

    def differences(self, got: Answer, *, tolerance_s: int = 0) -> list[str]:
        """The names of the fields in which ``got`` differs; times may by up to ``tolerance_s`` seconds."""
        return [
            name
            for name, wanted, found in zip(self._fields, self, got, strict=True)
            if (
                abs(wanted - found) > tolerance_s
                if name in _TIMES and isinstance(wanted, int) and isinstance(found, int)
                else wanted != found
            )
        ]


_TIMES: Final = frozenset({"reset_time", "retry_after_seconds"})


IDENTIFIER_TYPE: Final = IdentifierType.USER
"""Of all cases: an algorithm does not know who asks."""

_VECTORS: Final = files("ratelimitd.cli.conformance").joinpath("vectors")

_SCHEMA: Final = ".schema.json"


class Step(NamedTuple):
    """One check of a case, and what it has to be answered. ``at_us`` is wall time, in µs since the Unix epoch."""

    at_us: int
    cost: int
    expected: Answer


class Case(NamedTuple):
    """One rule, and checks under one identifier in this order."""

    algorithm: Algorithm
    name: str
    limit: int
    window_seconds: int
    steps: tuple[Step, ...]
    burst: int = 0

    def __str__(self) -> str:
        return f"{self.algorithm}: {self.name}"

    @classmethod
    def of(cls, algorithm: str, case: Mapping[str, Any]) -> Self:
        """The case of a file that is valid by the schema."""
        limit, window_seconds = case["limit"], case["window_seconds"]
        steps = tuple(
            Step(
                step["at_us"],
                step["cost"],
                Answer(
                    step["allowed"],
                    step["remaining"],
                    step["reset_time"],
                    step["retry_after"],
                    step["reason"],
                    limit,
                    window_seconds,
                ),
            )
            for step in case["steps"]
        )
        burst = case.get("burst", 0)
        return cls(Algorithm(algorithm), case["name"], limit, window_seconds, steps, burst)

    @property
    def goes_back(self) -> bool:
        """Whether a check has an earlier time than the one before it, as no clock of a server has."""
        return any(later.at_us < earlier.at_us for earlier, later in pairwise(self.steps))

    def rule(self, endpoint: str) -> Rule:
        """The rule of the case, for ``endpoint``."""
        return Rule(
            "",
            endpoint,
            IDENTIFIER_TYPE,
            limit=self.limit,
            window_seconds=self.window_seconds,
            algorithm=self.algorithm,
            burst=self.burst,
        )


def cases() -> list[Case]:
    """All cases, by algorithm, in the order of the files."""
    return list(_cases())


def _cases() -> Iterator[Case]:
    for file in sorted(_VECTORS.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".json") and not file.name.endswith(_SCHEMA):
            vectors = json.loads(file.read_text(encoding="utf-8"))
            for case in vectors["cases"]:
                yield Case.of(vectors["algorithm"], case)


# On a server's own clock no check arrives exactly when it is due. So check n of a case, counted from 0, is sent n
# tolerances after its time, and has to be answered within one tolerance: whatever is to be over by its time then is.
# What would be answered otherwise somewhere in that span is left out: a check, where it is denied – that leaves the
# bucket as it is (I6) – or else the whole case. The algorithms themselves say what would be. Pure: never reads a
# clock.

TOLERANCE_S: Final = 1
"""Answers carry whole seconds: a slightly late one may be the next second."""


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

    Reset times are whole seconds, and fixed windows begin at multiples of their length: all are moved
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
    """Which checks may be late: none, all, one alone, all but one, all up to one, all after one."""
    everybody = set(range(count))
    for number in range(count + 1):
        yield {number}
        yield everybody - {number}
        yield range(number)
        yield range(number, count)


@contextmanager
def own_rules(
    target: Target, client: NodeClient, prefix: str, cases: Sequence[Case]
) -> Iterator[list[str]]:
    """Yield the endpoint of each case while it has its rule.

    Raises:
        CliError: a rule cannot be made, or not be deleted, and then it is said which are left.
    """
    endpoints = [f"{prefix}/{number}" for number in range(len(cases))]
    made: dict[str, str] = {}
    """The ids by endpoint; empty while it is unknown whether the rule exists."""
    with _on_signal(signal.SIGTERM, signal.default_int_handler):
        try:
            for endpoint, case in zip(endpoints, cases, strict=True):
                made[endpoint] = ""
                made[endpoint] = _make(client, endpoint, case)
            yield endpoints
        finally:
            # A server that hangs delays Ctrl-C by one timeout at most.
            with (
                _on_signal(signal.SIGINT, signal.SIG_IGN),
                _on_signal(signal.SIGTERM, signal.SIG_IGN),
            ):
                _delete(target, client, prefix, made)


def _make(client: NodeClient, endpoint: str, case: Case) -> str:
    """Return the id of the rule; say of which case it is when the server takes no such rule."""
    import grpc  # noqa: PLC0415 - see target.py

    try:
        return client.create_rule(_rule_of(case, endpoint)).id
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
            raise
        message = f"no rule for {case}: {error.details()}"
        raise CliError(message) from None


def _rule_of(case: Case, endpoint: str) -> pb.RateLimit:
    rule = pb.RateLimit(
        endpoint=endpoint,
        identifier_type=IDENTIFIER_TYPE,
        limit=case.limit,
        window_seconds=case.window_seconds,
        algorithm=case.algorithm,
    )
    if case.burst:
        rule.limits.add(
            limit=case.limit,
            window_seconds=case.window_seconds,
            algorithm=case.algorithm,
            burst=case.burst,
        )
    return rule


def _delete(target: Target, client: NodeClient, prefix: str, made: dict[str, str]) -> None:
    try:
        with target.explained():
            for endpoint, rule_id in made.items():
                # Interrupted while it was made: only the server knows.
                found = [rule_id] if rule_id else [r.id for r in client.rules(endpoint=endpoint)]
                for known_id in found:
                    client.delete_rule(known_id)
    except CliError as failure:
        if not any(made.values()):
            return  # nothing was made, and why that failed is on its way already
        message = f"{failure}; rules of endpoints that begin with {prefix} may be left there"
        raise CliError(message, failure.exit_code) from None


@contextmanager
def _on_signal(
    number: signal.Signals, handler: Callable[..., object] | signal.Handlers
) -> Iterator[None]:
    """Let a signal do this until the end of the block; outside the main thread nothing can be said of signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)
