"""A whole node with a TOKENS_FILE: gRPC, JSON and the page, and changes of the file."""

import asyncio
import logging
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial

import grpc.aio
import httpx
import pytest

from ratelimitd.errors import StartupError
from ratelimitd.node.node import Node
from ratelimitd.node.serving import TRANSPORTS
from ratelimitd.settings.table import Settings
from ratelimitd.testing import ManualClock, running_node
from ratelimiter.v1 import ratelimiter_pb2 as pb
from ratelimiter.v1 import ratelimiter_pb2_grpc as stubs
from tests.named_tokens import digest_of, entry, token_of, write
from tests.page_visitor import PageVisitor

ADMIN = "the-admin-token"
RULE = {
    "endpoint": "/orders",
    "identifier_type": "user",
    "limit": "9",
    "window_seconds": "60",
    "algorithm": "token_bucket",
    "step": "store",
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tokens.json"


@pytest.fixture
def clock():
    return ManualClock()


@asynccontextmanager
async def node_with(path, *entries, clock=None, **settings):
    write(path, *entries)
    async with running_node(admin_token=ADMIN, tokens_file=path, clock=clock, **settings) as node:
        yield node


async def changed(node, path, *entries):
    """Replace the file, and let the node reload it, as it does each second."""
    write(path, *entries)
    await node._tokens.reload()


def bearer(name):
    return [("authorization", f"Bearer {token_of(name)}")]


async def json_status(node, name=""):
    """Return the status of a JSON check with the token of ``name``."""
    check = {"identifier": "u", "identifierType": "user", "endpoint": "/a"}
    headers = dict(bearer(name)) if name else {}
    async with httpx.AsyncClient(base_url=f"http://{node.http_address}") as http:
        return (await http.post("/v1/check", json=check, headers=headers)).status_code


async def status_of(method, request, name=""):
    """Return the status of a gRPC call with the token of ``name``."""
    try:
        await method(request, metadata=bearer(name) if name else [])
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def listed(node, name):
    async with grpc.aio.insecure_channel(node.grpc_address) as channel:
        method = stubs.RateLimiterConfigStub(channel).ListRateLimits
        return await status_of(method, pb.ListRateLimitsRequest(), name)


@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
async def test_a_changed_file_applies_to_the_next_call_on_both_transports(path, transport):
    async with node_with(path, entry("alice", "read"), transport=transport) as node:
        assert await listed(node, "alice") is grpc.StatusCode.OK
        assert await listed(node, "bob") is grpc.StatusCode.UNAUTHENTICATED
        await changed(node, path, entry("bob"))
        assert await listed(node, "alice") is grpc.StatusCode.UNAUTHENTICATED
        assert await listed(node, "bob") is grpc.StatusCode.OK
        path.unlink()
        await node._tokens.reload()
        assert await listed(node, "bob") is grpc.StatusCode.OK
        assert node.stats.token_guesses["wrong"] == 2


async def test_a_node_does_not_start_with_an_invalid_file(path):
    with pytest.raises(StartupError, match=r"tokens\[0\]\.role"):
        async with node_with(path, entry("alice", "king")):
            pass


async def test_checks_need_a_credential_if_the_file_has_a_check_entry(path):
    async with node_with(path, entry("alice", "read")) as node:
        assert await json_status(node) == 200
    async with node_with(path, entry("alice", "read"), entry("shop", "check")) as node:
        assert await json_status(node) == 401
        assert await json_status(node, "shop") == 200
        assert await json_status(node, "alice") == 403


@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
async def test_checks_need_a_credential_from_the_first_check_entry_even_after_the_last_is_gone(
    path, caplog, transport
):
    request = pb.RateLimitRequest(identifier="u", identifier_type="user", endpoint="/a")
    async with (
        node_with(path, entry("alice"), transport=transport) as node,
        grpc.aio.insecure_channel(node.grpc_address) as channel,
    ):
        check = partial(status_of, stubs.RateLimiterStub(channel).CheckRateLimit, request)
        assert await check() is grpc.StatusCode.OK
        assert await json_status(node) == 200
        await changed(node, path, entry("alice"), entry("shop", "check"))
        assert await json_status(node) == 401
        assert await check() is grpc.StatusCode.UNAUTHENTICATED
        assert await check("shop") is grpc.StatusCode.OK
        assert "checks need a credential" in caplog.text
        await changed(node, path, entry("alice"))
        assert await check() is grpc.StatusCode.UNAUTHENTICATED
        assert await check("shop") is grpc.StatusCode.UNAUTHENTICATED
        assert await check("alice") is grpc.StatusCode.OK
        assert "checks still need a credential until a restart" in caplog.text


@pytest.mark.parametrize("when", ["before the start", "later"])
async def test_checks_that_another_worker_closed_are_closed(path, tmp_path, when):
    flags = {
        "ADMIN_TOKEN": ADMIN,
        "TOKENS_FILE": str(write(path, entry("alice"))),
        "LISTEN": "127.0.0.1:0",
        "HTTP_LISTEN": "127.0.0.1:0",
        "STATE_DIR": str(tmp_path / "state"),
        "DATABASE_URL": f"sqlite:///{tmp_path / 'rules.db'}",
    }
    node = Node(Settings.load({}, flags))
    if when == "before the start":
        node.guard_checks()
    await node.start()
    if when == "later":
        assert await json_status(node) == 200
        node.guard_checks()
    assert await json_status(node) == 401
    assert await json_status(node, "alice") == 200
    await node.drain()


@pytest.mark.deep
@pytest.mark.parametrize("change", ["removed", "demoted", "expired"])
async def test_a_live_stream_ends_with_the_token_of_its_session(path, clock, change):
    expires = (datetime.fromtimestamp(clock.now_us() / 1e6, UTC) + timedelta(hours=1)).isoformat()
    async with (
        node_with(path, entry("alice", expires=expires), clock=clock) as node,
        PageVisitor(node.http_address) as visitor,
        asyncio.timeout(20),
    ):
        await visitor.log_in(token_of("alice"))
        async with visitor.streaming("/events?names=shown") as events:
            assert await anext(events) == "retry: 2000"
            if change == "expired":
                clock.advance(seconds=3600)
            else:
                await changed(node, path, *[entry("alice", "read")][change == "removed" :])
            assert [event async for event in events if event.startswith("event: now")] == []


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"admin_token": "t"}, "ADMIN_TOKEN"), ({"check_token": "t"}, "CHECK_TOKEN"),
     ({"admin_token": ""}, "STATE_DIR/admin-token")],
)  # fmt: skip
async def test_the_token_of_another_setting_is_refused_as_an_entry(tmp_path, path, settings, name):
    state_dir = tmp_path / "state"
    state_dir.mkdir(mode=0o700)
    (state_dir / "admin-token").write_text("t")
    (state_dir / "admin-token").chmod(0o600)
    write(path, entry("alice", "read", token="t"))
    given = {key: value for key, value in {"admin_token": ADMIN, **settings}.items() if value}
    given |= {"loopback_admin": "off", "state_dir": state_dir}
    with pytest.raises(StartupError, match=rf"tokens\[0\]\.sha256 is already used: .*{name}"):
        async with running_node(tokens_file=path, **given):
            pass


async def test_json_edits_are_recorded_by_name_and_readers_can_read(path):
    rule = {"endpoint": "/a", "identifierType": "user", "limit": 9, "windowSeconds": 60}
    create = {"rateLimit": {**rule, "algorithm": "token_bucket"}}
    async with (
        node_with(path, entry("alice"), entry("viewer", "read")) as node,
        httpx.AsyncClient(base_url=f"http://{node.http_address}") as http,
    ):

        async def status_of(method, content, name):
            headers = dict(bearer(name))
            return (
                await http.post(f"/ratelimiter.v1.{method}", json=content, headers=headers)
            ).status_code

        assert await status_of("RateLimiterConfig/CreateRateLimit", create, "viewer") == 403
        assert await status_of("RateLimiterConfig/CreateRateLimit", create, "alice") == 200
        assert await status_of("RateLimiterConfig/ListRateLimits", {}, "viewer") == 200
        async with PageVisitor(node.http_address) as visitor:
            await visitor.log_in(token_of("viewer"))
            assert "alice" in (await visitor.get("/audit")).text


async def test_an_edit_on_the_page_is_recorded_with_the_users_name(path):
    async with (
        node_with(path, entry("alice")) as node,
        PageVisitor(node.http_address) as visitor,
    ):
        assert (await visitor.log_in(token_of("alice"))).status_code == 303
        assert (await visitor.post("/rules/new", RULE)).status_code == 303
        audit = (await visitor.get("/audit")).text
    assert "alice" in audit
    assert "admin@" not in audit


async def test_a_reader_sees_the_pages_and_changes_nothing(path):
    async with (
        node_with(path, entry("viewer", "read")) as node,
        PageVisitor(node.http_address) as visitor,
    ):
        await visitor.log_in(token_of("viewer"))
        for page in ("/", "/rules", "/plans", "/try", "/audit"):
            assert (await visitor.get(page)).status_code == 200
        assert (await visitor.post("/rules/new", RULE)).status_code == 403
        assert (await visitor.get("/?names=shown")).status_code == 403
        assert "/orders" not in (await visitor.get("/rules")).text


async def test_a_token_for_checks_does_not_log_in(path):
    async with (
        node_with(path, entry("shop", "check")) as node,
        PageVisitor(node.http_address) as visitor,
    ):
        assert (await visitor.log_in(token_of("shop"))).status_code == 401


@pytest.mark.parametrize("after", [[], [entry("alice", token="rotated")]])
async def test_a_session_ends_with_its_token(path, after):
    async with (
        node_with(path, entry("alice"), entry("bob")) as node,
        PageVisitor(node.http_address) as alice,
        PageVisitor(node.http_address) as bob,
        PageVisitor(node.http_address) as admin,
    ):
        for visitor, token in ((alice, token_of("alice")), (bob, token_of("bob")), (admin, ADMIN)):
            await visitor.log_in(token)
        await changed(node, path, entry("bob"), *after)
        ended = await alice.get("/rules")
        assert (ended.status_code, ended.headers["location"]) == (303, "/login?next=/rules")
        assert (await bob.get("/rules")).status_code == 200
        assert (await admin.get("/rules")).status_code == 200
        assert node.stats.token_guesses["wrong"] == 0


async def test_a_session_ends_when_its_token_expires(path, clock):
    now = datetime.fromtimestamp(clock.now_us() / 1e6, UTC)
    expires = (now + timedelta(minutes=5)).isoformat()
    async with (
        node_with(path, entry("alice", expires=expires), clock=clock) as node,
        PageVisitor(node.http_address) as visitor,
    ):
        await visitor.log_in(token_of("alice"))
        clock.advance(seconds=299)
        assert (await visitor.get("/rules")).status_code == 200
        assert await listed(node, "alice") is grpc.StatusCode.OK
        clock.advance(seconds=1)
        assert (await visitor.get("/rules")).status_code == 303
        assert await listed(node, "alice") is grpc.StatusCode.UNAUTHENTICATED
        assert node.stats.token_guesses["wrong"] == 1, "slowed like a wrong one"
        assert (await visitor.log_in(token_of("alice"))).status_code == 401


async def test_a_hold_belongs_to_the_name_and_outlives_the_token(path):
    asked = pb.HoldRequest(
        check=pb.RateLimitRequest(identifier="u", identifier_type="user", endpoint="/orders")
    )
    rule = {"endpoint": "/orders", "identifier_type": "user", "limit": 9, "window_seconds": 3600}
    request = pb.CreateRateLimitRequest(rate_limit=pb.RateLimit(**rule, algorithm="token_bucket"))
    async with (
        node_with(path, entry("shop", "check"), entry("other", "check"), entry("ops")) as node,
        grpc.aio.insecure_channel(node.grpc_address) as channel,
    ):
        holds = stubs.RateLimiterHoldsStub(channel)
        config = stubs.RateLimiterConfigStub(channel)
        await config.CreateRateLimit(request, metadata=bearer("ops"))
        hold = (await holds.Hold(asked, metadata=bearer("shop"))).hold
        settle = pb.SettleRequest(hold=hold, actual=1)
        for name in ("other", "ops"):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await holds.Settle(settle, metadata=bearer(name))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await changed(node, path, entry("shop", "check", token=token_of("rotated")))
        assert (await holds.Settle(settle, metadata=bearer("rotated"))).known


async def test_tokens_and_their_digests_are_never_shown(path, caplog):
    caplog.set_level(logging.DEBUG)
    names = ("alice", "bob", "stranger")
    async with (
        node_with(path, entry("alice"), entry("bob", "read")) as node,
        PageVisitor(node.http_address) as visitor,
    ):
        texts = []
        for name in names:
            texts += [(await visitor.log_in(token_of(name))).text]
            texts += [(await visitor.get(page)).text for page in ("/", "/rules", "/audit")]
            headers = dict(bearer(name))
            async with httpx.AsyncClient(base_url=f"http://{node.http_address}") as http:
                url = "/ratelimiter.v1.RateLimiterConfig/CreateRateLimit"
                texts += [(await http.post(url, json={}, headers=headers)).text]
                texts += [(await http.get("/metrics")).text]
        texts += map(str, visitor.cookies.values())
        stand_ins = [token.stand_in for token in node._tokens.tokens._by_name.values()]
        await changed(node, path, entry("alice") | {"sha256": token_of("alice")})
    shown = caplog.text + "".join(texts)
    assert "TOKENS_FILE" in shown
    for secret in [*map(token_of, names), *map(digest_of, map(token_of, names)), *stand_ins]:
        assert secret not in shown
