"""The installed command as a process: how it starts, how it stops, and what it remembers when it is killed."""

import os
import resource
import signal
import sys
import time

import grpc
import httpx
import pytest

from tests.system.process import COMMAND, START_S, Files, Load, one_line, until

pytestmark = pytest.mark.system

AS_ROOT = os.geteuid() == 0

FAST_PASS_S = 1.0
"""The snapshot's rhythm in the tests that kill a node, instead of 8 s: what they show holds in proportion."""

PASSES_LOST = 15 / 8
"""What a kill may forget, in passes: 15 s at the release's 8 s a pass."""


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path)


def hurried():
    """The command with a snapshot that passes every ``FAST_PASS_S``."""
    code = (
        "import sys; from ratelimitd.buckets import snapshot; from ratelimitd.cli import main;"
        f"snapshot.PASS_S = {FAST_PASS_S}; sys.exit(main())"
    )
    return [sys.executable, "-c", code]


def test_stdout_is_one_line_that_says_ready_and_the_log_goes_to_stderr(files):
    with files.serving("--node-id", "n1") as node:
        assert node.node_id == "n1"
        assert httpx.get(f"http://{node.http_address}/readyz").status_code == 200
        node.signal(signal.SIGTERM)
        status, rest, log = node.ended()
    assert (status, rest) == (0, "")
    assert all(line.startswith("{") and '"node_id": "n1"' in line for line in log.splitlines())


def test_an_http_side_that_is_off_is_called_off(files):
    with files.serving("--http-listen", "") as node:
        assert node.http_address == "off"


@pytest.mark.parametrize(
    ("transport", "number"),
    [("native", signal.SIGTERM), ("native", signal.SIGINT), ("grpcio", signal.SIGTERM)],
)
def test_a_stop_under_load_answers_what_is_in_flight_and_forgets_no_spend(files, transport, number):
    with files.serving("--drain-s", "5", "--transport", transport) as node:
        node.create_rule("/a", limit=1_000_000)
        load = Load(node, "/a")
        load.start()
        until(lambda: len(load.answered_at_s) > 200, "there is load")
        asked_s = time.monotonic()
        node.signal(number)
        status, _, _ = node.ended()
        assert time.monotonic() - asked_s < 5
        load.join(START_S)
    assert status == 0
    assert load.unexpected == []
    with files.serving() as node:
        assert len(load.answered_at_s) <= node.spent("/a") <= load.sent


def test_a_second_signal_ends_the_process_at_once(files):
    with files.serving("--drain-s", "60") as node:
        node.signal(signal.SIGSTOP)  # so that both are there when it goes on
        node.signal(signal.SIGTERM)
        node.signal(signal.SIGINT)
        node.signal(signal.SIGCONT)
        status, _, _ = node.ended()
    assert status in {128 + signal.SIGTERM, 128 + signal.SIGINT}


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A node, and its files."""
    files = Files(tmp_path_factory.mktemp("running"))
    with files.serving() as node:
        yield node, files


def test_a_second_node_on_the_same_state_directory_is_refused(running):
    node, files = running
    status, error = files.refused()
    assert status == 1
    assert one_line(error)
    assert "in use by another node" in error
    assert httpx.get(f"http://{node.http_address}/readyz").status_code == 200


@pytest.mark.parametrize("setting", ["listen", "http-listen"])
def test_a_taken_port_is_one_line(running, files, setting):
    node, _ = running
    taken = node.grpc_address if setting == "listen" else node.http_address
    status, error = files.refused(f"--{setting}", taken)
    assert status == 1
    assert one_line(error)
    assert taken in error
    assert "Address already in use" in error


def test_a_wrong_setting_is_one_line_that_names_it(files):
    status, error = files.refused("--drain-s", "soon")
    assert status == 1
    assert one_line(error)
    assert "--drain-s must be a whole number" in error


def test_a_database_that_cannot_be_written_is_one_line(files):
    with files.serving():
        pass
    for path in files.directory.glob("rules.db*"):
        path.chmod(0o400)
    files.directory.chmod(0o500)
    try:
        # Root may write everything, unless it gives that up.
        humbly = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if AS_ROOT else []
        status, error = files.refused(command=[*humbly, *COMMAND])
    finally:
        files.directory.chmod(0o700)
    assert status == 1
    assert one_line(error)
    assert "read-only" in error or "cannot be opened" in error


def let_files_grow(number, *, grow):
    """Let every further write of a process to a file fail, or succeed again. Pipes and sockets are not files.

    That is how a full disk shows, and it needs no right to mount a small one; only the name of the error differs.
    """
    most = resource.RLIM_INFINITY if grow else 0
    resource.prlimit(number, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))


def test_a_disk_that_is_full_at_the_start_is_one_line(files):
    with files.serving():
        pass  # so that there is a rule book to start from
    status, error = files.refused(command=["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *COMMAND])
    assert status == 1
    assert one_line(error)
    assert "cannot be written: File too large" in error


def test_a_disk_that_fills_up_stops_no_check_and_makes_no_reset_a_lie(files):
    with files.serving() as node:
        node.create_rule("/a", limit=3)
        assert [node.check("/a").allowed for _ in range(4)] == [True] * 3 + [False]
        node.reset("/a")
        let_files_grow(node.process.pid, grow=False)
        assert [node.check("/a").allowed for _ in range(4)] == [True] * 3 + [False]
        assert reset_outcome(node) is grpc.StatusCode.UNAVAILABLE
        assert node.spent("/a") == 3
        let_files_grow(node.process.pid, grow=True)
        assert reset_outcome(node) == "done"
        assert node.spent("/a") == 0


def reset_outcome(node):
    try:
        node.reset("/a")
    except grpc.RpcError as error:
        return error.code()
    return "done"


def test_a_kill_under_load_forgets_little_undoes_no_reset_and_leaves_the_rules_whole(files):
    with files.serving(command=hurried()) as node:
        for name in ("/a", "/reset", "/quiet"):
            node.create_rule(name, limit=1_000_000)
        for name in ("/reset", "/quiet"):
            for _ in range(10):
                assert node.check(name).allowed
        load = Load(node, "/a")
        load.start()
        # Long enough for passes to happen, some of which wrote the bucket that is then reset.
        started_s = time.monotonic()
        until(lambda: time.monotonic() - started_s > 4 * FAST_PASS_S, "some passes are over")
        node.reset("/reset")
        killed_s = time.monotonic()
        node.signal(signal.SIGKILL)
        status, _, _ = node.ended()
        load.join(START_S)
    assert status == -signal.SIGKILL
    assert load.unexpected == []
    old_enough_s = killed_s - PASSES_LOST * FAST_PASS_S
    due = sum(answered_s < old_enough_s for answered_s in load.answered_at_s)
    assert due > 100
    with files.serving() as node:
        assert node.metric("rate_limiter_rules") == 3
        assert due <= node.spent("/a") <= load.sent
        assert node.spent("/quiet") == 10
        assert node.spent("/reset") == 0
