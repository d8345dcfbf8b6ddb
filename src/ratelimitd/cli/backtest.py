"""``ratelimitd backtest``: replays recorded checks with other rules.

Calls no node: reads a trace and a rules file.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from ratelimitd.backtest import report as reports
from ratelimitd.backtest.recorder import FILE_S
from ratelimitd.backtest.replay import Trace
from ratelimitd.backtest.report import BINS, MAX_RETRIES, OfLimit, Report, Retries
from ratelimitd.backtest.sparing import SPARED_PERCENT
from ratelimitd.cli.client_options import (
    EXIT_CHANGES,
    EXIT_USAGE,
    CliError,
    UsageError,
    read_file,
    refusing,
)
from ratelimitd.cli.output import Output, counted, duration
from ratelimitd.cli.picture import panel_from_zero, svg, write_picture
from ratelimitd.errors import TraceInvalidError, printable
from ratelimitd.model import DEFAULT_LIMIT, US_PER_S, Enforcement, Rule
from ratelimitd.rules.rules_file import MAX_FILE_BYTES, parse_rules
from ratelimitd.rules.validation import validated

RULES_OPTION: Final = "--rules"


def backtest(
    trace: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACE...",
            help="The RECORD_DIR of the node that recorded, or files in it.",
        ),
    ],
    *,
    rules: Annotated[
        Path,
        typer.Option(
            RULES_OPTION, "-f", metavar="FILE", help="The rules, YAML; - reads standard input."
        ),
    ],
    retries: Annotated[
        Retries, typer.Option(help=f"How callers retry after a denial, up to {MAX_RETRIES} times.")
    ] = Retries.NONE,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw denials over time into this SVG file."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object.")] = False,
) -> None:
    """Replay recorded checks by the rules of a file, and print who would be denied, beside who was.

    Buckets begin full, and plans are those that identities had. An identity is shown as the trace has it, by a digest.

    Exit status: 0 when the rules deny nothing that was allowed, 4 when they do, 1 when the trace or the file is
    refused.

    Example:
      ratelimitd backtest /var/lib/ratelimitd/trace --rules new.yaml
      ratelimitd backtest trace -f new.yaml --retries backoff --json | jq .denied
    """
    wanted = _rules(rules)
    try:
        report = reports.backtest(Trace(*trace), wanted, retries)
    except TraceInvalidError as error:
        raise CliError(str(error)) from None
    except OSError as error:
        message = f"TRACE: cannot read {error.filename}: {error.strerror}"
        raise UsageError(message) from None
    if picture is not None:
        write_picture(picture, _drawn(report), EXIT_USAGE)
    output = Output(as_json=as_json)
    if as_json:
        output.json(_as_dict(report))
    else:
        _show(report, output)
        if any(path.is_dir() for path in trace):
            output.line(
                f"read up to {_time(report.last_us)}; newer checks of a recording node become readable within"
                f" {duration(FILE_S)}, or when it stops"
            )
    if report.newly_denied:
        raise typer.Exit(EXIT_CHANGES)


def _rules(file: Path) -> list[Rule]:
    """Read the rules; those without an id in the file get their position as id."""
    with refusing(file, "replayed"):
        drafts = parse_rules(read_file(file, MAX_FILE_BYTES, RULES_OPTION, may_be_stdin=True))
        return [
            validated(draft, rule_id=draft.id or str(place), revision=1)
            for place, draft in enumerate(drafts)
        ]


def _as_dict(report: Report) -> dict[str, Any]:
    return {
        **report._asdict(),
        "pauses_s": dict(zip(("median", "p99", "longest"), report.pauses_s, strict=True)),
        "endpoints": [one._asdict() for one in report.endpoints],
        "limits": [
            {
                "endpoint": one.rule.endpoint,
                "identifier_type": one.rule.identifier_type,
                "name": one.limit.name,
                "plan": one.plan,
                "limit": one.limit.limit,
                "window_seconds": one.limit.window_seconds,
                "algorithm": one.limit.algorithm,
                "enforcement": one.limit.enforcement,
                "denied": one.denied,
                "identities": one.identities,
                "identities_denied": one.identities_denied,
                "sparing": one.sparing or None,
            }
            for one in report.limits
        ],
        "named": [one._asdict() for one in report.named],
        "bins": [{"denied_before": before, "denied": now} for before, now in report.bins],
    }


def _show(report: Report, output: Output) -> None:
    begin, end = _time(report.first_us), _time(report.last_us)
    checks = counted(report.checks, "check")
    identities = counted(report.identities, "identity", "identities")
    output.line(f"{checks} of {identities}, {begin} to {end}")
    output.pairs(_summary(report))
    if report.endpoints:
        output.line()
        output.table(
            ("ENDPOINT", "TYPES", "CHECKS", "WAS DENIED", "DENIED"),
            [(printable(one.endpoint), *one[1:]) for one in report.endpoints],
        )
    if report.limits:
        output.line()
        numbers = ("DENIED", "IDENTITIES", f"SPARES {SPARED_PERCENT} %")
        head = ("RULE", "TYPE", "LIMIT", "WINDOW_S", "ALGORITHM", *numbers)
        output.table(head, map(_limit_row, report.limits))
    if report.named:
        output.line()
        output.table(
            ("IDENTITY", "TYPE", "WAS DENIED", "DENIED", "LONGEST S"),
            [(*one[:-1], f"{one.longest_s:.1f}") for one in report.named],
        )
        if more := report.identities_denied - len(report.named):
            output.line(f"and {counted(more, 'other')}")
    for line in _caveats(report):
        output.line(output.styled(line, "warn"))


def _summary(report: Report) -> Iterator[tuple[str, str]]:
    share = 100 * report.denied / report.checks if report.checks else 0
    yield "denied", f"{report.denied} ({share:.2f} %), was {report.denied_before}"
    yield "newly denied", str(report.newly_denied)
    yield "newly allowed", str(report.newly_allowed)
    identities = f"{report.identities_denied}, was {report.identities_denied_before}"
    yield "identities denied", identities
    median_s, high_s, longest_s = report.pauses_s
    times = f"median {median_s:.1f} s, 99 % {high_s:.1f} s, longest {longest_s:.1f} s"
    yield "denied for", times
    if report.retried:
        yield "retries", f"{report.retried}, {report.allowed_later} allowed"


def _limit_row(one: OfLimit) -> tuple[object, ...]:
    name = str(one.limit.limit)
    if one.limit.name != DEFAULT_LIMIT:
        name += f" ({one.limit.name})"
    if one.plan:
        name += f", plan {one.plan}"
    if one.limit.enforcement is Enforcement.OBSERVE:
        name += ", observed"
    return (
        printable(one.rule.endpoint),
        one.rule.identifier_type,
        name,
        one.limit.window_seconds,
        one.limit.algorithm,
        one.denied,
        f"{one.identities_denied} of {one.identities}",
        one.sparing or "",
    )


def _caveats(report: Report) -> Iterator[str]:
    """Yield the reasons for which the figures differ from a real run."""
    if report.share < 1:
        share = f"{100 * report.share:g} % of the identities were recorded"
        yield f"{share}: limits that several identities share see only these checks"
    if report.lost:
        yield f"{report.lost} checks could not be recorded"
    if report.holds:
        yield f"{report.holds} holds were made during the recording and are not in the trace"
    if report.unfinished:
        yield f"unfinished files left out: {report.unfinished}"
    if report.evicted:
        yield f"{report.evicted} buckets did not fit into memory, and began full again"


def _time(at_us: int) -> str:
    return datetime.fromtimestamp(at_us // US_PER_S, UTC).isoformat().replace("+00:00", "Z")


def _minute(at_us: int) -> str:
    return _time(at_us)[5:16].replace("T", " ")


def _drawn(report: Report) -> str:
    """Return denials over time as SVG: an area for those of the new rules, a line for those recorded."""
    head = f"denied by these rules: {report.denied:,} of {report.checks:,} checks; was: {report.denied_before:,}"
    most = max(4, *(max(one) for one in report.bins))
    panel, grid = panel_from_zero(50, BINS, most)
    parts = [
        *grid,
        panel.up(0, _minute(report.first_us)),
        panel.up(BINS, _minute(report.last_us)),
        panel.area((bin_, now) for bin_, (_, now) in enumerate(report.bins, 1)),
        panel.line(0, ((bin_, was) for bin_, (was, _) in enumerate(report.bins, 1))),
    ]
    return svg(head, "The area is what these rules deny, the line what was denied.", 250, parts)
