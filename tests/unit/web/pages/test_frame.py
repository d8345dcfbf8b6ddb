"""Shared page plumbing: identity of the visitor, forms, cookies, refusals."""

from functools import partial

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from ratelimitd.services.auth import Credentials, Role
from ratelimitd.web.pages.errors import ANSWERS, Cause, Refused, plain
from ratelimitd.web.pages.page_base import (
    FORM_COOKIE,
    MAX_FORM_BYTES,
    SESSION_COOKIE,
    local_path,
)
from ratelimitd.web.pages.sessions import SESSION_S, Sessions
from tests.access import access_of
from tests.page_visitor import PageVisitor, frame_of, token_in

TOKEN = "a token for the tests"
FORM = "application/x-www-form-urlencoded"


class Node:
    """An application with two pages: one shows a form, the other the fields sent."""

    def __init__(self, **credentials):
        self.refused = []
        self.now_s = 1_700_006_400.0
        self.sessions = Sessions(credentials.get("admin_token", ""), lambda: self.now_s)
        may_read = partial(access_of(Credentials(**credentials)).demand, Role.READ)
        self.frame = frame_of(self.sessions, may_read=may_read, refused=self.refused.append)
        self.app = Starlette(
            routes=[
                Route("/try", self.frame.reading(self.show)),
                Route("/sent", self.frame.posting(self.sent), methods=["POST"]),
            ],
            exception_handlers={Refused: self.frame.refuse},
        )

    async def show(self, request):
        return self.frame.page(request, "login.html", next="/", possible=True, error="")

    async def sent(self, request, fields):
        call = self.frame.call(request, "/s/m")
        who = (request.state.visitor.logged_in, call.metadata("authorization"))
        return PlainTextResponse(f"{dict(fields)} {who}")

    def visitor(self, **options):
        return PageVisitor(app=self.app, **options)

    def logged_in(self):
        visitor = self.visitor()
        visitor.cookies.set(SESSION_COOKIE, self.sessions.open())
        return visitor


@pytest.fixture
def local():
    return Node(loopback_admin=True)


@pytest.fixture
def guarded():
    return Node(admin_token=TOKEN)


async def test_loopback_visitor_reads_and_sends_forms_without_a_login(local):
    async with local.visitor() as visitor:
        page = await visitor.get("/try")
        assert page.status_code == 200
        assert "Node <b>n1</b>" in page.text
        assert "Log out" not in page.text
        answer = await visitor.post("/sent", {"a": "1", "b": ""})
        assert answer.text == "{'a': '1', 'b': ''} (False, None)"
    assert local.refused == []


async def test_form_cookie_is_set_once_and_hidden_from_scripts(local):
    async with local.visitor() as visitor:
        page = await visitor.get("/try")
        cookie = page.headers["set-cookie"]
        assert cookie.startswith(f"{FORM_COOKIE}=")
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert "Secure" not in cookie
        assert "set-cookie" not in (await visitor.get("/try")).headers
        visitor.cookies.clear()
        visitor.cookies.set(FORM_COOKIE, "chosen by somebody")
        assert "set-cookie" in (await visitor.get("/try")).headers


@pytest.mark.parametrize(("scheme", "secure"), [("https", True), ("http", False)])
def test_cookie_is_secure_behind_tls(local, scheme, secure):
    headers = [(b"host", b"node"), (b"x-forwarded-proto", scheme.encode())]
    request = Request({"type": "http", "scheme": "http", "path": "/", "headers": headers})
    answer = PlainTextResponse("")
    local.frame.set_cookie(request, answer, SESSION_COOKIE, "x")
    assert ("Secure" in answer.headers["set-cookie"]) is secure


@pytest.mark.parametrize("client", [("192.0.2.1", 1), ("2001:db8::1", 1)])
async def test_remote_visitor_is_refused_without_a_token_set(local, client):
    async with local.visitor(client=client) as visitor:
        answer = await visitor.get("/try")
    assert answer.status_code == 403
    assert "loopback only" in answer.text
    assert "n1" not in answer.text
    assert local.refused == [Cause.NOT_ALLOWED]


async def test_forwarded_request_is_not_local(local):
    async with local.visitor() as visitor:
        answer = await visitor.get("/try", **{"X-Forwarded-For": "127.0.0.1"})
    assert answer.status_code == 403


async def test_node_with_certificates_only_refuses_with_an_explanation():
    node = Node(admin_sans=frozenset({"ops"}))
    async with node.visitor() as visitor:
        answer = await visitor.get("/try")
    assert answer.status_code == 403
    assert "ADMIN_SANS" in answer.text


async def test_visitor_is_redirected_to_the_login_and_back(guarded):
    async with guarded.visitor() as visitor:
        answer = await visitor.get("/try?a=1&b=%2F")
        assert (answer.status_code, answer.headers["location"]) == (
            303,
            "/login?next=/try%3Fa%3D1%26b%3D%252F",
        )
        far = await visitor.get("/try?a=" + "%C3%84" * 300)
        assert far.headers["location"] == "/login"
        program = await visitor.get("/try", accept="application/json")
        assert program.status_code == 401
    assert guarded.refused == [Cause.LOGIN_REQUIRED]


async def test_session_or_header_authorizes_a_visitor(guarded):
    async with guarded.logged_in() as visitor:
        page = await visitor.get("/try")
        assert "Log out" in page.text
        answer = await visitor.post("/sent", {})
        assert answer.text == f"{{}} (True, 'Bearer {TOKEN}')"
    async with guarded.visitor() as visitor:
        header = {"Authorization": f"Bearer {TOKEN}"}
        assert (await visitor.get("/try", **header)).status_code == 200
        assert (await visitor.get("/try", Authorization="Bearer no")).status_code == 303


async def test_expired_session_is_refused_and_counted(guarded):
    async with guarded.logged_in() as visitor:
        token = token_in((await visitor.get("/try")).text)
        guarded.now_s += SESSION_S
        assert (await visitor.get("/try")).headers["location"] == "/login?next=/try"
        answer = await visitor.post("/sent", {}, token=token)
        assert answer.status_code == 401
        assert "Your session has ended" in answer.text
        assert ANSWERS[Cause.SESSION_EXPIRED].text in answer.text
        assert 'href="/login"' in answer.text
    assert guarded.refused == [Cause.SESSION_EXPIRED] * 2


async def test_form_without_its_token_is_refused_and_counted(local, guarded):
    for node, visiting in ((local, local.visitor()), (guarded, guarded.logged_in())):
        async with visiting as visitor:
            for token in ("", "0" * 64, "ü"):
                answer = await visitor.post("/sent", {}, token=token)
                assert answer.status_code == 403
                assert "not valid any more" in answer.text
        assert node.refused == [Cause.FORM_TOKEN] * 3


async def test_form_token_of_another_visitor_is_refused(local):
    async with local.visitor() as theirs, local.visitor() as mine:
        token = token_in((await theirs.get("/try")).text)
        await mine.get("/try")
        assert (await mine.post("/sent", {}, token=token)).status_code == 403


@pytest.mark.parametrize(
    ("content", "content_type", "cause"),
    [
        (b"a=1", "application/json", Cause.BAD_FORM),
        (b"a=1", "multipart/form-data; boundary=x", Cause.BAD_FORM),
        (b"a=1", "", Cause.BAD_FORM),
        (b"a=%ff", FORM, Cause.BAD_FORM),
        (b"a=\xff", FORM, Cause.BAD_FORM),
        (b"&".join(b"a=1" for _ in range(51)), FORM, Cause.BAD_FORM),
        (b"a=" + b"x" * MAX_FORM_BYTES, FORM, Cause.TOO_LARGE),
    ],
    ids=["json", "multipart", "no_type", "no_utf8_escaped", "no_utf8", "many_fields", "large"],
)
async def test_body_that_is_not_a_form_is_refused_and_counted(local, content, content_type, cause):
    async with local.visitor() as visitor:
        answer = await visitor.send("/sent", content, content_type)
    assert 400 <= answer.status_code < 500
    assert local.refused == [cause]


@pytest.mark.parametrize("path", ["/", "/rules?q=%2Fa&x=1", "/rules/0-1", "/a/b", "/?x=1"])
def test_login_may_redirect_to_a_path_of_this_node(path):
    assert local_path(path) == path


@pytest.mark.parametrize(
    "path",
    ["", "//evil.example", "/\\evil", "https://evil", "/\t/evil", "rules", "/a\nb", "/@evil:"],
)
def test_login_redirects_nowhere_else(path):
    assert local_path(path) == "/"


def test_each_cause_has_an_answer_with_an_action():
    assert set(ANSWERS) == set(Cause)
    for cause, answer in ANSWERS.items():
        assert 400 <= answer.status < 500
        assert answer.title
        assert answer.text or cause is Cause.NOT_ALLOWED


def test_plain_answer_has_title_and_text_and_is_not_cached():
    answer = plain(ANSWERS[Cause.UNKNOWN_HOST])
    assert answer.status_code == 421
    assert b"unknown Host\nHTTP_HOSTS" in answer.body
    assert answer.headers["cache-control"] == "no-store"
