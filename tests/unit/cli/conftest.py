"""Runs command lines in this process, against a node with canned answers."""

import os
import pty
import sys
from functools import cache, partial
from typing import NamedTuple

import pytest

from ratelimitd.cli import commands, main
from tests.fake_node import fake_node


class Ended(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture(scope="session", autouse=True)
def commands_made_once():
    """Typer takes 10 to 50 ms to make a command from its function: most of the time of a test."""
    made = cache(partial(commands._Commands.get_command, None, None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands._Commands, "get_command", lambda _self, _context, name: made(name))
        yield


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """Isolate tests from the environment of this machine."""
    for name in ("TARGET", "TOKEN", "TOKEN_FILE", "CA", "CERT", "KEY"):
        monkeypatch.delenv(f"RATELIMITD_{name}", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.fixture
def run(capsys):
    """Run a command line that calls no node, or names one."""

    def run_command(*arguments):
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ended(status, captured.out, captured.err)

    return run_command


@pytest.fixture
def keyboard(monkeypatch):
    """A terminal as stdin; returns the descriptor at which keys are pressed."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield ours
    os.close(ours)


@pytest.fixture
def node():
    with fake_node() as node:
        yield node


@pytest.fixture
def ask(run, node, monkeypatch):
    """Run a command line that calls the node with canned answers."""
    monkeypatch.setenv("RATELIMITD_TARGET", node.address)
    return run
