"""Many real nodes in one process: enough to fill a page with, at a fraction of what as many processes would take.

``python -m tests.browser.crowd SETTINGS NAME...`` runs nodes of these names until its input ends; the settings, a JSON
object by attribute name, are those of all.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ratelimitd.testing import running_node
from tests.system.process import clean_environment

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def crowd(names: Sequence[str], **settings: str) -> Iterator[None]:
    """Nodes of these names answer until the block ends."""
    command = [sys.executable, "-m", __name__, json.dumps(settings), *names]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=clean_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        yield
        process.stdin.close()


async def _run(names: Sequence[str], settings: dict[str, Any]) -> None:
    async with contextlib.AsyncExitStack() as nodes:
        for name in names:
            await nodes.enter_async_context(running_node(node_id=name, **settings))
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_run(sys.argv[2:], json.loads(sys.argv[1])))
