"""Authorization of every method; test_forms_of_credentials has every form of the tokens of settings."""

import grpc
import pytest

from ratelimitd.services.auth import Credentials, NamedTokens, Role, Token, digest_of
from ratelimitd.services.methods import ROLES
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.rpc.node import running_node

GUARDED = {path: role for path, role in ROLES.items() if role is not Role.OPEN}
TOKENS = Credentials(admin_token="the-admin-token", check_token="the-check-token")
DENIED = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
FORWARDED = (("x-forwarded-for", "127.0.0.1"),)


def bearer(token):
    return (("authorization", f"Bearer {token}"),)


async def verdict(node, path, metadata=()):
    """Return ``None`` if the call passed its guard, else the status of the refusal."""
    for form in (path, path.replace("ratelimiter.v1.", "")):
        code, _ = await node.outcome(form, b"\xff", metadata=metadata)
        if code in DENIED:
            return code
        assert code is grpc.StatusCode.INVALID_ARGUMENT  # the bytes were parsed
    return None


async def verdicts(node, metadata=()):
    """Return the verdict of every guarded method."""
    return {path: await verdict(node, path, metadata) for path in GUARDED}


def all_get(code):
    return dict.fromkeys(GUARDED, code)


def only(*roles):
    """Return the verdicts for callers that may use the methods of these roles."""
    return {
        path: None if role in roles else grpc.StatusCode.PERMISSION_DENIED
        for path, role in GUARDED.items()
    }


@pytest.fixture
async def guarded_node(tmp_path, transport):
    async with running_node(tmp_path, transport=transport, credentials=TOKENS) as node:
        yield node


async def test_without_tokens_this_host_may_do_everything(node):
    assert await verdicts(node) == all_get(None)


async def test_without_tokens_a_forwarded_call_may_only_check(node):
    assert await verdicts(node, FORWARDED) == only(Role.CHECK)


async def test_with_tokens_the_admin_token_opens_everything(guarded_node):
    for more in ((), FORWARDED):
        assert await verdicts(guarded_node, (*bearer("the-admin-token"), *more)) == all_get(None)


def named_token(name, role, token=None, **fields):
    return Token(name=name, role=role, digest=digest_of(token or f"token of {name}"), **fields)


@pytest.fixture
async def named_node(tmp_path, transport):
    """A node with a token of each role, and one that has expired."""
    roles = (Role.CHECK, Role.READ, Role.ADMIN)
    tokens = [
        *(named_token(str(role), role) for role in roles),
        named_token("late", Role.ADMIN, expires_s=1),
    ]
    credentials = Credentials(admin_token="the-admin-token", named=NamedTokens(lambda: 1.0, tokens))
    async with running_node(tmp_path, transport=transport, credentials=credentials) as node:
        yield node


async def test_a_named_token_holds_its_role(named_node):
    for role in (Role.CHECK, Role.READ):
        assert await verdicts(named_node, bearer(f"token of {role}")) == only(role)
    for token in (f"token of {Role.ADMIN}", "the-admin-token"):
        assert await verdicts(named_node, bearer(token)) == all_get(None)
    for token in ("token of late", "token of nobody"):
        unauthenticated = all_get(grpc.StatusCode.UNAUTHENTICATED)
        assert await verdicts(named_node, bearer(token)) == unauthenticated


async def test_the_audit_trail_has_the_name_of_a_token(named_node):
    rule = pb.RateLimit(
        endpoint="/a", identifier_type="user", limit=1, window_seconds=1, algorithm="token_bucket"
    )
    request = pb.CreateRateLimitRequest(rate_limit=rule)
    await named_node.config.CreateRateLimit(request, metadata=bearer("token of admin"))
    assert [entry.actor for entry in await named_node.store.audit("", None, 1)] == ["admin"]


async def test_each_call_on_one_connection_has_its_own_credentials(guarded_node):
    method = guarded_node.channel.unary_unary("/ratelimiter.v1.RateLimiterConfig/CreateRateLimit")
    codes = []
    for token in ("the-admin-token", "wrong", "the-check-token", "the-admin-token"):
        # Without a deadline, so that the calls differ only in the token.
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(b"\xff", metadata=bearer(token))
        codes.append(caught.value.code())
    past_the_guard = grpc.StatusCode.INVALID_ARGUMENT
    refused = [grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED]
    assert codes == [past_the_guard, *refused, past_the_guard]


async def test_health_and_reflection_are_open_to_all_callers(guarded_node):
    code, _ = await guarded_node.outcome("/grpc.health.v1.Health/Check", b"", metadata=FORWARDED)
    assert code is grpc.StatusCode.OK


async def test_an_admin_token_alone_leaves_checks_open(tmp_path, transport):
    credentials = Credentials(admin_token="the-admin-token")
    async with running_node(tmp_path, transport=transport, credentials=credentials) as node:
        assert await verdict(node, "/ratelimiter.v1.RateLimiter/CheckRateLimit") is None
