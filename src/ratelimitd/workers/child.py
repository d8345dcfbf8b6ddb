"""A process that the parent keeps running: its start, its messages and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final, Self, TypeVar

from ratelimitd.errors import StartupError
from ratelimitd.settings.table import Settings
from ratelimitd.web.parts import Readiness
from ratelimitd.workers import protocol
from ratelimitd.workers.protocol import Reading, Report

T = TypeVar("T")

COMMAND: Final = (sys.executable, "-P", "-m", "ratelimitd.workers")
"""``-P``: no file of the working directory can replace one of our modules."""

REPORT_TIMEOUT_S: Final = 1.0
READINESS_TIMEOUT_S: Final = 0.5
"""Longest wait for a worker's answer; slower ones are left out. Probes often wait for one second only."""


class ChildProcess(ABC):
    """A running process of a :class:`Respawner`: a worker, or their private Valkey."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._reason = ""

    @abstractmethod
    async def prepared(self) -> None:
        """Wait until it is ready to listen; raises as :meth:`ready`."""

    @abstractmethod
    async def ready(self) -> None:
        """Let it listen, and wait until it answers calls.

        Raises:
            StartupError: it ended first; one line says why.
        """

    @abstractmethod
    async def readiness(self) -> Readiness | None:
        """Return its readiness; ``None`` if it does not answer in time."""

    @abstractmethod
    async def report(self) -> Report | None:
        """Return its metrics; ``None`` if it does not answer in time."""

    @abstractmethod
    async def ended(self) -> int:
        """Wait for its end; returns the exit status, −n for signal n."""

    async def calls_ended(self) -> None:
        """Wait until it waits for :meth:`close`, or has ended."""
        await self.ended()

    @abstractmethod
    def close(self) -> None:
        """Let it end HTTP and close its stores; no effect after its end."""

    def terminate(self) -> None:
        """Request a drain by SIGTERM; no effect after its end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once; no effect after its end."""
        self._signal(signal.SIGKILL)

    @property
    def reason(self) -> str:
        """Why it ended: its own last line, or the exit status."""
        status = self._process.returncode or 0
        how = f"ended by signal {-status}" if status < 0 else f"ended with status {status}"
        return self._reason or how

    def _signal(self, number: signal.Signals) -> None:
        # Not by asyncio's methods: with its own event loop they poll the process first, which takes the exit status
        # from the code that waits for it.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)


class ChecksGuard:
    """Closes checks on all workers of a node after TOKENS_FILE closed those of one.

    Without it a worker that misses an entry, because it is removed again, would stay open.
    """

    def __init__(self) -> None:
        self._is_closed = False
        self._writers: set[asyncio.StreamWriter] = set()

    def add(self, writer: asyncio.StreamWriter) -> None:
        """Send the command to a new worker, now or when checks are closed."""
        self._writers.add(writer)
        if self._is_closed:
            _send(writer, protocol.GUARD)

    def discard(self, writer: asyncio.StreamWriter) -> None:
        """Forget a worker that ended."""
        self._writers.discard(writer)

    def close(self) -> None:
        """Send the command to all workers."""
        self._is_closed = True
        for writer in self._writers:
            _send(writer, protocol.GUARD)


class WorkerProcess(ChildProcess):
    """A worker.

    ``guard`` is shared by the workers of a node.
    ``on_report`` is called with each report, even if it is too late for its request.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        guard: ChecksGuard,
        on_report: Callable[[Report], None],
    ) -> None:
        super().__init__(process)
        self._writer = writer
        self._guard = guard
        self._on_report = on_report
        self._is_prepared = False
        self._is_ready = False
        self._prepared = asyncio.Event()
        """It is ready to listen, or never will be."""
        self._settled = asyncio.Event()
        """It is ready, or never will be."""
        self._calls_ended = asyncio.Event()
        """It waits for the command to close, or has ended."""
        self._readiness: asyncio.Future[Readiness | None] | None = None
        self._report: asyncio.Future[Report | None] | None = None
        self._points: dict[str, dict[str, Reading]] = {}
        """Points of the report that is being read."""
        self._listening = asyncio.create_task(self._listen(reader))

    @classmethod
    async def start(
        cls,
        settings: Settings,
        guard: ChecksGuard,
        on_report: Callable[[Report], None],
        command: Sequence[str] = COMMAND,
    ) -> Self:
        """Start a process and give it its settings.

        Raises:
            StartupError: the system has no process or no descriptor left.
        """
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                reader, writer = await asyncio.open_unix_connection(
                    sock=ours, limit=protocol.MAX_LINE_BYTES
                )
                # The name is for lists of processes.
                process = await _spawn((*command, settings.node_id), theirs, writer)
        except OSError as error:
            message = f"a worker cannot be started: {error.strerror}"
            raise StartupError(message) from error
        _send(writer, protocol.settings_message(settings))
        guard.add(writer)
        return cls(process, reader, writer, guard=guard, on_report=on_report)

    async def prepared(self) -> None:
        """Wait until it reports so, or ends."""
        await self._prepared.wait()
        if not self._is_prepared:
            raise StartupError(self.reason)

    async def ready(self) -> None:
        """Let it listen, and wait until it reports that it answers calls, or ends."""
        _send(self._writer, protocol.LISTEN)
        await self._settled.wait()
        if not self._is_ready:
            raise StartupError(self.reason)

    async def readiness(self) -> Readiness | None:
        """Ask it; concurrent requests share one answer."""
        if self._readiness is None:
            self._readiness = self._ask(protocol.READINESS)
        return await _in_time(self._readiness, READINESS_TIMEOUT_S)

    async def report(self) -> Report | None:
        """Ask it; concurrent requests share one answer."""
        if self._report is None:
            self._report = self._ask(protocol.REPORT)
        return await _in_time(self._report, REPORT_TIMEOUT_S)

    async def calls_ended(self) -> None:
        """Wait until it reports so, or ends."""
        await self._calls_ended.wait()

    def close(self) -> None:
        """Send the command."""
        _send(self._writer, protocol.CLOSE)

    async def ended(self) -> int:
        """Wait for the end, and until all its messages are read."""
        await asyncio.shield(self._listening)
        return await self._process.wait()

    def _ask(self, question: bytes) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._listening.done():
            answer.set_result(None)
        else:
            _send(self._writer, question)
        return answer

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                self._take(*protocol.parsed(line))
        except OSError:  # it ended with unread input
            pass
        except ValueError:  # an endless line: it does not follow the protocol
            self.kill()
        self._guard.discard(self._writer)
        self._writer.close()
        await self._process.wait()
        self._prepared.set()
        self._settled.set()
        self._calls_ended.set()
        for question in (self._readiness, self._report):
            if question is not None:
                question.set_result(None)

    def _take(self, kind: str, values: list[Any]) -> None:
        if kind == "prepared":
            self._is_prepared = True
            self._prepared.set()
        elif kind == "ready":
            self._is_ready = True
            self._settled.set()
        elif kind == "calls ended":
            self._calls_ended.set()
        elif kind == "guarded":
            self._guard.close()
        elif kind == "failed":
            [self._reason] = values
        elif kind == "readiness" and self._readiness is not None:
            self._readiness.set_result(Readiness(*values))
            self._readiness = None
        elif kind == "points":
            name, readings = values
            self._points.setdefault(name, {}).update(protocol.readings_of(readings))
        elif kind == "reported" and self._report is not None:
            report, self._points = self._points, {}
            self._on_report(report)
            self._report.set_result(report)
            self._report = None


def _send(writer: asyncio.StreamWriter, message: bytes) -> None:
    """Write to a process; no effect once its socket is closed, which happens before its end is noticed."""
    # asyncio ignores such a write, uvloop raises RuntimeError.
    if not writer.is_closing():
        writer.write(message)


async def _spawn(
    command: Sequence[str], stdin: socket.socket, writer: asyncio.StreamWriter
) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=stdin.fileno(),
            # Only the parent writes to stdout. The log goes to the same stderr.
            stdout=asyncio.subprocess.DEVNULL,
            # Its own session, so that Ctrl-C reaches only the parent, which signals the workers.
            start_new_session=True,
        )
    except BaseException:
        writer.close()  # a process that started nevertheless ends on this
        raise


async def _in_time(answer: asyncio.Future[T], timeout_s: float) -> T | None:
    """Return the answer, ``None`` if it is not there in time; it may still come later."""
    done, _ = await asyncio.wait([answer], timeout=timeout_s)
    return answer.result() if done else None
