"""The frame of each process around its event loop: signals, a one-line failure, an exit status.

Never shows the traceback or the text of an unexpected error.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, Final

from ratelimitd.errors import SettingsError, StartupError, printable

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
SIGNAL_BASE: Final = 128
"""A process ended by signal n exits with 128 + n, as shells report it."""

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_PR_SET_PDEATHSIG: Final = 1
_libc: Final = ctypes.CDLL(None)

_log = logging.getLogger(__name__)


def failed(line: str) -> int:
    """Print to stderr why the process ends; returns the exit status."""
    sys.stderr.write(f"Error: {printable(line)}\n")
    return EXIT_FAILED


def announce(grpc_address: str, http_address: str, node_id: str, login_link: str = "") -> None:
    """Write the ready line to stdout, then the login link if there is one. The link is never logged."""
    lines = f"ratelimitd ready grpc={grpc_address} http={http_address or 'off'} node={node_id}\n"
    if login_link:
        lines += f"page: {login_link} (logs in once, within 30 s)\n"
    with contextlib.suppress(OSError):  # a closed stdout is no reason not to serve
        sys.stdout.write(lines)
        sys.stdout.flush()


def run_process(
    serve: Callable[[], Coroutine[Any, Any, int]], on_failure: Callable[[str], int] = failed
) -> int:
    """Run ``serve`` in an event loop of its own; returns the exit status.

    An exception goes to ``on_failure`` as one line; its result is the status.
    """
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.get_loop().set_exception_handler(_report_lost_exception)
            return runner.run(serve())
    except (SettingsError, StartupError) as error:
        return on_failure(str(error))
    except Exception as error:  # noqa: BLE001 - whatever it is: one line, not a page
        place = traceback.extract_tb(error.__traceback__)[-1]
        kind = type(error).__name__
        return on_failure(f"unexpected {kind} at {place.filename}:{place.lineno} in {place.name}")


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop, of uvloop if it is installed."""
    try:
        import uvloop  # noqa: PLC0415 - optional: it is not there for every platform
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class StopSignals:
    """Handles :data:`SIGNALS`: the first requests the end, a later SIGTERM or SIGINT calls ``insist`` with its status.

    A terminal that closes sends SIGHUP several times. Where SIGHUP is ignored, as under ``nohup``, it stays ignored.
    """

    def __init__(self, insist: Callable[[int], None]) -> None:
        self._insist = insist
        self._asked = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            loop.add_signal_handler(number, self._on_signal, number)

    def ask(self) -> None:
        """Request the end, as the first signal does."""
        self._asked.set()

    async def wait(self) -> None:
        """Wait until the end is requested."""
        await self._asked.wait()

    async def comes_before(self, starting: asyncio.Task[Any]) -> bool:
        """Return whether the end is requested before the start is done; if so, the start is cancelled."""
        asked = asyncio.create_task(self._asked.wait())
        await asyncio.wait((asked, starting), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            asked.cancel()
            return False
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        return True

    def _on_signal(self, number: signal.Signals) -> None:
        if self._asked.is_set() and number != signal.SIGHUP:
            self._insist(SIGNAL_BASE + number)
        self._asked.set()


def _report_lost_exception(_loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """Log the error of a task or callback that is not awaited; asyncio's own line would quote arguments."""
    error = context.get("exception")
    if isinstance(error, socket.gaierror) and type(context.get("future")) is asyncio.Future:
        return  # uvloop does not cancel a look-up when its connection times out, and that was reported
    exc_info = error if isinstance(error, BaseException) else None
    _log.error("an exception was lost in the event loop", exc_info=exc_info)


leave: Callable[[int], None] = os._exit
"""Ends the process at once: flushes no buffers, joins no threads, runs no finalisers."""


def ending_with(parent: int) -> Callable[[], None]:
    """Return a ``preexec_fn``: makes the child's files private, and ends the child with its parent.

    It takes no lock: another thread may have held it at the fork.
    """

    def prepare() -> None:
        os.umask(0o077)
        if hasattr(_libc, "prctl"):  # Linux
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:  # the parent ended before the request
                os._exit(1)

    return prepare
