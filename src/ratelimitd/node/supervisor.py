"""The process around a node: start, ready line, drain, exit status.

Never knows what a node is made of. A failed start is one line and never a traceback.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Final, Protocol

from ratelimitd.node import jobs, process
from ratelimitd.node.node import Node
from ratelimitd.node.process import EXIT_FAILED, EXIT_OK, StopSignals
from ratelimitd.observe import logs
from ratelimitd.settings.table import Settings

OVERDUE_S: Final = 2.0
"""How much longer than DRAIN_S a drain may take before the process ends without it."""

SWITCH_INTERVAL_S: Final = 0.000_05
"""Must be shorter than an iteration of a busy event loop; see :func:`_share_the_interpreter`."""

_log = logging.getLogger(__name__)


class Overseer(Protocol):
    """Whom the process of a node answers to."""

    reuse_port: bool
    """Whether other processes of the overseer's listen on the node's port."""

    def attending(self, node: Node, stop: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        """Around the life of the node; ``stop`` asks for its end as a signal does."""

    async def may_listen(self) -> None:
        """All that the node lacks is to listen for calls; return when it may."""

    def ready(self, node: Node) -> None:
        """The node answers calls."""

    def failed(self, line: str) -> int:
        """The process ends because of this; returns its exit status."""

    def insist(self, status: int) -> None:
        """A signal came while the node was on its way out already; ``status`` is the one it stands for."""

    def drained(self) -> None:
        """The node is drained and everything is written; the process may end here."""


class Terminal:
    """The :class:`Overseer` of a process that somebody started by hand or by a service manager."""

    reuse_port = False

    def attending(
        self, _node: Node, _stop: Callable[[], None]
    ) -> AbstractAsyncContextManager[None]:
        """Ignore requests: there is no parent."""
        return nullcontext()

    async def may_listen(self) -> None:
        """At once: it is alone on its port."""

    def ready(self, node: Node) -> None:
        """The ready line, and the login link."""
        process.announce(node.grpc_address, node.http_address, node.node_id, node.login_link)

    def failed(self, line: str) -> int:
        """One line on stderr."""
        return process.failed(line)

    def insist(self, status: int) -> None:
        """End at once."""
        process.leave(status)

    def drained(self) -> None:
        """End as any program does."""


def run(settings: Settings, overseer: Overseer | None = None) -> int:
    """Run a node until a signal ends it; returns the exit status.

    0 after a drain, 1 when the node could not start or not drain in time; the reason is one line for ``overseer``, by
    default on stderr.
    """
    overseer = overseer or Terminal()
    context = logs.LogContext(settings.node_name)
    logs.configure(level=settings.log_level, log_format=settings.log_format, context=context)
    _share_the_interpreter()
    return process.run_process(lambda: _serve(settings, context, overseer), overseer.failed)


def _share_the_interpreter() -> None:
    """Let the threads that write to disk have their turn while the loop is busy.

    A thread that waits for the interpreter may demand it only after it has waited for this interval without the
    interpreter changing hands; and a loop that polls its sockets lets go and takes it back in every turn. With an
    interval longer than a turn the thread is woken in vain each time, and hardly ever gets it: with turns of 0.11 ms
    one write to the bucket log took 155 ms at an interval of 0.5 ms, 37 ms at 0.1 ms, and 0.3 ms at 0.05 ms (measured).
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
            overseer.failed("the node did not drain in time; what was not written is lost")
            process.leave(EXIT_FAILED)
        _log.info("drained")
        overseer.drained()
    return EXIT_OK
