"""Somebody who looks at a node's pages without a script: follows links, fills in forms, keeps cookies."""

import html
import re
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx

from ratelimitd.errors import StoreUnavailableError
from ratelimitd.web.pages.page_base import FORM_TOKEN_FIELD, Frame
from ratelimitd.web.pages.sessions import ProxyUsers

_TOKEN = re.compile(rf'name="{FORM_TOKEN_FIELD}" value="([0-9a-f]+)"')
_HIDDEN = re.compile(r'<input type="hidden" name="([a-z_-]+)" value="([^"]*)">')
_ERROR = re.compile(r'<p class="error" id="([a-z_-]+)-error"[^>]*>([^<]+)</p>')

BROWSER = {"Accept": "text/html,*/*", "Sec-Fetch-Site": "same-origin"}


class PageVisitor:
    """At the address of an HTTP side, with ``verify`` over TLS, or in front of an ASGI application."""

    def __init__(
        self, address="", *, app=None, client=("127.0.0.1", 50_000), headers=(), **options
    ) -> None:
        transport = httpx.ASGITransport(app=app, client=client) if app else None
        self._http = httpx.AsyncClient(
            base_url=f"http{'s' if 'verify' in options else ''}://{address or 'localhost'}",
            headers=[*BROWSER.items(), *headers],
            timeout=60,
            **({"transport": transport} if transport else options),
        )
        self.cookies = self._http.cookies

    async def __aenter__(self):
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *error):
        await self._http.__aexit__(*error)

    async def get(self, path, **headers):
        return await self._http.get(path, headers=headers)

    @asynccontextmanager
    async def streaming(self, path):
        """The lines of an event stream, as they come."""
        async with self._http.stream("GET", path, timeout=None) as answer:
            assert answer.status_code == 200
            yield answer.aiter_lines()

    async def post(self, path, fields, *, token=None, **headers):
        """Send a form as a page of this node would; ``token`` replaces the one of the page."""
        if token is None:
            token = token_in((await self.get("/try" if path != "/login" else path)).text)
        return await self._http.post(
            path, data={FORM_TOKEN_FIELD: token, **fields}, headers=headers
        )

    async def send(self, path, content, content_type="application/x-www-form-urlencoded"):
        """Send what no form would."""
        return await self._http.post(path, content=content, headers={"Content-Type": content_type})

    async def log_in(self, token):
        return await self.post("/login", {"token": token, "next": "/rules"})


async def away(*_args):
    """Stand in for a method of a store whose database does not answer."""
    message = "the rule database is away"
    raise StoreUnavailableError(message)


def frame_of(sessions, **parts):
    """The frame of the pages of a node ``n1`` with these parts; everybody may read unless they say otherwise."""
    usual = {"may_read": lambda _call: None, "refused": lambda _cause: None, "users": ProxyUsers()}
    chosen: Any = SimpleNamespace(**{**usual, **parts}, node_id="n1")
    return Frame(chosen, sessions)


def token_in(page):
    """The token of the first form of a page."""
    found = _TOKEN.search(page)
    assert found, page
    return found[1]


def hidden_in(page):
    """What the forms of a page send unseen."""
    return {name: html.unescape(value) for name, value in _HIDDEN.findall(page)}


def text_of(answer):
    """What a page says, on one line."""
    return html.unescape(" ".join(re.sub(r"<[^>]*>", " ", answer.text).split()))


def errors_in(page):
    """What a page says is wrong with which field."""
    return {name: html.unescape(text) for name, text in _ERROR.findall(page)}
