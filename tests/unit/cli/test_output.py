"""The output: JSON with the contract's names, fitting tables, colour and progress on terminals only; keys."""

import io
import json
import os
import signal
import sys
import termios

import pytest

from ratelimitd.cli.output import (
    LONG,
    Output,
    as_dict,
    duration,
    enum_name,
    on_signal,
    progress,
    single_keys,
    sparkline,
    table_lines,
    window,
    working,
)
from ratelimitd.errors import printable
from ratelimiter.v1 import ratelimiter_pb2 as pb


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59, "59 s"), (60, "1 min"), (90_061, "1 d 1 h"), (86_400, "1 d")],
)
def test_duration_is_shown_in_its_two_largest_units(seconds, text):
    assert duration(seconds) == text


def test_window_is_exact_to_the_second():
    assert (window(90_061), window(86_400)) == ("1 d 1 h 1 min 1 s", "1 d")


@pytest.mark.parametrize(
    ("values", "bars"),
    [((), ""), ((0, 0), "▁▁"), ((1, 2, 4, 8), "▂▃▅█"), ((9,) * 20, "█" * 10)],
)
def test_last_values_are_bars(values, bars):
    assert sparkline(values, 10) == bars


def test_json_has_every_field_with_the_contracts_names_and_order():
    assert list(as_dict(pb.RateLimitResponse(reason=pb.NO_RULE)).items()) == [
        ("allowed", False),
        ("remaining_tokens", 0),
        ("reset_time", "0"),
        ("retry_after_seconds", 0),
        ("reason", "NO_RULE"),
        ("limit", 0),
        ("window_seconds", 0),
        ("rule_id", ""),
        ("error", ""),
        ("limits", []),
        ("limit_name", ""),
        ("plan", ""),
        ("wait_ms", 0),
    ]


def test_field_with_presence_is_shown_only_when_set():
    assert "enabled" not in as_dict(pb.RateLimit())
    assert as_dict(pb.RateLimit(enabled=False))["enabled"] is False


def test_message_is_one_json_object(capsys):
    Output(as_json=True).message(pb.RateLimit(endpoint="/é"))
    text = capsys.readouterr().out
    assert json.loads(text)["endpoint"] == "/é"
    assert "/é" in text


@pytest.mark.parametrize("values", [[], [1], [{"a": [1, 2]}, {"b": "\n"}]])
def test_list_printed_in_pieces_is_one_json_list(capsys, values):
    Output().json_list(iter(values))
    text = capsys.readouterr().out
    assert json.loads(text) == values
    assert text.endswith("]\n")


def test_table_without_rows_is_its_head():
    assert table_lines(("NAME", "N"), [], 80) == ["NAME  N"]


def test_widest_column_shrinks_on_a_narrow_terminal_down_to_its_minimum():
    row = ("short", "x" * 50)
    assert table_lines(("A", "B"), [row], 30)[1] == "short  " + "x" * 22 + "…"
    assert table_lines(("A", "B"), [row], 10)[1] == "short  " + "x" * 11 + "…"
    assert table_lines(("A", "B"), [row], 57)[1] == "short  " + "x" * 50


def test_wide_and_combining_characters_keep_columns_aligned_and_within_the_terminal():
    rows = [("日本", 1), ("e\u0301", 20), ("👩", 3), ("x" * 9, 4)]
    assert table_lines(("NAME", "N"), rows, None) == [
        "NAME        N",
        "日本        1",
        "e\u0301          20",
        "👩          3",
        "xxxxxxxxx   4",
    ]
    assert table_lines(("A", "B"), [("short", "日" * 50)], 30)[1] == "short  " + "日" * 11 + "…"
    assert table_lines(("A", "B"), [("short", "日" * 50)], 29)[1] == "short  " + "日" * 10 + " …"


@pytest.mark.parametrize(("stream", "cell"), [(Terminal, "x" * 19 + "…"), (io.StringIO, "x" * 40)])
def test_terminal_sets_the_width_of_a_table_and_a_pipe_does_not(monkeypatch, stream, cell):
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", stream())
    Output().table(("A",), [("x" * 40,)])
    assert sys.stdout.getvalue() == f"A\n{cell}\n"


@pytest.mark.parametrize(
    ("terminal", "environ", "coloured"),
    [
        (True, {}, True),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),
        (True, {"TERM": "dumb"}, False),
        (False, {}, False),
    ],
)
def test_colour_is_used_on_capable_terminals_only(monkeypatch, terminal, environ, coloured):
    monkeypatch.setattr(sys, "stdout", Terminal() if terminal else io.StringIO())
    monkeypatch.setattr(os, "environ", environ)
    assert Output().styled("yes", "good") == ("\x1b[32myes\x1b[0m" if coloured else "yes")


def test_pairs_are_aligned(capsys):
    Output().pairs([("a", "1"), ("long", "2")])
    assert capsys.readouterr().out == "  a     1\n  long  2\n"


def test_foreign_text_cannot_control_the_terminal(capsys):
    assert printable("a\x1b[2Jb\r\nc") == "a\N{REPLACEMENT CHARACTER}[2Jb  c"
    Output().table(("A",), [("\x1b[2J",)])
    assert "\x1b" not in capsys.readouterr().out


def test_enum_value_is_shown_by_name_and_one_of_a_later_release_by_number():
    assert enum_name(pb.Reason, pb.NO_RULE) == "NO_RULE"
    assert enum_name(pb.Reason, 99) == "99"


@pytest.mark.parametrize("printed", [0, 2])
def test_interrupted_json_list_is_valid_json(capsys, printed):
    def values():
        yield from range(printed)
        message = "the node is gone"
        raise ConnectionError(message)

    with pytest.raises(ConnectionError):
        Output().json_list(values())
    assert json.loads(capsys.readouterr().out) == list(range(printed))


@pytest.fixture
def terminal(monkeypatch):
    """Make stderr a terminal; within the test, since pytest replaces it at the start."""

    def make():
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys, "stderr", Terminal())
        return sys.stderr

    return make


def work(steps):
    with progress("applying", steps) as step_done:
        for _ in range(steps):
            step_done()


def test_long_work_has_a_bar_on_a_terminal_which_disappears_at_the_end(terminal):
    stderr = terminal()
    work(LONG)
    assert "applying" in stderr.getvalue()
    assert "100%" in stderr.getvalue()
    assert stderr.getvalue().endswith("\x1b[2K")


def test_short_work_has_no_bar(terminal):
    stderr = terminal()
    work(LONG - 1)
    assert stderr.getvalue() == ""


def test_pipe_gets_no_bar(capsys):
    work(LONG)
    with working("upgrading"):
        pass
    assert capsys.readouterr() == ("", "")


def test_work_of_unknown_length_shows_activity(terminal):
    stderr = terminal()
    with working("upgrading the rule database"):
        pass
    assert "upgrading the rule database" in stderr.getvalue()


def test_failure_restores_the_terminal(terminal):
    stderr = terminal()
    with pytest.raises(ValueError), progress("applying", LONG):
        raise ValueError
    assert "\x1b[?25h" in stderr.getvalue()


def test_keyboard_needs_a_terminal():
    with single_keys() as found:
        assert found is None


@pytest.mark.parametrize("key", [b"q", b"Q", b"\x04"])
def test_quit_key_ends_the_wait_without_enter(keyboard, key):
    with single_keys() as found:
        os.write(keyboard, b"x" + key)
        assert found.quits_within(60)


def test_other_keys_do_not_end_the_wait(keyboard):
    with single_keys() as found:
        os.write(keyboard, b"x")
        assert not found.quits_within(0.01)
        assert not found.quits_within(0)


def test_terminal_is_restored(keyboard):
    before = termios.tcgetattr(keyboard)
    with single_keys():
        assert termios.tcgetattr(keyboard) != before
    assert termios.tcgetattr(keyboard) == before


def test_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with on_signal(signal.SIGHUP, signal.default_int_handler):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
