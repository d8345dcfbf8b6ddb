"""The API of the demo, its callers, and when a browser is opened."""

import asyncio
import contextlib

import httpx
import pytest

from ratelimitd.cli.client_options import CliError
from ratelimitd.cli.dev import demo as module
from ratelimitd.cli.dev.demo import ENDPOINT, Caller, api_of
from ratelimitd.web.server import HttpServer
from ratelimitd_client.testing import AsyncFakeRateLimiter


@pytest.fixture
def limiter():
    return AsyncFakeRateLimiter()


@pytest.fixture
async def api(limiter):
    limiter.limit(ENDPOINT, "user", limit=3, window_seconds=60)
    server = HttpServer(api_of(limiter), "127.0.0.1", 0)
    address = await server.start()
    yield int(address.rpartition(":")[2])
    await server.stop()


async def test_caller_is_allowed_up_to_the_limit_and_sees_it(api):
    caller, other = Caller("ann", 10_000), Caller("ben", 1)
    calling = asyncio.create_task(caller.call(api))
    async with asyncio.timeout(30):
        while caller.denied < 2:  # noqa: ASYNC110 -- it tells nobody
            await asyncio.sleep(0)
    calling.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await calling
    denied = caller.denied
    assert caller.reading(1.0) == ("ann", 3, denied, "3 in 60 s", "█")
    assert caller.reading(1.0) == ("ann", 0, 0, "3 in 60 s", "█▁")
    assert other.reading(1.0) == ("ben", 0, 0, "", "▁")


async def test_path_is_limited_by_its_rule(api, limiter):
    limiter.limit("/reports", "user", limit=1, window_seconds=60)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{api}") as client:
        statuses = [
            (await client.get(path)).status_code for path in ("/reports", "/reports", ENDPOINT)
        ]
    assert statuses == [200, 429, 200]


async def test_callers_without_a_name_are_limited_as_one(api):
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{api}") as client:
        statuses = [
            (await client.get(ENDPOINT, headers=headers)).status_code
            for headers in ({"X-User": ""}, {}, {"X-User": "you"}, {"X-User": ""})
        ]
    assert statuses == [200, 200, 200, 429]


async def test_caller_continues_while_the_api_is_unreachable(unused_tcp_port):
    calling = asyncio.create_task(Caller("ann", 10_000).call(unused_tcp_port))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not calling.done()
    calling.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await calling


@pytest.mark.parametrize(
    ("platform", "environ", "opened"),
    [
        ("linux", {}, False),
        ("linux", {"DISPLAY": ":0"}, True),
        ("linux", {"WAYLAND_DISPLAY": "wayland-0"}, True),
        ("darwin", {}, True),
    ],
)
def test_browser_is_opened_on_a_desktop_only(monkeypatch, platform, environ, opened):
    monkeypatch.setattr("sys.platform", platform)
    assert module.may_open_page(environ) is opened


@pytest.fixture
def demos(monkeypatch):
    """Replace the runs; collects their ports. Other processes take those in ``taken`` at the start."""

    class Demos(list):
        taken = ()
        fails = False

    demos = Demos()

    class Recorded:
        def __init__(self, node, api_port, _output, **_options):
            self.ports = [node.grpc_port, node.http_port, api_port]

        async def run(self):
            demos.append(self.ports)
            lost = [port for port in self.ports if port in demos.taken]
            monkeypatch.setattr(module.run, "is_free", lambda port: port not in lost)
            if lost or demos.fails:
                message = "n1 ended with status 1"
                raise CliError(message)

    monkeypatch.setattr(module, "Demo", Recorded)
    monkeypatch.setattr(module.run, "is_free", lambda _port: True)
    return demos


@pytest.mark.parametrize(
    ("taken", "then"),
    [(9090, [9091, 8080, 8000]), (8080, [9090, 8081, 8000]), (8000, [9090, 8080, 8001])],
)
def test_port_taken_at_the_start_is_skipped(run, demos, taken, then):
    demos.taken = (taken,)
    assert run("demo").status == 0
    assert demos == [[9090, 8080, 8000], then]


def test_ports_are_chosen_again_once(run, demos):
    demos.taken = (9090, 9091)
    assert run("demo").status == 1
    assert len(demos) == 2


def test_failure_with_free_ports_is_not_retried(run, demos):
    demos.fails = True
    assert run("demo") == (1, "", "Error: n1 ended with status 1\n")
    assert len(demos) == 1
