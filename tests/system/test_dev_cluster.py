"""`dev cluster` as somebody would try it out: real nodes that share a real Valkey, and the database of their choice."""

import os
import re
import signal
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from ratelimiter.v1 import ratelimiter_pb2 as pb
from ratelimiter.v1 import ratelimiter_pb2_grpc as stubs
from tests.postgres_server import let_others_enter
from tests.servers import free_port, until
from tests.system.process import COMMAND, START_S, Shown, running

pytestmark = pytest.mark.system

ROW = re.compile(r"(n\d) +(\S+) +http://(\S+)/ +(\d+)\n")


class Nodes(Shown):
    """The command that shows nodes."""

    @property
    def nodes(self):
        matches = [ROW.fullmatch(line) for line in self.lines]
        return {match[1]: (match[2], int(match[4])) for match in matches if match}


@pytest.fixture(params=[["--sqlite"], []], ids=["sqlite", "postgresql"])
def cluster(request):
    let_others_enter()
    with dev_cluster(COMMAND, *request.param) as shown:
        yield shown


@contextmanager
def dev_cluster(command, *options):
    """The command `dev cluster` of an installation, once all nodes are ready."""
    grpc_port = free_port(adjacent=6)  # of three nodes
    ports = ["--grpc-port", str(grpc_port), "--http-port", str(grpc_port + 3)]
    with running([*command, "dev", "cluster", *ports, *options], Nodes) as shown:
        shown.until("stops everything")
        yield shown


def left(address):
    with grpc.insecure_channel(address) as channel:
        return ask(channel, peek=True).remaining_tokens + 1  # it counts itself in


def ask(channel, **fields):
    request = pb.RateLimitRequest(
        identifier="alice", identifier_type="user", endpoint="/orders", **fields
    )
    return stubs.RateLimiterStub(channel).CheckRateLimit(request, timeout=START_S)


def test_nodes_share_a_limit_and_are_gone_afterwards(cluster):
    assert cluster.nodes.keys() == {"n1", "n2", "n3"}
    (first, _), (last, last_pid) = cluster.nodes["n1"], cluster.nodes["n3"]
    with grpc.insecure_channel(first) as channel:
        answers = [ask(channel) for _ in range(6)]
    assert all(answer.allowed for answer in answers)
    # On a busy machine the store may be late: such a check fails open, and may have been charged or not.
    charged = [answer.reason for answer in answers].count(pb.WITHIN_LIMIT)
    lefts = range(4, 11 - charged)
    until(lambda: left(last) in lefts, "the last node has heard of it")

    os.kill(last_pid, signal.SIGKILL)
    cluster.until("n3 ended with SIGKILL")
    assert left(first) in lefts

    [logs] = [line.split()[-1] for line in cluster.lines if line.strip().startswith("logs")]
    cluster.process.send_signal(signal.SIGINT)
    out, err = cluster.process.communicate(timeout=START_S)
    assert (cluster.process.returncode, out, err) == (0, "stopping\n", "")
    assert not Path(logs).parent.exists()
    for _, pid in cluster.nodes.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
