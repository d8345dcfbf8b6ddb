"""`serve --workers` without REDIS_URL: real processes that share a Valkey of their parent's own."""

import os
import signal
import stat
from collections import Counter
from pathlib import Path

import pytest

from ratelimiter.v1 import ratelimiter_pb2 as pb
from ratelimiter.v1 import ratelimiter_pb2_grpc as stubs
from tests.system.process import PATIENT, START_S, one_line, until
from tests.system.test_workers import (
    LIMIT,
    check,
    children_of,
    connection,
    files_of,
    runs,
    two_workers,
    worker_of,
    workers_of,
)

pytestmark = pytest.mark.system

LISTENS = "0A"
"""State of a TCP socket in /proc."""

OPTIONS = (*PATIENT, "--breaker-recovery-s", "1")
STRICT = (*OPTIONS, "--consistency", "strict")


@pytest.fixture
def files(tmp_path):
    return files_of(tmp_path)


@pytest.fixture
def several(tmp_path):
    """Arguments for two workers without a shared state of somebody else's."""
    return two_workers(tmp_path)


def valkey_of(node):
    """The process id of the private Valkey; 0 while there is none."""
    found = [pid for pid, command in children_of(node) if "valkey-server" in command[0]]
    return found[0] if found else 0


def tcp_ports_of(pid):
    """The TCP ports that a process listens on."""
    own = {str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return [row[1] for row in rows if row[3] == LISTENS and f"socket:[{row[9]}]" in own]


def spend(node, each):
    """Checks through both workers, at least ``each`` on either; returns how many were allowed."""
    asked, allowed = Counter(), 0
    while min(asked["n/0"], asked["n/1"]) < each:  # the kernel chooses
        with connection(node) as channel:
            worker = worker_of(channel)
            allowed += check(channel, "/scarce")
            asked[worker] += 1
    return allowed


def peek(channel):
    request = pb.RateLimitRequest(
        identifier="u", identifier_type="user", endpoint="/scarce", peek=True
    )
    return stubs.RateLimiterStub(channel).CheckRateLimit(request, timeout=START_S)


def until_both_count_again(node):
    """Wait until each worker has reached the store after an outage."""
    counting = set()

    def counts():
        with connection(node) as channel:
            if peek(channel).reason in {pb.WITHIN_LIMIT, pb.LIMIT_EXCEEDED}:
                counting.add(worker_of(channel))
        return len(counting) == 2

    until(counts, "both workers count again")


def test_two_workers_share_a_limit_exactly_and_over_a_restart(files, several):
    with files.serving(*several, *STRICT) as node:
        assert sorted(workers_of(node)) == ["n/0", "n/1"]
        assert spend(node, LIMIT) == LIMIT
        assert node.metric('rate_limiter_worker_restarts_total{worker="store"}') == 0
        valkey = valkey_of(node)
        node.signal(signal.SIGTERM)
        status, _, log = node.ended()
    assert status == 0
    assert log.count('"drained"') == 3
    assert not runs(valkey)
    with files.serving(*several, *STRICT) as node:
        assert spend(node, 1) == 0


def test_nobody_else_reaches_the_private_valkey(files, several):
    with files.serving(*several) as node:
        valkey = valkey_of(node)
        assert tcp_ports_of(node.process.pid)  # of the pages: the test sees ports
        assert tcp_ports_of(valkey) == []
        directory = files.state_dir / "valkey"
        for path in (directory, *directory.rglob("*")):
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
        told = Path(f"/proc/{valkey}/cmdline").read_bytes()
        assert b"#" not in told
        assert Path(f"/proc/{valkey}/environ").read_bytes() == b""


@pytest.mark.parametrize(
    ("options", "most"), [(STRICT, LIMIT), (OPTIONS, 1.51 * LIMIT)], ids=["strict", "eventual"]
)
def test_what_was_settled_survives_a_kill_of_a_worker_and_of_the_private_valkey(
    files, several, options, most
):
    with files.serving(*several, *options) as node:
        allowed = spend(node, 4)
        killed = valkey_of(node)
        os.kill(killed, signal.SIGKILL)
        restarts = 'rate_limiter_worker_restarts_total{worker="store"}'
        until(lambda: node.metric(restarts) == 1, "its end is seen")
        until(lambda: valkey_of(node) not in {0, killed}, "it is another process")
        until_both_count_again(node)
        allowed += spend(node, 2)
        worker = workers_of(node)["n/0"]
        os.kill(worker, signal.SIGKILL)
        until(lambda: workers_of(node).get("n/0", worker) != worker, "it is another process")
        until(lambda: node.metric("rate_limiter_workers") == 2, "it is back")
        until_both_count_again(node)
        allowed += spend(node, LIMIT)
        assert LIMIT <= allowed <= most
        node.signal(signal.SIGTERM)
        status, _, log = node.ended()
    assert status == 0
    assert "the private Valkey: ended by signal 9; it is started again" in log


def test_the_private_valkey_is_gone_with_a_parent_that_is_killed(files, several):
    with files.serving(*several, *STRICT) as node:
        assert spend(node, LIMIT) == LIMIT
        pids = [valkey_of(node), *workers_of(node).values()]
        node.signal(signal.SIGKILL)
        until(lambda: not any(map(runs, pids)), "all have ended")
        node.ended()
    with files.serving(*several, *STRICT) as node:
        assert spend(node, 1) == 0


def test_a_private_valkey_that_is_told_to_end_with_its_parent_costs_no_drain(files, several):
    with files.serving(*several) as node:
        for pid in (valkey_of(node), node.process.pid):
            os.kill(pid, signal.SIGTERM)
        status, _, log = node.ended()
    assert status == 0, log
    assert log.count('"drained"') == 3


def test_a_file_that_the_private_valkey_cannot_read_is_one_line_and_status_1(files, several):
    files_of_valkey = files.state_dir / "valkey" / "appendonlydir"
    files_of_valkey.mkdir(parents=True)
    (files_of_valkey / "appendonly.aof.manifest").write_text("no manifest\n")
    status, error = files.refused(*several)
    assert status == 1
    assert one_line(error)
    assert "Error: the private Valkey: " in error
