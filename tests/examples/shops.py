"""The shops of examples/ in real servers, by the commands of their pages."""

import asyncio
import contextlib
import os
import re
import shlex
import sys
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]
LISTENS = re.compile(r"(?:running on|Listening at:) (http://127\.0\.0\.1:\d+)")
TIMEOUT_S = "30"
"""Of a check: that of the examples is meant for a machine which is not full of tests."""


def command_of(page, program):
    """The command line that a page names for a program, to listen on a free port instead."""
    [line] = re.findall(rf"^    \.venv/bin/({program} .*)$", page.read_text(), re.MULTILINE)
    program, *arguments = shlex.split(
        line.replace(":8000", ":0").replace("--port 8000", "--port 0")
    )
    # The control socket has one place for all servers of a user, and two tests may run at a time.
    alone = ["--no-control-socket"] if program == "gunicorn" else []
    return [Path(sys.executable).with_name(program), *arguments, *alone]


@contextlib.asynccontextmanager
async def running_shop(command, node, **environ):
    """A client of a shop that asks a node. The server says nothing of errors, and ends when it is told to."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOT,
        env={**os.environ, "RATELIMITD": node.grpc_address, "TIMEOUT_S": TIMEOUT_S, **environ},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    said = ""
    while (found := LISTENS.search(said)) is None:
        line = await process.stderr.readline()
        assert line, said
        said += line.decode()
    try:
        async with httpx.AsyncClient(base_url=found[1], timeout=60) as client:
            yield client
    finally:
        process.terminate()
        said += (await process.communicate())[1].decode()
    assert "Traceback" not in said, said
    assert "let through" not in said, said
