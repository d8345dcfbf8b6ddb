"""Child processes of a command: started, watched, and ended with it.

Each has a session of its own, so that Ctrl-C reaches the command alone, which then ends them in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ratelimitd.cli.failures import CliError
from ratelimitd.cli.output import printable

STOP_S: Final = 15.0
"""How long a child may take to end: longer than a node drains."""

SILENCE: Final = "it wrote nothing"


@dataclass(frozen=True, slots=True, eq=False)
class Child:
    """One child process; ``log`` is what it writes to stderr, and to stdout unless that is read."""

    name: str
    process: asyncio.subprocess.Process
    log: Path

    @property
    def last_words(self) -> str:
        """The last line that it wrote."""
        lines = self.log.read_text(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), SILENCE)
        return printable(last.removeprefix("Error: "))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self.process.returncode is None


class Children:
    """The children of a command; their logs are in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._children: list[Child] = []
        self._stopping = False

    async def start(
        self, name: str, command: Sequence[str], *, user: str | None = None, read: bool = False
    ) -> Child:
        """Start one, as ``user`` if not as this process; ``read`` says that its stdout will be."""
        path = self._directory / f"{name}.log"
        with path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE if read else log,
                stderr=log,
                cwd=self._directory,
                env=_environment(),
                start_new_session=True,
                user=user,
                # Without this process's groups: as one of root's, a directory that others may enter stays closed.
                group=pwd.getpwnam(user).pw_gid if user else None,
                extra_groups=() if user else None,
            )
        child = Child(name, process, path)
        self._children.append(child)
        return child

    async def run(self, name: str, command: Sequence[str], *, user: str | None = None) -> None:
        """Run one to its end.

        Raises:
            CliError: it failed; says what its last line was.
        """
        child = await self.start(name, command, user=user)
        await child.process.wait()
        self._children.remove(child)
        if child.process.returncode:
            raise failure(child)

    async def ended(self, child: Child) -> bool:
        """Wait until it has ended; whether nobody had asked it to."""
        await child.process.wait()
        return not self._stopping

    async def stop(self) -> None:
        """End them, those first that were started last."""
        self._stopping = True
        for child in reversed(self._children):
            await _stop(child)


def failure(child: Child) -> CliError:
    """The error of a child that ended and should not have."""
    status = child.process.returncode
    how = f"status {status}" if status is None or status >= 0 else signal.Signals(-status).name
    message = f"{child.name} ended with {how}: {child.last_words}"
    return CliError(message)


async def _stop(child: Child) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.process.send_signal(signal.SIGCONT)  # somebody may have tried out what a pause does
        child.process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await child.process.wait()
                return
        child.process.kill()
        await child.process.wait()


def _environment() -> dict[str, str]:
    """That of the command, without what would set a node."""
    return {name: text for name, text in os.environ.items() if not name.startswith("RATELIMITD_")}
