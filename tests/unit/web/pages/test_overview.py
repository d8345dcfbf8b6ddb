"""The overview, requested as by a browser or a program."""

import asyncio
import logging

import httpx
import pytest
from starlette.applications import Starlette

from ratelimitd.observe.denials import DeniedEndpoint, DeniedIdentifier
from ratelimitd.observe.history import Sample
from ratelimitd.observe.live import NodeView, Overview
from ratelimitd.observe.node_status import HeldLimit
from ratelimitd.rpc.interface import RpcError, StatusCode
from ratelimitd.web.pages.errors import Refused
from ratelimitd.web.pages.overview import FRAGMENTS, OverviewPage
from ratelimitd.web.pages.sessions import Sessions
from tests.page_visitor import frame_of, text_of
from tests.unit.observe.test_live import status_of

HTML = {"accept": "text/html"}


class FakeLive:
    """A node with one denied identifier; unless ``lasts`` is set, it ends after one step with a listener."""

    def __init__(self):
        self.ended, self.refreshed, self.spans = False, 0, []
        self.lasts = False

    def history(self, span):
        self.spans.append(span)
        return [Sample(1_000 - span.step_s)]

    def listen(self, listener):
        if not self.lasts:
            self.stepping = asyncio.create_task(self.step_and_end(listener))

    async def step_and_end(self, listener):
        await listener()
        self.ended = True
        await listener()

    def unlisten(self, listener):
        self.ended = False

    async def refresh(self):
        self.refreshed += 1

    def overview(self, *, named=False):
        status = status_of("<n1>", at_ms=1_000)
        name = "ada.lovelace" if named else ""
        return Overview(
            total=status.sample,
            nodes=[NodeView(status, is_this=True, age_s=0.0, gone=False)],
            stale_s=3.0,
            shares=True,
            endpoints=[DeniedEndpoint("/<script>", 3.0)],
            identifiers=[
                DeniedIdentifier("00", "user", "ada…", 12.3, name),
                DeniedIdentifier("01", "api_key", "sk_l…", 3.0),
            ],
            holds=[HeldLimit("/<held>", "user", "minute", 2, 7_000)],
            unmatched=[DeniedEndpoint("/<unmatched>", 3.0)],
        )


class Site:
    def __init__(self):
        self.live, self.admin = FakeLive(), True
        frame = frame_of(
            Sessions("", lambda: 0.0),
            live=self.live,
            may_administer=self.may_administer,
            actor=lambda call: f"admin@{call.peer}",
            on_breaker_open="",
            grpc_address=lambda: "127.0.0.1:9090",
        )
        routes = OverviewPage(frame).routes()
        self.app = Starlette(routes=routes, exception_handlers={Refused: frame.refuse})

    def may_administer(self, _call):
        if not self.admin:
            raise RpcError(StatusCode.PERMISSION_DENIED, "for administrators")

    async def get(self, path, method="GET", **headers):
        transport = httpx.ASGITransport(app=self.app, client=("127.0.0.1", 5))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, headers=headers)


@pytest.fixture
def site():
    return Site()


async def test_page_shows_numbers_without_scripts(site):
    answer = await site.get("/", **HTML)
    assert answer.status_code == 200
    assert "<dt>Allowed</dt><dd><b>1</b>" in answer.text
    assert "the shared state does not answer" in answer.text.lower()
    assert 'data-events="/events"' in answer.text
    assert site.live.refreshed == 1
    for name in FRAGMENTS:
        assert f'<div id="{name}">' in answer.text


async def test_input_from_callers_and_nodes_is_escaped(site):
    answer = await site.get("/", **HTML)
    for found in ("/<script> 3 ", "/<unmatched> 3 ", "/<held> user minute 2 7 000", "<n1>"):
        assert found in text_of(answer)
    assert "<script>" not in answer.text
    assert 'href="/try?endpoint=/%3Cscript%3E"' in answer.text


async def test_names_are_masked_unless_requested_and_requests_are_logged(site, caplog):
    with caplog.at_level(logging.INFO):
        masked = await site.get("/", **HTML)
        assert "ada… user 12 sk_l… api_key 3" in text_of(masked)
        assert "lovelace" not in masked.text
        named = await site.get("/?names=shown", **HTML)
        await site.get("/events?names=shown", **HTML)
    assert "ada.lovelace user 12 sk_l… api_key 3" in text_of(named)
    assert 'data-events="/events?names=shown"' in named.text
    assert 'form="pick" name="pick" value="user ada.lovelace"' in named.text
    assert '"pick"' not in masked.text
    assert [record.message for record in caplog.records if "overview" in record.name] == [
        "admin@ipv4:127.0.0.1:5 looks at the names of denied identifiers"
    ] * 2


@pytest.mark.parametrize("path", ["/", "/events"])
async def test_names_require_the_admin_role(site, path):
    site.admin = False
    answer = await site.get(f"{path}?names=shown", **HTML)
    assert answer.status_code == 403
    assert "for administrators" in answer.text
    assert (await site.get(path, **HTML)).status_code == 200


@pytest.mark.parametrize(("query", "shown"), [("", False), ("?names=shown", True)])
async def test_stream_sends_the_history_and_the_parts_of_the_page(site, query, shown):
    answer = await site.get(f"/events{query}")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "event: past\ndata: [[998,0.0," in answer.text
    assert all(f'"{name}":"' in answer.text for name in FRAGMENTS)
    assert ("ada.lovelace" in answer.text) is shown


async def test_links_and_stream_keep_the_selected_range(site):
    text = (await site.get("/?range=1h", **HTML)).text
    assert "The last hour" in text
    assert 'href="/?range=1h" aria-current="true">1 h</a>' in text
    assert 'href="/?range=24h">24 h</a>' in text
    assert 'href="/">15 m</a>' in text
    assert 'href="/?names=shown&amp;range=1h">Show names' in text
    assert 'data-events="/events?range=1h"' in text
    assert 'data-span-ms="3600000" data-step-ms="10000"' in text
    answer = await site.get("/events?range=1h")
    assert "event: past\ndata: [[990,0.0," in answer.text
    assert '{"row":[990,0.0,' in answer.text


async def test_unknown_range_defaults_to_a_quarter_of_an_hour(site):
    assert "The last 15 minutes" in (await site.get("/?range=7y", **HTML)).text


async def test_charts_have_a_table_without_scripts(site):
    text = text_of(await site.get("/", **HTML))
    assert "Until Allowed Blocked Fail-open 99 % within Hit ratio Buckets 00:00:00 0 0" in text
    site.live.history = lambda span: []
    assert "No sample was taken yet." in (await site.get("/", **HTML)).text


async def test_head_request_occupies_no_stream(site):
    site.live.lasts = True  # as a stream would
    answer = await site.get("/events", method="HEAD")
    assert answer.headers["content-type"].startswith("text/event-stream")


async def test_stopping_node_starts_no_stream(site):
    site.live.ended = True
    assert (await site.get("/events")).status_code == 503
