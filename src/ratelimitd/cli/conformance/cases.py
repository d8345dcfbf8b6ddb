"""The test vectors in ``vectors/``: cases with a virtual clock, in one file per algorithm, for policies and for holds.

The files are fixed: other implementations are tested against the same ones.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import pairwise
from typing import Any, Final, NamedTuple, Self

from ratelimitd.algorithms import DECIDE
from ratelimitd.cli.output import enum_name
from ratelimitd.model import US_PER_S, Algorithm, Calendar, IdentifierType, Period, Rule
from ratelimiter.v1 import ratelimiter_pb2 as pb

ANY: Final = -1
"""Replaces an expected time that depends on the server's clock: not compared."""


class LimitAnswer(NamedTuple):
    """The answer of one limit, in the fields of a ``LimitStatus``; ``rule`` is the position of its rule in the case."""

    rule: int
    name: str
    allowed: bool
    remaining_tokens: int
    reset_time: int
    retry_after_seconds: int
    reason: str

    @classmethod
    def of(
        cls, status: pb.LimitStatus | pb.RateLimitResponse, name: str, rule_ids: Sequence[str]
    ) -> Self:
        """Convert a server's answer; a rule outside the case is -1."""
        rule = rule_ids.index(status.rule_id) if status.rule_id in rule_ids else -1
        return cls(rule, name, *_received(status))


class Answer(NamedTuple):
    """The fields of a ``RateLimitResponse`` that a case determines; ``reason`` is the name of its value.

    ``limits`` are all that applied, including an only one: the deciding limit first, the others by name. Empty in the
    cases of one algorithm.
    """

    allowed: bool
    remaining_tokens: int
    reset_time: int
    retry_after_seconds: int
    reason: str
    limit: int
    window_seconds: int
    limits: tuple[LimitAnswer, ...] = ()

    @classmethod
    def of(cls, response: pb.RateLimitResponse, rule_ids: Sequence[str] = ()) -> Self:
        """Convert a server's answer, with the limits of these rules."""
        limits = [LimitAnswer.of(one, one.name, rule_ids) for one in response.limits]
        if not limits and response.rule_id:
            limits = [LimitAnswer.of(response, response.limit_name, rule_ids)]
        shown = _in_order(limits) if rule_ids else ()
        return cls(*_received(response), response.limit, response.window_seconds, shown)

    def fields(self) -> dict[str, object]:
        """Return all fields by path, such as ``limits[0].allowed``."""
        found: dict[str, object] = {
            name: value for name, value in self._asdict().items() if name != "limits"
        }
        for place, one in enumerate(self.limits):
            found |= {f"limits[{place}].{name}": value for name, value in one._asdict().items()}
        return found

    def later(self, seconds: int) -> Self:
        """Return the expected answer if everything happens this many seconds later."""
        return self._replace(reset_time=self.reset_time + seconds)

    def differences(self, got: Answer, *, tolerance_s: int = 0) -> list[str]:
        """Return the names of the fields in which ``got`` differs; times may do so by up to ``tolerance_s`` seconds."""
        wanted, found = self.fields(), got.fields()
        return [
            name
            for name in wanted | found
            if not _are_alike(wanted.get(name), found.get(name), tolerance_s * (name in _TIMES))
        ]


def _received(one: pb.LimitStatus | pb.RateLimitResponse) -> tuple[bool, int, int, int, str]:
    """Return the fields that an answer and each of its limits have."""
    times = one.reset_time, one.retry_after_seconds
    return one.allowed, one.remaining_tokens, *times, enum_name(pb.Reason, one.reason)


def _in_order(limits: Sequence[LimitAnswer]) -> tuple[LimitAnswer, ...]:
    return (*limits[:1], *sorted(limits[1:]))


_TIMES: Final = frozenset({"reset_time", "retry_after_seconds"})


def _are_alike(wanted: object, found: object, tolerance: int) -> bool:
    if wanted == ANY:
        return True
    if tolerance and isinstance(wanted, int) and isinstance(found, int):
        return abs(wanted - found) <= tolerance
    return wanted == found


IDENTIFIER_TYPE: Final = IdentifierType.USER
"""Identifier type of all cases of one algorithm, whose result does not depend on it."""


class Step(NamedTuple):
    """One check of a case with its expected answer.

    Attributes:
        at_us: wall time, in µs since the Unix epoch.
        cost: tokens to spend.
        expected: the answer.
        endpoint: suffix to the endpoint of the case.
        identities: pairs of type and identifier, the first for the check itself, the others for ``also``.
        hold: the name of the hold, if the check is one.
        settles: pairs of hold name and actual tokens, settled before the check.
    """

    at_us: int
    cost: int
    expected: Answer
    endpoint: str = ""
    identities: tuple[tuple[str, str], ...] = ((IDENTIFIER_TYPE, ""),)
    hold: str = ""
    settles: tuple[tuple[str, int], ...] = ()


class Case(NamedTuple):
    """One rule, and checks of one identifier in this order; or several rules in ``rules``.

    With several, ``limit`` is that of the first, ``window_seconds`` the longest window, and the file name replaces the
    algorithm.
    """

    algorithm: Algorithm | str
    name: str
    limit: int
    window_seconds: int
    steps: tuple[Step, ...]
    burst: int = 0
    calendar: Calendar | None = None
    rules: tuple[pb.RateLimit, ...] = ()

    def __str__(self) -> str:
        return f"{self.algorithm}: {self.name}"

    @classmethod
    def of(cls, algorithm: str, case: Mapping[str, Any]) -> Self:
        """Return the case of a file that is valid against its schema."""
        limit, window_seconds = case["limit"], case["window_seconds"]
        steps = tuple(
            Step(step["at_us"], step["cost"], Answer(*_answered(step), limit, window_seconds))
            for step in case["steps"]
        )
        calendar = None
        if "period" in case:
            period, anchor_day = Period(case["period"]), case.get("anchor_day", 1)
            calendar = Calendar(period, case["time_zone"], anchor_day)
        numbers = (limit, window_seconds, steps, case.get("burst", 0))
        return cls(Algorithm(algorithm), case["name"], *numbers, calendar)

    @classmethod
    def of_policy(cls, file: str, case: Mapping[str, Any]) -> Self:
        """Return the case of a file of policies or holds that is valid against its schema."""
        rules = tuple(_policy_rule(rule) for rule in case["rules"])
        windows = [limit.window_seconds for rule in rules for limit in rule.limits]
        steps = tuple(_policy_step(step, rules) for step in case["steps"])
        first = rules[0].limits[0]
        return cls(file, case["name"], first.limit, max(windows), steps, rules=rules)

    @property
    def goes_back(self) -> bool:
        """Whether a check has an earlier time than its predecessor, which no server clock has."""
        return any(later.at_us < earlier.at_us for earlier, later in pairwise(self.steps))

    @property
    def has_holds(self) -> bool:
        """Whether any of its checks is a hold."""
        return any(step.hold for step in self.steps)

    def rule(self, endpoint: str) -> Rule:
        """Return the only rule of a case of one algorithm, for ``endpoint``."""
        return Rule(
            "",
            endpoint,
            IDENTIFIER_TYPE,
            limit=self.limit,
            window_seconds=self.window_seconds,
            algorithm=Algorithm(self.algorithm),
            burst=self.burst,
            calendar=self.calendar,
        )

    def rule_ids(self, endpoint: str) -> list[str]:
        """Return the ids of the rules of a policy case with this ``endpoint``."""
        return [
            str(uuid.uuid5(uuid.NAMESPACE_URL, f"{endpoint} {number}"))
            for number in range(len(self.rules))
        ]


def _answered(of: Mapping[str, Any]) -> tuple[bool, int, int, int, str]:
    """Return the answer of a step, or of one of its limits."""
    reset_time, retry_after = of.get("reset_time", ANY), of.get("retry_after", ANY)
    return of["allowed"], of["remaining"], reset_time, retry_after, of["reason"]


def _policy_rule(rule: Mapping[str, Any]) -> pb.RateLimit:
    limits = [
        pb.Limit(**{**limit, "enforcement": pb.Enforcement.Value(limit["enforcement"].upper())})
        for limit in rule["limits"]
    ]
    return pb.RateLimit(
        endpoint=rule["endpoint"], identifier_type=rule["identifier_type"], limits=limits
    )


def _policy_step(step: Mapping[str, Any], rules: Sequence[pb.RateLimit]) -> Step:
    only = {**step, "rule": 0, "name": rules[0].limits[0].name}
    limits = [
        LimitAnswer(one["rule"], one["name"], *_answered(one)) for one in step.get("limits", [only])
    ]
    decides = [
        limit for one in limits[:1] for limit in rules[one.rule].limits if limit.name == one.name
    ]
    limit, window_seconds = (decides[0].limit, decides[0].window_seconds) if decides else (0, 0)
    return Step(
        step["at_us"],
        step["cost"],
        Answer(*_answered(step), limit, window_seconds, _in_order(limits)),
        step["endpoint"],
        tuple(step["identities"].items()),
        step.get("hold", ""),
        tuple(step.get("settles", {}).items()),
    )


def cases() -> list[Case]:
    """Return all cases, by algorithm, in file order."""
    found = []
    vectors_dir = files("ratelimitd.cli.conformance").joinpath("vectors")
    for file in sorted(vectors_dir.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".json") and not file.name.endswith(".schema.json"):
            vectors = json.loads(file.read_text(encoding="utf-8"))
            algorithm, name = vectors.get("algorithm"), file.name.removesuffix(".json")
            found += [
                Case.of(algorithm, case) if algorithm else Case.of_policy(name, case)
                for case in vectors["cases"]
            ]
    return found


# On a server's own clock, no check arrives exactly at its due time. So check n of a case, counted from 0, is sent n
# tolerances after its time and must be answered within one tolerance: a period that ends by the due time has then
# ended. Where the answer depends on the moment within that span, a denied check is omitted – it leaves the bucket
# unchanged (I6) – or else the whole case. The algorithms determine this. Pure: reads no clock.

TOLERANCE_S: Final = 1
"""Answers use whole seconds: a slightly late one may show the next second."""


def left_out(case: Case, longest_us: int, tolerance_us: int) -> str:
    """Return why a case cannot run in real time, empty if it can."""
    if case.rules:
        return "it has holds" if case.has_holds else "it has several limits"
    if case.goes_back:
        return "its time goes back"
    takes_us = _grid_us(case) + case.steps[-1].at_us - case.steps[0].at_us
    if case.calendar is not None or takes_us > longest_us:
        return "it takes longer"
    if not _certain(case, tolerance_us):
        return "it depends on moments"
    return ""


def timetable(case: Case, not_before_us: int, tolerance_us: int) -> list[Step]:
    """Return the checks of a case that can run, the first at ``not_before_us`` or as soon after as its time allows.

    Reset times are whole seconds, and fixed windows begin at multiples of their length: times are moved by whole
    seconds and whole windows.
    """
    grid_us = _grid_us(case)
    moved_us = -((case.steps[0].at_us - not_before_us) // grid_us) * grid_us
    return [
        step._replace(at_us=at_us + moved_us, expected=step.expected.later(moved_us // US_PER_S))
        for at_us, step in _sent(_certain(case, tolerance_us), tolerance_us)
    ]


def _grid_us(case: Case) -> int:
    """Return the interval of the moments at which the case can start, which is the longest wait for one."""
    return (case.window_seconds if case.algorithm is Algorithm.FIXED_WINDOW else 1) * US_PER_S


def _sent(steps: Iterable[Step], tolerance_us: int) -> Iterator[tuple[int, Step]]:
    return ((step.at_us + number * tolerance_us, step) for number, step in enumerate(steps))


def _certain(case: Case, tolerance_us: int) -> Sequence[Step]:
    """Return the checks whose answers do not depend on when in their span they arrive; empty if there are none."""
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
    """Return the numbers of the checks whose answer changes with some order of early and late arrivals."""
    rule = case.rule("/")
    decide = DECIDE[rule.algorithm]
    doubtful = set[int]()
    for late in _lateness(len(steps)):
        state: Any = None
        for number, (sent_us, step) in enumerate(_sent(steps, tolerance_us)):
            at_us = sent_us + (tolerance_us if number in late else 0)
            allowed, remaining, reset, retry, reason, state = decide(state, rule, at_us, step.cost)
            fields = (rule.limit, rule.window_seconds)
            answer = Answer(allowed, remaining, reset, retry, reason.name, *fields)
            if step.expected.differences(answer, tolerance_s=TOLERANCE_S):
                doubtful.add(number)
    return doubtful


def _lateness(count: int) -> Iterator[range | set[int]]:
    """Yield sets of late checks: none, all, one, all but one, all up to one, all after one."""
    everybody = set(range(count))
    for number in range(count + 1):
        yield {number}
        yield everybody - {number}
        yield range(number)
        yield range(number, count)
