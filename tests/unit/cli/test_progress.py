"""What is shown of work that takes a while: to a person at a terminal, and to nobody else."""

import io
import sys

import pytest

from ratelimitd.cli.output import LONG, progress, working


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Make stderr a terminal; in the test itself, since pytest gives it another one at its start."""

    def make():
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys, "stderr", Terminal())
        return sys.stderr

    return make


def work(steps):
    with progress("applying", steps) as step_done:
        for _ in range(steps):
            step_done()


def test_long_work_has_a_bar_on_a_terminal_that_is_gone_at_the_end(terminal):
    stderr = terminal()
    work(LONG)
    assert "applying" in stderr.getvalue()
    assert "100%" in stderr.getvalue()
    assert stderr.getvalue().endswith("\x1b[2K")


def test_short_work_has_none(terminal):
    stderr = terminal()
    work(LONG - 1)
    assert stderr.getvalue() == ""


def test_a_pipe_gets_nothing(capsys):
    work(LONG)
    with working("upgrading"):
        pass
    assert capsys.readouterr() == ("", "")


def test_work_of_unknown_length_shows_that_it_goes_on(terminal):
    stderr = terminal()
    with working("upgrading the rule database"):
        pass
    assert "upgrading the rule database" in stderr.getvalue()


def test_a_failure_leaves_the_terminal_as_it_should_be(terminal):
    stderr = terminal()
    with pytest.raises(ValueError), progress("applying", LONG):
        raise ValueError
    assert "\x1b[?25h" in stderr.getvalue()
