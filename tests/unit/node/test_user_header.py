"""A whole node behind a proxy that names users: which users, from which addresses, for which requests."""

import grpc.aio
import httpx
import pytest

from ratelimitd.node.serving import TRANSPORTS
from ratelimitd.testing import ManualClock
from ratelimiter.v1 import ratelimiter_pb2 as pb
from ratelimiter.v1 import ratelimiter_pb2_grpc as stubs
from tests.named_tokens import entry, token_of, write
from tests.page_visitor import PageVisitor, text_of, token_in
from tests.unit.node.test_named_tokens import RULE
from tests.unit.node.test_named_tokens import node_with as node_with_tokens

HEADER = "X-Forwarded-Email"


def user(name, role="admin", **fields):
    return {"name": name, "role": role, **fields}


ANN, VIEWER = user("ann@example.com"), user("viewer", "read")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tokens.json"


def node_with(path, *entries, proxies="127.0.0.1", **settings):
    settings |= {"user_header": HEADER, "trusted_proxies": proxies}
    return node_with_tokens(path, *entries, **settings)


def visitor_at(node, *names):
    """Return a visitor whose requests have these names in the header, one line each."""
    return PageVisitor(node.http_address, headers=[(HEADER, name) for name in names])


async def test_the_audit_trail_has_the_user_named_by_the_proxy(path):
    async with node_with(path, ANN, VIEWER) as node, visitor_at(node, ANN["name"]) as visitor:
        assert (await visitor.post("/rules/new", RULE)).status_code == 303
        trail = await visitor.get("/audit")
        assert ANN["name"] in text_of(trail)
        assert "Log out" not in trail.text, "the proxy would log in again"
        assert "set-cookie" not in trail.headers


async def test_a_reader_changes_nothing_and_sees_no_names(path):
    async with node_with(path, VIEWER) as node, visitor_at(node, "viewer") as visitor:
        for page in ("/", "/rules", "/plans", "/try", "/audit"):
            assert (await visitor.get(page)).status_code == 200
        assert (await visitor.post("/rules/new", RULE)).status_code == 403
        assert (await visitor.get("/?names=shown")).status_code == 403


@pytest.mark.parametrize(
    "names",
    [["nobody"], ["ci"], ["the-admin-token"], ["Ann@example.com"], ["ann@example.com "],
     ["ann@example.com,viewer"], ["viewer", "ann@example.com"], ["ann@example.com", "ann@example.com"],
     ["x" * 5_000], ["", "ann@example.com"], ["expired"]],
)  # fmt: skip
async def test_an_unknown_name_has_no_role(path, names):
    expired = user("expired", expires="2020-01-01")
    async with node_with(path, ANN, VIEWER, entry("ci"), expired) as node:
        names = [name.replace(" ", "\xa0") for name in names]
        async with visitor_at(node, *[name.encode("latin-1") for name in names]) as visitor:
            answer = await visitor.get("/rules")
        assert answer.status_code == 403
        assert "no role" in text_of(answer)
        assert node.stats.refused_by_web["unknown_user"] == 1


async def test_a_token_does_not_help_a_user_without_a_role(path):
    async with node_with(path, entry("alice")) as node, visitor_at(node, "nobody") as visitor:
        await visitor.log_in(token_of("alice"))
        assert (await visitor.get("/rules")).status_code == 403


async def test_the_header_takes_precedence_over_a_session(path):
    async with node_with(path, VIEWER, entry("alice")) as node:
        async with PageVisitor(node.http_address) as alice:
            await alice.log_in(token_of("alice"))
            cookies = alice.cookies
        async with visitor_at(node, "viewer") as visitor:
            visitor.cookies.update(cookies)
            assert (await visitor.post("/rules/new", RULE)).status_code == 403


@pytest.mark.parametrize("names", [[], [""]])
async def test_without_a_name_users_log_in_as_usual(path, names):
    async with node_with(path, entry("alice")) as node, visitor_at(node, *names) as visitor:
        assert (await visitor.get("/rules")).status_code == 303
        await visitor.log_in(token_of("alice"))
        assert (await visitor.get("/rules")).status_code == 200
        assert node.stats.refused_by_web["user_header"] == 0


@pytest.mark.parametrize("proxies", ["192.0.2.1", "unix", "10.0.0.0/8,unix"])
async def test_the_header_from_untrusted_addresses_is_ignored_and_counted(path, proxies):
    async with node_with(path, ANN, proxies=proxies) as node:
        async with visitor_at(node, ANN["name"]) as visitor:
            answer = await visitor.get("/rules")
            assert (answer.status_code, answer.headers["location"]) == (303, "/login?next=/rules")
            forwarded = {"X-Forwarded-For": "192.0.2.1", "Forwarded": "for=192.0.2.1"}
            assert (await visitor.get("/rules", **forwarded)).status_code == 303
        assert node.stats.refused_by_web["user_header"] == 2


@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
async def test_the_header_counts_on_pages_only(path, transport):
    async with node_with(path, ANN, transport=transport) as node:
        async with grpc.aio.insecure_channel(node.grpc_address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stubs.RateLimiterConfigStub(channel).ListRateLimits(
                    pb.ListRateLimitsRequest(), metadata=[(HEADER.lower(), ANN["name"])]
                )
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        async with httpx.AsyncClient(base_url=f"http://{node.http_address}") as http:
            for prefix in ("", "ratelimiter.v1."):
                url = f"/{prefix}RateLimiterConfig/ListRateLimits"
                answer = await http.post(url, json={}, headers={HEADER: ANN["name"]})
                assert answer.status_code == 401


async def test_forms_of_other_sites_and_other_users_change_nothing(path):
    bob = user("bob")
    async with (
        node_with(path, ANN, bob) as node,
        visitor_at(node, ANN["name"]) as visitor,
        visitor_at(node, "bob") as other,
        PageVisitor(node.http_address) as nobody,
    ):
        others = [await other.get("/try"), await nobody.get("/login")]
        for token in ("", *(token_in(page.text) for page in others)):
            answer = await visitor.post("/rules/new", RULE, token=token)
            assert (answer.status_code, "not valid any more" in answer.text) == (403, True)
        own = token_in((await visitor.get("/try")).text)
        for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Origin": "http://evil.example"}):
            answer = await visitor.post("/rules/new", RULE, token=own, **headers)
            assert (answer.status_code, "another site" in answer.text) == (403, True)
        assert (await visitor.get("/rules", Host="evil.example")).status_code == 421
        assert "/orders" not in (await visitor.get("/rules")).text
        assert (await visitor.post("/rules/new", RULE, token=own)).status_code == 303


async def test_forms_are_valid_on_each_node_with_the_same_admin_token(path, tmp_path):
    async with (
        node_with(path, ANN) as node,
        node_with(path, ANN) as other,
        visitor_at(node, ANN["name"]) as visitor,
        visitor_at(other, ANN["name"]) as elsewhere,
    ):
        token = token_in((await visitor.get("/try")).text)
        assert (await elsewhere.post("/rules/new", RULE, token=token)).status_code == 303


async def test_a_user_whose_entry_is_removed_loses_access_at_once(path):
    async with node_with(path, ANN) as node, visitor_at(node, ANN["name"]) as visitor:
        async with visitor.streaming("/events") as events:
            assert await anext(events) == "retry: 2000"
            write(path, VIEWER)
            await node._tokens.reload()
            assert [event async for event in events if event.startswith("event: now")] == []
        assert (await visitor.get("/rules")).status_code == 403


async def test_no_name_is_in_the_log_or_the_metrics(path, caplog):
    clock = ManualClock()
    async with node_with(path, ANN, clock=clock) as node:
        for name in (ANN["name"], "stranger@example.com"):
            async with visitor_at(node, name) as visitor:
                await visitor.get("/rules")
                shown = (await visitor.get("/metrics")).text
            assert name not in shown + caplog.text
