"""Keys as they are pressed, on a terminal that is a real one to this process."""

import os
import pty
import sys
import termios

import pytest

from ratelimitd.cli.output import single_keys


@pytest.fixture
def keys(monkeypatch):
    """A terminal as stdin; returns where its keys are pressed."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield ours
    os.close(ours)


def test_without_a_terminal_there_is_no_keyboard():
    with single_keys() as keyboard:
        assert keyboard is None


@pytest.mark.parametrize("key", [b"q", b"Q", b"\x04"])
def test_the_quit_key_ends_the_wait_without_enter(keys, key):
    with single_keys() as keyboard:
        os.write(keys, b"x" + key)
        assert keyboard.quits_within(60)


def test_no_other_key_does(keys):
    with single_keys() as keyboard:
        os.write(keys, b"x")
        assert not keyboard.quits_within(0.01)
        assert not keyboard.quits_within(0)


def test_the_terminal_is_left_as_it_was(keys):
    before = termios.tcgetattr(keys)
    with single_keys():
        assert termios.tcgetattr(keys) != before
    assert termios.tcgetattr(keys) == before
