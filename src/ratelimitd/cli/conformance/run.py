"""Cases, run against a server whose rules are made: with times of the cases' own, or on the server's clock.

Never says what came of it: results are values.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from ratelimitd.cli.failures import CliError, UsageError
from ratelimitd.conformance.answers import Answer
from ratelimitd.conformance.cases import IDENTIFIER_TYPE, Case
from ratelimitd.conformance.real_time import TOLERANCE_S, left_out, timetable
from ratelimitd.model import US_PER_S
from ratelimiter.v1 import ratelimiter_pb2 as pb

if TYPE_CHECKING:
    from ratelimitd_client import NodeClient

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


class CaseResult(NamedTuple):
    """What came of a case; ``not_judged`` says why nothing did."""

    case: Case
    checks: Sequence[Checked]
    not_judged: str = ""

    @property
    def ok(self) -> bool:
        """Whether there is no difference."""
        return not any(check.differences for check in self.checks)


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
        self._client = client
        self._cases = cases
        self._endpoints = endpoints
        self._name = name
        self._time = time

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
        return list(map(CaseResult, self._cases, checked))

    def with_real_time(self, how: RealTime) -> list[CaseResult]:
        """Run the cases that can be, all at once."""
        self._in_force()
        reasons = [left_out(case, how.longest_us, how.tolerance_us) for case in self._cases]
        start_us = self._time.now_us() + LEAD_US
        due = {
            number: timetable(case, start_us, how.tolerance_us)
            for number, case in enumerate(self._cases)
            if not reasons[number]
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
            responses = self._responses(
                [
                    self._request(number, ON_ITS_CLOCK, due[number][index].cost)
                    for number, index in together
                ]
            )
            late_us = self._time.now_us() - at_us
            for (number, index), response in zip(together, responses, strict=True):
                if late_us > how.tolerance_us:
                    reasons[number] = f"an answer came {late_us / 1_000:.0f} ms after it was due"
                    results[number].clear()
                    continue
                check, got = due[number][index], Answer.of(response)
                differences = check.expected.differences(got, tolerance_s=TOLERANCE_S)
                results[number].append(
                    Checked(index, ON_ITS_CLOCK, check.cost, check.expected, got, differences)
                )
                if index + 1 < len(due[number]):
                    following = (due[number][index + 1].at_us, number, index + 1)
                    heapq.heappush(waiting, following)
        return list(map(CaseResult, self._cases, results, reasons))

    def _in_force(self) -> Sequence[pb.RateLimitResponse]:
        """Wait until all rules are, and return what the first check of each case would be answered.

        Raises:
            CliError: they are not, or the server refuses the check.
        """
        asked = [
            self._request(number, "first", 1, case.steps[0].at_us, peek=True)
            for number, case in enumerate(self._cases)
        ]
        until_us = self._time.now_us() + IN_FORCE_WITHIN_US
        while True:
            answers = self._responses(asked)
            if all(answer.reason != pb.NO_RULE for answer in answers):
                break
            if self._time.now_us() >= until_us:
                message = f"rules are not in force {IN_FORCE_WITHIN_US // US_PER_S} s after they were made"
                raise CliError(message)
            self._time.wait_until(self._time.now_us() + ASK_AGAIN_US)
        refused = next(
            (answer.error for answer in answers if answer.reason == pb.INVALID_REQUEST), None
        )
        if refused is not None:
            message = f"the server refuses a check: {refused}"
            raise CliError(message)
        return answers

    def _see_whose_time_counts(self, answers: Sequence[pb.RateLimitResponse]) -> None:
        """Raise if a bucket is whole again later than a window after the time that was sent, and about now."""
        for case, answer in zip(self._cases, answers, strict=True):
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
        steps = [self._cases[number].steps[index] for number, index in numbers]
        requests = [
            self._request(number, way, step.cost, step.at_us)
            for (number, _), step in zip(numbers, steps, strict=True)
        ]
        responses = self._alone(requests[0]) if way == ALONE else self._responses(requests)
        for (number, index), step, response in zip(numbers, steps, responses, strict=True):
            got = Answer.of(response)
            differences = step.expected.differences(got)
            checked[number].append(Checked(index, way, step.cost, step.expected, got, differences))

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

    def _alone(self, request: pb.RateLimitRequest) -> list[pb.RateLimitResponse]:
        response = self._client.check(
            request.identifier,
            request.identifier_type,
            request.endpoint,
            cost=request.tokens_requested,
            timestamp=request.timestamp,
        )
        return [response]

    def _responses(self, requests: Sequence[pb.RateLimitRequest]) -> list[pb.RateLimitResponse]:
        """The answers to any number of checks.

        Raises:
            CliError: there are more or fewer.
        """
        from ratelimitd_client.check import MAX_BATCH  # noqa: PLC0415 - see target.py

        responses: list[pb.RateLimitResponse] = []
        for start in range(0, len(requests), MAX_BATCH):
            batch = requests[start : start + MAX_BATCH]
            answers = self._client.check_batch(batch)
            if len(answers) != len(batch):
                message = f"the server gave {len(answers)} answers to a batch of {len(batch)}"
                raise CliError(message)
            responses += answers
        return responses
