"""Names all commands, and converts the end of each to an exit status.

Prints no traceback for a known error: one line on stderr, and status 0, 1, 2, 3, 4 or 130.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup
from typer.main import get_command, get_group

from ratelimitd import __version__
from ratelimitd.cli.client_options import EXIT_ERROR, EXIT_INTERRUPTED, CliError
from ratelimitd.cli.options import help_of
from ratelimitd.errors import RateLimitdError
from ratelimitd.settings.sources import COMMAND_VARIABLES, ENV_PREFIX

DEBUG_VARIABLE: Final = ENV_PREFIX + "DEBUG"
"""If set, an unexpected error prints its traceback."""

FORMER_PREFIX: Final = "RATELIMITCTL_"
"""Accepted until the release after 0.1, with a warning."""

COMMANDS: Final = {
    "serve": "serve:command",
    "check": "check:check",
    "explain": "check:explain",
    "hold": "holds:hold",
    "settle": "holds:settle",
    "reset": "health:reset",
    "health": "health:health",
    "metrics": "health:metrics",
    "top": "top.command:top",
    "token": "serve:token",
    "backtest": "backtest:backtest",
    "bench": "bench.command:bench",
    "conformance": "conformance.command:conformance",
    "demo": "dev.demo:demo",
    "doctor": "doctor.command:command",
    "rules": "rules:app",
    "plans": "plans:app",
    "holds": "holds:app",
    "config": "options:app",
    "db": "serve:app",
    "dev": "dev.command:app",
}
"""Module and function of each command, or its group of commands; in the order of the help."""


class _Commands(TyperGroup):
    """Imports a command when it is requested: importing all of them takes half a second."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        # The keys are listed in the help, and suggested for a misspelt name.
        self.commands = dict.fromkeys(COMMANDS, self)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002 -- as in the base class
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        found = getattr(import_module(f"{__package__}.{module}"), name)
        if isinstance(found, typer.Typer):
            return get_group(found)
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(cmd_name, help=help_of(found))(found)
        return get_command(single)


app = typer.Typer(
    help="A standalone gRPC rate limiter.",
    cls=_Commands,
    no_args_is_help=True,
    # Plain help is fast, and the same on a terminal, in a pipe and in a manual.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def run(arguments: Sequence[str] | None) -> int:
    """Run a command line (``None`` = that of the process) and return its exit status."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal without "→" must not fail the command. A file must not lose it: it may be applied again.
            encoding = stream.encoding if stream.isatty() else "utf-8"
            stream.reconfigure(encoding=encoding, errors="replace")
    _accept_former_names(os.environ)
    try:
        status = _run(arguments)
        sys.stdout.flush()
    except CliError as error:
        status = _fail("\n  ".join([str(error), *error.details]), error.exit_code)
    except RateLimitdError as error:
        status = _fail(str(error), EXIT_ERROR)
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
    except OSError as error:
        status = _output_failed(error)
    except Exception as error:
        if os.environ.get(DEBUG_VARIABLE):
            raise
        # Without the error's text, which may contain a secret.
        bug = f"this is a bug ({type(error).__name__}); {DEBUG_VARIABLE}=1 shows where"
        status = _fail(bug, EXIT_ERROR)
    return status


def _open_closed_streams() -> None:
    """Open /dev/null for streams that the caller closed; a socket or file would get their descriptors otherwise."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, PTH123 -- until the end


def _accept_former_names(environ: MutableMapping[str, str]) -> None:
    """Copy variables with the former prefix to the current one, which takes precedence, and warn."""
    former = [name for name in COMMAND_VARIABLES if FORMER_PREFIX + name in environ]
    for name in former:
        environ.setdefault(ENV_PREFIX + name, environ[FORMER_PREFIX + name])
    if former:
        names = ", ".join(FORMER_PREFIX + name for name in former)
        print(f"Warning: {names}: the prefix is {ENV_PREFIX} now", file=sys.stderr)


def _run(arguments: Sequence[str] | None) -> int:
    try:
        app(args=arguments, prog_name="ratelimitd")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else EXIT_ERROR
    return 0


def _fail(message: str, status: int) -> int:
    print(f"Error: {message}", file=sys.stderr)
    return status


def _output_failed(error: OSError) -> int:
    """Report why the output failed, unless its reader closed it."""
    # The interpreter must not fail again when it flushes the buffer at its end.
    with suppress(io.UnsupportedOperation):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return EXIT_ERROR
    return _fail(error.strerror or str(error), EXIT_ERROR)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"ratelimitd {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """A standalone gRPC rate limiter."""
