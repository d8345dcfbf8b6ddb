"""The process around a node: its event loop, its signals, its one line on stdout, its exit status.

Never knows what a node is made of. A failed start is one line on stderr and never a traceback.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Final

from ratelimitd import collector
from ratelimitd.app import Node
from ratelimitd.errors import SettingsError, StartupError
from ratelimitd.observe import logs
from ratelimitd.settings import Settings

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
SIGNAL_BASE: Final = 128
"""A process ended by signal n exits with 128 + n, as shells report it."""

OVERDUE_S: Final = 2.0
"""How much longer than DRAIN_S a drain may take before the process ends without it."""

SWITCH_INTERVAL_S: Final = 0.000_05
"""Must be shorter than a turn of a busy loop; see :func:`_share_the_interpreter`."""

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

_log = logging.getLogger(__name__)


def run(settings: Settings) -> int:
    """Run a node until a signal ends it; returns the exit status.

    0 after a drain, 1 when the node could not start or not drain in time; the reason is one line on stderr.
    """
    context = logs.LogContext(settings.node_name)
    logs.configure(level=settings.log_level, log_format=settings.log_format, context=context)
    _share_the_interpreter()
    try:
        with asyncio.Runner(loop_factory=_new_event_loop) as runner:
            return runner.run(_serve(settings, context))
    except (SettingsError, StartupError) as error:
        return _failed(str(error))
    except Exception as error:  # noqa: BLE001 - whatever it is: one line, not a page
        place = traceback.extract_tb(error.__traceback__)[-1]
        kind = type(error).__name__
        return _failed(f"unexpected {kind} at {place.filename}:{place.lineno} in {place.name}")


def _share_the_interpreter() -> None:
    """Let the threads that write to disk have their turn while the loop is busy.

    A thread that waits for the interpreter may demand it only after it has waited for this interval without the
    interpreter changing hands; and a loop that polls its sockets lets go and takes it back in every turn. With an
    interval longer than a turn the thread is woken in vain each time, and hardly ever gets it: with turns of 0.11 ms
    one write to the bucket log took 155 ms at an interval of 0.5 ms, 37 ms at 0.1 ms, and 0.3 ms at 0.05 ms (measured).
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop  # noqa: PLC0415 - optional: it is not there for every platform
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _serve(settings: Settings, context: logs.LogContext) -> int:
    stop = _StopSignals(asyncio.get_running_loop())
    asyncio.get_running_loop().set_exception_handler(_report_lost_exception)
    collector.tidy()
    node = Node(settings, context=context, whole_load=collector.whole_load)
    starting = asyncio.create_task(node.start())
    if not await stop.comes_before(starting):
        starting.result()
        collector.tidy()
        _announce(node)
        await stop.wait()
    _log.info("draining")
    try:
        async with asyncio.timeout(settings.drain_s + OVERDUE_S):
            await node.drain()
    except TimeoutError:
        # Left behind are threads that hang in a system call: to wait for them is to wait for ever.
        _failed("the node did not drain in time; what was not written is lost")
        _leave(EXIT_FAILED)
    _log.info("drained")
    return EXIT_OK


class _StopSignals:
    """SIGTERM and SIGINT: the first asks for a drain, the second ends the process at once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._asked = asyncio.Event()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)

    async def wait(self) -> None:
        """Return at the first signal."""
        await self._asked.wait()

    async def comes_before(self, starting: asyncio.Task[None]) -> bool:
        """Whether a signal comes before the start is done; then the start is broken off, and what it opened closed."""
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
        if self._asked.is_set():
            _leave(SIGNAL_BASE + number)
        self._asked.set()


def _announce(node: Node) -> None:
    http = node.http_address or "off"
    with contextlib.suppress(OSError):  # nobody reads our stdout: no reason not to serve
        sys.stdout.write(
            f"ratelimitd ready grpc={node.grpc_address} http={http} node={node.node_id}\n"
        )
        sys.stdout.flush()


def _report_lost_exception(_loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """Log what ended a task or callback that nobody waits for; asyncio's own line would quote arguments."""
    error = context.get("exception")
    exc_info = error if isinstance(error, BaseException) else None
    _log.error("an exception was lost in the event loop", exc_info=exc_info)


def _failed(line: str) -> int:
    sys.stderr.write(f"Error: {line}\n")
    return EXIT_FAILED


_leave: Callable[[int], None] = os._exit
"""Ends the process without another thought: no buffers, no threads, no finalisers."""
