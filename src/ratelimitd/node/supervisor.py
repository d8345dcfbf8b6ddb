"""The process around a node: start, ready line, drain, exit status.

A failed start is one line, never a traceback.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Final

from ratelimitd.node import jobs, process
from ratelimitd.node.node import Node
from ratelimitd.node.process import EXIT_FAILED, EXIT_OK, StopSignals
from ratelimitd.observe import logs
from ratelimitd.settings.table import Settings

OVERDUE_S: Final = 2.0
"""Time beyond DRAIN_S after which the process ends without a complete drain."""

SWITCH_INTERVAL_S: Final = 0.000_05
"""Must be shorter than an iteration of a busy event loop; see :func:`_share_the_interpreter`."""

_log = logging.getLogger(__name__)


class Overseer:
    """Controls the process of a node, and receives its events.

    This one is for a process that was started by hand or by a service manager.
    """

    reuse_port: bool = False
    """Whether other processes of the overseer listen on the node's port."""

    def attending(
        self, _node: Node, _stop: Callable[[], None]
    ) -> AbstractAsyncContextManager[None]:
        """Return a context around the life of the node; ``_stop`` requests its end, as a signal does."""
        return nullcontext()

    async def may_listen(self) -> None:
        """Wait until the node may listen for calls; all else is open."""

    async def may_close(self) -> None:
        """Wait until a draining node may end HTTP; its calls have ended."""

    def checks_guarded(self) -> None:
        """Handle that checks need a credential because of TOKENS_FILE, even after it changes again."""

    def ready(self, node: Node) -> None:
        """Report that the node answers calls."""
        process.announce(node.grpc_address, node.http_address, node.node_id, node.login_link)

    def failed(self, line: str) -> int:
        """Report an error that ends the process; returns the exit status."""
        return process.failed(line)

    def insist(self, status: int) -> None:
        """Handle a signal during the drain; ``status`` is its exit status."""
        process.leave(status)

    def drained(self) -> None:
        """Handle that the node is drained and everything is written; may end the process."""


def run(settings: Settings, overseer: Overseer | None = None) -> int:
    """Run a node until a signal ends it; returns the exit status.

    0 after a drain, 1 when the node could not start or not drain in time; the reason is one line for ``overseer``, by
    default on stderr.
    """
    overseer = overseer or Overseer()
    context = logs.LogContext(settings.node_name)
    logs.configure(level=settings.log_level, log_format=settings.log_format, context=context)
    _share_the_interpreter()
    return process.run_process(lambda: _serve(settings, context, overseer), overseer.failed)


def _share_the_interpreter() -> None:
    """Let the threads that write to disk run while the loop is busy.

    A thread that waits for the GIL may request it only after an interval in which the GIL did not change hands, and the
    event loop releases and retakes it in each iteration, when it polls its sockets. If the interval is longer than an
    iteration, the thread wakes in vain and starves: with iterations of 0.11 ms, one write to the bucket log took 155 ms
    at an interval of 0.5 ms, 37 ms at 0.1 ms, and 0.3 ms at 0.05 ms (measured).
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)


async def _serve(settings: Settings, context: logs.LogContext, overseer: Overseer) -> int:
    stop = StopSignals(overseer.insist)
    jobs.tidy()
    node = Node(
        settings,
        context=context,
        whole_load=jobs.whole_load,
        reuse_port=overseer.reuse_port,
        may_listen=overseer.may_listen,
        may_close=overseer.may_close,
        on_guard=overseer.checks_guarded,
    )
    async with overseer.attending(node, stop.ask):
        starting = asyncio.create_task(node.start())
        if not await stop.comes_before(starting):
            starting.result()
            jobs.tidy()
            overseer.ready(node)
            await stop.wait()
        _log.info("draining")
        try:
            async with asyncio.timeout(settings.drain_s + OVERDUE_S):
                await node.drain()
        except TimeoutError:
            # Threads may hang in a system call; waiting for them would never end.
            overseer.failed("the node did not drain in time; changes not yet written are lost")
            process.leave(EXIT_FAILED)
        _log.info("drained")
        overseer.drained()
    return EXIT_OK
