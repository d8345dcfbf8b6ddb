"""Runs against a real node with a manual clock, and against one with wrong answers."""

import asyncio
from collections import Counter

import grpc
import pytest

from ratelimitd.cli.client_options import CliError, Target, UsageError
from ratelimitd.cli.conformance.cases import cases
from ratelimitd.cli.conformance.own_rules import Place, own_rules
from ratelimitd.cli.conformance.run import RealTime, Refused, Runner
from ratelimitd.ledger.accounts import ACCOUNTS
from ratelimitd.testing import ManualClock, running_node
from ratelimiter.v1 import ratelimiter_pb2 as pb

HOW = RealTime(30_000_000, 20_000)

CASE = cases()[0]

POLICY = next(case for case in cases() if len(case.rules) > 1)

HELD = next(case for case in cases() if case.has_holds)

CHOSEN = [
    *(case for case in cases() if len(case.steps) in {5, 9, 11, 13, 14} and not case.rules),
    *(POLICY, HELD, next(case for case in cases() if case.goes_back)),
]
"""A few cases of all algorithms, and one of each other kind: creating a rule takes time."""


class SetTime:
    """The node's wall time, which advances when it is waited for."""

    def __init__(self, clock):
        self.clock = clock
        self.late_us = 0

    def now_us(self):
        return self.clock.now_us()

    def wait_until(self, at_us):
        self.clock.advance(us=max(0, at_us + self.late_us - self.clock.now_us()))


def run_in_real_time(address, time):
    target, chosen = Target(address, 5.0), CHOSEN
    with target.client() as client, own_rules(target, client, "/c", chosen) as places:
        return Runner(client, chosen, places, name="c", time=time).with_real_time(HOW)


async def test_eligible_cases_pass_in_real_time():
    clock = ManualClock(1_795_000_000_300_000)
    async with running_node(clock=clock, http_listen="") as node:
        results = await asyncio.to_thread(run_in_real_time, node.grpc_address, SetTime(clock))
    judged = [result for result in results if not result.not_judged]
    assert {result.case.algorithm for result in judged} == {*ACCOUNTS}
    assert [(str(result.case), result.checks) for result in judged if not result.ok] == []
    assert all(result.checks for result in judged)
    assert {result.not_judged for result in results} == {
        "",
        "its time goes back",
        "it takes longer",
        "it has several limits",
        "it has holds",
    }
    assert clock.monotonic_us() < HOW.longest_us + 2_000_000


class Answering:
    """A server with given answers to batches, the last one repeated; refuses single checks."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    def check_batch(self, requests):
        self.asked.append(requests)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return [answer] * len(requests)

    def check(self, *arguments, **_):
        self.asked.append(arguments)
        return pb.RateLimitResponse()


def runner(client, *chosen):
    time = SetTime(ManualClock())
    places = [Place(f"/{number}") for number in range(len(chosen))]
    return Runner(client, chosen, places, name="c", time=time), time


SLOTS = next(case for case in cases() if case.name.startswith("a hold takes a slot"))

IN_FORCE = pb.RateLimitResponse(reason=pb.WITHIN_LIMIT, reset_time=1_700_006_460)


def test_rules_that_come_into_force_late_are_awaited():
    client = Answering(pb.RateLimitResponse(reason=pb.NO_RULE), IN_FORCE)
    run, time = runner(client, CASE)
    run.with_virtual_time(one_batch=False)
    assert time.clock.monotonic_us() == 100_000
    assert all(request.peek for batch in client.asked[:2] for request in batch)


def test_rules_that_never_come_into_force_end_the_run():
    run, time = runner(Answering(pb.RateLimitResponse(reason=pb.NO_RULE)), CASE)
    with pytest.raises(CliError, match=r"^rules are not in force 10 s after they were made$"):
        run.with_virtual_time(one_batch=False)
    assert time.clock.monotonic_us() == 10_000_000


def test_server_that_refuses_every_check_ends_the_run_with_its_error():
    refused = pb.RateLimitResponse(reason=pb.INVALID_REQUEST, error="timestamp: too old")
    run, _ = runner(Answering(refused), CASE)
    with pytest.raises(
        CliError, match=r"^the server refuses every check: INVALID_REQUEST: timestamp: too old$"
    ):
        run.with_virtual_time(one_batch=False)


def test_server_with_its_own_clock_is_detected_before_anything_is_spent():
    now = pb.RateLimitResponse(reason=pb.WITHIN_LIMIT, reset_time=1_795_000_060)
    client = Answering(now)
    run, _ = runner(client, CASE)
    with pytest.raises(UsageError, match=r"TIMESTAMPS=caller for this, or give --real-time$"):
        run.with_virtual_time(one_batch=False)
    assert [request.peek for batch in client.asked for request in batch] == [True]


def test_case_with_refused_rules_is_skipped():
    client = Answering(IN_FORCE)
    places = [Place("/0"), Place("/1", "one limit")]
    run = Runner(client, [CASE, POLICY], places, name="c", time=SetTime(ManualClock()))
    first, second = run.with_virtual_time(one_batch=True)
    assert not first.not_judged
    assert (second.not_judged, second.checks) == ("the server refuses these rules: one limit", [])
    assert {request.endpoint for batch in client.asked[:1] for request in batch} == {"/0"}


async def test_cases_with_holds_run_one_by_one():
    with_holds = [CASE, HELD, SLOTS]

    def run(address):
        target = Target(address, 5.0)
        with target.client() as client, own_rules(target, client, "/c", with_holds) as places:
            time = SetTime(ManualClock())
            return Runner(client, with_holds, places, name="c", time=time).with_virtual_time(
                one_batch=True
            )

    async with running_node(timestamps="caller", http_listen="") as node:
        results = await asyncio.to_thread(run, node.grpc_address)
    assert [result.ok for result in results] == [True] * 3
    ways = [[check.way for check in result.checks] for result in results]
    assert ways[1:] == [["alone"] * len(HELD.steps), ["alone"] * len(SLOTS.steps)]
    assert {*ways[0]} == {"alone", "in batches", "in one batch"}


class WithoutHolds(Answering):
    """A server of a release without holds."""

    def hold(self, _request):
        raise Unimplemented


class Unimplemented(grpc.RpcError):
    def code(self):
        return grpc.StatusCode.UNIMPLEMENTED


def test_other_cases_are_judged_on_a_server_without_holds():
    # Its first step is a check, whose result is omitted, too.
    check_first = HELD._replace(steps=(HELD.steps[1], *HELD.steps))
    run, _ = runner(WithoutHolds(IN_FORCE), check_first, CASE)
    without, other = run.with_virtual_time(one_batch=True)
    assert (without.not_judged, without.checks) == ("the server has no holds", [])
    assert without.ok
    assert len(other.checks) == 3 * len(CASE.steps)


def test_refused_hold_ends_its_case():
    client = Answering(IN_FORCE)
    client.hold = lambda request: pb.HoldResponse(answer=IN_FORCE, hold="h")
    client.settle = lambda hold, actual: pb.SettleResponse()
    run, _ = runner(client, HELD)
    [result] = run.with_virtual_time(one_batch=False)
    assert result.refused == Refused(2, "alone", HELD.steps[2].cost, "hold a is not known")
    assert [check.number for check in result.checks] == [0, 1]


def test_slots_do_not_show_which_clock_the_server_uses():
    now = pb.RateLimitResponse(reason=pb.WITHIN_LIMIT, reset_time=1_795_000_060)
    client = WithoutHolds(now)
    run, _ = runner(client, SLOTS)
    [result] = run.with_virtual_time(one_batch=False)
    assert result.not_judged == "the server has no holds"


def test_wrong_answers_are_results():
    run, _ = runner(Answering(IN_FORCE), CASE)
    [result] = run.with_virtual_time(one_batch=True)
    assert not result.ok
    assert [(check.number, check.way) for check in result.checks] == [
        (number, way) for way in ("alone", "in batches", "in one batch") for number in range(5)
    ]
    assert "remaining_tokens" in result.checks[0].differences


class Refusing(Answering):
    """A server that refuses some checks of one endpoint, when sent in one way."""

    def __init__(self, endpoint, *, way, after=0, upto=1_000):
        super().__init__(IN_FORCE)
        self.refused = (f"c {way}", endpoint)
        self.which = range(after + 1, upto + 1)
        self.seen = Counter()

    def answer(self, request):
        asked = (request.identifier, request.endpoint)
        self.seen[asked] += 1
        if asked == self.refused and self.seen[asked] in self.which:
            return pb.RateLimitResponse(reason=pb.INVALID_REQUEST, error="no")
        return IN_FORCE

    def check_batch(self, requests):
        self.asked.append(requests)
        return list(map(self.answer, requests))

    def check(self, *arguments, **_):
        self.asked.append(arguments)
        names = ("identifier", "identifier_type", "endpoint")
        return self.answer(pb.RateLimitRequest(**dict(zip(names, arguments, strict=True))))


def test_refused_check_ends_only_its_case():
    client = Refusing("/1", way="alone", after=2)
    run, _ = runner(client, CASE, CASE, CASE)
    first, refused, last = run.with_virtual_time(one_batch=False)
    assert refused.refused == Refused(2, "alone", CASE.steps[2].cost, "INVALID_REQUEST: no")
    assert not refused.ok
    assert [(check.number, check.way) for check in refused.checks] == [(0, "alone"), (1, "alone")]
    assert (first.refused, last.refused) == (None, None)
    assert len(first.checks) == len(last.checks) == 2 * len(CASE.steps)
    assert client.seen["c alone", "/1"] == 3
    assert client.seen["c in batches", "/1"] == 0


def test_checks_after_a_refused_one_in_a_batch_do_not_count():
    run, _ = runner(Refusing("/0", after=1, upto=2, way="in one batch"), CASE, CASE)
    refused, other = run.with_virtual_time(one_batch=True)
    assert refused.refused == Refused(1, "in one batch", CASE.steps[1].cost, "INVALID_REQUEST: no")
    assert [check.way for check in refused.checks].count("in one batch") == 1
    assert [check.way for check in other.checks].count("in one batch") == len(CASE.steps)


def test_case_refused_beforehand_is_skipped():
    client = Refusing("/0", way="beforehand")
    run, _ = runner(client, CASE, CASE)
    refused, other = run.with_virtual_time(one_batch=False)
    assert refused.refused == Refused(0, "beforehand", 1, "INVALID_REQUEST: no")
    assert refused.checks == []
    assert other.refused is None
    assert client.seen["c alone", "/0"] == 0


def test_refused_check_in_real_time_ends_only_its_case():
    case = next(case for case in cases() if case.name == "limit 1 allows one")
    for asked, refused_as in (0, "beforehand"), (1, "on its clock"):
        client = Refusing("/0", way=refused_as)
        run, _ = runner(client, case, case)
        refused, other = run.with_real_time(HOW)
        assert (refused.refused.number, refused.refused.way) == (0, refused_as)
        assert refused.checks == []
        assert other.refused is None
        assert other.checks
        assert client.seen["c on its clock", "/0"] == asked


def test_case_without_a_result_is_not_refused():
    case = next(case for case in cases() if case.goes_back)
    run, _ = runner(Refusing("/0", way="beforehand"), case, CASE)
    left_out = run.with_real_time(HOW)[0]
    assert (left_out.not_judged, left_out.refused) == ("its time goes back", None)


def test_case_with_late_answers_has_no_result():
    case = next(case for case in cases() if case.name == "limit 1 allows one")
    run, time = runner(Answering(IN_FORCE), case)
    time.late_us = 25_000
    [result] = run.with_real_time(HOW)
    assert result.not_judged == "an answer came 25 ms after it was due"
    assert result.checks == []
