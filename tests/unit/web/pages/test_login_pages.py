from functools import partial

import pytest
from starlette.applications import Starlette

from ratelimitd.services.auth import Credentials, Role
from ratelimitd.services.guesses import LOGIN_COST, MAX_GUESSES, SPARE
from ratelimitd.web.pages.errors import Cause, Refused
from ratelimitd.web.pages.login import LoginPages
from ratelimitd.web.pages.page_base import SESSION_COOKIE
from ratelimitd.web.pages.sessions import LINK_S, Sessions
from tests.access import access_of
from tests.page_visitor import PageVisitor, errors_in, frame_of

TOKEN = "a token for the tests"
TRIES = (MAX_GUESSES - SPARE) // LOGIN_COST


class Node:
    def __init__(self, admin_token=TOKEN):
        self.refused = []
        self.now_s = 1_700_006_400.0
        sessions = Sessions(admin_token, lambda: self.now_s)
        access = access_of(Credentials(admin_token=admin_token, loopback_admin=True))
        may_read = partial(access.demand, Role.READ)
        frame = frame_of(
            sessions, may_read=may_read, refused=self.refused.append, login=access.login
        )
        routes = LoginPages(frame).routes()
        self.app = Starlette(routes=routes, exception_handlers={Refused: frame.refuse})

    def visitor(self, host="192.0.2.1"):
        return PageVisitor(app=self.app, client=(host, 1))


@pytest.fixture
def node():
    return Node()


async def test_token_opens_a_session_and_redirects_back(node):
    async with node.visitor() as visitor:
        page = await visitor.get("/login?next=/rules?q=a")
        assert '<input type="hidden" name="next" value="/rules?q=a">' in page.text
        assert "Log out" not in page.text
        answer = await visitor.log_in(f" {TOKEN} ")
        assert (answer.status_code, answer.headers["location"]) == (303, "/rules")
        cookie = answer.headers["set-cookie"]
        assert cookie.startswith(f"{SESSION_COOKIE}=")
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert TOKEN not in cookie
    assert node.refused == []


async def test_wrong_token_is_reported_at_the_field_and_counted(node):
    async with node.visitor() as visitor:
        answer = await visitor.log_in("guess")
    assert (answer.status_code, answer.headers.get("set-cookie")) == (401, None)
    assert errors_in(answer.text) == {"token": "This token may not log in on this node."}
    assert "guess" not in answer.text
    assert node.refused == [Cause.WRONG_TOKEN]


async def test_right_token_must_wait_after_too_many_wrong_ones(node):
    async with node.visitor() as visitor, node.visitor("192.0.2.2") as other:
        for _ in range(TRIES):
            await visitor.log_in("guess")
        answer = await visitor.log_in(TOKEN)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "5")
        assert "Wait a minute" in errors_in(answer.text)["token"]
        answer = await visitor.post("/logout", {}, token="", Authorization="Bearer guess")
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert (await other.log_in(TOKEN)).status_code == 303
    assert node.refused == [Cause.WRONG_TOKEN] * TRIES + [Cause.TOO_MANY_LOGINS] * 2


async def test_login_from_a_foreign_form_is_refused(node):
    async with node.visitor() as visitor:
        answer = await visitor.post("/login", {"token": TOKEN}, token="0" * 64)
    assert answer.status_code == 403
    assert node.refused == [Cause.FORM_TOKEN]


async def test_login_never_redirects_to_another_site(node):
    async with node.visitor() as visitor:
        answer = await visitor.post("/login", {"token": TOKEN, "next": "//evil.example"})
    assert answer.headers["location"] == "/"


def code_of(node, host="localhost", token=TOKEN):
    return Sessions(token, lambda: node.now_s).link_code(host)


async def test_login_link_opens_one_session(node):
    async with node.visitor() as visitor, node.visitor() as other:
        path = f"/login?code={code_of(node)}"
        looked = await visitor._http.head(path)
        # A HEAD request does not consume the link.
        assert SESSION_COOKIE not in looked.headers["set-cookie"]
        node.now_s += LINK_S - 1
        answer = await visitor.get(path)
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        assert answer.headers["set-cookie"].startswith(f"{SESSION_COOKIE}=")
        again = await other.get(path)
        assert again.status_code == 401
        assert "used before" in errors_in(again.text)["token"]
    assert node.refused == [Cause.LOGIN_LINK]


@pytest.mark.parametrize(
    ("made", "age_s", "host"),
    [
        ({}, LINK_S, "localhost"),
        ({}, 0, "127.0.0.1"),
        ({}, 0, "localhost:8080"),
        ({"token": "another token"}, 0, "localhost"),
        ({"host": "127.0.0.1"}, 0, "localhost"),
    ],
)
async def test_expired_or_foreign_link_shows_the_login(node, made, age_s, host):
    path = f"/login?code={code_of(node, **made)}"
    node.now_s += age_s
    async with node.visitor() as visitor:
        answer = await visitor.get(path, Host=host)
    assert answer.status_code == 401
    assert SESSION_COOKIE not in answer.headers.get("set-cookie", "")
    assert ">Token<" in answer.text
    assert node.refused == [Cause.LOGIN_LINK]


@pytest.mark.parametrize("code", ["", "x", "x.y", "a" * 10_000, "%00", "W10.x"])
async def test_invalid_code_shows_the_login(node, code):
    async with node.visitor() as visitor:
        answer = await visitor.get(f"/login?code={code}")
    assert answer.status_code == 401
    assert node.refused == [Cause.LOGIN_LINK]


async def test_session_cookie_is_not_a_login_link(node):
    async with node.visitor() as visitor:
        await visitor.log_in(TOKEN)
        answer = await visitor.get(f"/login?code={visitor.cookies[SESSION_COOKIE]}")
    assert answer.status_code == 401


async def test_no_link_opens_a_session_without_an_admin_token():
    node = Node(admin_token="")
    async with node.visitor("127.0.0.1") as visitor:
        answer = await visitor.get(f"/login?code={code_of(node, token='x')}")
    assert answer.status_code == 401


async def test_page_explains_that_login_needs_an_admin_token():
    node = Node(admin_token="")
    async with node.visitor("127.0.0.1") as visitor:
        page = await visitor.get("/login")
        assert "has no admin token" in page.text
