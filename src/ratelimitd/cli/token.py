"""``ratelimitd token``: generates a random token and its entry for TOKENS_FILE."""

from __future__ import annotations

import json
import secrets
import sys
from hashlib import sha256
from typing import Annotated

import typer

from ratelimitd.cli.client_options import CliError
from ratelimitd.node.admin_token import TOKEN_BYTES


def token(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name in the audit trail.")],
    *,
    role: Annotated[str, typer.Option(metavar="ROLE", help="check, read or admin.")] = "read",
) -> None:
    """Make a random token: its entry for TOKENS_FILE on stdout, the token on stderr.

    The token is stored nowhere else; the file has its SHA-256 alone. A running node loads the file when it changes.

    Example:
      echo tokens: > tokens.yaml
      ratelimitd token alice --role admin >> tokens.yaml
    """
    # Imports the services, which other commands do without.
    from ratelimitd.node.tokens_file import TOKENS_KEY, parse_tokens  # noqa: PLC0415
    from ratelimitd.rules.yaml_reader import YamlError  # noqa: PLC0415

    made = secrets.token_urlsafe(TOKEN_BYTES)
    entry = {"name": name, "role": role, "sha256": sha256(made.encode()).hexdigest()}
    line = f"- {json.dumps(entry)}"
    try:
        parse_tokens(f"{TOKENS_KEY}:\n{line}".encode())
    except YamlError as error:
        message = str(error).partition(".")[2].rpartition(" (line")[0]
        raise CliError(message) from None
    print(line)
    print(made, file=sys.stderr)
