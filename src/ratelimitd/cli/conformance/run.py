"""Cases, run against a server whose rules are made: with times of the cases' own, or on the server's clock.

Never says what came of it: results are values.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, Self

from ratelimitd.cli.client_options import CliError, UsageError
from ratelimitd.cli.conformance.cases import (
    IDENTIFIER_TYPE,
    TOLERANCE_S,
    Answer,
    Case,
    left_out,
    timetable,
)
from ratelimitd.cli.output import Output
from ratelimitd.model import US_PER_S
from ratelimiter.v1 import ratelimiter_pb2 as pb

if TYPE_CHECKING:
    import grpc

    from ratelimitd_client import NodeClient
if TYPE_CHECKING:
    from ratelimitd_client import NodeClient

ENDS_ALL: Final = frozenset(
    {
        "CANCELLED",
        "DEADLINE_EXCEEDED",
        "PERMISSION_DENIED",
        "UNAUTHENTICATED",
        "UNAVAILABLE",
        "UNIMPLEMENTED",
    }
)
"""Statuses that are about the server or the caller: no other check would fare better."""


class Refusal(NamedTuple):
    """What the server said instead of deciding a check."""

    words: str

    @classmethod
    def of(cls, name: str, text: str) -> Self:
        """By the name of the status or reason, and what is said beside it."""
        return cls(f"{name}: {text}" if text else name)


Answered = pb.RateLimitResponse | Refusal


class Asking:
    """Asks one server."""

    def __init__(self, client: NodeClient) -> None:
        self._client = client

    def alone(self, request: pb.RateLimitRequest) -> Answered:
        """The answer to one check.

        Raises:
            grpc.RpcError: the server answers no check at all.
        """
        import grpc  # noqa: PLC0415 - see target.py

        try:
            response = self._client.check(
                request.identifier,
                request.identifier_type,
                request.endpoint,
                cost=request.tokens_requested,
                timestamp=request.timestamp,
            )
        except grpc.RpcError as error:
            return _refusal(error)
        return _answered(response)

    def together(self, requests: Sequence[pb.RateLimitRequest]) -> list[Answered]:
        """The answers to any number of checks, asked in as few batches as it takes.

        Raises:
            CliError: there are more or fewer.
            grpc.RpcError: the server answers no check at all.
        """
        from ratelimitd_client.check import MAX_BATCH  # noqa: PLC0415 - see target.py

        answers: list[Answered] = []
        for start in range(0, len(requests), MAX_BATCH):
            answers += self._batch(requests[start : start + MAX_BATCH])
        return answers

    def _batch(self, requests: Sequence[pb.RateLimitRequest]) -> list[Answered]:
        import grpc  # noqa: PLC0415 - see target.py

        try:
            responses = self._client.check_batch(requests)
        except grpc.RpcError as error:
            refusal = _refusal(error)
            if len(requests) == 1:
                return [refusal]
            # Which of them it was is found one by one.
            return [answer for request in requests for answer in self._batch([request])]
        if len(responses) != len(requests):
            message = f"the server gave {len(responses)} answers to a batch of {len(requests)}"
            raise CliError(message)
        return list(map(_answered, responses))


def _answered(response: pb.RateLimitResponse) -> Answered:
    """The answer, or in its place what a server says of a check of a batch that is not valid."""
    if response.reason == pb.INVALID_REQUEST:
        return Refusal.of("INVALID_REQUEST", response.error)
    return response


def _refusal(error: grpc.RpcError) -> Refusal:
    """What the server said to one check; raises the error that is about more."""
    code: str = error.code().name
    if code in ENDS_ALL:
        raise error
    return Refusal.of(code, error.details() or "")


BEFOREHAND: Final = "beforehand"
ALONE: Final = "alone"
IN_BATCHES: Final = "in batches"
IN_ONE_BATCH: Final = "in one batch"
ON_ITS_CLOCK: Final = "on its clock"

LEAD_US: Final = US_PER_S // 2
"""Before the first check in real time: all of them are ready when it is due."""

IN_FORCE_WITHIN_US: Final = 10 * US_PER_S
"""A rule that one node has taken is in force on the others within seconds."""

ASK_AGAIN_US: Final = US_PER_S // 10


class WallTime(Protocol):
    """Wall time, in µs since the Unix epoch."""

    def now_us(self) -> int:
        """What time it is."""
        ...

    def wait_until(self, at_us: int) -> None:
        """Return when it is that time, or at once if it is later."""
        ...


class Checked(NamedTuple):
    """One check: which one of its case, how it was sent, and what it was answered."""

    number: int
    way: str
    cost: int
    expected: Answer
    got: Answer
    differences: list[str]


class Refused(NamedTuple):
    """A check that the server did not decide, and its words; the rest of the case is not asked."""

    number: int
    way: str
    cost: int
    words: str


class CaseResult(NamedTuple):
    """What came of a case; ``not_judged`` says why nothing did."""

    case: Case
    checks: Sequence[Checked]
    not_judged: str = ""
    refused: Refused | None = None

    @property
    def ok(self) -> bool:
        """Whether every check was decided, and there is no difference."""
        return self.refused is None and not any(check.differences for check in self.checks)


class RealTime(NamedTuple):
    """Which cases may take how long, and how late a check may be answered."""

    longest_us: int
    tolerance_us: int


class Runner:
    """Runs cases: case i asks for endpoint i, and all are asked for by identifiers that begin with ``name``."""

    def __init__(
        self,
        client: NodeClient,
        cases: Sequence[Case],
        endpoints: Sequence[str],
        *,
        name: str,
        time: WallTime,
    ) -> None:
        self._asking = Asking(client)
        self._cases = cases
        self._endpoints = endpoints
        self._name = name
        self._time = time
        self._refused: dict[int, Refused] = {}

    def with_virtual_time(self, *, one_batch: bool) -> list[CaseResult]:
        """Run every case check by check, then all cases in batches, each with the next check of every case.

        ``one_batch``: then once more, all checks of all cases in one batch (in several where they are too many).

        Raises:
            UsageError: the server does not judge by its callers' time.
        """
        self._see_whose_time_counts(self._in_force())
        rounds = [
            [(number, index) for number, case in enumerate(self._cases) if index < len(case.steps)]
            for index in range(max(len(case.steps) for case in self._cases))
        ]
        checked: list[list[Checked]] = [[] for _ in self._cases]
        for number, case in enumerate(self._cases):
            for index in range(len(case.steps)):
                self._check(ALONE, [(number, index)], checked)
        for together in rounds:
            self._check(IN_BATCHES, together, checked)
        if one_batch:
            self._check(IN_ONE_BATCH, list(chain.from_iterable(rounds)), checked)
        return [
            CaseResult(case, checks, refused=self._refused.get(number))
            for number, (case, checks) in enumerate(zip(self._cases, checked, strict=True))
        ]

    def with_real_time(self, how: RealTime) -> list[CaseResult]:
        """Run the cases that can be, all at once."""
        self._in_force()
        reasons = [left_out(case, how.longest_us, how.tolerance_us) for case in self._cases]
        start_us = self._time.now_us() + LEAD_US
        due = {
            number: timetable(case, start_us, how.tolerance_us)
            for number, case in enumerate(self._cases)
            if not reasons[number] and number not in self._refused
        }
        results: list[list[Checked]] = [[] for _ in self._cases]
        # (when, which case, which check), the next one first.
        waiting = [(checks[0].at_us, number, 0) for number, checks in due.items()]
        heapq.heapify(waiting)
        while waiting:
            at_us = waiting[0][0]
            together = []
            while waiting and waiting[0][0] == at_us:
                together.append(heapq.heappop(waiting)[1:])
            self._time.wait_until(at_us)
            answers = self._asking.together(
                [
                    self._request(number, ON_ITS_CLOCK, due[number][index].cost)
                    for number, index in together
                ]
            )
            late_us = self._time.now_us() - at_us
            for (number, index), answer in zip(together, answers, strict=True):
                check = due[number][index]
                if isinstance(answer, Refusal):
                    self._refuse(number, Refused(index, ON_ITS_CLOCK, check.cost, answer.words))
                    continue
                if late_us > how.tolerance_us:
                    reasons[number] = f"an answer came {late_us / 1_000:.0f} ms after it was due"
                    results[number].clear()
                    continue
                got = Answer.of(answer)
                differences = check.expected.differences(got, tolerance_s=TOLERANCE_S)
                results[number].append(
                    Checked(index, ON_ITS_CLOCK, check.cost, check.expected, got, differences)
                )
                if index + 1 < len(due[number]):
                    following = (due[number][index + 1].at_us, number, index + 1)
                    heapq.heappush(waiting, following)
        return [
            CaseResult(case, checks, why, None if why else self._refused.get(number))
            for number, (case, checks, why) in enumerate(
                zip(self._cases, results, reasons, strict=True)
            )
        ]

    def _in_force(self) -> Sequence[Answered]:
        """Wait until all rules are, and return what the first check of each case would be answered.

        Raises:
            CliError: they are not, or the server refuses all these checks.
        """
        asked = [
            self._request(number, BEFOREHAND, 1, case.steps[0].at_us, peek=True)
            for number, case in enumerate(self._cases)
        ]
        until_us = self._time.now_us() + IN_FORCE_WITHIN_US
        while True:
            answers = self._asking.together(asked)
            if not any(_has_no_rule(answer) for answer in answers):
                break
            if self._time.now_us() >= until_us:
                message = f"rules are not in force {IN_FORCE_WITHIN_US // US_PER_S} s after they were made"
                raise CliError(message)
            self._time.wait_until(self._time.now_us() + ASK_AGAIN_US)
        for number, answer in enumerate(answers):
            if isinstance(answer, Refusal):
                self._refuse(number, Refused(0, BEFOREHAND, 1, answer.words))
        if len(self._refused) == len(self._cases):
            message = f"the server refuses every check: {self._refused[0].words}"
            raise CliError(message)
        return answers

    def _refuse(self, number: int, refused: Refused) -> None:
        """End a case; what was refused first counts."""
        self._refused.setdefault(number, refused)

    def _see_whose_time_counts(self, answers: Sequence[Answered]) -> None:
        """Raise if a bucket is whole again later than a window after the time that was sent, and about now."""
        for case, answer in zip(self._cases, answers, strict=True):
            if isinstance(answer, Refusal):
                continue
            sent_us = case.steps[0].at_us
            latest_s = sent_us // US_PER_S + case.window_seconds + TOLERANCE_S
            between_s = (sent_us + self._time.now_us()) // 2 // US_PER_S
            if answer.reset_time > max(latest_s, between_s):
                message = (
                    "the server judges checks by its own clock: start one with TIMESTAMPS=caller for this,"
                    " or give --real-time"
                )
                raise UsageError(message)

    def _check(
        self, way: str, numbers: Sequence[tuple[int, int]], checked: Sequence[list[Checked]]
    ) -> None:
        """Ask the checks whose numbers these are, of their case and within it, at their times; add what came."""
        asked = [check for check in numbers if check[0] not in self._refused]
        steps = [self._cases[number].steps[index] for number, index in asked]
        requests = [
            self._request(number, way, step.cost, step.at_us)
            for (number, _), step in zip(asked, steps, strict=True)
        ]
        if way == ALONE:
            answers = [self._asking.alone(request) for request in requests]
        else:
            answers = self._asking.together(requests)
        for (number, index), step, answer in zip(asked, steps, answers, strict=True):
            if isinstance(answer, Refusal):
                self._refuse(number, Refused(index, way, step.cost, answer.words))
            elif number not in self._refused:  # as it may be by now in one batch, by a check before
                got = Answer.of(answer)
                differences = step.expected.differences(got)
                checked[number].append(
                    Checked(index, way, step.cost, step.expected, got, differences)
                )

    def _request(
        self, number: int, way: str, cost: int, timestamp: int = 0, *, peek: bool = False
    ) -> pb.RateLimitRequest:
        return pb.RateLimitRequest(
            identifier=f"{self._name} {way}",
            identifier_type=IDENTIFIER_TYPE,
            endpoint=self._endpoints[number],
            tokens_requested=cost,
            timestamp=timestamp,
            peek=peek,
        )


def _has_no_rule(answer: Answered) -> bool:
    return not isinstance(answer, Refusal) and answer.reason == pb.NO_RULE


HEAD: Final = ("algorithm", "case", "checks", "expected", "got", "ok")

MOST_WORDS: Final = 100
"""Characters of what a server said that the table shows; JSON has all."""

US_PER_MS: Final = 1_000

MOST_DIFFERENCES: Final = 3
"""Of a case that the table shows; the first usually explains the others, and JSON has all."""


def print_table(results: Sequence[CaseResult], output: Output, how: RealTime | None) -> None:
    """Print a row for each case, below it one for each check that was answered otherwise, and what that comes to."""
    output.table(HEAD, (row for result in results for row in _rows(result)))
    output.line()
    judged = [result for result in results if not result.not_judged]
    wrong = sum(not result.ok for result in judged)
    output.line(
        output.styled(f"{wrong} of {len(judged)} cases differ", "bad")
        if wrong
        else output.styled(f"{len(judged)} cases as expected", "good")
    )
    if len(judged) < len(results):
        output.line(f"{len(results) - len(judged)} not judged")
    if how is not None:
        within = f"{how.tolerance_us / US_PER_MS:g} ms"
        output.line(
            f"in real time: every answer came within {within}, and may tell times that differ by {TOLERANCE_S} s"
        )


def as_json(results: Sequence[CaseResult], target: str, how: RealTime | None) -> dict[str, Any]:
    """All of a run, with every check."""
    return {
        "target": target,
        "clock": "caller" if how is None else "server",
        "tolerance_ms": how and how.tolerance_us / US_PER_MS,
        "ok": passed(results),
        "cases": [
            {
                "algorithm": result.case.algorithm,
                "name": result.case.name,
                "limit": result.case.limit,
                "window_seconds": result.case.window_seconds,
                "burst": result.case.burst,
                "ok": None if result.not_judged else result.ok,
                "not_judged": result.not_judged or None,
                "refused": result.refused
                and {
                    "number": result.refused.number,
                    "sent": result.refused.way,
                    "tokens_requested": result.refused.cost,
                    "error": result.refused.words,
                },
                "checks": [
                    {
                        "number": check.number,
                        "sent": check.way,
                        "tokens_requested": check.cost,
                        "expected": check.expected._asdict(),
                        "got": check.got._asdict(),
                        "differences": check.differences,
                    }
                    for check in result.checks
                ],
            }
            for result in results
        ],
    }


def passed(results: Sequence[CaseResult]) -> bool:
    """Whether at least one case was judged, and none differs."""
    return all(result.ok for result in results) and any(not result.not_judged for result in results)


def _rows(result: CaseResult) -> Iterator[tuple[object, ...]]:
    case = result.case
    name = (str(case.algorithm), case.name)
    if result.not_judged:
        yield (*name, "", "", f"not judged: {result.not_judged}", "–")
        return
    expected = _verdicts([check.expected.allowed for check in result.checks])
    got = _verdicts([check.got.allowed for check in result.checks])
    yield (*name, str(len(result.checks)), expected, got, "yes" if result.ok else "NO")
    if result.refused is not None:
        words = f"refused: {result.refused.words[:MOST_WORDS]}"
        yield ("", _label(result.refused), "", "a decision", words, "")
    different = [check for check in result.checks if check.differences]
    for check in different[:MOST_DIFFERENCES]:
        yield from _difference_rows(check)
    if len(different) > MOST_DIFFERENCES:
        yield ("", f"  and {len(different) - MOST_DIFFERENCES} more checks", "", "", "", "")


def _label(check: Checked | Refused) -> str:
    return f"  check {check.number + 1} {check.way}, cost {check.cost}"


def _difference_rows(check: Checked) -> Iterator[tuple[object, ...]]:
    label = _label(check)
    for name in check.differences:
        expected, got = getattr(check.expected, name), getattr(check.got, name)
        yield ("", label, "", f"{name} {_text(expected)}", _text(got), "")
        label = ""


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _verdicts(allowed: Sequence[bool]) -> str:
    return f"{sum(allowed)} allowed, {len(allowed) - sum(allowed)} denied"
