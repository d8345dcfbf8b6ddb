"""The examples in other languages, against real nodes: they limit, they never wait for a node, they come back to it."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests import http2_peer as h2
from tests.client.hostile import bytes_server, socket_server
from tests.servers import free_port
from tests.system.languages import LANGUAGES, asking, status_without_answer
from tests.system.process import NEVER_ENDING_S, Files, until

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]

PATIENT_MS = "5000"
"""A deadline for what counts checks: a busy machine makes no answer late."""

DEADLINE_S = 0.020
"""That of the programs, unless they are told another."""

ROUNDED_S = 0.001
"""How much gRPC may round a deadline up on the wire."""

TIMED_OUT = {"deadlineexceeded", "cancelled"}
"""The second is tonic's word when its own timer is first."""

ATTEMPTS = 10
"""To connect, within the 30 s of ``until``: with the back-off that gRPC has by itself, 5."""

RULES = f"""
rules:
  - endpoint: /login
    identifier_type: ip
    limit: 5
    window_seconds: {NEVER_ENDING_S}
    algorithm: fixed_window
"""

ADDRESSES = {language: f"192.0.2.{number}" for number, language in enumerate(LANGUAGES)}

DENIED = re.compile(r"429 Too Many Requests \(Retry-After: (\d+)\)")


@pytest.fixture(params=LANGUAGES)
def language(request):
    return request.param


@contextmanager
def serving(directory, *arguments):
    """A node that lets each address log in five times."""
    rules = directory / "rules.yaml"
    rules.write_text(RULES)
    with Files(directory).serving("--rules-file", str(rules), *arguments) as node:
        yield node


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("node")) as node:
        yield node


@pytest.fixture(scope="module")
def denying_node(tmp_path_factory):
    """A node that denies while its breaker is open; its shared state does not answer."""
    away = ("--redis-url", f"redis://127.0.0.1:{free_port()}", "--on-breaker-open", "deny")
    with serving(tmp_path_factory.mktemp("denying"), *away) as node:
        yield node


def test_five_are_allowed_and_the_next_are_told_when_to_come_back(language, node):
    began_at_s = int(time.time())
    with asking(language, node.grpc_address, PATIENT_MS) as program:
        answers = [program.ask(ADDRESSES[language]) for _ in range(7)]
    assert answers[:5] == [f"200 OK ({left} left)" for left in (4, 3, 2, 1, 0)]
    for answer in answers[5:]:
        told = DENIED.fullmatch(answer)
        assert told, answer
        assert began_at_s <= NEVER_ENDING_S - int(told[1]) <= time.time()


def test_no_identifier_opens_anything(language, node):
    with asking(language, node.grpc_address, PATIENT_MS) as program:
        for identifier in (
            "",
            "no address",
            "é" * 129,
            "x" * 5_000_000,
            b"\xff\xfe",
            b"\xed\xa0\x80",
        ):
            assert program.ask(identifier) == "400 Bad Request"


def test_a_node_that_hangs_or_is_gone_holds_nobody_up_and_limits_again_when_it_is_back(
    language, tmp_path
):
    with ExitStack() as stack:
        node = stack.enter_context(serving(tmp_path))
        program = stack.enter_context(asking(language, node.grpc_address))

        def limited():
            return DENIED.fullmatch(program.ask("192.0.2.7"))

        until(limited, "it is limited")
        node.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, node.process.pid, os.WSTOPPED | os.WNOWAIT)
        for _ in range(3):
            assert status_without_answer(program.ask("192.0.2.7")) in TIMED_OUT
        node.signal(signal.SIGCONT)
        until(limited, "it is limited again by the node that hung")

        node.signal(signal.SIGKILL)
        node.ended()
        for _ in range(3):
            assert status_without_answer(program.ask("192.0.2.7"))
        stack.enter_context(serving(tmp_path, "--listen", node.grpc_address))
        until(limited, "it is limited again by the node that is back")


def test_what_a_node_set_to_deny_denies_unchecked_stays_denied(language, denying_node):
    with asking(language, denying_node.grpc_address, PATIENT_MS) as program:
        # Before the breaker opens, the node fails open.
        until(lambda: DENIED.fullmatch(program.ask("192.0.2.7")), "it is denied")


def test_a_program_that_starts_without_a_node_finds_it_later(language, tmp_path):
    address = f"127.0.0.1:{free_port()}"
    with asking(language, address) as program:
        assert status_without_answer(program.ask("192.0.2.7"))
        with serving(tmp_path, "--listen", address):
            until(lambda: DENIED.fullmatch(program.ask("192.0.2.7")), "it is limited")


def test_connecting_is_tried_again_soon(language):
    """At what takes connections and ends them; so a node that comes back is found that soon."""
    attempts = []
    with socket_server(attempts.append) as address, asking(language, address) as program:

        def tried():
            assert status_without_answer(program.ask("192.0.2.7"))
            return len(attempts) >= ATTEMPTS

        until(tried, "it tried to connect often enough")


def test_tools_need_no_client(node):
    """The command lines of the page, by curl and by ``buf curl``: five are allowed to both together."""
    page = (ROOT / "examples" / "first_check" / "README.md").read_text(encoding="utf-8")
    page = page.replace("\\\n", "").replace("192.0.2.7", "198.51.100.7")
    page = page.replace("127.0.0.1:8080", node.http_address)
    page = page.replace("127.0.0.1:9090", node.grpc_address)
    [curl], [buf_curl] = (
        re.findall(rf"^    ({tool} .*)$", page, re.MULTILINE) for tool in ("curl", "buf curl")
    )

    def answered(line):
        tool, *arguments = shlex.split(line)
        beside_python = Path(sys.executable).with_name(tool)
        command = [str(beside_python) if beside_python.exists() else tool, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    for _ in range(5):
        assert json.loads(answered(buf_curl))["allowed"]
    denied = answered(curl)
    assert denied.startswith("HTTP/1.1 429 ")
    assert re.search(r"^retry-after: \d+\r?$", denied, re.MULTILINE | re.IGNORECASE)


def test_the_deadline_is_told_to_the_node(language):
    remaining_s = []

    def answer(request, context):
        if not pb.RateLimitRequest.FromString(request).peek:
            remaining_s.append(context.time_remaining())
        return pb.RateLimitResponse(allowed=True).SerializeToString()

    def arrived():
        program.ask("192.0.2.7")
        return remaining_s

    with bytes_server(answer) as address, asking(language, address) as program:
        until(arrived, "a check arrives in time")
    assert all(left_s <= DEADLINE_S + ROUNDED_S for left_s in remaining_s)


def refusing(pinged, connection):
    """Refuse each call of an HTTP/2 connection, and mind its pings."""
    with connection.makefile("rb") as octets:
        connection.sendall(h2.settings())
        octets.read(len(h2.PREFACE))
        while head := octets.read(9):
            kind, flags, stream_id = head[3], head[4], int.from_bytes(head[5:9], "big")
            octets.read(int.from_bytes(head[:3], "big"))
            if kind == h2.SETTINGS and not flags & h2.ACK:
                connection.sendall(h2.frame(h2.SETTINGS, h2.ACK, 0))
            elif kind == h2.HEADERS:
                connection.sendall(h2.rst_stream(stream_id))
            elif kind == h2.PING:
                # No answer had a body, which libraries measure the line by pings for: this one is a keepalive.
                pinged.set()


def test_an_idle_connection_is_pinged():
    """All programs at once, since the pause before a ping is 10 s."""
    with ExitStack() as stack:
        pinged = {language: threading.Event() for language in LANGUAGES}
        for language, event in pinged.items():
            address = stack.enter_context(socket_server(partial(refusing, event)))
            stack.enter_context(asking(language, address))
        for language, event in pinged.items():
            until(event.is_set, f"{language} pings")
