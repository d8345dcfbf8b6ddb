"""The table and the JSON of a run."""

import io
import re
from contextlib import redirect_stdout

from ratelimitd.cli.conformance.cases import cases
from ratelimitd.cli.conformance.command import as_json, passed, print_table
from ratelimitd.cli.conformance.run import CaseResult, Checked, RealTime, Refused
from ratelimitd.cli.output import Output

CASE, OTHER = cases()[:2]


def checked(number, **changes):
    expected = CASE.steps[number].expected
    got = expected._replace(**changes)
    return Checked(number, "alone", 1, expected, got, expected.differences(got))


RIGHT = CaseResult(CASE, [checked(number) for number in range(5)])
WRONG = CaseResult(CASE, [checked(0), checked(1, allowed=False, reset_time=7), checked(2)])
REFUSED = CaseResult(
    CASE,
    [checked(0)],
    refused=Refused(1, "alone", 1, "INVALID_ARGUMENT: cost: " + "too large " * 20),
)
LEFT_OUT = CaseResult(OTHER, [], "it takes longer")


def printed(*results, how=None):
    stream = io.StringIO()
    with redirect_stdout(stream):
        print_table(results, Output(), how)
    return stream.getvalue().splitlines()


def test_passed_case_is_one_row():
    head, row, _, sentence = printed(RIGHT)
    assert head.split() == ["algorithm", "case", "checks", "expected", "got", "ok"]
    assert row.split("  ")[0] == "fixed_window"
    assert row.endswith("5       3 allowed, 2 denied  3 allowed, 2 denied  yes")
    assert sentence == "1 cases as expected"


def test_difference_is_shown_by_field_below_its_case():
    lines = printed(WRONG)
    assert lines[1].endswith("NO")
    assert lines[2].strip().startswith("check 2 alone, cost 1")
    assert lines[2].endswith("allowed true           false")
    assert lines[3].split() == ["reset_time", "1700006460", "7"]
    assert lines[-1] == "1 of 1 cases differ"


def test_only_the_first_differences_are_shown_with_the_number_of_others():
    many = CaseResult(CASE, [checked(number, limit=9) for number in range(5)])
    text = "\n".join(printed(many))
    assert text.count("limit 2") == 3
    assert "  and 2 more checks" in text


def test_case_without_a_result_shows_the_reason():
    lines = printed(RIGHT, LEFT_OUT)
    assert "not judged: it takes longer" in lines[2]
    assert lines[-2:] == ["1 cases as expected", "1 not judged"]


def test_refused_check_is_shown_below_its_case_with_the_servers_error():
    lines = printed(REFUSED)
    assert re.split(" {2,}", lines[1])[2:] == [
        "1",
        "1 allowed, 0 denied",
        "1 allowed, 0 denied",
        "NO",
    ]
    assert lines[2].strip().startswith("check 2 alone, cost 1")
    assert "a decision           refused: INVALID_ARGUMENT: cost: too large too" in lines[2]
    assert lines[2].count("too large") == 7
    assert lines[-1] == "1 of 1 cases differ"


def test_case_with_a_refused_first_check_has_no_verdicts():
    lines = printed(CaseResult(CASE, [], refused=Refused(0, "beforehand", 1, "INTERNAL")))
    assert re.split(" {2,}", lines[1])[-3:] == ["0 allowed, 0 denied", "0 allowed, 0 denied", "NO"]
    assert lines[2].strip().startswith("check 1 beforehand, cost 1")


def test_json_has_every_check_with_the_contracts_names():
    report = as_json([WRONG, LEFT_OUT], "h:1", None)
    assert (report["target"], report["clock"], report["ok"]) == ("h:1", "caller", False)
    wrong, left_out = report["cases"]
    assert (wrong["ok"], wrong["not_judged"], wrong["refused"]) == (False, None, None)
    assert (left_out["ok"], left_out["not_judged"]) == (None, "it takes longer")
    assert wrong["checks"][1] == {
        "number": 1,
        "sent": "alone",
        "tokens_requested": 1,
        "expected": CASE.steps[1].expected.fields(),
        "got": CASE.steps[1].expected._replace(allowed=False, reset_time=7).fields(),
        "differences": ["allowed", "reset_time"],
    }


def test_json_has_the_whole_error_of_a_refused_check():
    [refused] = as_json([REFUSED], "h:1", None)["cases"]
    assert not refused["ok"]
    assert refused["refused"] == {
        "number": 1,
        "sent": "alone",
        "tokens_requested": 1,
        "error": REFUSED.refused.words,
    }


def test_run_without_results_has_not_passed():
    assert passed([RIGHT, LEFT_OUT])
    assert not passed([WRONG, RIGHT])
    assert not passed([REFUSED, RIGHT])
    assert not passed([LEFT_OUT])


def test_real_time_report_has_the_tolerances():
    how = RealTime(30_000_000, 20_000)
    assert printed(RIGHT, how=how)[-1] == (
        "in real time: every answer came within 20 ms, and its times may differ by 1 s"
    )
    report = as_json([RIGHT], "h:1", how)
    assert (report["clock"], report["tolerance_ms"]) == ("server", 20.0)
