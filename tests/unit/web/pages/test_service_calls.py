"""What pages ask is what the services hear; the services themselves are asked in the tests of the pages."""

import pytest
from google.rpc import error_details_pb2

from ratelimitd.rpc.interface import Methods, RpcError, StatusCode
from ratelimitd.services.convert_rules import rate_limit_of
from ratelimitd.services.errors import rich_error
from ratelimitd.web.api.json_api import CHECK_METHOD
from ratelimitd.web.pages.invoke import (
    CONFIG,
    HTTP_STATUS,
    RESET_METHOD,
    Rejected,
    ServiceCalls,
)
from ratelimitd.web.pages.rule_form import RuleForm
from ratelimiter.v1 import ratelimiter_pb2 as pb

FORM = RuleForm("/orders", "user", "10", "60", "token_bucket", enabled=False)
RULE = {
    "endpoint": "/orders",
    "identifier_type": "user",
    "limit": 10,
    "window_seconds": 60,
    "algorithm": "token_bucket",
    "enabled": False,
}
ALICE = {"identifier": "alice", "identifier_type": "user", "endpoint": "/orders"}


class Services:
    """Methods that note what they are asked; ``answer`` is what they answer, or raise."""

    def __init__(self):
        self.asked = []
        self.answer = b""
        self.calls = ServiceCalls(Methods(unary=self), self, rate_limit_of)

    def __getitem__(self, method):
        def handler(data, call):
            assert call == ("call", method)
            self.asked.append((method, data))
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

        return handler

    def call(self, _request, method):
        return ("call", method)


@pytest.fixture
def services():
    return Services()


async def test_a_create_says_every_field_and_tells_the_id(services):
    services.answer = pb.RateLimit(id="1").SerializeToString()
    assert await services.calls.create(None, FORM) == "1"
    [(method, data)] = services.asked
    assert method == f"{CONFIG}/CreateRateLimit"
    assert pb.CreateRateLimitRequest.FromString(data).rate_limit == pb.RateLimit(**RULE)


async def test_an_update_and_a_delete_are_for_one_version(services):
    await services.calls.update(None, "1", FORM, "e")
    await services.calls.delete(None, "1", "e")
    [(_, update), (_, delete)] = services.asked
    expected = pb.UpdateRateLimitRequest(rate_limit=pb.RateLimit(id="1", etag="e", **RULE))
    assert pb.UpdateRateLimitRequest.FromString(update) == expected
    assert pb.DeleteRateLimitRequest.FromString(delete) == pb.DeleteRateLimitRequest(
        id="1", etag="e"
    )


async def test_a_check_and_a_reset_are_about_one_identifier(services):
    services.answer = pb.RateLimitResponse(allowed=True).SerializeToString()
    checked, forgotten = pb.RateLimitRequest(**ALICE, peek=True), pb.ResetRequest(**ALICE)
    assert (await services.calls.check(None, checked)).allowed
    services.answer = b""
    await services.calls.reset(None, forgotten)
    [(check_method, check), (reset_method, reset)] = services.asked
    assert (check_method, reset_method) == (CHECK_METHOD, RESET_METHOD)
    assert pb.RateLimitRequest.FromString(check) == checked
    assert pb.ResetRequest.FromString(reset) == forgotten


async def test_fields_that_are_refused_are_named_as_the_form_names_them(services):
    request = error_details_pb2.BadRequest()
    request.field_violations.add(field="rate_limit.limit", description="too much")
    request.field_violations.add(field="id", description="no UUID")
    services.answer = rich_error(StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "no", request)
    with pytest.raises(Rejected) as raised:
        await services.calls.create(None, FORM)
    assert raised.value.fields == {"limit": "too much", "id": "no UUID"}
    assert (raised.value.status, raised.value.message) == (422, "no")


async def test_an_error_without_fields_has_its_message(services):
    services.answer = RpcError(StatusCode.UNAVAILABLE, "away")
    with pytest.raises(Rejected, match="away") as raised:
        await services.calls.delete(None, "1", "e")
    assert (raised.value.status, raised.value.fields) == (503, {})


def test_every_other_error_is_a_defect_of_ours():
    assert Rejected(StatusCode.INTERNAL, "", {}).status == 500
    assert StatusCode.OK not in HTTP_STATUS
