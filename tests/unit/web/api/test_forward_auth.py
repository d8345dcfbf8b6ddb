import asyncio
import hashlib

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from ratelimitd.counters import CheckStats
from ratelimitd.errors import InvalidInputError
from ratelimitd.services.auth import Access, Credentials, Role
from ratelimitd.services.convert import check_of
from ratelimitd.services.errors import ErrorEdge
from ratelimitd.services.guesses import TokenGuesses
from ratelimitd.services.wire import parse_check
from ratelimitd.web.api.forward_auth import (
    AUTH_PATH,
    MAX_PATH_BYTES,
    ForwardAuth,
    PathTemplates,
    segments_of,
)
from ratelimitd_wire.ratelimit_headers import NEWEST_REVISION
from ratelimiter.v1 import ratelimiter_pb2 as pb

PROXY = "192.0.2.7"
CLIENT = "198.51.100.9"
TEMPLATES = (
    "GET /api/orders/{id}",
    "/api/orders/{id}",
    "shop.example/search",
    "/files/{path...}",
    "/",
)


class Node:
    """Forward auth with a handler that records its requests."""

    def __init__(self, **options):
        self.stats = CheckStats()
        self.edge = ErrorEdge(self.stats)
        self.asked = []
        self.answer = pb.RateLimitResponse(allowed=True)
        self.late = False
        chosen = {
            "identifiers": {"x-api-key": "api_key", "x-forwarded-for": "ip"},
            "endpoints": TEMPLATES,
            "trusted_proxies": (PROXY,),
            "ignored": self.stats.ignored_forwarding,
        }
        self.app = ForwardAuth(
            self.handle,
            **{**chosen, **options},
            admit=lambda _call: None,
            translate=self.edge.translate,
            now_s=lambda: 1_000.0,
            revision=NEWEST_REVISION,
        )

    def handle(self, data, call):
        self.asked.append(pb.RateLimitRequest.FromString(data))
        answer = self.answer.SerializeToString()
        return self.answer_later(answer) if self.late else answer

    @staticmethod
    async def answer_later(answer):
        await asyncio.sleep(0)
        return answer

    async def ask(self, headers=(), *, query="", method="GET", peer=PROXY):
        transport = httpx.ASGITransport(app=self.app, client=(peer, 50_000))
        async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
            url = AUTH_PATH + (f"?{query}" if query else "")
            return await client.request(method, url, headers=headers)

    async def pass_on(self, uri="/", *, query="", **headers):
        """Send a request as a proxy does."""
        forwarded = {"X-Forwarded-For": CLIENT, "X-Forwarded-Uri": uri}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.ask({**forwarded, **named}, query=query)

    @property
    def identities(self):
        [asked] = self.asked
        pairs = [(one.identifier_type, one.identifier) for one in (asked, *asked.also)]
        return dict(pairs)


@pytest.fixture
def node():
    return Node()


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "OPTIONS", "PURGE"])
async def test_allowed_request_is_answered_200_with_the_limit(node, method):
    node.answer = pb.RateLimitResponse(
        allowed=True, rule_id="r", limit=10, remaining_tokens=9, window_seconds=60, reset_time=1_060
    )
    answer = await node.ask({"X-Forwarded-Uri": "/"}, method=method)
    assert answer.status_code == 200
    assert answer.content == b""
    assert answer.headers["ratelimit"] == '"r";r=9;t=60'
    assert answer.headers["ratelimit-policy"] == '"r";q=10;w=60'
    assert answer.headers["cache-control"] == "no-store"


async def test_denied_request_is_answered_429_with_retry_after(node):
    node.answer = pb.RateLimitResponse(
        rule_id="r", limit=10, window_seconds=60, reset_time=1_060, retry_after_seconds=5
    )
    answer = await node.pass_on()
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "5")
    assert answer.headers["ratelimit"] == '"r";r=0;t=5'
    assert answer.text == "Too many requests. Try again in 5 s.\n"


async def test_denied_request_is_answered_403_on_request(node):
    node.answer = pb.RateLimitResponse()
    answer = await node.pass_on(query="deny=403")
    assert (answer.status_code, answer.text) == (403, "Too many requests.\n")
    assert (await node.pass_on(query="deny=429")).status_code == 429


async def test_check_that_waits_for_the_shared_state_is_answered(node):
    node.late = True
    assert (await node.pass_on()).status_code == 200


async def test_proxy_parameters_set_cost_and_endpoint(node):
    assert (await node.pass_on("/any", query="endpoint=%2Fa%20b&cost=3")).status_code == 200
    [asked] = node.asked
    assert (asked.endpoint, asked.tokens_requested) == ("/a b", 3)


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("deny=200", "deny"),
        ("deny=", "deny"),
        ("cost=0", "cost"),
        ("cost=-1", "cost"),
        ("cost=2147483648", "cost"),
        ("cost=99999999999", "cost"),
        ("cost=²", "cost"),
        ("endpoint=", "endpoint"),
        ("cost=1&cost=2", "query"),
        ("colour=red", "query"),
        ("page", "query"),
        ("endpoint=" + "x" * 2_048, "query"),
    ],
)
async def test_invalid_parameter_is_refused_by_name(node, query, field):
    answer = await node.pass_on(query=query)
    assert answer.status_code == 400
    assert answer.json()["message"].startswith(f"{field}: ")
    assert "red" not in answer.text
    assert not node.asked


@pytest.mark.parametrize("fragment", ["", "#part"])
@pytest.mark.parametrize(
    "query",
    [
        "endpoint=/cheap",
        "deny=403&endpoint=/cheap",
        "endpoint=/cheap&cost=1",
        "cost=1&endpoint=/cheap&deny=403",
    ],
)
async def test_forwarded_client_query_is_refused(node, query, fragment):
    answer = await node.pass_on(f"/orders?endpoint=/cheap{fragment}", query=query)
    assert answer.status_code == (403 if "deny" in query else 400)
    assert "passes on the client's query" in answer.text
    assert not node.asked
    assert (await node.pass_on("/orders?page=2", query="endpoint=/x")).status_code == 200


@pytest.mark.parametrize(
    ("uri", "method", "host", "endpoint"),
    [
        ("/api/orders/5?x=1", "GET", "", "GET /api/orders/{id}"),
        ("/api/orders/5#x", "HEAD", "", "GET /api/orders/{id}"),
        ("/api/orders/5", "POST", "", "/api/orders/{id}"),
        ("/api/orders/5/", "POST", "", "/api/orders/{id}"),
        ("/api/orders", "POST", "", "unmatched"),
        ("/api/orders/5/lines", "POST", "", "unmatched"),
        ("/search", "GET", "Shop.Example:8443", "shop.example/search"),
        ("/search", "GET", "shop.example.", "shop.example/search"),
        ("/search", "GET", "other.example", "unmatched"),
        ("/files", "GET", "", "/files/{path...}"),
        ("/files/a/b", "GET", "", "/files/{path...}"),
        ("/", "GET", "", "/"),
        ("/other", "GET", "", "unmatched"),
    ],
)
async def test_endpoint_is_the_first_matching_template(  # noqa: PLR0917 -- the parameters of a row
    node, uri, method, host, endpoint
):
    more = {"X_Forwarded_Host": host} if host else {}
    await node.pass_on(uri, X_Forwarded_Method=method, **more)
    assert [one.endpoint for one in node.asked] == [endpoint]


async def test_method_and_host_default_to_those_of_the_proxys_request(node):
    uri = {"X-Forwarded-Uri": "/search"}
    await node.ask({**uri, "Host": "shop.example"})
    await node.ask({"X-Forwarded-Uri": "/api/orders/5"}, method="DELETE")
    await node.ask()
    found = [one.endpoint for one in node.asked]
    assert found == ["shop.example/search", "/api/orders/{id}", "unmatched"]


def test_every_path_is_unmatched_without_templates():
    assert PathTemplates(()).endpoint_of("GET", "", [b"x"]) == "unmatched"


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("/", ""),
        ("//a///b/", "a/b"),
        ("/a/./b/.", "a/b"),
        ("/a/../b", "b"),
        ("/a/b/..", "a"),
        ("/a/...", "a/..."),
        ("/%61%2Fb", "a/b"),
        ("/x/%2e%2E/b", "b"),
        ("/x%2f..%2Fb", "b"),
        ("/%252F", "%2F"),
        ("/a%3Fb%23c", "a?b#c"),
        ("/a+b", "a+b"),
        ("/%FF\xe9", "\xff\xe9"),
        ("/" + "a" * (MAX_PATH_BYTES - 1), "a" * (MAX_PATH_BYTES - 1)),
        ("/a?" + "x" * 60_000, "a"),
    ],
)
def test_path_is_normalised_once(uri, path):
    assert b"/".join(segments_of(uri)) == path.encode("latin-1")


@pytest.mark.parametrize(
    ("uri", "text"),
    [
        ("", "begin with /"),
        ("*", "begin with /"),
        ("http://shop.example/", "begin with /"),
        ("/..", "above the root"),
        ("/a/%2e%2e/..", "above the root"),
        ("/a%00b", "zero byte"),
        ("/%", "hexadecimal"),
        ("/%4", "hexadecimal"),
        ("/%zz", "hexadecimal"),
        ("/%+1", "hexadecimal"),
        ("/" + "a" * MAX_PATH_BYTES, "at most 8192 bytes"),
        ("/" + "a" * 65_536, "at most 8192 bytes"),
    ],
)
async def test_invalid_path_is_refused_without_an_error_of_the_node(node, uri, text):
    with pytest.raises(InvalidInputError, match=text):
        segments_of(uri)
    for query, status in (("", 400), ("deny=403", 403)):
        answer = await node.pass_on(uri, query=query)
        assert answer.status_code == status
        assert answer.json()["message"].startswith("X-Forwarded-Uri: must ")
    assert not node.asked


@pytest.mark.parametrize("name", ["X-Forwarded-Uri", "X-Forwarded-Method", "X-Forwarded-Host"])
async def test_repeated_forwarding_header_is_refused(node, name):
    given = [("X-Forwarded-Uri", "/")] * (name != "X-Forwarded-Uri")
    answer = await node.ask([*given, (name, "/a"), (name, "/b")])
    assert answer.status_code == 400
    assert answer.json()["message"] == f"{name}: must be sent once"


async def test_every_present_identity_is_sent(node):
    await node.pass_on(X_Api_Key="k")
    assert node.identities == {"api_key": "k", "ip": CLIENT}


async def test_client_address_is_the_default_identity():
    node = Node(identifiers={"x-api-key": "api_key"})
    await node.pass_on(X_Api_Key="")
    assert node.identities == {"ip": CLIENT}


async def test_address_counts_beside_an_identity_only_where_configured():
    node = Node(identifiers={"x-user": "user", "x-login": "user", "x-tenant": "tenant"})
    await node.pass_on(X_Login="second", X_User="first", X_Tenant="t")
    assert node.identities == {"user": "first", "tenant": "t"}


@pytest.mark.parametrize("second", ["b", "a", ""])
async def test_repeated_identifier_is_refused(node, second):
    """The application uses one of them, and the limit must not use the other."""
    forwarded = [("X-Forwarded-For", CLIENT), ("X-Forwarded-Uri", "/")]
    answer = await node.ask([*forwarded, ("X-Api-Key", "a"), ("X-Api-Key", second)])
    assert (answer.status_code, answer.json()["message"]) == (400, "x-api-key: must be sent once")
    assert not node.asked


async def test_value_that_resembles_a_digest_is_hashed(node):
    text = f"sha256:{'0a' * 32}"
    await node.ask([("X-Forwarded-For", CLIENT), ("X-Api-Key", text)])
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert node.identities["api_key"] == f"sha256:{digest}"


@pytest.mark.parametrize("raw", [b"k" * 257, b"\xff"])
async def test_value_that_no_check_can_carry_is_hashed(node, raw):
    await node.ask([(b"X-Forwarded-For", CLIENT.encode()), (b"X-Api-Key", raw)])
    assert node.identities["api_key"] == f"sha256:{hashlib.sha256(raw).hexdigest()}"


async def test_value_may_be_any_text(node):
    await node.ask([(b"X-Api-Key", "schlüssel".encode())])
    assert node.identities["api_key"] == "schlüssel"


@pytest.mark.parametrize(
    ("value", "address"), [("2001:db8::5", "2001:db8::"), ("nobody", CLIENT), ("", CLIENT)]
)
async def test_other_header_may_hold_the_address(value, address):
    node = Node(identifiers={"x-real-ip": "ip"})
    await node.pass_on(X_Real_IP=value)
    assert node.identities == {"ip": address}


async def test_forged_entries_of_a_client_do_not_count(node):
    await node.pass_on(X_Forwarded_For=f"203.0.113.66, {CLIENT}, {PROXY}")
    assert node.identities == {"ip": CLIENT}


async def test_peer_that_has_left_is_no_trusted_proxy_and_is_refused():
    node = Node(trusted_proxies=("unix",))
    answer = await node.ask({"X-Forwarded-For": CLIENT, "X-Forwarded-Uri": "/"}, peer="")
    assert answer.status_code == 400
    assert answer.json()["message"] == "X-Forwarded-For: must name the address of the client"
    assert not node.asked


async def test_forwarding_headers_of_untrusted_peers_are_ignored_counted_and_logged_once(caplog):
    node = Node(identifiers={"x-real-ip": "ip", "x-forwarded-for": "ip"})
    for name in ("X-Forwarded-For", "X-Forwarded-Uri", "X-Forwarded-Method", "X-Forwarded-Host"):
        headers = {name: "/api/orders/5", "X-Real-IP": CLIENT}
        assert (await node.ask(headers, peer="203.0.113.1")).status_code == 200
    await node.ask(peer="203.0.113.1")
    assert node.stats.forwarding_ignored_total == 4
    assert {(one.identifier, one.endpoint) for one in node.asked} == {("203.0.113.1", "unmatched")}
    [line] = [one.getMessage() for one in caplog.records]
    assert "TRUSTED_PROXIES" in line
    assert "203.0.113.1" not in line


async def test_cross_site_request_of_a_browser_spends_nothing(node):
    for peer in (PROXY, "127.0.0.1"):
        answer = await node.ask({"Sec-Fetch-Site": "cross-site"}, peer=peer)
        assert answer.status_code == 403
    assert not node.asked
    # For forwarded requests, the proxy decides.
    assert (await node.pass_on(Sec_Fetch_Site="cross-site")).status_code == 200


async def test_caller_without_the_role_is_refused_and_logged(node, caplog):
    access = Access(Credentials(check_token="c" * 16), TokenGuesses(node.stats, lambda: 0))
    node.app._admit = access.requirement(Role.CHECK)
    sent = {"Authorization": "Bearer wrong-secret", "X_Api_Key": "key-secret"}
    assert (await node.pass_on(**sent)).status_code == 401
    assert not node.asked
    [line] = [one.getMessage() for one in caplog.records]
    assert "Authorization" in line
    assert "CHECK_TOKEN" in line
    for secret in ("secret", CLIENT, PROXY):
        assert secret not in line


async def test_defect_is_reported_in_the_log_only(node, caplog):
    node.answer = None
    answer = await node.pass_on(X_Api_Key="secret")
    assert (answer.status_code, answer.json()["message"]) == (500, "unexpected error")
    assert "secret" not in caplog.text


_ANY_TEXT = st.text(st.characters(max_codepoint=255), max_size=20)
_ANY_URI = st.lists(st.sampled_from([*"/.%?#a0*{}", "%2f", "%00", "\xff"]) | _ANY_TEXT).map("".join)


@given(
    uri=_ANY_URI | _ANY_URI.map("/".__add__),
    method=_ANY_TEXT,
    host=_ANY_TEXT,
    key=_ANY_TEXT,
    hops=_ANY_TEXT,
    query=st.sampled_from(["", "deny=403"]),
)
async def test_no_client_input_is_an_error_of_the_node(*, uri, method, host, key, hops, query):
    node = Node()
    values = {"uri": uri, "method": method, "host": host, "for": hops}
    headers = [(f"x-forwarded-{name}".encode(), value) for name, value in values.items()]
    headers.append((b"x-api-key", key))
    scope = {
        "type": "http", "method": "GET", "path": AUTH_PATH, "query_string": query.encode(),
        "headers": [(name, value.encode("latin-1")) for name, value in headers],
        "client": (PROXY, 1),
    }  # fmt: skip
    answer = await node.app.answer(Request(scope))
    assert answer.status_code in {200, 403 if query else 400}
    assert node.stats.unexpected_total == 0
    for asked in node.asked:
        check = check_of(parse_check(asked.SerializeToString()))
        assert check.endpoint in {*TEMPLATES, "unmatched"}


async def test_disconnected_client_is_not_answered(node):
    async def never(_answer):
        await asyncio.Event().wait()

    async def receive():
        return {"type": "http.disconnect"}

    sent = []

    async def send(message):
        sent.append(message)

    node.late, node.answer_later = True, never
    scope = {
        "type": "http", "method": "GET", "path": AUTH_PATH, "query_string": b"", "headers": [],
        "client": (PROXY, 1),
    }  # fmt: skip
    await asyncio.wait_for(node.app(scope, receive, send), 10)
    assert sent[0]["status"] == 499
