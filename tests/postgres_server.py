"""A real PostgreSQL for tests, as a child process: one server for a whole run, with a database for each test.

The server is built without TLS and without ICU. It listens on 127.0.0.1 and on a socket in its directory, trusts
everybody but the role ``guarded``, and can be made to crash, to hang and to come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

from ratelimitd.cli.dev.servers import (
    AUTHENTICATION,
    BEGINS_SESSION,
    UNPRIVILEGED,
    postgresql_programs,
)
from ratelimitd.rules.sql.migrations import upgrade
from tests.servers import free_port

BINARIES: Final = postgresql_programs()

START_S: Final = 20.0

PASSWORD: Final = "pass/wörd"
"""Of the role ``guarded``, which is asked for one, and may only connect."""

_OPTIONS: Final = {
    "listen_addresses": "127.0.0.1",
    "fsync": "off",
    "full_page_writes": "off",
    "autovacuum": "off",
    "shared_buffers": "16MB",
    "max_connections": "60",
}
"""No durability beyond the process: a crash of the machine ends the tests, too."""

_ACCESS: Final = """
host all guarded 127.0.0.1/32 scram-sha-256
host all all 127.0.0.1/32 trust
local all all trust
"""


class PostgresServer:
    """One server, from ``with`` to its end."""

    def __init__(self) -> None:
        # Not pytest's directory: PostgreSQL refuses to run as root, and nobody else may enter that one.
        self.directory = Path(tempfile.mkdtemp(prefix="ratelimitd-pg-"))
        self.port = free_port()
        self._data = self.directory / "data"
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count(1)
        self._used: list[str] = []
        self._old: list[str] = []

    def __enter__(self) -> Self:
        self._user = _unprivileged(self.directory)
        # Without root's groups: as one of them, a directory that others may enter is closed to who is not root.
        self._group = None if self._user is None else pwd.getpwnam(self._user).pw_gid
        self._extra_groups = None if self._user is None else ()
        self._run("initdb", "-D", str(self._data), "-U", "postgres", "-A", "trust", "-E", "UTF8",
                  "--locale=C.UTF-8", "--no-sync", "--no-instructions")  # fmt: skip
        (self._data / "pg_hba.conf").write_text(_ACCESS)
        self.start()
        self.sql(f"CREATE ROLE guarded LOGIN PASSWORD '{PASSWORD}'", "CREATE DATABASE migrated")
        with _new_loop() as runner:
            runner.run(upgrade(self.url("migrated")))
        return self

    def __exit__(self, *_: object) -> None:
        self.crash()
        shutil.rmtree(self.directory)

    def url(self, database: str, *, user: str = "postgres") -> str:
        """For DATABASE_URL."""
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}"

    def new_database(self, template: str = "migrated") -> str:
        """The URL of a database of its own; with the schema, unless ``template`` is ``template0``.

        It is there until another is made after :meth:`restore`: each takes 8 MB of disk.
        """
        name = f"test_{next(self._numbers)}"
        drops = [f"DROP DATABASE {old} WITH (FORCE)" for old in self._old]
        self.sql(*drops, f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY file_copy")
        self._old.clear()
        self._used.append(name)
        return self.url(name)

    def sql(self, *statements: str, database: str = "postgres") -> list[str]:
        """Run statements as a superuser; the rows, with ``|`` between their columns."""
        commands = [argument for statement in statements for argument in ("-c", statement)]
        told = self._run("psql", "-h", str(self.directory), "-p", str(self.port), "-U", "postgres",
                         "-qXAt", "-v", "ON_ERROR_STOP=1", *commands, database)  # fmt: skip
        return told.splitlines()

    def start(self, **options: str) -> None:
        """Start, and wait until it answers."""
        settings = {**_OPTIONS, **options, "port": str(self.port)}
        settings["unix_socket_directories"] = str(self.directory)
        arguments = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [BINARIES / "postgres", "-D", self._data, *arguments],
                stdout=log,
                stderr=log,
                user=self._user,
                group=self._group,
                extra_groups=self._extra_groups,
                cwd=self.directory,
            )
        deadline_s = time.monotonic() + START_S
        while not self._answers():
            log_text = (self.directory / "log").read_text()
            assert self._process.poll() is None, log_text
            assert time.monotonic() < deadline_s, log_text
            time.sleep(0.01)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Shut down: sessions are ended and told so."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait()
            self._process = None

    def crash(self) -> None:
        """End every process of the server at once; what was committed is there at the next start."""
        if self._process is None:
            return
        family = self._family()
        for pid in family:
            _signal(pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        for pid in family[1:]:  # the next start refuses while one of them holds the shared memory
            while _lives(pid):
                time.sleep(0.001)

    def pause(self) -> None:
        """Let it hang: connections stay and new ones are accepted, but nothing is answered."""
        for pid in self._family():
            _signal(pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        for pid in self._family():
            _signal(pid, signal.SIGCONT)

    def become_standby(self) -> None:
        """Restart as a standby that receives nothing, such as one that lags behind; its sessions are lost."""
        self.stop()
        (self._data / "standby.signal").touch()
        self.start()

    def promote(self) -> None:
        """Make a standby a primary; its sessions stay."""
        self.sql("SELECT pg_promote()")

    def restore(self) -> None:
        """Make it run and answer, whatever a test did to it; the databases of that test may go."""
        self._old += self._used
        self._used.clear()
        if self._process is None:
            self.start()
        self.resume()
        if (self._data / "standby.signal").exists():
            self.promote()

    def _family(self) -> list[int]:
        assert self._process is not None
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pid, *map(int, children)]

    def _run(self, program: str, *arguments: str) -> str:
        # Only the server minds who it is. To become somebody else takes a real fork, in which what gRPC's threads were
        # doing just then may fail.
        is_server = program != "psql"
        done = subprocess.run(
            [BINARIES / program, *arguments],
            user=self._user if is_server else None,
            group=self._group if is_server else None,
            extra_groups=self._extra_groups if is_server else None,
            cwd=self.directory,
            capture_output=True,
            text=True,
            check=False,
            env={"LC_ALL": "C.UTF-8", "PGOPTIONS": "-c client_min_messages=warning"},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), START_S) as probe:
                probe.sendall(BEGINS_SESSION)
                return probe.recv(1) == AUTHENTICATION
        except OSError:
            return False


def let_others_enter() -> None:
    """See that somebody else than root can run the programs, wherever root has put this checkout."""
    for parent in BINARIES.parents if os.geteuid() == 0 else ():
        if not parent.stat().st_mode & stat.S_IXOTH:  # such as /root
            parent.chmod(parent.stat().st_mode | stat.S_IXOTH)


def _unprivileged(directory: Path) -> str | None:
    """Who the server runs as: PostgreSQL refuses root. Gives ``directory`` to them."""
    if os.geteuid() != 0:
        return None
    let_others_enter()
    shutil.chown(directory, UNPRIVILEGED)
    return UNPRIVILEGED


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextlib.contextmanager
def _new_loop() -> Iterator[asyncio.Runner]:
    # With a factory the runner leaves the thread's own event loop, which is pytest's, alone.
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        yield runner
