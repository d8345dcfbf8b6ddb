"""The rules of a run: they exist during it, are deleted afterwards, and other rules are untouched."""

import signal
import threading

import grpc
import pytest

from ratelimitd.cli.client_options import CliError, Target
from ratelimitd.cli.conformance.cases import cases
from ratelimitd.cli.conformance.own_rules import own_rules
from tests.fake_node import status

CHOSEN = cases()[:3]

POLICY = next(case for case in cases() if len(case.rules) > 1)


@pytest.fixture(autouse=True)
def interruptible():
    """Enable Ctrl-C as in a terminal: tests in the background of a shell ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def with_rules(node):
    target = Target(node.address, 5.0)
    node.add_rule("/others", id="others")

    def run(inside=lambda: None, chosen=CHOSEN):
        with target.client() as client, own_rules(target, client, "/c", chosen) as places:
            inside()
            return places

    return run


def test_each_case_has_its_rule_during_the_run(with_rules, node):
    seen = []
    places = with_rules(lambda: seen.extend(node.rules.values()))
    assert places == [("/c/0", ""), ("/c/1", ""), ("/c/2", "")]
    assert [
        (rule.endpoint, rule.limit, rule.window_seconds, rule.algorithm) for rule in seen[1:]
    ] == [
        (place.endpoint, case.limit, case.window_seconds, case.algorithm)
        for place, case in zip(places, CHOSEN, strict=True)
    ]
    assert list(node.rules) == ["others"]


def test_policy_has_all_its_rules_with_their_own_ids(with_rules, node):
    seen = []
    assert with_rules(lambda: seen.extend(node.rules.values()), [POLICY]) == [("/c/0", "")]
    assert [(rule.id, rule.endpoint, rule.identifier_type) for rule in seen[1:]] == [
        (rule_id, f"/c/0{rule.endpoint}", rule.identifier_type)
        for rule_id, rule in zip(POLICY.rule_ids("/c/0"), POLICY.rules, strict=True)
    ]
    assert list(node.rules) == ["others"]


@pytest.mark.parametrize("code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ALREADY_EXISTS])
def test_policy_with_refused_rules_is_reported_and_the_others_have_theirs(with_rules, node, code):
    def refusing(request, context):
        if node.methods()[-1] == "CreateRateLimit" and request.rate_limit.identifier_type == "ip":
            context.abort(code, "one identity")

    node.on_call = refusing
    places = with_rules(chosen=[POLICY, CHOSEN[0]])
    assert places == [("/c/0", "one identity"), ("/c/1", "")]
    assert list(node.rules) == ["others"]


def test_rules_are_deleted_when_the_run_fails(with_rules, node):
    def fail():
        raise RuntimeError

    with pytest.raises(RuntimeError):
        with_rules(fail)
    assert list(node.rules) == ["others"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_rules_are_deleted_when_a_signal_ends_the_run(with_rules, node, number):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        with_rules(lambda: signal.raise_signal(number))
    assert list(node.rules) == ["others"]
    assert signal.getsignal(number) is before


def test_rule_being_created_at_ctrl_c_is_deleted(with_rules, node):
    def interrupted(request, context):
        if node.methods() == ["CreateRateLimit"] * 2:
            node.add_rule(request.rate_limit.endpoint)
            given_up = threading.Event()
            context.add_callback(given_up.set)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            given_up.wait()
            context.abort(grpc.StatusCode.CANCELLED, "nobody waits")

    node.on_call = interrupted
    with pytest.raises(KeyboardInterrupt):
        with_rules()
    assert list(node.rules) == ["others"]


def test_ctrl_c_does_not_interrupt_the_deletion(with_rules, node):
    before = signal.getsignal(signal.SIGINT)

    def interrupted(_request, _context):
        if node.methods()[-1] == "DeleteRateLimit":
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    node.on_call = interrupted
    with_rules()
    assert list(node.rules) == ["others"]
    assert signal.getsignal(signal.SIGINT) is before


def test_unreachable_node_at_the_end_is_named_with_the_rules_left(with_rules, node):
    def gone():
        node.error = status(grpc.StatusCode.UNAVAILABLE, "draining")

    with pytest.raises(
        CliError, match=r"draining.*rules of endpoints that begin with /c may be left"
    ):
        with_rules(gone)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (grpc.StatusCode.PERMISSION_DENIED, r"^permission denied: no$"),
        (grpc.StatusCode.INVALID_ARGUMENT, r"^no rule for fixed_window: counts down, .*: no$"),
    ],
)
def test_only_the_first_error_is_reported_if_no_rule_could_be_created(with_rules, node, code, told):
    node.error = status(code, "no")
    with pytest.raises(CliError, match=told):
        with_rules()


def test_rules_are_deleted_in_another_thread(with_rules, node):
    thread = threading.Thread(target=with_rules)
    thread.start()
    thread.join()
    assert list(node.rules) == ["others"]
