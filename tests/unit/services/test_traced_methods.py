"""The calls that get a span, and its attributes, which never contain data of the request."""

import asyncio

import pytest

from ratelimitd.rpc.interface import Methods, RpcError, StatusCode
from ratelimitd.services.methods import traced
from ratelimiter.v1 import ratelimiter_pb2 as pb

SAMPLED = f"00-{'a' * 32}-{'b' * 16}-01"
UNSAMPLED = f"00-{'a' * 32}-{'b' * 16}-00"
CHECK = "/ratelimiter.v1.RateLimiter/CheckRateLimit"
BATCH = "/ratelimiter.v1.RateLimiter/CheckRateLimitBatch"
HOLD = "/ratelimiter.v1.RateLimiterHolds/Hold"
CREATE = "/ratelimiter.v1.RateLimiterConfig/CreateRateLimit"
ALLOWED = pb.RateLimitResponse(allowed=True, reason=pb.WITHIN_LIMIT, rule_id="r")


class Recorded:
    """A span, and a tracer that records it."""

    def __init__(self):
        self.begun = []
        self.notes = {}
        self.errors = []
        self.samples = True

    def begin(self, name, parent=None):
        self.begun.append((name, parent))
        return self if self.samples else None

    def set_attribute(self, name, value):
        self.notes[name] = value

    def end(self, error=""):
        self.errors.append(error)


class Call:
    def __init__(self, parent=None):
        self.parent = parent

    def metadata(self, key):
        return self.parent if key == "traceparent" else None


@pytest.fixture
def tracer():
    return Recorded()


def handlers(tracer, path, answer):
    def handle(_data, _call):
        if isinstance(answer, Exception):
            raise answer
        return answer

    return traced(Methods(unary={path: handle}), tracer).unary[path]


@pytest.mark.parametrize(
    ("path", "answer"), [(CHECK, ALLOWED), (HOLD, pb.HoldResponse(answer=ALLOWED, hold="h"))]
)
def test_a_check_is_traced_only_below_a_recorded_trace(tracer, path, answer):
    handle = handlers(tracer, path, answer.SerializeToString())
    for parent in (None, UNSAMPLED):
        assert handle(b"", Call(parent)) == answer.SerializeToString()
    assert not tracer.begun
    assert handle(b"", Call(SAMPLED)) == answer.SerializeToString()
    assert tracer.begun == [(path[1:], SAMPLED)]
    assert tracer.notes == {
        "ratelimitd.allowed": True,
        "ratelimitd.reason": "WITHIN_LIMIT",
        "ratelimitd.rule_id": "r",
        "rpc.grpc.status_code": 0,
    }
    assert tracer.errors == [""]


async def test_the_span_of_a_batch_has_the_number_of_denials(tracer):
    async def later():
        return pb.BatchRateLimitResponse(
            responses=[ALLOWED, pb.RateLimitResponse()]
        ).SerializeToString()

    await handlers(tracer, BATCH, later())(b"", Call(SAMPLED))
    assert (tracer.notes["ratelimitd.checks"], tracer.notes["ratelimitd.denied"]) == (2, 1)


@pytest.mark.parametrize("path", [CREATE, CREATE.replace("ratelimiter.v1.", "")])
def test_a_change_of_rules_is_traced_under_both_paths_if_the_tracer_decides_so(tracer, path):
    handle = handlers(tracer, path, b"")
    handle(b"", Call())
    assert tracer.begun == [(CREATE[1:], None)]
    assert tracer.errors == [""]
    tracer.samples = False
    assert handle(b"", Call()) == b""
    assert tracer.errors == [""]


@pytest.mark.parametrize("later", [False, True])
async def test_the_span_of_an_error_has_its_status_and_not_its_text(tracer, later):
    error = RpcError(StatusCode.NOT_FOUND, "no rule for alice")

    async def fail():
        raise error

    handle = handlers(tracer, CREATE, fail() if later else error)
    with pytest.raises(RpcError):
        await handle(b"", Call())
    assert (tracer.errors, tracer.notes) == (["NOT_FOUND"], {"rpc.grpc.status_code": 5})


async def test_a_caller_who_leaves_ends_the_span(tracer):
    async def wait():
        await asyncio.Event().wait()

    task = asyncio.ensure_future(handlers(tracer, CREATE, wait())(b"", Call()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert tracer.errors == ["CANCELLED"]


def test_health_and_others_are_not_traced_and_sampled_checks_skip_the_bulk_handler(tracer):
    def handle(_data, _call):
        return b""

    polled = "/ratelimiter.v1.RateLimiterHealth/GetMetrics"
    methods = Methods(unary={"/grpc.health.v1.Health/Check": handle, polled: handle})
    assert traced(methods, tracer).unary == methods.unary
    assert traced(methods, tracer).bulk_unless_sampled
