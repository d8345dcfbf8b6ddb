"""Sending checks: which ones a server refused, and which errors end the run."""

from types import SimpleNamespace

import grpc
import pytest

from ratelimitd.cli.client_options import CliError
from ratelimitd.cli.conformance.run import ENDS_ALL, NO_HOLDS, Asking, Refusal
from ratelimitd_client import NodeClient
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.fake_node import status

REQUESTS = [
    pb.RateLimitRequest(identifier="alice", identifier_type="user", endpoint=f"/{n}", timestamp=n)
    for n in range(5)
]


@pytest.fixture
def asking(node):
    with NodeClient(node.address, timeout_s=30) as client:
        yield Asking(client)


@pytest.fixture
def refuses(node):
    """Make the node refuse every call that contains a check of this endpoint."""

    def refuse(endpoint, code=grpc.StatusCode.INVALID_ARGUMENT):
        def refused(request, context):
            if endpoint in {check.endpoint for check in getattr(request, "requests", [request])}:
                context.abort(code, "too much")

        node.on_call = refused

    return refuse


def test_single_check_is_answered(asking, node):
    assert asking.alone(REQUESTS[3]).allowed
    assert node.seen[0].request == REQUESTS[3]


def test_hold_has_the_longest_time_and_is_settled_by_name(asking, node):
    held, settled = pb.RateLimitRequest(identifier="alice", tokens_requested=7), REQUESTS[1]
    assert asking.alone(held, hold="a").allowed
    assert asking.alone(settled, settles=[("a", 4)]).allowed
    assert [call.request for call in node.seen] == [
        pb.HoldRequest(check=held, ttl_seconds=3_600),
        pb.SettleRequest(hold="hold-0", actual=4),
        settled,
    ]


def test_check_is_not_sent_if_its_hold_is_unknown(asking, node):
    asking.alone(REQUESTS[0], hold="a")
    node.held.clear()
    assert asking.alone(REQUESTS[1], settles=[("a", 4)]) == Refusal("hold a is not known")
    assert node.methods() == ["Hold", "Settle"]


def test_server_without_holds_is_recognised_by_its_status(asking, node):
    asking.alone(REQUESTS[0], hold="a")
    node.error = status(grpc.StatusCode.UNIMPLEMENTED, "no")
    assert asking.alone(REQUESTS[0], hold="b") is NO_HOLDS
    assert asking.alone(REQUESTS[0], settles=[("a", 4)]) is NO_HOLDS


def test_refused_hold_has_the_servers_error(asking, node):
    node.error = status(grpc.StatusCode.INVALID_ARGUMENT, "no")
    assert asking.alone(REQUESTS[0], hold="a") == Refusal("INVALID_ARGUMENT: no")


def test_many_checks_are_sent_in_one_batch(asking, node):
    node.limit = 3
    answers = asking.together(REQUESTS)
    assert [answer.allowed for answer in answers] == [True, True, True, False, False]
    assert node.methods() == ["BatchRateLimit"]


def test_checks_beyond_one_batch_are_sent_in_several(asking, node):
    node.limit = 1_001
    answers = asking.together(REQUESTS[:1] * 1_002)
    assert [len(call.request.requests) for call in node.seen] == [1_000, 2]
    assert [answer.allowed for answer in answers] == [True] * 1_001 + [False]


def test_no_checks_send_no_call(asking, node):
    assert asking.together([]) == []
    assert node.seen == []


def test_refused_check_has_the_servers_error(asking, refuses):
    refuses("/1")
    assert asking.alone(REQUESTS[1]) == Refusal("INVALID_ARGUMENT: too much")
    assert asking.alone(REQUESTS[2]).allowed


def test_refused_check_of_a_refused_batch_is_found(asking, node, refuses):
    node.limit = 10
    refuses("/1", grpc.StatusCode.INTERNAL)
    answers = asking.together(REQUESTS)
    assert answers[1] == Refusal("INTERNAL: too much")
    assert [answer.allowed for answer in answers if answer is not answers[1]] == [True] * 4


def test_invalid_check_is_refused_in_its_answer(asking, node):
    node.answer = pb.RateLimitResponse(reason=pb.INVALID_REQUEST, error="cost: too large")
    refusal = Refusal("INVALID_REQUEST: cost: too large")
    assert asking.alone(REQUESTS[0]) == refusal
    assert asking.together(REQUESTS) == [refusal] * 5


def test_refusal_without_a_text_is_quoted_by_its_name(asking, node):
    node.answer = pb.RateLimitResponse(reason=pb.INVALID_REQUEST)
    assert asking.alone(REQUESTS[0]) == Refusal("INVALID_REQUEST")


@pytest.mark.parametrize("name", sorted(ENDS_ALL))
def test_error_that_concerns_all_checks_ends_the_run(asking, node, name):
    node.error = status(grpc.StatusCode[name], "no")
    with pytest.raises(grpc.RpcError):
        asking.alone(REQUESTS[0])
    with pytest.raises(grpc.RpcError):
        asking.together(REQUESTS)
    assert len(node.seen) == 2


def test_batch_must_have_as_many_answers_as_checks():
    asking = Asking(SimpleNamespace(check_batch=lambda _requests: []))
    with pytest.raises(CliError, match=r"^the server gave 0 answers to a batch of 5$"):
        asking.together(REQUESTS)
