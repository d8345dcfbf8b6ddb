"""``ratelimitd rules import-envoy``: what envoyproxy/ratelimit was told, as a rules file. Asks no node."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from ratelimitd.cli.client_options import CliError, UsageError
from ratelimitd.cli.output import Output, printable
from ratelimitd.errors import RuleInvalidError
from ratelimitd.model import IdentifierType
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
    """Print the limits of a configuration of envoyproxy/ratelimit as a file that `rules apply` reads.

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
            _content(file), {key: IdentifierType(kind) for key, _, kind in pairs}
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
        print(printable(f"nodes need {SETTING}={needed}"), file=sys.stderr)


def _content(file: Path) -> bytes:
    """The bytes of the file, one more than allowed when it is too large."""
    try:
        with file.open("rb") as stream:
            return stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        message = f"cannot read {file}: {error.strerror}"
        raise UsageError(message) from None
