"""The results of a run: as a table, as JSON, and as pass or fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from ratelimitd.cli.conformance.cases import TOLERANCE_S
from ratelimitd.cli.conformance.run import CaseResult, Checked, RealTime, Refused
from ratelimitd.cli.output import Output
from ratelimitd.model import US_PER_MS

HEAD: Final = ("algorithm", "case", "checks", "expected", "got", "ok")

MOST_WORDS: Final = 100
"""Characters of a server's error in the table; JSON has all."""

MOST_DIFFERENCES: Final = 3
"""Differences per case in the table; the first usually explains the others, and JSON has all."""


def print_table(results: Sequence[CaseResult], output: Output, how: RealTime | None) -> None:
    """Print a row per case, below it one per differing check, and a summary."""
    output.table(HEAD, (row for result in results for row in _rows(result)))
    output.line()
    judged = [result for result in results if not result.not_judged]
    wrong = sum(not result.ok for result in judged)
    output.line(
        output.styled(f"{wrong} of {len(judged)} cases differ", "bad")
        if wrong
        else output.styled(f"{len(judged)} cases as expected", "good")
    )
    if len(judged) < len(results):
        output.line(f"{len(results) - len(judged)} not judged")
    if how is not None:
        within = f"{how.tolerance_us / US_PER_MS:g} ms"
        output.line(
            f"in real time: every answer came within {within}, and may tell times that differ by {TOLERANCE_S} s"
        )


def as_json(results: Sequence[CaseResult], target: str, how: RealTime | None) -> dict[str, Any]:
    """Return all results of a run, with every check."""
    return {
        "target": target,
        "clock": "caller" if how is None else "server",
        "tolerance_ms": how and how.tolerance_us / US_PER_MS,
        "ok": passed(results),
        "cases": [
            {
                "algorithm": result.case.algorithm,
                "name": result.case.name,
                "limit": result.case.limit,
                "window_seconds": result.case.window_seconds,
                "burst": result.case.burst,
                "ok": None if result.not_judged else result.ok,
                "not_judged": result.not_judged or None,
                "refused": result.refused
                and {
                    "number": result.refused.number,
                    "sent": result.refused.way,
                    "tokens_requested": result.refused.cost,
                    "error": result.refused.words,
                },
                "checks": [
                    {
                        "number": check.number,
                        "sent": check.way,
                        "tokens_requested": check.cost,
                        "expected": check.expected.fields(),
                        "got": check.got.fields(),
                        "differences": check.differences,
                    }
                    for check in result.checks
                ],
            }
            for result in results
        ],
    }


def passed(results: Sequence[CaseResult]) -> bool:
    """Return whether at least one case was judged and none differs."""
    return all(result.ok for result in results) and any(not result.not_judged for result in results)


def _rows(result: CaseResult) -> Iterator[tuple[object, ...]]:
    case = result.case
    name = (str(case.algorithm), case.name)
    if result.not_judged:
        yield (*name, "", "", f"not judged: {result.not_judged}", "–")
        return
    expected = _verdicts([check.expected.allowed for check in result.checks])
    got = _verdicts([check.got.allowed for check in result.checks])
    yield (*name, str(len(result.checks)), expected, got, "yes" if result.ok else "NO")
    if result.refused is not None:
        words = f"refused: {result.refused.words[:MOST_WORDS]}"
        yield ("", _label(result.refused), "", "a decision", words, "")
    different = [check for check in result.checks if check.differences]
    for check in different[:MOST_DIFFERENCES]:
        yield from _difference_rows(check)
    if len(different) > MOST_DIFFERENCES:
        yield ("", f"  and {len(different) - MOST_DIFFERENCES} more checks", "", "", "", "")


def _label(check: Checked | Refused) -> str:
    return f"  check {check.number + 1} {check.way}, cost {check.cost}"


def _difference_rows(check: Checked) -> Iterator[tuple[object, ...]]:
    label = _label(check)
    wanted, found = check.expected.fields(), check.got.fields()
    for name in check.differences:
        expected, got = wanted.get(name, "–"), found.get(name, "–")
        yield ("", label, "", f"{name} {_text(expected)}", _text(got), "")
        label = ""


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _verdicts(allowed: Sequence[bool]) -> str:
    return f"{sum(allowed)} allowed, {len(allowed) - sum(allowed)} denied"
