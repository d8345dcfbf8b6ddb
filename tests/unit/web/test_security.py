import httpx
import pytest
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse

from ratelimitd.web.api.http_call import is_cross_site
from ratelimitd.web.app import SECURITY_HEADERS, with_security_headers
from ratelimitd.web.pages.errors import Cause

POLICY = SECURITY_HEADERS["Content-Security-Policy"]


@pytest.fixture
def refused():
    return []


@pytest.fixture
def ask(refused):
    async def app(scope, receive, send):
        headers = {"Cache-Control": "kept"} if scope["path"] == "/kept" else None
        await PlainTextResponse("hello", headers=headers)(scope, receive, send)

    async def ask(method, path="/", **headers):
        transport = httpx.ASGITransport(app=with_security_headers(app, refused.append))
        async with httpx.AsyncClient(transport=transport, base_url="http://node:8080") as client:
            return await client.request(method, path, headers=headers)

    return ask


async def test_every_answer_has_the_headers(ask):
    answer = await ask("GET")
    assert (
        SECURITY_HEADERS.items()
        <= {name.title(): text for name, text in answer.headers.items()}.items()
    )
    assert answer.headers["cache-control"] == "no-store"
    refusal = await ask("POST", **{"sec-fetch-site": "cross-site"})
    assert refusal.headers["content-security-policy"] == POLICY


async def test_own_cache_control_is_kept(ask):
    assert (await ask("GET", "/kept")).headers["cache-control"] == "kept"


def test_policy_allows_nothing_inline_or_external():
    assert "unsafe" not in POLICY
    assert "http" not in POLICY
    assert POLICY.startswith("default-src 'none'; ")


CROSS_SITE = [
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"origin": "https://evil.example"},
    {"origin": "http://node:9090"},
    {"origin": "null"},
    {"sec-fetch-site": "same-origin", "origin": "http://evil.example"},
]
OWN = [
    {},
    {"sec-fetch-site": "same-origin"},
    {"sec-fetch-site": "none"},
    {"origin": "http://node:8080"},
    {"origin": "https://NODE:8080", "sec-fetch-site": "same-origin"},
]


@pytest.mark.parametrize("headers", CROSS_SITE)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "NEW"])
async def test_cross_site_request_is_refused_and_counted(ask, refused, method, headers):
    answer = await ask(method, **headers)
    assert answer.status_code == 403
    assert "came from another site" in answer.text
    assert refused == [Cause.CROSS_SITE]


@pytest.mark.parametrize("headers", OWN)
async def test_own_pages_and_programs_pass(ask, refused, headers):
    assert (await ask("POST", **headers)).text == "hello"
    assert refused == []


async def test_link_on_another_site_may_lead_here(ask):
    assert (await ask("GET", **{"sec-fetch-site": "cross-site"})).status_code == 200


def test_null_origin_is_another_origin():
    assert is_cross_site(Headers({"origin": "http://[", "host": "node:8080"}))
