"""What the page costs: throughput of a node that is watched, and how soon a browser shows the page of a large cluster.

*Watched* is one open page with its stream of live numbers, and a scrape of ``/metrics`` each second. The load is an
open loop at 70 % of what the node did before, then as much as it can do; watched and alone take turns, the best of each
counts.
"""

import contextlib
import http.client
import threading
from collections.abc import Iterator

from bench.replay import Measured, replay
from bench.report import Row
from bench.servers import Server, load_core, node

ROUNDS, SECONDS = 4, 5
SHAPE = (16, 64)
LOAD = 0.7
SCENARIO = "one-key"
SCRAPE_S = 1.0
HTTP_S = 10.0
"""Longest wait for a part of an answer: live numbers come more often."""


def measure() -> list[Row]:
    """All figures of one run."""
    return _watched()


def _watched() -> list[Row]:
    with load_core(), node("--http-listen", "127.0.0.1:0") as server:
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
    """Keeps the page of a node open and scrapes it, while the block runs.

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
    """Read the stream of live numbers, as the page does."""
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
