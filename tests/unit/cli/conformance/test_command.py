"""`conformance` against a node with canned answers: its output and exit status."""

import json
import time

import grpc
import pytest

from ratelimitd.cli.conformance import command
from ratelimitd.cli.conformance.cases import cases
from ratelimitd.cli.conformance.run import SystemTime
from ratelimitd.testing import ManualClock
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.unit.cli.conformance.test_run import SetTime

ALL = len(cases())


def canned(**fields):
    return pb.RateLimitResponse(allowed=True, reason=pb.WITHIN_LIMIT, **fields)


def test_differing_server_is_status_1_and_its_rules_are_deleted(ask, node):
    node.answer = canned(reset_time=1_700_006_460)
    ended = ask("conformance", "--token", "t")
    assert (ended.status, ended.err) == (1, "")
    assert f"{ALL} of {ALL} cases differ" in ended.out
    assert node.rules == {}
    creation = node.seen[0]
    assert creation.metadata["authorization"] == "Bearer t"
    assert creation.request.rate_limit.endpoint.startswith("/conformance-")


def test_refused_checks_of_one_case_do_not_stop_the_others(ask, node):
    def refused(request, context):
        if getattr(request, "tokens_requested", 0) > 1_000_000:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "tokens_requested: too many")

    node.on_call = refused
    node.answer = canned(reset_time=1_700_006_460)
    ended = ask("conformance")
    assert (ended.status, ended.err) == (1, "")
    assert "refused: INVALID_ARGUMENT: tokens_requested: too many" in ended.out
    assert f"{ALL} of {ALL} cases differ" in ended.out
    assert node.rules == {}


def test_every_run_has_its_own_endpoints_and_identifiers(ask, node, monkeypatch):
    monkeypatch.setattr(command, "cases", lambda: cases()[:2])
    node.answer = canned(reset_time=1_700_006_460)
    for _ in range(2):
        ask("conformance")
    checks = [call.request for call in node.seen if call.method == "RateLimit"]
    assert len({check.endpoint.split("/")[1] for check in checks}) == 2
    first, *_, last = checks
    assert first.identifier.split()[0] != last.identifier.split()[0]


def test_json_contains_every_check(ask, node):
    node.answer = canned(reset_time=1_700_006_460)
    report = json.loads(ask("conformance", "--json", "--one-batch").out)
    assert (report["target"], report["ok"], len(report["cases"])) == (node.address, False, ALL)
    ways = [check["sent"] for check in report["cases"][0]["checks"]]
    assert ways == ["alone"] * 5 + ["in batches"] * 5 + ["in one batch"] * 5


def test_server_with_its_own_clock_is_status_2(ask, node):
    node.answer = canned(reset_time=1_795_000_000)
    ended = ask("conformance")
    assert (ended.status, ended.out) == (2, "")
    assert "TIMESTAMPS=caller" in ended.err
    assert node.rules == {}


def test_real_time_checks_carry_no_time(ask, node, monkeypatch):
    node.answer = canned()
    monkeypatch.setattr(command, "SystemTime", lambda: SetTime(ManualClock()))
    ended = ask("conformance", "--real-time", "--longest", "1", "--json")
    report = json.loads(ended.out)
    assert (ended.status, report["clock"]) == (1, "server")
    batches = [call.request for call in node.seen if call.method == "BatchRateLimit"]
    assert [check.timestamp for batch in batches[1:] for check in batch.requests] == [0, 0]


@pytest.mark.parametrize(
    "options", [("--one-batch", "--real-time"), ("--longest", "0"), ("--tolerance", "0")]
)
def test_misuse_is_status_2(run, options):
    assert run("conformance", *options).status == 2


def test_system_time_waits_for_the_clock():
    clock = SystemTime()
    assert abs(clock.now_us() - time.time() * 1_000_000) < 5_000_000
    at_us = clock.now_us() + 1_000
    clock.wait_until(at_us)
    assert clock.now_us() >= at_us
