import asyncio
from collections import Counter

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from ratelimitd import fair_queue
from ratelimitd.observe.metrics import Definition, Point
from ratelimitd.web.app import with_host_check, worker_application
from ratelimitd.web.pages.errors import Cause
from ratelimitd.web.parts import Readiness


def one_metric():
    yield Definition("a_total", "counter", "Number.", lambda _: ()), [Point(3)]


class Web:
    def __init__(self, readiness=None, points=one_metric):
        self.readiness = Readiness(ready=True)
        self.refused = []
        app = worker_application(
            points=points,
            readiness=readiness or (lambda: self.readiness),
            others=Starlette(routes=[Route("/", PlainTextResponse("ok"))]),
        )
        self.app = with_host_check(app, ["node.example"], self.refused.append)

    async def get(self, path, **headers):
        transport = httpx.ASGITransport(app=self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get(path, headers=headers)


@pytest.fixture
def web():
    return Web()


async def test_live_process_is_healthy_whether_or_not_it_is_ready(web):
    web.readiness = Readiness(ready=False, reason="draining")
    assert (await web.get("/healthz")).status_code == 200


async def test_unready_node_reports_the_reason(web):
    answer = await web.get("/readyz")
    assert (answer.status_code, answer.text) == (200, "ready\n")
    web.readiness = Readiness(ready=False, reason="draining")
    answer = await web.get("/readyz")
    assert (answer.status_code, answer.text) == (503, "not ready: draining\n")


async def test_ready_node_may_report_an_unready_part(web):
    web.readiness = Readiness(ready=True, reason="all but worker 1 (starting)")
    answer = await web.get("/readyz")
    assert (answer.status_code, answer.text) == (200, "ready: all but worker 1 (starting)\n")


async def test_readiness_and_metrics_may_be_awaitable():
    async def readiness():
        return Readiness(ready=False, reason="waited")

    async def points():
        return one_metric()

    web = Web(readiness=readiness, points=points)
    assert (await web.get("/readyz")).text == "not ready: waited\n"
    assert "a_total 3.0\n" in (await web.get("/metrics")).text


async def test_metrics_have_the_requested_format(web):
    answer = await web.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "a_total 3.0\n" in answer.text
    answer = await web.get("/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


async def test_scrapes_share_one_budget_per_event_loop_iteration(monkeypatch):
    monkeypatch.setattr(fair_queue, "BUDGET_S", 0.0)  # one step
    pieces_by_iteration = Counter()
    iteration = 0

    async def iterate():
        nonlocal iteration
        while True:
            iteration += 1
            await asyncio.sleep(0)

    def three_metrics():
        for name in ("a", "b", "c"):
            pieces_by_iteration[iteration] += 1
            yield Definition(name, "gauge", "Number.", lambda _: ()), [Point(3)]

    web = Web(points=three_metrics)
    async with asyncio.TaskGroup() as group:
        iterating = group.create_task(iterate())
        answers = await asyncio.gather(*(web.get("/metrics") for _ in range(20)))
        iterating.cancel()
    assert all("a 3.0" in answer.text and "c 3.0" in answer.text for answer in answers)
    assert set(pieces_by_iteration.values()) == {1}
    assert pieces_by_iteration.total() == 60


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:8080",
        "node.example:8080",
        "127.0.0.1:8080",
        "10.1.2.3",
        "[::1]:8080",
        "0.0.0.0:8080",
    ],
)
async def test_page_is_shown_under_own_names_and_addresses(web, host):
    assert (await web.get("/", host=host)).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8080",
        "",
        "[evil]",
        "127.0.0.1.evil",
        "localhost:80@evil.example",
        "[::1",
        "[::1]evil",
    ],
)
async def test_page_is_refused_under_foreign_names(web, host):
    assert (await web.get("/", host=host)).status_code == 421
    assert (await web.get("/later/page", host=host)).status_code == 421
    assert web.refused == [Cause.UNKNOWN_HOST] * 2


async def test_other_events_than_requests_pass_the_check(web):
    seen = []

    async def app(scope, _receive, _send):
        seen.append(scope["type"])

    await with_host_check(app, [], web.refused.append)({"type": "lifespan"}, None, None)
    assert seen == ["lifespan"]
