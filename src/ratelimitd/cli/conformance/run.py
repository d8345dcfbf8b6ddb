"""Runs cases against a server that has their rules: with the times of the cases, or on the server's clock.

Prints nothing: results are values.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from itertools import chain
from typing import Final, NamedTuple, Self

import grpc

from ratelimitd.cli.check import send
from ratelimitd.cli.client_options import CliError, UsageError, demand
from ratelimitd.cli.conformance.cases import (
    TOLERANCE_S,
    Answer,
    Case,
    Step,
    left_out,
    timetable,
)
from ratelimitd.cli.conformance.own_rules import Place
from ratelimitd.ledger.holds import MAX_TTL_S
from ratelimitd.model import EVERYBODY, US_PER_S, IdentifierType
from ratelimitd_client import NodeClient
from ratelimitd_client.check import MAX_BATCH
from ratelimiter.v1 import ratelimiter_pb2 as pb

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
"""Statuses caused by the server or the caller, which every other check would get, too."""


class Refusal(NamedTuple):
    """The server's error in place of a decision."""

    words: str

    @classmethod
    def of(cls, name: str, text: str) -> Self:
        """Return the refusal with this status or reason name, and its text."""
        return cls(f"{name}: {text}" if text else name)


Answered = pb.RateLimitResponse | Refusal

NO_HOLDS: Final = Refusal("the server has no holds")


class Asking:
    """Sends the checks to one server."""

    def __init__(self, client: NodeClient) -> None:
        self._client = client
        self._holds: dict[str, str] = {}

    def alone(
        self, request: pb.RateLimitRequest, hold: str = "", settles: Sequence[tuple[str, int]] = ()
    ) -> Answered:
        """Return the answer to one check, after settling these holds with their tokens.

        ``hold`` makes it a hold with this name.

        Raises:
            grpc.RpcError: an error that every check would get.
        """
        try:
            for name, actual in settles:
                if not self._client.settle(self._holds[name], actual).known:
                    return Refusal(f"hold {name} is not known")
            if hold:
                # The maximum, so that no hold ends during a slow run: ends follow the server's clock.
                held = self._client.hold(pb.HoldRequest(check=request, ttl_seconds=MAX_TTL_S))
                self._holds[hold] = held.hold
                return held.answer
            return _answered(send(self._client, request))
        except grpc.RpcError as error:
            if (hold or settles) and error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return NO_HOLDS
            return _refusal(error)

    def together(self, requests: Sequence[pb.RateLimitRequest]) -> list[Answered]:
        """Return the answers to any number of checks, sent in as few batches as possible.

        Raises:
            CliError: the number of answers differs.
            grpc.RpcError: an error that every check would get.
        """
        answers: list[Answered] = []
        for start in range(0, len(requests), MAX_BATCH):
            answers += self._batch(requests[start : start + MAX_BATCH])
        return answers

    def _batch(self, requests: Sequence[pb.RateLimitRequest]) -> list[Answered]:
        try:
            responses = self._client.check_batch(requests)
        except grpc.RpcError as error:
            refusal = _refusal(error)
            if len(requests) == 1:
                return [refusal]
            # One check is at fault: find it by sending them one by one.
            return [answer for request in requests for answer in self._batch([request])]
        what = f"the server gave {len(responses)} answers to a batch of {len(requests)}"
        demand(len(responses) == len(requests), what, CliError)
        return list(map(_answered, responses))


def _answered(response: pb.RateLimitResponse) -> Answered:
    """Return the answer, or the server's error for an invalid check of a batch."""
    if response.reason == pb.INVALID_REQUEST:
        return Refusal.of("INVALID_REQUEST", response.error)
    return response


def _refusal(error: grpc.RpcError) -> Refusal:
    """Return the server's error for one check; raise one that concerns more."""
    code: str = error.code().name
    if code in ENDS_ALL:
        raise error
    return Refusal.of(code, error.details() or "")


BEFOREHAND: Final = "beforehand"
ALONE: Final = "alone"
IN_BATCHES: Final = "in batches"
IN_ONE_BATCH: Final = "in one batch"
ON_ITS_CLOCK: Final = "on its clock"

WAYS: Final = (BEFOREHAND, ALONE, IN_BATCHES, IN_ONE_BATCH, ON_ITS_CLOCK)
"""Each has its own identifiers, and so new buckets."""

LEAD_US: Final = US_PER_S // 2
"""Delay of the first check in real time, by which all of them are prepared."""

IN_FORCE_WITHIN_US: Final = 10 * US_PER_S
"""A rule accepted by one node is in force on the others within seconds."""

ASK_AGAIN_US: Final = US_PER_S // 10


class SystemTime:
    """The wall clock of this machine, in µs since the Unix epoch."""

    def now_us(self) -> int:
        """Return the current time."""
        return time.time_ns() // 1_000

    def wait_until(self, at_us: int) -> None:
        """Wait until this time; return at once if it has passed."""
        while (left_us := at_us - self.now_us()) > 0:
            time.sleep(left_us / US_PER_S)


class Checked(NamedTuple):
    """One check: its number in the case, how it was sent, and its answer."""

    number: int
    way: str
    cost: int
    expected: Answer
    got: Answer
    differences: list[str]


class Refused(NamedTuple):
    """A check that the server did not decide, with its error; ends the case."""

    number: int
    way: str
    cost: int
    words: str


class CaseResult(NamedTuple):
    """The result of a case; ``not_judged`` says why there is none."""

    case: Case
    checks: Sequence[Checked]
    not_judged: str = ""
    refused: Refused | None = None

    @property
    def ok(self) -> bool:
        """Whether every check was decided without a difference."""
        return self.refused is None and not any(check.differences for check in self.checks)


class RealTime(NamedTuple):
    """The maximum duration of a case, and the longest delay of an answer."""

    longest_us: int
    tolerance_us: int


class Runner:
    """Runs cases: case i uses place i; all identifiers begin with ``name``."""

    def __init__(
        self,
        client: NodeClient,
        cases: Sequence[Case],
        places: Sequence[Place],
        *,
        name: str,
        time: SystemTime,
    ) -> None:
        self._client = client
        self._asking = Asking(client)
        self._cases = cases
        self._places = places
        self._name = name
        self._time = time
        self._checked: list[list[Checked]] = [[] for _ in cases]
        self._refused: dict[int, Refused] = {}
        self._not_judged = {
            number: f"the server refuses these rules: {place.refused}"
            for number, place in enumerate(places)
            if place.refused
        }

    def with_virtual_time(self, *, one_batch: bool) -> list[CaseResult]:
        """Run every case check by check, then those without holds in batches of the next check of every case.

        ``one_batch``: then all their checks in one batch (several if they are too many).

        Raises:
            UsageError: the server ignores its callers' time.
        """
        self._require_caller_time(self._in_force())
        rounds = [
            [
                (number, index)
                for number in self._judged
                if index < len(self._cases[number].steps) and not self._cases[number].has_holds
            ]
            for index in range(max(len(case.steps) for case in self._cases))
        ]
        for number in self._judged:
            self._check_alone(number)
        self._reset_all_callers()
        for together in rounds:
            self._check(IN_BATCHES, together)
        if one_batch:
            self._reset_all_callers()
            self._check(IN_ONE_BATCH, list(chain.from_iterable(rounds)))
        return self._results()

    def with_real_time(self, how: RealTime) -> list[CaseResult]:
        """Run the eligible cases concurrently."""
        self._in_force()
        for number in self._judged:
            if why := left_out(self._cases[number], how.longest_us, how.tolerance_us):
                self._not_judged[number] = why
        start_us = self._time.now_us() + LEAD_US
        due = {
            number: timetable(self._cases[number], start_us, how.tolerance_us)
            for number in self._judged
            if number not in self._refused
        }
        # Heap of (due time, case, check).
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
                    self._request(number, ON_ITS_CLOCK, due[number][index])
                    for number, index in together
                ]
            )
            late_us = self._time.now_us() - at_us
            for (number, index), answer in zip(together, answers, strict=True):
                if late_us > how.tolerance_us and not isinstance(answer, Refusal):
                    why = f"an answer came {late_us / 1_000:.0f} ms after it was due"
                    self._leave_out(number, why)
                    continue
                step, *following = due[number][index:]
                self._add(ON_ITS_CLOCK, (number, index), step, answer, tolerance_s=TOLERANCE_S)
                if following and number not in self._refused:
                    heapq.heappush(waiting, (following[0].at_us, number, index + 1))
        return self._results()

    def _results(self) -> list[CaseResult]:
        return [
            CaseResult(
                case,
                self._checked[number],
                why := self._not_judged.get(number, ""),
                None if why else self._refused.get(number),
            )
            for number, case in enumerate(self._cases)
        ]

    @property
    def _judged(self) -> Sequence[int]:
        """The numbers of the cases that the server accepts."""
        return [number for number in range(len(self._cases)) if number not in self._not_judged]

    def _in_force(self) -> Mapping[int, Answered]:
        """Wait until all rules are in force, and return the answers of a peek with the first check of each case.

        Raises:
            CliError: rules are not in force in time, or the server refuses all these checks.
        """
        first = {number: self._cases[number].steps[0] for number in self._judged}
        asked = [
            self._request(number, BEFOREHAND, step._replace(cost=1), peek=True)
            for number, step in first.items()
        ]
        until_us = self._time.now_us() + IN_FORCE_WITHIN_US
        while True:
            answers = dict(zip(first, self._asking.together(asked), strict=True))
            decided = [one for one in answers.values() if not isinstance(one, Refusal)]
            if all(answer.reason != pb.NO_RULE for answer in decided):
                break
            within = f"{IN_FORCE_WITHIN_US // US_PER_S} s"
            what = f"rules are not in force {within} after they were made"
            demand(self._time.now_us() < until_us, what, CliError)
            self._time.wait_until(self._time.now_us() + ASK_AGAIN_US)
        for number, answer in answers.items():
            if isinstance(answer, Refusal):
                self._refused[number] = Refused(0, BEFOREHAND, 1, answer.words)
        if len(self._refused) == len(first):
            message = f"the server refuses every check: {self._refused[0].words}"
            raise CliError(message)
        return answers

    def _leave_out(self, number: int, why: str) -> None:
        """End a case without a result."""
        self._not_judged[number] = why
        self._checked[number].clear()

    def _require_caller_time(self, answers: Mapping[int, Answered]) -> None:
        """Raise if reset times show that the server uses its own clock instead of the time sent."""
        for number, answer in answers.items():
            case = self._cases[number]
            if isinstance(answer, Refusal) or case.has_holds:  # slots end by the server's clock
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

    def _check_alone(self, number: int) -> None:
        """Send the checks of a case one by one, until one is refused; record the answers."""
        for index, step in enumerate(self._cases[number].steps):
            if number in self._refused:
                return
            request = self._request(number, ALONE, step)
            answer = self._asking.alone(request, step.hold, step.settles)
            if answer is NO_HOLDS:
                self._leave_out(number, NO_HOLDS.words)
                return
            self._add(ALONE, (number, index), step, answer)

    def _check(self, way: str, numbers: Sequence[tuple[int, int]]) -> None:
        """Send checks, given as numbers of case and check, in batches; record the answers."""
        asked = [
            (check, self._cases[check[0]].steps[check[1]])
            for check in numbers
            if check[0] not in self._refused
        ]
        answers = self._asking.together(
            [self._request(number, way, step) for (number, _), step in asked]
        )
        for (check, step), answer in zip(asked, answers, strict=True):
            self._add(way, check, step, answer)

    def _add(
        self,
        way: str,
        check: tuple[int, int],
        step: Step,
        answer: Answered,
        *,
        tolerance_s: int = 0,
    ) -> None:
        """Record the answer to a check; the first refusal ends its case."""
        number, index = check
        if number in self._refused:  # an earlier check of its batch
            return
        if isinstance(answer, Refusal):
            self._refused[number] = Refused(index, way, step.cost, answer.words)
            return
        got = Answer.of(answer, self._cases[number].rule_ids(self._places[number].endpoint))
        differences = step.expected.differences(got, tolerance_s=tolerance_s)
        self._checked[number].append(
            Checked(index, way, step.cost, step.expected, got, differences)
        )

    def _reset_all_callers(self) -> None:
        """Reset the buckets of ``all``: they have no identifier that could differ between ways."""
        for number in self._judged:
            for rule in self._cases[number].rules:
                if rule.identifier_type == EVERYBODY:
                    endpoint = f"{self._places[number].endpoint}{rule.endpoint}"
                    self._client.reset("", EVERYBODY, endpoint)

    def _request(
        self, number: int, way: str, step: Step, *, peek: bool = False
    ) -> pb.RateLimitRequest:
        first, *also = [
            pb.Identity(identifier_type=kind, identifier=self._identifier(kind, named, way))
            for kind, named in step.identities
        ]
        return pb.RateLimitRequest(
            identifier=first.identifier,
            identifier_type=first.identifier_type,
            endpoint=f"{self._places[number].endpoint}{step.endpoint}",
            tokens_requested=step.cost,
            timestamp=0 if way == ON_ITS_CLOCK else step.at_us,
            peek=peek,
            also=also,
        )

    def _identifier(self, kind: str, named: str, way: str) -> str:
        if kind == IdentifierType.IP:
            return str(ip_address(named) + (WAYS.index(way) << 32))
        return " ".join(filter(None, [self._name, way, named]))
