"""``ratelimitd dev …``: tools for local experiments by developers; not for production."""

from __future__ import annotations

import typer

from ratelimitd.cli.dev.command import cluster
from ratelimitd.cli.options import help_of

app = typer.Typer(
    help="Run a cluster for development.", no_args_is_help=True, rich_markup_mode=None
)


app.command(help=help_of(cluster))(cluster)
