"""Commands with options and in groups; the settings of a node become options, so that none can be missing.

Does not validate: :mod:`ratelimitd.settings.table` defines names and values.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

import typer

from ratelimitd.cli.output import Output
from ratelimitd.settings.sources import file_of, flag_of
from ratelimitd.settings.table import SETTINGS, Settings, SettingSpec


def takes_settings(
    command: Callable[..., None],
    only: Collection[str] = (),
    load: Callable[[Mapping[str, str], Mapping[str, str | None]], Any] = Settings.load,
) -> Callable[..., None]:
    """Add an option per setting to a command, and pass it the loaded :class:`Settings` as its first argument.

    ``only`` names the settings that get an option; the others still come from the environment. The command raises
    ``SettingsError`` for an invalid setting, unless ``load`` is replaced.
    """
    options = [
        parameter
        for spec in SETTINGS
        if not only or spec.name in only
        for parameter in _options(spec)
    ]

    def loaded(values: Mapping[str, Any]) -> Any:
        return load(os.environ, {option.name.upper(): values[option.name] for option in options})

    return with_options(command, options, loaded)


def with_options(
    command: Callable[..., None],
    options: Sequence[inspect.Parameter],
    first_of: Callable[[Mapping[str, Any]], Any],
) -> Callable[..., None]:
    """Add options to a command, and pass it the result of ``first_of`` for all values as its first argument."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        first = first_of(values)
        for option in options:
            del values[option.name]
        command(first, **values)

    # typer reads a command's options from its signature.
    parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*own, *options)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _options(spec: SettingSpec) -> Iterator[inspect.Parameter]:
    """Yield the option of a setting; for a secret, also the one that names its file."""
    default = f" [default: {spec.default}]" if spec.default else ""
    named = [(spec.name, "VALUE", f"{spec.help}{default}")]
    if spec.secret:
        named.append((file_of(spec.name), "FILE", f"file that holds {spec.name}"))
    for name, metavar, text in named:
        option = typer.Option(flag_of(name), metavar=metavar, help=text)
        annotation, kind = Annotated[str | None, option], inspect.Parameter.KEYWORD_ONLY
        yield inspect.Parameter(name.lower(), kind, default=None, annotation=annotation)


EXAMPLE: Final = "Example:"

VERBATIM: Final = "\b\n"
"""typer wraps every paragraph except those with this prefix."""


def help_of(command: Callable[..., Any]) -> str:
    """Return the help text of a command."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(
        VERBATIM + paragraph if paragraph.startswith(EXAMPLE) else paragraph
        for paragraph in paragraphs
    )


def group(text: str, commands: Mapping[str, Callable[..., None]]) -> typer.Typer:
    """Return a group of commands by their names; ``text`` is its help."""
    app = typer.Typer(help=text, no_args_is_help=True, rich_markup_mode=None)
    for name, command in commands.items():
        app.command(name, help=help_of(command))(command)
    return app


def show(
    settings: Settings,
    *,
    json: Annotated[bool, typer.Option("--json", help="Print a list of objects.")] = False,
) -> None:
    """Show each setting with its value and source. Secrets are masked.

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


app = group("Show the settings of a node.", {"show": takes_settings(show)})
