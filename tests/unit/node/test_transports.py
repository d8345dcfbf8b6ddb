"""The transports by name; a node imports only the one it uses."""

import os
import subprocess
import sys

import pytest

from ratelimitd.node.serving import CAUSES, TRANSPORTS, server_of
from ratelimitd.rpc.grpcio_server import GrpcioServer
from ratelimitd.rpc.server import NativeServer
from ratelimitd.settings.table import Settings

SERVING = """
import os, signal, sys
from ratelimitd.node import supervisor
from ratelimitd.cli import main

def ready(_terminal, _node):
    print("serving", "grpc" in sys.modules)
    os.kill(os.getpid(), signal.SIGTERM)

supervisor.Overseer.ready = ready
main(sys.argv[1:])
"""
"""The installed command; instead of its ready line it prints whether grpcio was imported."""


def test_each_name_has_its_server():
    assert [server_of(name) for name in TRANSPORTS] == [NativeServer, GrpcioServer]


def test_the_causes_are_strings():
    assert {type(cause) for cause in CAUSES} == {str}
    assert {"cancelled", "unread_answers"} <= CAUSES
    assert not {"peer_reset", "owner"} & CAUSES


def test_every_name_is_a_value_of_the_setting_and_the_first_its_default():
    assert Settings.load({}, {}).transport == TRANSPORTS[0]
    for name in TRANSPORTS:
        assert Settings.load({}, {"TRANSPORT": name}).transport == name


@pytest.mark.deep
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_node_imports_grpc_only_to_serve_with_it(tmp_path, transport):
    anywhere = ["--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"]
    ended = subprocess.run(
        [sys.executable, "-c", SERVING, "serve", "--transport", transport, *anywhere],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if "RATELIMIT" not in name},
        check=False,
        timeout=30,
    )
    assert ended.stdout == f"serving {transport == 'grpcio'}\n", ended.stderr
