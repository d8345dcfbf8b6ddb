"""The cost of the page: throughput of a watched node, and the time until a browser shows the page of a large cluster.

*First render* is the first contentful paint in a Chromium with an empty cache: the median of several visits to a node
with 10,000 rules in a cluster of 20.

*Watched* is one open page with its live stream, and a scrape of ``/metrics`` each second. The load is an open loop at
70 % of the node's previous rate, then a closed one; watched and unwatched alternate, and the best of each counts.
"""

import contextlib
import http.client
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from bench.native import EVERYTHING
from bench.replay import Measured, replay
from bench.report import Row, percentile
from bench.servers import Missing, Server, load_core, node
from tests.browser.large import MANY_NODES, MANY_RULES, large
from tests.browser.visit import Visit, chromium, transferred

ROUNDS, SECONDS = 4, 5
SHAPE = (16, 64)
LOAD = 0.7
SCENARIO = "one-key"
SCRAPE_S = 1.0
HTTP_S = 10.0
"""Longest wait for a part of an answer: live events are more frequent."""


PAGES = {"/": f"{MANY_NODES} nodes", "/rules": f"{MANY_RULES:,} rules"}
NOTHING = "/healthz"
"""Baseline of a browser: a page of two letters."""
VISITS = 11
FIRST_PAINT = """
() => new Promise(resolve => new PerformanceObserver(paints => {
  const first = paints.getEntriesByName('first-contentful-paint')[0]
  if (first) resolve(first.startTime)
}).observe({type: 'paint', buffered: true}))
"""
"""In ms since the start of the navigation."""


def measure() -> list[Row]:
    """Measure all figures.

    Raises:
        Missing: there is no Chromium.
    """
    if shutil.which("chromium") is None:
        raise Missing(program="chromium", package="chromium")
    return [*_rendered(), *_watched()]


def _rendered() -> list[Row]:
    with (
        tempfile.TemporaryDirectory() as directory,
        large(Path(directory)) as served,
        chromium() as browser,
    ):
        paints_ms: dict[str, list[float]] = {path: [] for path in (NOTHING, *PAGES)}
        sizes: dict[str, int] = {}
        for _ in range(VISITS):
            for path, found_ms in paints_ms.items():
                visit = Visit(browser, served.http_address)
                with transferred(visit) as octets:
                    page = visit.go(path)
                    found_ms.append(page.evaluate(FIRST_PAINT))
                sizes[path] = octets.count
                visit.close()
    middle_ms = {path: percentile(found_ms, 0.5) for path, found_ms in paints_ms.items()}
    rows = []
    for path, what in PAGES.items():
        name = f"first render of {path}, {what}"
        rows += [
            Row(name, middle_ms[path], "ms", f"{NOTHING}; aim 200 ms", middle_ms[NOTHING]),
            Row(f"{path}, {what}: sent", sizes[path] / 1000, "kB", "at most", 150.0),
        ]
    return rows


def _watched() -> list[Row]:
    with load_core(), node(*EVERYTHING) as server:
        most = replay(server, SCENARIO, SHAPE, seconds=SECONDS).rate
        best: dict[str, Measured] = {}
        for _ in range(ROUNDS):
            for load, rate in (("70 %", most * LOAD), ("all it can", 0.0)):
                for watched in (False, True):
                    with _visitor(server) if watched else contextlib.nullcontext():
                        measured = replay(server, SCENARIO, SHAPE, seconds=SECONDS, rate=rate)
                    name = f"{load} {watched}"
                    if name not in best or measured.rate > best[name].rate:
                        best[name] = measured
    rows = [Row("70 % load", most * LOAD, "checks/s due", "all it can", most)]
    for load, aim in (("70 %", "; aim 0.98"), ("all it can", "")):
        seen, alone = best[f"{load} True"], best[f"{load} False"]
        rows += [
            Row(f"{load}, watched", seen.rate, "checks/s", f"alone{aim}", alone.rate),
            Row(f"{load}, watched: CPU", seen.cpu_us, "us/check", "alone", alone.cpu_us),
        ]
    return rows


@contextlib.contextmanager
def _visitor(server: Server) -> Iterator[None]:
    """Keep the page of a node open and scrape it during the block.

    Raises:
        AssertionError: the node refused either, or ended the stream.
    """
    done, failures = threading.Event(), list[BaseException]()

    def run(visit: object) -> None:
        try:
            visit(server.http_port, done)  # type: ignore[operator]
        except BaseException as failure:
            failures.append(failure)
            raise

    threads = [threading.Thread(target=run, args=(visit,)) for visit in (_watch, _scrape)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not failures, failures


def _watch(port: int, done: threading.Event) -> None:
    """Read the live stream, as the page does."""
    with contextlib.closing(_get(port, "/")) as connection:
        connection.getresponse().read()
    with contextlib.closing(_get(port, "/events")) as connection:
        answer = connection.getresponse()
        assert answer.status == 200, answer.status  # noqa: PLR2004 -- success
        while not done.is_set():
            assert answer.readline(), "the stream has ended"


def _scrape(port: int, done: threading.Event) -> None:
    while not done.wait(SCRAPE_S):
        with contextlib.closing(_get(port, "/metrics")) as connection:
            assert connection.getresponse().read().endswith(b"\n")


def _get(port: int, path: str) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HTTP_S)
    connection.request("GET", path, headers={"Accept": "text/html, text/event-stream, */*"})
    return connection
