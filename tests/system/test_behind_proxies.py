"""A node without settings behind proxies on its own host, as they come: whom they bring is no administrator."""

import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from ratelimitd.node.serving import TRANSPORTS
from ratelimitd.services.auth import Role
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.chaos_proxy import ChaosProxy
from tests.every_surface import attempts
from tests.servers import free_port, until
from tests.system.process import START_S, Files

pytestmark = pytest.mark.system

UNPACKED = Path(sys.prefix) / "debian"

NGINX = """
daemon off; pid {directory}/pid; error_log {directory}/error; worker_processes 1;
events {{}}
http {{
  access_log off;
  client_body_temp_path {directory}/1; proxy_temp_path {directory}/2; fastcgi_temp_path {directory}/3;
  uwsgi_temp_path {directory}/4; scgi_temp_path {directory}/5;
  server {{ listen 127.0.0.1:{grpc_port} http2; location / {{ grpc_pass grpc://{grpc}; }} }}
  server {{ listen 127.0.0.1:{http_port}; location / {{ proxy_pass http://{http}; }} }}
}}
"""

HAPROXY = """
defaults
  timeout connect 30s
  timeout client 30s
  timeout server 30s
listen grpc
  mode {mode}
  bind 127.0.0.1:{grpc_port} {h2}
  server node {grpc} {h2}
listen http
  mode {mode}
  bind 127.0.0.1:{http_port}
  server node {http}
"""


class Front(NamedTuple):
    """Where a proxy listens for the two ports of a node."""

    grpc_address: str
    http_address: str


@contextmanager
def proxy(command, config, directory, node, **more):
    """A proxy with this configuration; ``command`` is given its file."""
    directory.mkdir()
    grpc_port, http_port = free_port(), free_port()
    file = directory / "config"
    file.write_text(
        config.format(
            directory=directory, grpc=node.grpc_address, http=node.http_address,
            grpc_port=grpc_port, http_port=http_port, **more,
        )
    )  # fmt: skip
    [library] = {path.parent for path in UNPACKED.glob("usr/lib/*/liblua5.3.so.0")}
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, file],
            stdout=log,
            stderr=log,
            env={**os.environ, "LD_LIBRARY_PATH": str(library)},
        )
    try:
        until(lambda: listens(grpc_port) and listens(http_port), "the proxy listens")
        yield Front(f"127.0.0.1:{grpc_port}", f"127.0.0.1:{http_port}")
    finally:
        process.terminate()
        process.wait(START_S)


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def forwarder(_directory, node):
    """Two ports whose octets go to those of the node, both ways."""
    grpc_port, http_port = (
        int(at.rpartition(":")[2]) for at in (node.grpc_address, node.http_address)
    )
    with ChaosProxy(grpc_port) as grpc_front, ChaosProxy(http_port) as http_front:
        yield Front(grpc_front.address, http_front.address)


def nginx(directory, node):
    return proxy([UNPACKED / "usr/sbin/nginx", "-c"], NGINX, directory / "nginx", node)


def haproxy(mode, h2):
    command = [UNPACKED / "usr/sbin/haproxy", "-db", "-f"]
    return lambda directory, node: proxy(
        command, HAPROXY, directory / "haproxy", node, mode=mode, h2=h2
    )


PROXIES = {
    "nginx": nginx,
    "haproxy by HTTP": haproxy("http", "proto h2"),
    "haproxy by TCP": haproxy("tcp", ""),
    "a TCP forwarder": forwarder,
}


@pytest.fixture(scope="module", params=sorted(TRANSPORTS))
def node(request, tmp_path_factory):
    with Files(tmp_path_factory.mktemp("node")).serving("--transport", request.param) as node:
        yield node


@pytest.mark.parametrize("name", PROXIES)
def test_whoever_comes_through_a_proxy_may_check_and_nothing_else(tmp_path, name, node):
    with PROXIES[name](tmp_path, node) as front:
        before = len(list_rules(node))
        found = list(attempts(*front))
        assert {one.surface for one in found} >= {"grpc", "application/json", "page", "form"}
        for one in found:
            assert one.passed is (one.role is Role.CHECK), one
        assert len(list_rules(node)) == before
        # The proxies do pass on what has a credential.
        assert all(one.passed for one in attempts(*front, node.authorization))


def list_rules(node):
    return node.rules.ListRateLimits(pb.ListRateLimitsRequest(), timeout=START_S).rate_limits
