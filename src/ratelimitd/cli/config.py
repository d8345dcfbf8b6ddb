"""``ratelimitd config show``: what a node started here and now would be set to."""

from __future__ import annotations

from typing import Annotated

import typer

from ratelimitd.cli.command_help import help_of
from ratelimitd.cli.output import Output
from ratelimitd.cli.setting_options import takes_settings
from ratelimitd.settings import Settings

app = typer.Typer(help="Show how a node is set.", no_args_is_help=True, rich_markup_mode=None)


def show(
    settings: Settings,
    *,
    json: Annotated[bool, typer.Option("--json", help="Print a list of objects.")] = False,
) -> None:
    """Show every setting, its value and where it came from; secrets are masked.

    Reads the environment and takes the options of `serve`, so it answers for that command line.

    Example:
      ratelimitd config show
      RATELIMITD_DRAIN_S=30 ratelimitd config show --json
    """
    output = Output(as_json=json)
    rows = settings.describe()
    if json:
        output.json([row._asdict() for row in rows])
    else:
        output.table(("SETTING", "VALUE", "SOURCE"), rows)


app.command("show", help=help_of(show))(takes_settings(show))
