"""``ratelimitd rules import-envoy``: converts the configuration of another rate limiter to a rules file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from ratelimitd.cli.client_options import CliError, UsageError, read_file
from ratelimitd.cli.output import Output, counted
from ratelimitd.errors import RuleInvalidError, printable
from ratelimitd.rules.envoy_import import MAX_FILE_BYTES, import_config
from ratelimitd.rules.rules_file import dump_rules
from ratelimitd.settings.parsing import identifier_keys
from ratelimitd.settings.table import SETTINGS

SETTING: Final = "ENVOY_IDENTIFIERS"

_DEFAULT: Final = next(setting.default for setting in SETTINGS if setting.name == SETTING)


def import_envoy(
    *,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Configuration of envoyproxy/ratelimit, YAML.")
    ],
    identifiers: Annotated[
        str,
        typer.Option(
            metavar="KEY=TYPE,…", help=f"What {SETTING} is on the node.", show_default=False
        ),
    ] = _DEFAULT,
) -> None:
    """Convert a configuration of envoyproxy/ratelimit to a file for `rules apply`.

    What has no equivalent is listed on stderr, and so is what the setting ENVOY_IDENTIFIERS of the node has to be.

    Example:
      ratelimitd rules import-envoy config.yaml > rules.yaml
      ratelimitd rules apply -f rules.yaml --dry-run
    """
    try:
        pairs = [pair.rpartition("=") for pair in identifier_keys(identifiers)]
    except ValueError as error:
        message = f"--identifiers {error}"
        raise UsageError(message) from None
    try:
        imported = import_config(
            read_file(file, MAX_FILE_BYTES), {key: kind for key, _, kind in pairs}
        )
    except RuleInvalidError as error:
        message = f"{file}: {error.violations[0].description}"
        raise CliError(message) from None
    Output().line(dump_rules(imported.rules).rstrip("\n"))
    for note in imported.notes:
        print(printable(str(note)), file=sys.stderr)
    if imported.new_identifiers:
        added = [f"{key}={kind}" for key, kind in imported.new_identifiers.items()]
        needed = ",".join([*filter(None, [identifiers]), *added])
        typed = [f"{key}={key}" for key in imported.new_identifiers]
        other = ",".join([*filter(None, [identifiers]), *typed])
        print(printable(f"nodes need {SETTING}={needed}"), file=sys.stderr)
        hint = f"with types of their own, which IDENTIFIER_TYPES declares: --identifiers {other}"
        print(printable(hint), file=sys.stderr)
    rules = counted(len(imported.rules), "rule")
    print(f"{rules}, {counted(imported.left_out, 'limit')} left out", file=sys.stderr)
