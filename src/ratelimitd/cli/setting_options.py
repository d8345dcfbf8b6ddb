"""The settings of a node as options of a command: one for each, generated, so that none can be forgotten.

Knows no setting by name and judges no value: :mod:`ratelimitd.settings` does both.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Annotated, Any

import typer

from ratelimitd.settings import SETTINGS, Settings, SettingSpec
from ratelimitd.settings_sources import file_of, flag_of

Load = Callable[[Mapping[str, str], Mapping[str, str | None]], Any]
"""Makes what a command wants of the environment and the flags, as :meth:`Settings.load` does."""


def takes_settings(
    command: Callable[..., None], only: Collection[str] = (), load: Load = Settings.load
) -> Callable[..., None]:
    """Give a command an option for each setting, and hand it the loaded :class:`Settings` as its first parameter.

    ``only`` names the settings that get an option; the others still come from the environment. The result raises
    ``SettingsError`` when a setting is wrong, unless ``load`` is another.
    """
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    options = [
        parameter
        for spec in SETTINGS
        if not only or spec.name in only
        for parameter in _options(spec)
    ]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        flags = {option.name.upper(): values.pop(option.name) for option in options}
        command(load(os.environ, flags), **values)

    # typer reads a command's options from its signature.
    run.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *options]}
    return run


def _options(spec: SettingSpec) -> Iterator[inspect.Parameter]:
    """The option of a setting, and for a secret the one that names its file."""
    default = f" [default: {spec.default}]" if spec.default else ""
    yield _option(spec.name, "VALUE", f"{spec.help}{default}")
    if spec.secret:
        yield _option(file_of(spec.name), "FILE", f"file that holds {spec.name}")


def _option(name: str, metavar: str, text: str) -> inspect.Parameter:
    option = typer.Option(flag_of(name), metavar=metavar, help=text, show_default=False)
    return inspect.Parameter(
        name.lower(),
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, option],
    )
