"""``ratelimitd db upgrade``: bring the rule database to the schema of this release."""

from __future__ import annotations

import asyncio

import typer

from ratelimitd.cli.command_help import help_of
from ratelimitd.cli.progress import working
from ratelimitd.cli.setting_options import takes_settings
from ratelimitd.settings import Settings

app = typer.Typer(help="Look after the rule database.", no_args_is_help=True, rich_markup_mode=None)


def upgrade(settings: Settings) -> None:
    """Bring the rule database to the schema of this release; a current one is left as it is.

    `serve` does this itself on SQLite. On PostgreSQL a new or older database waits for this command.

    Example:
      ratelimitd db upgrade --database-url postgresql://ratelimitd@db.internal/ratelimitd
    """
    # SQLAlchemy and Alembic take some 300 ms to import: the other commands start without.
    from ratelimitd.rules import migrations  # noqa: PLC0415

    with working("upgrading the rule database"):
        asyncio.run(migrations.upgrade(settings.database_url))
    print("the rule database is up to date")


app.command("upgrade", help=help_of(upgrade))(takes_settings(upgrade, only=("DATABASE_URL",)))
