"""The HTTP side of a node as a whole: behaviour common to all routes and callers."""

import asyncio

import httpx
import pytest_asyncio

from ratelimitd import __version__
from ratelimitd.testing import running_node
from ratelimitd.web.app import SECURITY_HEADERS
from tests.page_visitor import PageVisitor

TOKEN = "token-of-the-tests"

PAGES = ["/", "/rules", "/rules/new", "/rules/0/switch", "/try", "/audit", "/plans", "/backtest"]


@pytest_asyncio.fixture
async def node():
    async with running_node(admin_token=TOKEN) as found:
        yield found


@pytest_asyncio.fixture
async def stranger(node):
    async with PageVisitor(node.http_address) as found:
        yield found


@pytest_asyncio.fixture
async def operator(node):
    async with PageVisitor(node.http_address) as found:
        assert (await found.log_in(TOKEN)).status_code == 303
        yield found


async def test_every_page_requires_a_login(stranger):
    for path in PAGES:
        answer = await stranger.get(path)
        assert answer.status_code == 303, path
        assert answer.headers["location"].startswith("/login?next=")


async def test_every_page_has_the_content_security_policy(operator):
    for path in [*PAGES, "/login", "/nothing", "/static/page.css", "/static/none"]:
        headers = (await operator.get(path)).headers
        assert {name: headers.get(name) for name in SECURITY_HEADERS} == dict(SECURITY_HEADERS), (
            path
        )


async def test_post_without_a_session_changes_nothing_and_is_counted(stranger, node):
    answer = await stranger.post("/rules/new", {"step": "store"}, token="0" * 64)
    assert answer.status_code == 401
    answer = await stranger.post(
        "/rules/new", {}, token="0" * 64, **{"Sec-Fetch-Site": "cross-site"}
    )
    assert answer.status_code == 403
    answer = await stranger.get("/rules", Host="evil.example")
    assert answer.status_code == 421
    assert "ADMIN_TOKEN" not in answer.text
    page = (await stranger.get("/metrics")).text
    for cause in ("login_required", "cross_site", "unknown_host"):
        assert f'rate_limiter_web_refused_total{{cause="{cause}"}} 1.0' in page


async def test_page_is_closed_after_logout(operator):
    assert (await operator.get("/rules")).status_code == 200
    page = (await operator.get("/try")).text
    assert 'action="/logout"' in page
    assert (await operator.post("/logout", {})).headers["location"] == "/login"
    assert (await operator.get("/rules")).status_code == 303


async def test_not_found_is_answered_to_browsers_and_programs(operator):
    page = await operator.get("/nothing")
    assert (page.status_code, "<h1>There is no such page</h1>" in page.text) == (404, True)
    answer = await operator.get("/nothing", Accept="application/json")
    assert answer.text == "There is no such page\n"
    answer = await operator.post("/audit", {}, token="x")
    assert answer.status_code == 405
    assert "This page does not accept that method" in answer.text
    assert answer.headers["allow"] == "GET, HEAD"


async def test_refused_method_is_answered_with_those_of_all_routes_of_the_path(node):
    async with httpx.AsyncClient(base_url=f"http://{node.http_address}") as client:
        for accept in ("text/html", "*/*"):
            answer = await client.put("/login", headers={"Accept": accept})
            assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD, POST")


async def test_programs_get_a_description_without_a_login(stranger, node):
    answer = await stranger.get("/", Accept="*/*")
    assert answer.status_code == 200
    assert answer.text.startswith(f"ratelimitd {__version__}")
    assert node.grpc_address in answer.text
    assert answer.headers["cache-control"] == "no-store"


async def test_machine_endpoints_need_no_login(stranger):
    for path in ("/metrics", "/healthz", "/readyz"):
        answer = await stranger.get(path, Host="service.example", **{"X-Forwarded-For": "::1"})
        assert answer.status_code == 200
        assert "content-security-policy" not in answer.headers


async def test_proxy_may_forward_any_request_of_its_client():
    async with (
        running_node(trusted_proxies="127.0.0.1") as node,
        httpx.AsyncClient(base_url=f"http://{node.http_address}") as http,
    ):
        of_client = {"Host": "shop.example", "Origin": "null", "Sec-Fetch-Site": "cross-site"}
        for method in ("GET", "HEAD", "POST", "DELETE"):
            headers = {**of_client, "X-Forwarded-Uri": "/a?" + "x" * 50_000}
            answer = await http.request(method, "/v1/auth", headers=headers, content=b"body")
            assert answer.status_code == 200
            assert "content-security-policy" not in answer.headers
        headers = {**of_client, "X-Forwarded-Uri": "/" + "x" * 60_000}
        answer = await http.get("/v1/auth", headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid_argument")
        assert (await http.get("/v1/auth", headers=of_client)).status_code == 403


async def test_form_of_a_visitor_who_leaves_is_not_logged(caplog):
    async with running_node() as node:
        reader, writer = await asyncio.open_connection(*node.http_address.split(":"))
        writer.write(
            b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
            b"Content-Type: application/x-www-form-urlencoded\r\n\r\ntoken"
        )
        writer.write_eof()
        await reader.read()
        writer.close()
    assert not [one for one in caplog.records if one.levelname == "ERROR"]


async def test_connect_is_refused_and_the_connection_stays_usable():
    async with running_node(trusted_proxies="127.0.0.1") as node:
        for target in ("/v1/auth", "/metrics", "/rules", "localhost:80"):
            reader, writer = await asyncio.open_connection(*node.http_address.split(":"))
            writer.write(
                f"CONNECT {target} HTTP/1.1\r\nHost: localhost\r\nX-Forwarded-Uri: /a\r\n\r\n"
                "GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
            )
            answers = await reader.read()
            writer.close()
            assert answers.startswith(b"HTTP/1.1 405 "), target
            assert b"\r\n\r\nthis is not a proxy\nHTTP/1.1 200 OK\r\n" in answers, target


async def test_no_page_mentions_another_host(operator):
    for path in ("/rules", "/rules/new", "/try", "/audit", "/plans", "/login"):
        page = (await operator.get(path)).text
        assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in page
        assert "<style" not in page
        assert " style=" not in page
        assert "<script>" not in page
