"""`backtest`: replayed traces as text, JSON and picture, and its errors."""

import json
from xml.etree import ElementTree as ET

import pytest

from ratelimitd.backtest.trace import Block, End, Kind, encode_block, encode_end, header

AT_US = 1_700_006_400_000_000
TIGHT = "rules: [{endpoint: /orders, identifier_type: user, limit: 2, window: 1m, algorithm: fixed_window}]"
WIDE = TIGHT.replace("limit: 2", "limit: 100")


@pytest.fixture
def trace(tmp_path):
    """Four checks a second apart, of which the last was denied, and one of another identity."""
    directory = tmp_path / "trace"
    directory.mkdir()
    recorded = whole([b"\xaa" * 8] * 4 + [b"\xbb" * 8], [1, 1, 1, 0, 1], 7, End(5, 2, 0.25))
    (directory / "1.trace").write_bytes(recorded)
    (directory / "2.part").write_bytes(b"")
    return directory


def whole(identities, allowed, lost=0, end=None):
    """A file of checks a second apart."""
    count = len(identities)
    block = Block(
        kinds=[Kind(("user",), "/orders")],
        times=[AT_US + second * 1_000_000 for second in range(count)],
        identities=identities,
        costs=[1] * count,
        numbers=[0] * count,
        allowed=allowed,
        lost=lost,
    )
    return header(b"T" * 16, b"W" * 8) + encode_block(block) + encode_end(end or End(count))


@pytest.fixture
def rules(tmp_path):
    def write(text):
        file = tmp_path / "rules.yaml"
        file.write_text(text)
        return file

    return write


def test_new_denials_are_printed_beside_the_recorded_ones(run, trace, rules):
    ended = run("backtest", trace, "--rules", rules(TIGHT))
    assert (ended.status, ended.err) == (4, "")
    assert ended.out == (
        "5 checks of 2 identities, 2023-11-15T00:00:00Z to 2023-11-15T00:00:04Z\n"
        "  denied             2 (40.00 %), was 1\n"
        "  newly denied       1\n"
        "  newly allowed      0\n"
        "  identities denied  1, was 1\n"
        "  denied for         median 1.0 s, 99 % 1.0 s, longest 1.0 s\n"
        "\n"
        "ENDPOINT  TYPES  CHECKS  WAS DENIED  DENIED\n"
        "/orders   user        5           1       2\n"
        "\n"
        "RULE     TYPE  LIMIT  WINDOW_S  ALGORITHM     DENIED  IDENTITIES  SPARES 99 %\n"
        "/orders  user  2            60  fixed_window       2  1 of 2                4\n"
        "\n"
        "IDENTITY          TYPE  WAS DENIED  DENIED  LONGEST S\n"
        "aaaaaaaaaaaaaaaa  user           1       2  1.0\n"
        "25 % of the identities were recorded: limits that several identities share see only these checks\n"
        "7 checks could not be recorded\n"
        "2 holds were made meanwhile, and are not in the trace\n"
        "files that are not finished, and were left out: 1\n"
        "read up to 2023-11-15T00:00:04Z; newer checks of a node that records become readable within 5 min,"
        " or when it stops\n"
    )


def test_one_check_is_singular_and_a_whole_file_has_no_caveat(run, tmp_path, rules):
    file = tmp_path / "1.trace"
    file.write_bytes(whole([b"\xaa" * 8], [1]))
    lines = run("backtest", file, "-f", rules(WIDE)).out.splitlines()
    assert lines[0].startswith("1 check of 1 identity, ")
    assert "read up to" not in lines[-1]


@pytest.mark.parametrize("rest", ["", "1 other", "3 others"])
def test_unnamed_denied_identities_are_counted(run, tmp_path, rules, rest):
    identities = 20 + int(rest[:1] or 0)
    file = tmp_path / "1.trace"
    file.write_bytes(
        whole([bytes([number]) * 8 for number in range(identities)] * 3, [1] * 3 * identities)
    )
    daily = rules(TIGHT.replace("1m", "1d"))
    *named, last = run("backtest", file, "-f", daily).out.splitlines()
    named += [] if rest else [last]
    assert sum(line.endswith("  0.0") for line in named) == 20
    assert (last == f"and {rest}") == bool(rest)


def test_rules_without_new_denials_are_status_0(run, trace, rules):
    ended = run("backtest", trace, "-f", rules(WIDE), "--json")
    assert ended.status == 0
    report = json.loads(ended.out)
    assert (report["denied"], report["denied_before"], report["newly_allowed"]) == (0, 1, 1)
    assert report["limits"][0]["sparing"] == 4
    assert report["pauses_s"] == {"median": 0, "p99": 0, "longest": 0}


def test_trace_without_matching_rule_and_denials_has_a_short_report(run, trace, rules):
    ended = run("backtest", trace, "-f", rules("rules: []"))
    assert ended.status == 0
    assert "RULE " not in ended.out
    assert "IDENTITY " not in ended.out


def test_plans_names_and_observed_limits_are_distinguished(run, trace, rules):
    text = """\
rules:
  - endpoint: /orders
    identifier_type: user
    limits:
      - {name: minute, limit: 2, window: 1m, algorithm: fixed_window}
      - {name: hour, limit: 1, window: 1h, algorithm: fixed_window, enforcement: observe}
"""
    out = run("backtest", trace, "-f", rules(text)).out
    assert "/orders  user  2 (minute)                60" in out
    assert "/orders  user  1 (hour), observed      3600" in out


def test_callers_may_retry(run, trace, rules):
    out = run("backtest", trace, "-f", rules(TIGHT), "--retries", "immediate").out
    assert "  retries            6, 0 allowed\n" in out


def test_picture_is_drawn(run, trace, rules, tmp_path):
    file = tmp_path / "denials.svg"
    run("backtest", trace, "-f", rules(TIGHT), "--picture", file)
    picture = ET.fromstring(file.read_text())  # noqa: S314 -- our own
    assert picture.findtext("{*}title") == "denied by these rules: 2 of 5 checks; was: 1"
    assert len(picture.findall("{*}path")) == 2


def test_unwritable_picture_is_reported(run, trace, rules, tmp_path):
    ended = run("backtest", trace, "-f", rules(TIGHT), "--picture", tmp_path / "no" / "x.svg")
    assert (ended.status, ended.out) == (2, "")
    assert "--picture: cannot write" in ended.err


def test_damaged_trace_is_reported_without_output(run, trace, rules):
    file = trace / "1.trace"
    file.write_bytes(file.read_bytes()[:-3])
    ended = run("backtest", trace, "-f", rules(TIGHT))
    assert (ended.status, ended.out) == (1, "")
    assert ended.err.startswith(f"Error: {file} is cut: the block at byte ")


def test_missing_trace_is_reported(run, rules, tmp_path):
    ended = run("backtest", tmp_path / "none", "-f", rules(TIGHT))
    assert (ended.status, ended.out) == (2, "")
    assert (
        ended.err == f"Error: TRACE: cannot read {tmp_path / 'none'}: No such file or directory\n"
    )


def test_invalid_file_is_reported_with_the_place_of_each_error(run, trace, rules):
    ended = run("backtest", trace, "-f", rules(TIGHT.replace("limit: 2", "limit: 0")))
    assert (ended.status, ended.out) == (1, "")
    assert "is refused, nothing was replayed:\n  rules[0].limit: " in ended.err


def test_missing_file_is_reported(run, trace, tmp_path):
    ended = run("backtest", trace, "-f", tmp_path / "none.yaml")
    assert ended.status == 2
    assert ended.err.startswith("Error: --rules: cannot read ")
