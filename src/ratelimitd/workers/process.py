"""One process of a worker, as its parent sees it: started, asked, told to end, ended. Never starts another one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, Self, TypeVar

from ratelimitd.errors import StartupError
from ratelimitd.settings import Settings
from ratelimitd.web.pages import Readiness
from ratelimitd.workers import messages
from ratelimitd.workers.messages import Reading, Report

T = TypeVar("T")

COMMAND: Final = (sys.executable, "-P", "-m", "ratelimitd.workers")
"""``-P``: no file of the working directory can stand in for a module of ours."""

REPORT_TIMEOUT_S: Final = 1.0
READINESS_TIMEOUT_S: Final = 0.5
"""How long a worker may take to answer; one that takes longer is left out. Probes often wait for a second only."""


class WorkerProcess:
    """A process that was started.

    ``on_report`` is called with each report, also with one that comes too late for whoever asked.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_report: Callable[[Report], None],
    ) -> None:
        self._process = process
        self._writer = writer
        self._on_report = on_report
        self._is_prepared = False
        self._is_ready = False
        self._reason = ""
        self._prepared = asyncio.Event()
        """All it lacks is the word to listen, or it never will be ready."""
        self._settled = asyncio.Event()
        """It is ready, or never will be."""
        self._readiness: asyncio.Future[Readiness | None] | None = None
        self._report: asyncio.Future[Report | None] | None = None
        self._points: dict[str, dict[str, Reading]] = {}
        """Of the report that is being read."""
        self._listening = asyncio.create_task(self._listen(reader))

    @classmethod
    async def start(
        cls,
        settings: Settings,
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
                    sock=ours, limit=messages.MAX_LINE_BYTES
                )
                # The name is for people who look at a list of processes.
                process = await _spawn((*command, settings.node_id), theirs, writer)
        except OSError as error:
            message = f"a worker cannot be started: {error.strerror}"
            raise StartupError(message) from error
        writer.write(messages.settings_message(settings))
        return cls(process, reader, writer, on_report)

    async def prepared(self) -> None:
        """Wait until all it lacks is the word to listen.

        Raises:
            StartupError: it ended before; one line says why.
        """
        await self._prepared.wait()
        if not self._is_prepared:
            raise StartupError(self.reason)

    async def ready(self) -> None:
        """Let it listen as soon as it can, and wait until it answers calls.

        Raises:
            StartupError: it ended before; one line says why.
        """
        if not self._listening.done():
            self._writer.write(messages.LISTEN)
        await self._settled.wait()
        if not self._is_ready:
            raise StartupError(self.reason)

    async def readiness(self) -> Readiness | None:
        """Whether checks should come to it; ``None`` when it does not answer in time."""
        if self._readiness is None:
            self._readiness = self._ask(messages.READINESS)
        return await _in_time(self._readiness, READINESS_TIMEOUT_S)

    async def report(self) -> Report | None:
        """Its metrics; ``None`` when it does not answer in time. Whoever asks meanwhile gets the same answer."""
        if self._report is None:
            self._report = self._ask(messages.REPORT)
        return await _in_time(self._report, REPORT_TIMEOUT_S)

    def terminate(self) -> None:
        """Ask it to drain and end, as a signal does; nothing happens to one that has ended."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once; nothing happens to one that has ended."""
        self._signal(signal.SIGKILL)

    async def ended(self) -> int:
        """Wait for its end; returns the exit status, −n for signal n."""
        await asyncio.shield(self._listening)
        return await self._process.wait()

    @property
    def reason(self) -> str:
        """Why it ended: in its own words, or as the system tells."""
        status = self._process.returncode or 0
        how = f"ended by signal {-status}" if status < 0 else f"ended with status {status}"
        return self._reason or how

    def _signal(self, number: signal.Signals) -> None:
        # Not by asyncio's methods: on its own event loop they look whether the process has ended first, which takes its
        # status away from whoever waits for it.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def _ask(self, question: bytes) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._listening.done():
            answer.set_result(None)
        else:
            self._writer.write(question)
        return answer

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                self._take(*messages.parsed(line))
        except OSError:  # it ended with something of ours unread
            pass
        except ValueError:  # a line without end: it is no worker of ours any more
            self.kill()
        self._writer.close()
        await self._process.wait()
        self._prepared.set()
        self._settled.set()
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
        elif kind == "failed":
            [self._reason] = values
        elif kind == "readiness" and self._readiness is not None:
            self._readiness.set_result(Readiness(*values))
            self._readiness = None
        elif kind == "points":
            name, readings = values
            self._points.setdefault(name, {}).update(messages.readings_of(readings))
        elif kind == "reported" and self._report is not None:
            report, self._points = self._points, {}
            self._on_report(report)
            self._report.set_result(report)
            self._report = None


async def _spawn(
    command: Sequence[str], stdin: socket.socket, writer: asyncio.StreamWriter
) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=stdin.fileno(),
            # The one line there is the parent's. The log goes to the same stderr.
            stdout=asyncio.subprocess.DEVNULL,
            # Of its own, so that a Ctrl-C reaches the parent alone, which tells the workers.
            start_new_session=True,
        )
    except BaseException:
        writer.close()  # a process that was started all the same ends when it sees that
        raise


async def _in_time(answer: asyncio.Future[T], timeout_s: float) -> T | None:
    """The answer, ``None`` when it does not come in time; it may still come later."""
    done, _ = await asyncio.wait([answer], timeout=timeout_s)
    return answer.result() if done else None
