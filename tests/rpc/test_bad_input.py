"""Hostile and broken input through a real channel: the documented status, the named field, and no change.

One fixture checks each case: the bucket and the rules are unchanged, no fail-open was counted, and nothing was logged.
"""

import gzip
import logging
import uuid

import grpc
import pytest
import pytest_asyncio
from google.protobuf.field_mask_pb2 import FieldMask
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from ratelimitd.node.serving import TRANSPORTS
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.rpc.node import check, running_node
from tests.rpc.wire import field, varint

CHECK = "/ratelimiter.v1.RateLimiter/CheckRateLimit"
BATCH = "/ratelimiter.v1.RateLimiter/CheckRateLimitBatch"
CREATE = "/ratelimiter.v1.RateLimiterConfig/CreateRateLimit"
UPDATE = "/ratelimiter.v1.RateLimiterConfig/UpdateRateLimit"
DELETE = "/ratelimiter.v1.RateLimiterConfig/DeleteRateLimit"
LIST = "/ratelimiter.v1.RateLimiterConfig/ListRateLimits"
METRICS = "/ratelimiter.v1.RateLimiterHealth/GetMetrics"
EXPLAIN = "/ratelimiter.v1.RateLimiterHealth/ExplainRateLimit"
RESET = "/ratelimiter.v1.RateLimiterHealth/ResetRateLimit"
ASSIGN = "/ratelimiter.v1.RateLimiterPlans/AssignPlan"
UNASSIGN = "/ratelimiter.v1.RateLimiterPlans/UnassignPlan"
ASSIGNMENT = "/ratelimiter.v1.RateLimiterPlans/GetAssignment"
ASSIGNMENTS = "/ratelimiter.v1.RateLimiterPlans/ListAssignments"
ASSIGN_BATCH = "/ratelimiter.v1.RateLimiterPlans/BatchAssignPlans"
APPLY = "/ratelimiter.v1.RateLimiterConfig/ApplyRateLimits"
PLANS = (ASSIGN, UNASSIGN, ASSIGNMENT, ASSIGNMENTS, ASSIGN_BATCH)
INVALID = grpc.StatusCode.INVALID_ARGUMENT
OTHER_ID = str(uuid.UUID(int=1))
FIRST = pb.Limit(limit=1, window_seconds=1, algorithm="fixed_window")
DAY = pb.Limit(name="day", limit=9, window_seconds=86_400, algorithm="fixed_window")

SPENT_DAY = pb.Limit(name="day", limit=-1, window_seconds=86_400, algorithm="fixed_window")

NO_NUMBERS = {"limit": 0, "window_seconds": 0, "algorithm": ""}


def limit_of(name, **fields):
    valid = {"limit": 1, "window_seconds": 1, "algorithm": "fixed_window"}
    return pb.Limit(name=name, **{**valid, **fields})


# No case may change the node, so all share one per transport.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=sorted(TRANSPORTS))
async def node(request, tmp_path_factory):
    """A node with a half-used bucket."""
    async with running_node(tmp_path_factory.mktemp("node"), transport=request.param) as running:
        await running.rule("/a", limit=10)
        await running.plans.AssignPlan(pb.AssignPlanRequest(assignment=assignment()))
        await running.checks.CheckRateLimit(check(tokens_requested=4))
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def unharmed(node, caplog):
    """The node, which the test must not change."""
    caplog.set_level(logging.DEBUG)
    before = await state(node)
    caplog.clear()
    yield node
    assert await state(node) == before
    # In debug mode asyncio logs slow callbacks, which depend on the machine, not the input.
    lines = [record for record in caplog.records if record.name != "asyncio"]
    assert [line for line in lines if line.levelno >= logging.INFO] == []


async def state(node):
    peek = await node.checks.CheckRateLimit(check(peek=True))
    assigned = await node.plans.ListAssignments(pb.ListAssignmentsRequest())
    # Includes the feed's own look-up, to detect partial changes.
    served = list(node.feed.assignments.items())
    rules = await node.config.ListRateLimits(pb.ListRateLimitsRequest())
    return peek, rules, assigned, served, node.fail_opens(), node.stats.unexpected_total


def burst(number, **fields):
    valid = {"limit": 1, "window_seconds": 1, "algorithm": "token_bucket"}
    return pb.Limit(**{**valid, **fields}, burst=number)


def calendar(**fields):
    """A limit per month, unless ``fields`` differ."""
    valid = {"name": "month", "limit": 1, "algorithm": "fixed_window", "period": pb.MONTH}
    return pb.Limit(**{**valid, **fields})


def rule(**fields):
    valid = {
        "endpoint": "/b", "identifier_type": "user", "limit": 1, "window_seconds": 1, "algorithm": "fixed_window",
    }  # fmt: skip
    return pb.RateLimit(**{**valid, **fields})


def assignment(identifier="u", identifier_type="user", **fields):
    identity = pb.Identity(identifier_type=identifier_type, identifier=identifier)
    return pb.Assignment(**{"identity": identity, "plan": "pro", **fields})


async def refusal(node, path, message):
    """Return the status and the named fields of a refused call."""
    data = message if isinstance(message, bytes) else message.SerializeToString()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await node.raw(path, data)
    error = caught.value
    named: list[str] = []
    status = rpc_status.from_call(error)
    assert status is not None
    assert (status.code, status.message) == (error.code().value[0], error.details())
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == "ratelimitd"
    for detail in status.details[1:]:
        bad_request = error_details_pb2.BadRequest()
        if detail.Unpack(bad_request):
            named += [violation.field for violation in bad_request.field_violations]
    return error.code(), named


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",
        b"\x0a\x05user",
        b"\x0a",
        b"\x08",
        b"\x0b\x0c\x0c",
        b"\x00\x00",
        b"\x20" + b"\xff" * 11,
    ],
    ids=["garbage", "truncated text", "tag only", "no varint", "broken group", "field 0", "varint"],
)
@pytest.mark.parametrize(
    "path", [CHECK, BATCH, CREATE, UPDATE, DELETE, LIST, METRICS, RESET, EXPLAIN, *PLANS]
)
async def test_malformed_bytes_are_refused_with_a_fixed_text(unharmed, path, data):
    assert await refusal(unharmed, path, data) == (INVALID, ["request"])


@pytest.mark.parametrize("name", ["identifier", "identifier_type", "endpoint"])
async def test_invalid_utf8_names_its_field(unharmed, name):
    number = pb.RateLimitRequest.DESCRIPTOR.fields_by_name[name].number
    data = check().SerializeToString() + field(number, b"\xff\xfe")
    assert await refusal(unharmed, CHECK, data) == (INVALID, [name])
    assert await refusal(unharmed, RESET, data) == (INVALID, [name])


@pytest.mark.parametrize("wait_ms", [-1, 60_001, 2**31 - 1])
async def test_a_wait_out_of_range_is_refused_and_named(unharmed, wait_ms):
    message = check(max_wait_ms=wait_ms)
    for path in (CHECK, EXPLAIN):
        assert await refusal(unharmed, path, message) == (INVALID, ["max_wait_ms"])
    batch = pb.BatchRateLimitRequest(requests=[message])
    [answer] = (await unharmed.checks.CheckRateLimitBatch(batch)).responses
    assert (answer.reason, "requests[0].max_wait_ms" in answer.error) == (pb.INVALID_REQUEST, True)


async def test_a_wait_that_does_not_fit_is_refused_not_wrapped(unharmed):
    data = check().SerializeToString() + b"\x40" + varint(2**32 + 7)
    assert await refusal(unharmed, CHECK, data) == (INVALID, ["max_wait_ms"])


async def test_a_field_of_the_wrong_wire_type_is_unknown_so_the_field_is_missing(unharmed):
    data = b"\x08\x01" + check(identifier="").SerializeToString()
    assert await refusal(unharmed, CHECK, data) == (INVALID, ["identifier"])


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"identifier": ""}, "identifier"),
        ({"identifier": "i" * 257}, "identifier"),
        ({"identifier_type": ""}, "identifier_type"),
        ({"identifier_type": "USER"}, "identifier_type"),
        ({"identifier_type": " user"}, "identifier_type"),
        ({"identifier_type": "tenant"}, "identifier_type"),
        ({"identifier_type": "u" * 51}, "identifier_type"),
        ({"endpoint": ""}, "endpoint"),
        ({"identifier_type": "ip+user"}, "identifier_type"),
        ({"endpoint": "*"}, "endpoint"),
        ({"endpoint": "e" * 256}, "endpoint"),
        ({"endpoint": "/a\x00"}, "endpoint"),
        ({"identifier_type": "ip", "identifier": "not an address"}, "identifier"),
    ],
)
async def test_a_malformed_field_of_a_check_or_reset_is_refused_and_named(unharmed, fields, named):
    for path in (CHECK, EXPLAIN, RESET):
        assert await refusal(unharmed, path, check(**fields)) == (INVALID, [named])


async def test_the_refusal_of_a_type_names_the_setting_that_declares_it(unharmed):
    listing = pb.ListAssignmentsRequest(identifier_type="tenant")
    created = pb.CreateRateLimitRequest(rate_limit=rule(identifier_type="tenant"))
    for call, request in (
        (unharmed.checks.CheckRateLimit, check(identifier_type="tenant")),
        (unharmed.config.CreateRateLimit, created),
        (unharmed.plans.ListAssignments, listing),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match="setting IDENTIFIER_TYPES declares others"):
            await call(request)


def also(*identities):
    return [pb.Identity(identifier_type=kind, identifier=named) for kind, named in identities]


@pytest.mark.parametrize(
    ("further", "named"),
    [
        (also(("ip", "::1"), ("ip", "::2")), ["also[1].identifier_type"]),
        (also(("user", "v")), ["also[0].identifier_type"]),
        (also(("tenant", "t")), ["also[0].identifier_type"]),
        (also(("api_key+ip", "t")), ["also[0].identifier_type"]),
        (also(("all", "t")), ["also[0].identifier_type"]),
        (also(("ip", "no address"), ("", "")), ["also[0].identifier", "also[1].identifier", "also[1].identifier_type"]),
        (also(("api_key", "i" * 257)), ["also[0].identifier"]),
        (also(*[("ip", "::1")] * 8), ["also"]),
    ],
)  # fmt: skip
async def test_a_malformed_further_identity_is_refused_and_named(unharmed, further, named):
    for path in (CHECK, EXPLAIN):
        assert await refusal(unharmed, path, check(also=further)) == (INVALID, named)
    reset = pb.ResetRequest(identifier="u", identifier_type="user", endpoint="/a", also=further)
    assert await refusal(unharmed, RESET, reset) == (INVALID, named)
    batch = pb.BatchRateLimitRequest(requests=[check(also=further)])
    (answer,) = (await unharmed.checks.CheckRateLimitBatch(batch)).responses
    assert answer.reason == pb.INVALID_REQUEST
    assert answer.error.startswith(f"requests[0].{named[0]}: ")


async def test_an_identifier_with_invalid_utf8_names_its_identity(unharmed):
    data = check().SerializeToString() + field(7, field(1, b"api_key") + field(2, b"\xff"))
    assert await refusal(unharmed, CHECK, data) == (INVALID, ["also[0].identifier"])


async def test_the_endpoint_of_a_global_rule_is_invalid_in_a_check(unharmed):
    for path in (CHECK, EXPLAIN):
        assert await refusal(unharmed, path, check(endpoint="**")) == (INVALID, ["endpoint"])
    batch = pb.BatchRateLimitRequest(requests=[check(endpoint="**")])
    (answer,) = (await unharmed.checks.CheckRateLimitBatch(batch)).responses
    assert answer.error.startswith("requests[0].endpoint: ")


async def test_an_update_with_a_mask_refuses_invalid_limits(unharmed):
    existing = (await unharmed.config.ListRateLimits(pb.ListRateLimitsRequest())).rate_limits[0]
    for limits, named in (([FIRST, DAY, DAY], "limits[2].name"), ([FIRST] + [DAY] * 8, "limits")):
        message = pb.UpdateRateLimitRequest(
            rate_limit=pb.RateLimit(id=existing.id, limits=limits),
            update_mask=FieldMask(paths=["limits"]),
        )
        assert await refusal(unharmed, UPDATE, message) == (INVALID, [f"rate_limit.{named}"])


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"identifier": "u"}, ["identifier"]),
        ({"also": also(("ip", "::1"))}, ["also"]),
        ({"endpoint": "*"}, ["endpoint"]),
    ],
)
async def test_a_reset_of_all_callers_refuses_an_identity(unharmed, fields, named):
    reset = pb.ResetRequest(**{"identifier_type": "all", "endpoint": "/a", **fields})
    assert await refusal(unharmed, RESET, reset) == (INVALID, named)


async def test_every_malformed_field_of_a_check_is_named_at_once(unharmed):
    message = pb.RateLimitRequest(
        endpoint="*", tokens_requested=-1, also=also(("ip", "")), max_wait_ms=-1
    )
    expected = [
        "identifier", "identifier_type", "endpoint", "tokens_requested", "also[0].identifier", "max_wait_ms",
    ]  # fmt: skip
    assert await refusal(unharmed, CHECK, message) == (INVALID, expected)


@pytest.mark.parametrize("tokens", [-1, -(2**31), 2**31, 2**32 - 1, 2**32 + 1, 2**63])
async def test_a_cost_that_is_negative_or_beyond_int32_is_refused_not_wrapped(unharmed, tokens):
    data = check().SerializeToString() + b"\x20" + varint(tokens)
    assert await refusal(unharmed, CHECK, data) == (INVALID, ["tokens_requested"])


async def test_the_largest_cost_is_denied_as_above_the_limit(unharmed):
    answer = await unharmed.checks.CheckRateLimit(check(tokens_requested=2**31 - 1))
    assert (answer.allowed, answer.reason) == (False, pb.COST_EXCEEDS_LIMIT)
    assert answer.retry_after_seconds == 60


@pytest.mark.parametrize("timestamp", [-1, 1, 2**63 - 1, -(2**63)])
async def test_a_timestamp_out_of_tolerance_is_replaced_by_the_nodes_clock(unharmed, timestamp):
    before = unharmed.stats.clock_rejected_total
    answer = await unharmed.checks.CheckRateLimit(check(timestamp=timestamp, peek=True))
    assert answer == await unharmed.checks.CheckRateLimit(check(peek=True))
    assert unharmed.stats.clock_rejected_total == before + 1


async def test_odd_but_valid_identifiers_are_opaque(unharmed):
    for identifier in ("i" * 256, "nul\x00", "cr\r\nlf", "a:b{c}*", "\u202ertl", "e\u0301"):
        answer = await unharmed.checks.CheckRateLimit(check(identifier=identifier, peek=True))
        assert answer.remaining_tokens == 9


async def test_the_spellings_of_an_address_share_a_bucket(node):
    await node.rule("/ip", "ip")
    left = [
        (await node.checks.CheckRateLimit(
            pb.RateLimitRequest(identifier=text, identifier_type="ip", endpoint="/ip")
        )).remaining_tokens
        for text in ("1.2.3.4", "::ffff:1.2.3.4", "::FFFF:102:304")
    ]  # fmt: skip
    assert left == [9, 8, 7]


async def test_endpoints_are_compared_byte_for_byte(unharmed):
    for endpoint in ("/A", "/a/", "%2Fa", "/a?x=1"):
        answer = await unharmed.checks.CheckRateLimit(check(endpoint=endpoint))
        assert (answer.reason, answer.remaining_tokens) == (pb.NO_RULE, 2**31 - 1)


async def test_unknown_repeated_and_reordered_fields_are_parsed_as_by_protobuf(unharmed):
    plain = check(peek=True)
    odd = field(3, b"/x") + field(2, b"user") + field(99, b"z" * 1_000_000) + b"\x30\x01"
    odd += field(3, b"/a") + field(1, b"u")
    answer = pb.RateLimitResponse.FromString(await unharmed.raw(CHECK, odd))
    assert answer == await unharmed.checks.CheckRateLimit(plain)


async def test_a_message_above_4_mib_is_resource_exhausted(unharmed):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await unharmed.raw(CHECK, field(99, b"z" * (4 * 1024 * 1024)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_small_message_that_unpacks_to_more_than_4_mib_is_resource_exhausted(unharmed):
    bomb = field(99, b"\x00" * (64 * 1024 * 1024))
    assert len(gzip.compress(bomb)) < 100_000
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await unharmed.raw(CHECK, bomb, compression=grpc.Compression.Gzip)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("length", "code"),
    [
        (9_000, grpc.StatusCode.OK),
        (15_000, grpc.StatusCode.OK),
        (20_000, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
async def test_metadata_is_always_accepted_up_to_the_bound_and_never_above(unharmed, length, code):
    data = check(peek=True).SerializeToString()
    # Repeated, since grpc decides at random between its two bounds if they differ. A refusal takes grpc 0.3 s.
    for _ in range(40 if code is grpc.StatusCode.OK else 4):
        found, _answer = await unharmed.outcome(CHECK, data, metadata=(("x-long", "v" * length),))
        assert found is code


async def test_an_empty_batch_gets_an_empty_answer(unharmed):
    answer = await unharmed.checks.CheckRateLimitBatch(pb.BatchRateLimitRequest())
    assert len(answer.responses) == 0


async def test_a_batch_at_the_bound_is_answered_and_a_longer_one_refused_uncharged(unharmed):
    items = [check(peek=True)] * 1000
    answer = await unharmed.checks.CheckRateLimitBatch(pb.BatchRateLimitRequest(requests=items))
    assert len(answer.responses) == 1000
    items = [check()] * 1001
    message = pb.BatchRateLimitRequest(requests=items)
    assert await refusal(unharmed, BATCH, message) == (INVALID, ["requests"])


async def test_two_million_empty_items_are_refused_like_any_other_long_batch(unharmed):
    assert await refusal(unharmed, BATCH, b"\x0a\x00" * 2_000_000) == (INVALID, ["requests"])


CHECK_OF_MANY = check().SerializeToString() + b"\x3a\x00" * 1_000_000
RULE_OF_MANY = rule().SerializeToString() + b"\x4a\x00" * 1_000_000
PLAN_OF_MANY = rule().SerializeToString() + field(
    10, field(1, b"pro") + field(2, b"\x0a\x00" * 1_000_000)
)


@pytest.mark.parametrize(
    ("path", "data"),
    [
        (CHECK, CHECK_OF_MANY),
        (EXPLAIN, CHECK_OF_MANY),
        (BATCH, field(1, CHECK_OF_MANY)),
        (RESET, check().SerializeToString() + b"\x22\x00" * 1_000_000),
        (CREATE, field(1, RULE_OF_MANY)),
        (CREATE, field(1, PLAN_OF_MANY)),
        (UPDATE, field(1, RULE_OF_MANY)),
        (UPDATE, field(1, rule(id=OTHER_ID).SerializeToString()) + field(2, b"\x0a\x00" * 10**6)),
        (ASSIGN_BATCH, b"\x0a\x00" * 1_000_000),
    ],
    ids=["also", "explained", "batch", "reset", "limits", "plan", "update", "mask", "assignments"],
)
async def test_a_million_empty_entries_are_refused_before_they_are_parsed(unharmed, path, data):
    assert await refusal(unharmed, path, data) == (INVALID, ["request"])


async def test_a_malformed_item_is_answered_in_place_without_effect_on_others(unharmed):
    batch = pb.BatchRateLimitRequest(
        requests=[check(peek=True), check(endpoint="*"), check(peek=True)]
    )
    data = batch.SerializeToString() + field(1, field(1, b"\xff"))
    before = unharmed.stats.invalid_total
    first, second, third, fourth = pb.BatchRateLimitResponse.FromString(
        await unharmed.raw(BATCH, data)
    ).responses
    assert first == third
    assert first.reason == pb.WITHIN_LIMIT
    assert (second.allowed, second.reason) == (False, pb.INVALID_REQUEST)
    assert second.error.startswith("requests[1].endpoint: ")
    assert fourth.error.startswith("requests[3].identifier: ")
    assert unharmed.stats.invalid_total == before + 2


async def test_an_overflowing_cost_inside_a_batch_is_a_malformed_item(unharmed):
    data = field(1, check().SerializeToString() + b"\x20" + varint(2**32 + 1))
    answer = pb.BatchRateLimitResponse.FromString(await unharmed.raw(BATCH, data))
    assert answer.responses[0].error.startswith("requests[0].tokens_requested: ")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"limit": -1}, "limit"),
        ({"window_seconds": -5}, "window_seconds"),
        ({"algorithm": "Token_Bucket"}, "algorithm"),
        ({"identifier_type": ""}, "identifier_type"),
        ({"identifier_type": "u" * 51}, "identifier_type"),
        ({"identifier_type": "tenant"}, "identifier_type"),
        ({"identifier_type": "tenant+user"}, "identifier_type"),
        ({"endpoint": ""}, "endpoint"),
        ({"endpoint": "e" * 256}, "endpoint"),
        ({"limits": [FIRST, *[DAY] * 8]}, "limits"),
        ({"limits": [FIRST, DAY, DAY]}, "limits[2].name"),
        ({"limits": [pb.Limit(limit=2, window_seconds=1, algorithm="fixed_window")]}, "limit"),
        ({"limits": [SPENT_DAY], **NO_NUMBERS}, "limits[0].limit"),
        ({"limits": [SPENT_DAY], **NO_NUMBERS, "limit": -1}, "limits[0].limit"),
        ({"limits": [limit_of("", window_seconds=0), DAY], **NO_NUMBERS}, "limits[0].window_seconds"),
        ({"limits": [limit_of("", algorithm="leaky"), DAY], **NO_NUMBERS}, "limits[0].algorithm"),
        ({"limits": [FIRST, limit_of("")]}, "limits[1].name"),
        ({"limits": [FIRST, limit_of("day", window_seconds=0)]}, "limits[1].window_seconds"),
        ({"limits": [FIRST, limit_of("day", enforcement=7)]}, "limits[1].enforcement"),
        ({"limits": [FIRST, pb.Limit(name="day", limit=1, window_seconds=1)]}, "limits[1].algorithm"),
        ({"limits": [FIRST, SPENT_DAY]}, "limits[1].limit"),
        ({"plans": {"unlimited": pb.LimitList(limits=[DAY])}}, "plans[unlimited]"),
        ({"plans": {"Pro": pb.LimitList(limits=[DAY])}}, "plans"),
        ({"plans": {"": pb.LimitList(limits=[DAY])}}, "plans"),
        ({"plans": {f"p{n}": pb.LimitList(limits=[DAY]) for n in range(33)}}, "plans"),
        ({"plans": {"pro": pb.LimitList()}}, "plans[pro].limits"),
        ({"plans": {"pro": pb.LimitList(limits=[FIRST, *[DAY] * 8])}}, "plans[pro].limits"),
        ({"plans": {"pro": pb.LimitList(limits=[DAY, DAY])}}, "plans[pro].limits[1].name"),
        ({"plans": {"pro": pb.LimitList(limits=[SPENT_DAY])}}, "plans[pro].limits[0].limit"),
        ({"limits": [burst(-1)], "algorithm": "token_bucket"}, "limits[0].burst"),
        ({"limits": [burst(5, algorithm="fixed_window")], "algorithm": "fixed_window"}, "limits[0].burst"),
        ({"limits": [FIRST, calendar(algorithm="token_bucket")]}, "limits[1].period"),
        ({"limits": [FIRST, calendar(period=4, window_seconds=1)]}, "limits[1].period"),
        ({"limits": [FIRST, calendar(window_seconds=-1)]}, "limits[1].window_seconds"),
        ({"limits": [FIRST, calendar(time_zone="Europe/Atlantis")]}, "limits[1].time_zone"),
        ({"limits": [FIRST, calendar(anchor_day=-1)]}, "limits[1].anchor_day"),
        ({"limits": [FIRST, calendar(period=pb.DAY, anchor_day=1)]}, "limits[1].anchor_day"),
        ({"limits": [FIRST, calendar(period=0, window_seconds=1, time_zone="UTC")]}, "limits[1].time_zone"),
        ({"limits": [calendar()], "window_seconds": 1}, "window_seconds"),
    ],
)  # fmt: skip
async def test_a_malformed_field_of_a_rule_is_refused_and_named(unharmed, fields, named):
    path = [f"rate_limit.{named}"]
    message = pb.CreateRateLimitRequest(rate_limit=rule(**fields))
    assert await refusal(unharmed, CREATE, message) == (INVALID, path)
    message = pb.UpdateRateLimitRequest(rate_limit=rule(id=OTHER_ID, **fields))
    assert await refusal(unharmed, UPDATE, message) == (INVALID, path)


@pytest.mark.parametrize("name", ["limit", "window_seconds"])
async def test_numbers_of_a_rule_that_do_not_fit_are_refused_not_wrapped(unharmed, name):
    number = pb.RateLimit.DESCRIPTOR.fields_by_name[name].number
    wide = bytes([number << 3]) + varint(2**32 + 7)
    data = field(1, rule(id=OTHER_ID).SerializeToString() + wide)
    for path in (CREATE, UPDATE):
        assert await refusal(unharmed, path, data) == (INVALID, [f"rate_limit.{name}"])


@pytest.mark.parametrize("name", ["endpoint", "identifier_type", "algorithm", "id"])
async def test_invalid_utf8_in_a_rule_names_its_field(unharmed, name):
    number = pb.RateLimit.DESCRIPTOR.fields_by_name[name].number
    data = field(1, rule(id=OTHER_ID).SerializeToString() + field(number, b"\xc3\x28"))
    for path in (CREATE, UPDATE):
        assert await refusal(unharmed, path, data) == (INVALID, [f"rate_limit.{name}"])


async def test_every_malformed_field_of_a_rule_is_named_at_once(unharmed):
    expected = ["id", "endpoint", "identifier_type", "limit", "window_seconds", "algorithm"]
    expected = [f"rate_limit.{name}" for name in expected]
    message = pb.CreateRateLimitRequest(rate_limit=pb.RateLimit(id="x"))
    assert await refusal(unharmed, CREATE, message) == (INVALID, expected)
    message = pb.UpdateRateLimitRequest(rate_limit=pb.RateLimit(id="x"))
    assert await refusal(unharmed, UPDATE, message) == (INVALID, expected)


async def test_a_create_without_a_rule_names_what_is_missing(unharmed):
    code, named = await refusal(unharmed, CREATE, b"")
    assert code is INVALID
    assert "rate_limit.endpoint" in named


async def test_an_id_that_is_not_a_uuid_is_refused(unharmed):
    message = pb.CreateRateLimitRequest(rate_limit=rule(id="not-a-uuid"))
    assert await refusal(unharmed, CREATE, message) == (INVALID, ["rate_limit.id"])
    message = pb.UpdateRateLimitRequest(rate_limit=rule())
    assert await refusal(unharmed, UPDATE, message) == (INVALID, ["rate_limit.id"])
    assert await refusal(unharmed, DELETE, b"") == (INVALID, ["id"])
    assert await refusal(unharmed, DELETE, field(1, b"\xff")) == (INVALID, ["id"])


async def test_an_unknown_id_is_not_found(unharmed):
    message = pb.UpdateRateLimitRequest(rate_limit=rule(id=OTHER_ID))
    assert (await refusal(unharmed, UPDATE, message))[0] is grpc.StatusCode.NOT_FOUND
    message = pb.DeleteRateLimitRequest(id=OTHER_ID)
    assert (await refusal(unharmed, DELETE, message))[0] is grpc.StatusCode.NOT_FOUND


async def test_a_second_rule_with_the_same_place_or_id_already_exists(unharmed):
    existing = (await unharmed.config.ListRateLimits(pb.ListRateLimitsRequest())).rate_limits[0]
    for duplicate in (rule(endpoint="/a"), rule(id=existing.id)):
        message = pb.CreateRateLimitRequest(rate_limit=duplicate)
        code, _ = await refusal(unharmed, CREATE, message)
        assert code is grpc.StatusCode.ALREADY_EXISTS


async def test_a_stale_etag_aborts(unharmed):
    existing = (await unharmed.config.ListRateLimits(pb.ListRateLimitsRequest())).rate_limits[0]
    message = pb.DeleteRateLimitRequest(id=existing.id, etag="stale")
    assert (await refusal(unharmed, DELETE, message))[0] is grpc.StatusCode.ABORTED
    message = pb.UpdateRateLimitRequest(rate_limit=rule(id=existing.id, etag="stale"))
    assert (await refusal(unharmed, UPDATE, message))[0] is grpc.StatusCode.ABORTED


@pytest.mark.parametrize("path", ["nope", "id", "etag", "Limit", "rate_limit.limit", "*", "\u2028"])
async def test_a_mask_with_an_immutable_field_is_refused(unharmed, path):
    existing = (await unharmed.config.ListRateLimits(pb.ListRateLimitsRequest())).rate_limits[0]
    message = pb.UpdateRateLimitRequest(
        rate_limit=rule(id=existing.id), update_mask=FieldMask(paths=["limit", path])
    )
    assert await refusal(unharmed, UPDATE, message) == (INVALID, ["update_mask"])


async def test_a_mask_of_many_unknown_paths_is_refused_in_a_short_answer(unharmed):
    paths = ["\u00e9" * 50 + str(index) for index in range(1_900)]
    message = pb.UpdateRateLimitRequest(
        rate_limit=rule(id=OTHER_ID), update_mask=FieldMask(paths=paths)
    )
    assert await refusal(unharmed, UPDATE, message) == (INVALID, ["update_mask"] * 16)


async def test_an_unset_field_in_the_mask_is_zero_and_refused(unharmed):
    existing = (await unharmed.config.ListRateLimits(pb.ListRateLimitsRequest())).rate_limits[0]
    message = pb.UpdateRateLimitRequest(
        rate_limit=pb.RateLimit(id=existing.id), update_mask=FieldMask(paths=["limit"])
    )
    assert await refusal(unharmed, UPDATE, message) == (INVALID, ["rate_limit.limit"])


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (pb.ListRateLimitsRequest(page_size=-1).SerializeToString(), "page_size"),
        (b"\x18" + varint(2**31 + 2**32), None),
        (b"\x18" + varint(2**32 - 1), None),
        (pb.ListRateLimitsRequest(page_size=2**31 - 1).SerializeToString(), None),
        (pb.ListRateLimitsRequest(page_token="forged").SerializeToString(), "page_token"),
        (pb.ListRateLimitsRequest(page_token="\u00e9").SerializeToString(), "page_token"),
        (pb.ListRateLimitsRequest(page_token="A" * 80).SerializeToString(), "page_token"),
        (field(4, b"\xff"), "page_token"),
        (field(1, b"\xff"), "endpoint"),
        (pb.ListRateLimitsRequest(identifier_type="x").SerializeToString(), "identifier_type"),
    ],
)
async def test_a_malformed_listing_is_named_and_a_huge_page_size_is_capped(unharmed, data, named):
    if named is None:
        assert await unharmed.raw(LIST, data)
    else:
        assert await refusal(unharmed, LIST, data) == (INVALID, [named])


async def test_an_altered_page_token_or_one_of_other_filters_is_refused(unharmed):
    await unharmed.rule("/b")
    first = await unharmed.config.ListRateLimits(pb.ListRateLimitsRequest(page_size=1))
    token = first.next_page_token
    altered = {"page_token": token[:-1] + ("A" if token[-1] != "A" else "Q")}
    for other in (altered, {"page_token": token, "identifier_type": "user"}):
        message = pb.ListRateLimitsRequest(page_size=1, **other)
        assert await refusal(unharmed, LIST, message) == (INVALID, ["page_token"])
    rules = (await unharmed.config.ListRateLimits(pb.ListRateLimitsRequest())).rate_limits
    await unharmed.config.DeleteRateLimit(pb.DeleteRateLimitRequest(id=rules[1].id))


async def test_the_reset_of_an_unknown_bucket_succeeds(unharmed):
    await unharmed.health.ResetRateLimit(
        pb.ResetRequest(identifier="stranger", identifier_type="user", endpoint="/nowhere")
    )


async def test_too_many_metric_names_are_refused(unharmed):
    message = pb.MetricsRequest(names=["n"] * 1001)
    assert await refusal(unharmed, METRICS, message) == (INVALID, ["names"])


async def test_answers_of_the_largest_rule_fit_their_fields(node):
    """The extreme numbers of an answer fit its fields, so every answer can be encoded."""
    for algorithm in ("token_bucket", "sliding_window", "fixed_window"):
        for limit, window_seconds in ((2**31 - 1, 1), (1, 2**31 - 1), (2**31 - 1, 2**31 - 1)):
            created = await node.rule(
                "/w", limit=limit, window_seconds=window_seconds, algorithm=algorithm
            )
            for tokens in (1, 2**31 - 1):
                message = check(endpoint="/w", tokens_requested=tokens)
                answer = await node.checks.CheckRateLimit(message)
                assert 0 <= answer.remaining_tokens <= limit
                assert answer.reset_time >= 0
                assert answer.retry_after_seconds >= 0
            await node.config.DeleteRateLimit(pb.DeleteRateLimitRequest(id=created.id))
    assert node.fail_opens() == (0, 0)


@pytest.mark.parametrize(
    ("identifier", "identifier_type", "named"),
    [
        ("", "user", ["identifier"]),
        ("no address", "ip", ["identifier"]),
        ("u", "", ["identifier_type"]),
        ("u", "tenant", ["identifier_type"]),
        ("u", "ip+user", ["identifier_type"]),
        ("u", "all", ["identifier_type"]),
        ("", "all", ["identifier", "identifier_type"]),
    ],
)
async def test_an_identity_invalid_in_checks_is_refused_for_plans(
    unharmed, identifier, identifier_type, named
):
    wrong = assignment(identifier, identifier_type)
    message = pb.AssignPlanRequest(assignment=wrong)
    paths = [f"assignment.identity.{name}" for name in named]
    assert await refusal(unharmed, ASSIGN, message) == (INVALID, paths)
    batch = pb.BatchAssignPlansRequest(assignments=[assignment("v"), wrong])
    paths = [f"assignments[1].identity.{name}" for name in named]
    assert await refusal(unharmed, ASSIGN_BATCH, batch) == (INVALID, paths)
    paths = [f"identity.{name}" for name in named]
    for path, kind in ((UNASSIGN, pb.UnassignPlanRequest), (ASSIGNMENT, pb.GetAssignmentRequest)):
        assert await refusal(unharmed, path, kind(identity=wrong.identity)) == (INVALID, paths)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"plan": ""}, ["plan"]),
        ({"plan": "Pro"}, ["plan"]),
        ({"plan": "pro plan"}, ["plan"]),
        ({"plan": "pro\n"}, ["plan"]),
        ({"plan": "p" * 33}, ["plan"]),
        ({"expire_time": -1}, ["expire_time"]),
        ({"expire_time": 1_700_000_000}, ["expire_time"]),
        ({"expire_time": 2**33}, ["expire_time"]),
        ({"expire_time": 2**63 - 1}, ["expire_time"]),
        ({"note": "n" * 256}, ["note"]),
        ({"note": "a\nb"}, ["note"]),
        ({"note": "\x00"}, ["note"]),
        ({"plan": "", "expire_time": 1, "note": "\x7f"}, ["plan", "expire_time", "note"]),
    ],
)
async def test_a_malformed_field_of_an_assignment_is_refused_and_named(unharmed, fields, named):
    message = pb.AssignPlanRequest(assignment=assignment(**fields))
    paths = [f"assignment.{name}" for name in named]
    assert await refusal(unharmed, ASSIGN, message) == (INVALID, paths)
    batch = pb.BatchAssignPlansRequest(assignments=[assignment("v"), assignment(**fields)])
    paths = [f"assignments[1].{name}" for name in named]
    assert await refusal(unharmed, ASSIGN_BATCH, batch) == (INVALID, paths)


@pytest.mark.parametrize(
    ("number", "name"),
    [(2, "plan"), (4, "note")],
)
async def test_invalid_utf8_in_an_assignment_names_its_field(unharmed, number, name):
    data = field(1, assignment().SerializeToString() + field(number, b"\xc3\x28"))
    assert await refusal(unharmed, ASSIGN, data) == (INVALID, [f"assignment.{name}"])
    identity = field(1, field(1, b"user") + field(2, b"\xff"))
    assert await refusal(unharmed, UNASSIGN, identity) == (INVALID, ["identity.identifier"])


async def test_a_batch_of_assignments_has_1_to_1000_distinct_identities(unharmed):
    many = [assignment(f"v{number}") for number in range(1_001)]
    for batch in ([], many):
        message = pb.BatchAssignPlansRequest(assignments=batch)
        assert await refusal(unharmed, ASSIGN_BATCH, message) == (INVALID, ["assignments"])
    twice = pb.BatchAssignPlansRequest(
        assignments=[assignment("::1", "ip"), assignment("0:0::1", "ip", plan="free")]
    )
    assert await refusal(unharmed, ASSIGN_BATCH, twice) == (INVALID, ["assignments[1].identity"])


async def test_one_stale_etag_refuses_the_whole_batch(unharmed):
    message = pb.BatchAssignPlansRequest(
        assignments=[assignment("v"), assignment(plan="free", etag="stale")]
    )
    assert await refusal(unharmed, ASSIGN_BATCH, message) == (grpc.StatusCode.ABORTED, [])
    alone = pb.AssignPlanRequest(assignment=assignment(plan="free", etag="stale"))
    assert await refusal(unharmed, ASSIGN, alone) == (grpc.StatusCode.ABORTED, [])
    away = pb.UnassignPlanRequest(identity=assignment().identity, etag="stale")
    assert await refusal(unharmed, UNASSIGN, away) == (grpc.StatusCode.ABORTED, [])


async def test_an_identity_without_a_plan_is_not_found(unharmed):
    identity = assignment("nobody").identity
    for path, kind in ((UNASSIGN, pb.UnassignPlanRequest), (ASSIGNMENT, pb.GetAssignmentRequest)):
        found = await refusal(unharmed, path, kind(identity=identity))
        assert found == (grpc.StatusCode.NOT_FOUND, [])


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"plan": "Pro"}, ["plan"]),
        ({"identifier_type": "tenant"}, ["identifier_type"]),
        ({"identifier_type": "all"}, ["identifier_type"]),
        ({"identifier_prefix": "a"}, ["identifier_type"]),
        ({"identifier_type": "user", "identifier_prefix": "a" * 257}, ["identifier_prefix"]),
        ({"page_size": -1}, ["page_size"]),
        ({"page_token": "forged"}, ["page_token"]),
    ],
)
async def test_a_malformed_listing_of_assignments_is_refused_and_named(unharmed, fields, named):
    message = pb.ListAssignmentsRequest(**fields)
    assert await refusal(unharmed, ASSIGNMENTS, message) == (INVALID, named)


def whole_set(*rules, **options):
    valid = {"identifier_type": "user", "limit": 1, "window_seconds": 1}
    return pb.ApplyRateLimitsRequest(
        rate_limits=[
            pb.RateLimit(**{**valid, "algorithm": "fixed_window", **fields}) for fields in rules
        ],
        **options,
    )


@pytest.mark.parametrize(
    ("rules", "options", "named"),
    [
        ([{"endpoint": "/b"}, {"endpoint": ""}], {}, ["rate_limits[1].endpoint"]),
        ([{"endpoint": "/b", "limit": 0}], {"prune": True}, ["rate_limits[0].limit"]),
        ([{"endpoint": "/b", "limit": -1, "id": "x"}], {}, ["rate_limits[0].id", "rate_limits[0].limit"]),
        ([{"endpoint": "/b", "identifier_type": "tenant"}], {}, ["rate_limits[0].identifier_type"]),
        ([{"endpoint": "/b"}, {"endpoint": "/b"}], {}, ["rate_limits[1].endpoint"]),
        (
            [{"endpoint": "/b", "id": OTHER_ID}, {"endpoint": "/c", "id": OTHER_ID}],
            {},
            ["rate_limits[1].id"],
        ),
        ([{"endpoint": "/a", "id": OTHER_ID}], {}, ["rate_limits[0].id"]),
        (
            [{"endpoint": "/b", "limits": [FIRST, SPENT_DAY]}],
            {"dry_run": True},
            ["rate_limits[0].limits[1].limit"],
        ),
        (
            [{"endpoint": "/b", "plans": {"pro": pb.LimitList()}}],
            {},
            ["rate_limits[0].plans[pro].limits"],
        ),
        ([], {"revision": -1, "as_of": -1}, ["revision", "as_of"]),
        ([], {"as_of": 10**9}, ["as_of"]),
        ([], {"as_of": 1, "prune": True}, ["as_of"]),
        ([{"endpoint": "/b"}], {"as_of": 1}, ["as_of"]),
    ],
)  # fmt: skip
async def test_an_invalid_rule_refuses_the_whole_set_and_is_named(unharmed, rules, options, named):
    message = whole_set(*rules, **options)
    assert await refusal(unharmed, APPLY, message) == (INVALID, named)


async def test_fifteen_of_many_invalid_rules_are_named_and_the_rest_counted(unharmed):
    message = whole_set(*({"endpoint": f"/{n}", "limit": 0} for n in range(40)))
    named = [*(f"rate_limits[{n}].limit" for n in range(15)), "rate_limits"]
    assert await refusal(unharmed, APPLY, message) == (INVALID, named)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff",
        field(1, b"\xff"),
        field(1, b"")[:-1] + b"\x05",
        b"\x0a\x80",
        b"\x0b\x0c",
        b"\x10\x01" * 3_000,
        field(1, b"\x4a\x00" * 9_000),
    ],
)
async def test_malformed_bytes_of_a_whole_set_are_refused(unharmed, data):
    assert await refusal(unharmed, APPLY, data) == (INVALID, ["request"])


async def test_invalid_utf8_in_a_rule_of_a_set_names_its_place(unharmed):
    sound = whole_set({"endpoint": "/b"}).SerializeToString()
    broken = field(1, whole_set({}).rate_limits[0].SerializeToString() + field(2, b"\xc3\x28"))
    assert await refusal(unharmed, APPLY, sound + broken) == (
        INVALID,
        ["rate_limits[1].endpoint"],
    )


async def test_a_set_for_another_revision_or_etag_changes_nothing(unharmed):
    for message in (
        whole_set(prune=True, revision=10**9),
        whole_set({"endpoint": "/a", "etag": "stale"}),
        whole_set({"endpoint": "/b", "etag": "stale"}, prune=True),
    ):
        assert await refusal(unharmed, APPLY, message) == (grpc.StatusCode.ABORTED, [])
