"""A stand-in for the process of a worker: it says what a test tells it to, instead of running a node."""

from __future__ import annotations

import sys
import textwrap

_PROLOGUE = r"""
import json, os, signal, socket, struct, sys, time

sock = socket.socket(fileno=0)
[rest] = struct.unpack("!I", sock.recv(4, socket.MSG_WAITALL))
settings = sock.recv(rest, socket.MSG_WAITALL)
questions = sock.makefile("rb")

def say(*message):
    sock.sendall(json.dumps(message).encode() + b"\n")

def ready():
    say("prepared")
    assert questions.readline() == b"listen\n"
    say("ready")

def metrics(**readings):
    for name, reading in readings.items():
        say("points", name, [["", reading]])
    say("reported")

def until_told():
    # A process that is told to drain ends well.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
"""

ANSWERING = """
until_told()
ready()
count = 0
for question in questions:
    count += 1
    if question == b"readiness\\n":
        say("readiness", True, "")
    else:
        metrics(rate_limiter_requests_allowed_total=count, rate_limiter_tasks=1)
"""
"""Ready at once and always; as a metric it counts the questions that it was asked."""


def command(program: str = ANSWERING) -> list[str]:
    """The command line of a process that runs ``program`` with what :data:`_PROLOGUE` defines."""
    # Without the packages of this environment: it starts in a tenth of the time.
    return [sys.executable, "-ES", "-c", _PROLOGUE + textwrap.dedent(program)]
