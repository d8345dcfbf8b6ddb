"""A worker: a node in its own process, overseen by the parent at the other end of standard input.

Its settings come over the socket, not from its environment or arguments. When the parent is gone, the worker drains and
exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from ratelimitd.node import process, supervisor
from ratelimitd.node.node import Node
from ratelimitd.node.process import EXIT_FAILED, EXIT_OK
from ratelimitd.workers import protocol

REPORT_TIMEOUT_S: Final = 1.0
"""Longest wait for a parent that does not read the worker's error."""

STANDARD_INPUT: Final = 0

_log = logging.getLogger(__name__)


def main(descriptor: int = STANDARD_INPUT) -> int:
    """Run a worker in this process; ``descriptor`` is the socket to its parent.

    Returns the exit status.
    """
    with socket.socket(fileno=descriptor) as sock:
        try:
            settings = protocol.receive_settings(sock)
        except (EOFError, OSError):
            return EXIT_FAILED  # the parent is gone already
        return supervisor.run(settings, Parent(sock))


class Parent(supervisor.Overseer):
    """The process that started this one."""

    reuse_port = True

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._writer: asyncio.StreamWriter | None = None
        self._may_listen = asyncio.Event()
        self._may_close = asyncio.Event()

    @asynccontextmanager
    async def attending(self, node: Node, stop: Callable[[], None]) -> AsyncIterator[None]:
        """Answer the parent's requests; call ``stop`` when the parent is gone."""
        # A duplicate, so that the socket outlives the loop and can send a last error.
        reader, self._writer = await asyncio.open_unix_connection(sock=self._socket.dup())
        answering = asyncio.create_task(self._answer(reader, self._writer, node, stop))
        try:
            yield
        finally:
            answering.cancel()
            await asyncio.wait([answering])
            self._writer.close()

    async def may_listen(self) -> None:
        """Report that the node is prepared, and wait for the command to listen."""
        self._send("prepared")
        await self._may_listen.wait()

    async def may_close(self) -> None:
        """Report that the calls have ended, and wait for the command to close, or the end of the parent."""
        self._send("calls ended")
        await self._may_close.wait()

    def checks_guarded(self) -> None:
        """Report it, for the other workers and for later ones, which may not see the entry of TOKENS_FILE."""
        self._send("guarded")

    def ready(self, _node: Node) -> None:
        """Report that the node answers calls."""
        self._send("ready")

    def failed(self, line: str) -> int:
        """Report why the process ends; the parent prints it, once for all workers."""
        with contextlib.suppress(OSError):
            self._socket.settimeout(REPORT_TIMEOUT_S)
            # On its own line, even after an incomplete message.
            self._socket.sendall(b"\n" + protocol.message("failed", line))
        return EXIT_FAILED

    def insist(self, _status: int) -> None:
        """Continue to drain: after a service manager's signal to all processes, the parent signals again."""

    def drained(self) -> None:
        """Exit at once: a signal after the end of the event loop would kill the process."""
        process.leave(EXIT_OK)

    def _send(self, kind: str) -> None:
        assert self._writer is not None  # noqa: S101 -- it attends to the node by now
        self._writer.write(protocol.message(kind))

    async def _answer(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        node: Node,
        stop: Callable[[], None],
    ) -> None:
        with contextlib.suppress(OSError):
            while question := await reader.readline():
                if question == protocol.LISTEN:
                    self._may_listen.set()
                elif question == protocol.CLOSE:
                    self._may_close.set()
                elif question == protocol.GUARD:
                    node.guard_checks()
                elif question == protocol.READINESS:
                    writer.write(protocol.message("readiness", *node.readiness))
                elif question == protocol.REPORT:
                    await _report(node, writer)
        _log.warning("the parent process is gone: draining")
        self._may_close.set()
        stop()


async def _report(node: Node, writer: asyncio.StreamWriter) -> None:
    """Write every metric, in pieces; between two of them the loop answers checks."""
    points = node.metrics.points() if node.metrics is not None else ()
    for line in protocol.report_messages(points):
        writer.write(line)
        await writer.drain()
        await asyncio.sleep(0)
