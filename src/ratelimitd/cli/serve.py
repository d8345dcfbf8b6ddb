"""``ratelimitd serve``, and what its operator needs: ``token`` and ``db upgrade``."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from hashlib import sha256
from typing import Annotated

import typer

from ratelimitd.cli.client_options import CliError
from ratelimitd.cli.options import group, takes_settings
from ratelimitd.cli.output import working
from ratelimitd.node.admin_token import TOKEN_BYTES
from ratelimitd.settings.table import Settings


def serve(settings: Settings) -> None:
    """Run a node.

    Every option is also an environment variable: --http-listen is RATELIMITD_HTTP_LISTEN. An option wins. A secret on
    a command line can be read by every user of the machine, so each secret can come from a file as well.

    When the node is ready it prints one line that begins with `ratelimitd ready`. SIGTERM, SIGINT and SIGHUP make it
    answer the calls in flight and stop; a second SIGTERM or SIGINT makes it stop at once.

    Example:
      ratelimitd serve
      ratelimitd serve --listen 0.0.0.0:9090 --admin-token-file admin.token --rules-file rules.yaml
    """
    # These imports take about 300 ms: other commands do without, and so does the parent of several workers.
    if settings.workers > 1:
        from ratelimitd.workers import parent  # noqa: PLC0415

        raise typer.Exit(parent.run(settings))
    from ratelimitd.node import supervisor  # noqa: PLC0415

    raise typer.Exit(supervisor.run(settings))


command = takes_settings(serve)


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


def upgrade(settings: Settings) -> None:
    """Upgrade the rule database to the schema of this release, if it is older.

    `serve` does this itself on SQLite. On PostgreSQL a new or older database waits for this command.

    Example:
      ratelimitd db upgrade --database-url postgresql://ratelimitd@db.internal/ratelimitd
    """
    # SQLAlchemy and Alembic take about 300 ms to import; other commands do without.
    from ratelimitd.rules.sql import migrations  # noqa: PLC0415

    with working("upgrading the rule database"):
        asyncio.run(migrations.upgrade(settings.database_url))
    print("the rule database is up to date")


app = group(
    "Maintain the rule database.", {"upgrade": takes_settings(upgrade, only=("DATABASE_URL",))}
)
