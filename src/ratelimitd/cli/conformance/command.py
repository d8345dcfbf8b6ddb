"""The command: the server, the clock, the results as a table and as JSON, and the exit status."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final

import typer

from ratelimitd.cli.client_options import EXIT_ERROR, Target, asks_node, demand
from ratelimitd.cli.conformance.cases import TOLERANCE_S, cases
from ratelimitd.cli.conformance.own_rules import own_rules
from ratelimitd.cli.conformance.run import (
    CaseResult,
    Checked,
    RealTime,
    Refused,
    Runner,
    SystemTime,
)
from ratelimitd.cli.output import Output, working
from ratelimitd.model import US_PER_MS, US_PER_S

MOST_WORDS: Final = 100
"""Characters of a server's error in the table; JSON has all."""

MOST_DIFFERENCES: Final = 3
"""Differences per case in the table; the first usually explains the others, and JSON has all."""


@asks_node
def conformance(
    target: Target,
    *,
    one_batch: Annotated[
        bool,
        typer.Option("--one-batch", help="Also send all checks in one batch; not for clusters."),
    ] = False,
    real_time: Annotated[
        bool,
        typer.Option("--real-time", help="Use the clock of the server, and wait in real time."),
    ] = False,
    longest: Annotated[
        float,
        typer.Option(
            min=1,
            max=86_400,
            metavar="SECONDS",
            help="With --real-time: skip cases that take longer.",
        ),
    ] = 30.0,
    tolerance: Annotated[
        float,
        typer.Option(
            min=1,
            max=1_000,
            metavar="MS",
            help="With --real-time: longest delay of an answer.",
        ),
    ] = 20.0,
) -> None:
    """Test a server against the contract, and print a table of the cases.

    Any server of the contract: it makes rules for endpoints of its own (/conformance- and something random), and one
    for ** that denies nobody else, asks checks, and deletes the rules again, also after Ctrl-C. It needs the admin
    role. The checks carry the time that they are to be judged at, so the server must go by it (TIMESTAMPS=caller);
    with --real-time it goes by its own.

    Exit status: 0 as expected, 1 when an answer differs, a check is refused or none could be judged, 2 when the server
    cannot be asked.

    Example:
      ratelimitd conformance --target 127.0.0.1:9090
      ratelimitd conformance --real-time --longest 5 --json
    """
    demand(
        not (one_batch and real_time),
        "--one-batch and --real-time exclude each other: checks of one batch must carry their time",
    )
    name = f"conformance-{secrets.token_hex(6)}"
    chosen = cases()
    how = RealTime(round(longest * US_PER_S), round(tolerance * 1_000)) if real_time else None
    with target.client() as client, own_rules(target, client, f"/{name}", chosen) as places:
        runner = Runner(client, chosen, places, name=name, time=SystemTime())
        with working("asking checks"):
            results = (
                runner.with_virtual_time(one_batch=one_batch)
                if how is None
                else runner.with_real_time(how)
            )
    if target.output.as_json:
        target.output.json(as_json(results, target.address, how))
    else:
        print_table(results, target.output, how)
    if not passed(results):
        raise typer.Exit(EXIT_ERROR)


def print_table(results: Sequence[CaseResult], output: Output, how: RealTime | None) -> None:
    """Print a row per case, below it one per differing check, and a summary."""
    head = ("algorithm", "case", "checks", "expected", "got", "ok")
    output.table(head, (row for result in results for row in _rows(result)))
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
            f"in real time: every answer came within {within}, and its times may differ by {TOLERANCE_S} s"
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
                and {**_sent(result.refused), "error": result.refused.words},
                "checks": [
                    {
                        **_sent(check),
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


def _sent(check: Checked | Refused) -> dict[str, Any]:
    return {"number": check.number, "sent": check.way, "tokens_requested": check.cost}


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
