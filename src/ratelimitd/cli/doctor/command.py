"""The command: takes the options of ``serve``, runs all checks, and prints their findings."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import typer

from ratelimitd.cli.client_options import EXIT_ERROR
from ratelimitd.cli.doctor.files import (
    check_admin_token,
    check_record_dir,
    check_rules_file,
    check_secrets,
    check_state_dir,
    check_store_certificate,
    check_tls,
    check_tokens_file,
)
from ratelimitd.cli.doctor.finding import (
    Finding,
    Level,
    check_event_loop,
    check_open_files,
    check_ports,
    check_unmatched,
    ok,
    problem,
)
from ratelimitd.cli.doctor.stores import (
    check_answer_without,
    check_database,
    check_shared_state,
)
from ratelimitd.cli.options import takes_settings
from ratelimitd.cli.output import Output
from ratelimitd.errors import SettingsError, printable
from ratelimitd.settings.sources import environment_of, file_of
from ratelimitd.settings.table import SETTINGS, Settings

_STYLES: Final = {Level.OK: "good", Level.WARNING: "warn", Level.PROBLEM: "bad"}

_LEVEL_WIDTH: Final = max(map(len, Level))


class Given(NamedTuple):
    """The environment and the flags, not yet validated: invalid settings are findings, too."""

    environ: Mapping[str, str]
    flags: Mapping[str, str | None]


def doctor(
    given: Given,
    *,
    json: Annotated[bool, typer.Option("--json", help="Print a list of objects.")] = False,
) -> None:
    """Diagnose the settings and dependencies of a node, with a remedy for each problem.

    Takes the options of `serve` and reads its environment: run it as the node's user, where the node runs, before or
    while it does. It changes nothing: what it tries in the shared state expires within a second.

    Exit status: 0 when there is no problem, 1 when there is one.

    Example:
      ratelimitd doctor
      ratelimitd doctor --redis-url redis://store.internal --json
    """
    names = [file_of(spec.name) for spec in SETTINGS if spec.secret]
    texts = {
        name: given.flags.get(name) or given.environ.get(environment_of(name)) for name in names
    }
    findings = list(check_secrets({name: Path(text) for name, text in texts.items() if text}))
    try:
        settings = Settings.load(given.environ, given.flags)
    except SettingsError as error:
        remedy = "docs/operations.md has every setting"
        findings += [problem("settings", part, remedy) for part in str(error).split("; ")]
    else:
        findings = [ok("settings", "each is valid"), *findings, *asyncio.run(_look(settings))]
    _report(findings, Output(as_json=json))
    if any(finding.level is Level.PROBLEM for finding in findings):
        raise typer.Exit(EXIT_ERROR)


command = takes_settings(doctor, load=Given)


async def _look(settings: Settings) -> list[Finding]:
    """Run every check separately, so that a failed one hides no other."""
    return [
        *check_admin_token(settings),
        *check_tokens_file(settings, datetime.now(UTC)),
        *check_tls(settings, datetime.now(UTC)),
        *check_store_certificate(settings, datetime.now(UTC)),
        *check_rules_file(settings),
        *check_state_dir(settings),
        *check_record_dir(settings),
        *await check_database(settings),
        *await check_shared_state(settings),
        *check_answer_without(settings),
        *await check_ports(settings),
        *await check_unmatched(settings),
        *check_open_files(),
        *check_event_loop(),
    ]


def _report(findings: Sequence[Finding], output: Output) -> None:
    if output.as_json:
        output.json([finding._asdict() for finding in findings])
        return
    area_width = max(len(finding.area) for finding in findings)
    for finding in findings:
        level = output.styled(f"{finding.level:<{_LEVEL_WIDTH}}", _STYLES[finding.level])
        output.line(f"{level}  {printable(finding.area):<{area_width}}  {printable(finding.what)}")
        if finding.remedy:
            output.line(f"{' ' * (_LEVEL_WIDTH + area_width + 2)}  → {printable(finding.remedy)}")
    counts = Counter(finding.level for finding in findings)
    output.line(
        f"problems: {counts[Level.PROBLEM]}, warnings: {counts[Level.WARNING]}, fine: {counts[Level.OK]}"
    )
