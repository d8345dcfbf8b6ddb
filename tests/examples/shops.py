"""The shops of examples/ in real servers, by the commands of their pages."""

import asyncio
import contextlib
import os
import re
import shlex
import sys
from pathlib import Path

import httpx

from ratelimitd import testing

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "examples/rules.yaml"
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


async def assert_the_limit_holds(command):
    """Five logins a minute from one address, whatever it says of itself; all orders under one template."""
    clock = testing.ManualClock()
    async with (
        testing.running_node(clock=clock, rules_file=RULES, log_level="error") as node,
        running_shop(command, node) as client,
    ):
        answers = []
        for attempt in range(6):
            headers = {"X-Forwarded-For": f"203.0.113.{attempt}"}
            answers.append(await client.post("/login", headers=headers))
        clock.advance(seconds=float(answers[5].headers["Retry-After"]))
        again = await client.post("/login")
        orders = [await client.get(f"/orders/{number}") for number in (1, 2)]
    assert [answer.status_code for answer in answers] == [200] * 5 + [429]
    assert [left_of(answer) for answer in answers] == ["4", "3", "2", "1", "0", "0"]
    assert {answer.headers["RateLimit-Policy"] for answer in answers} == {'"default";q=5;w=60'}
    assert answers[5].headers["Retry-After"] == "60"
    assert answers[5].text == "Too many requests. Try again in 60 s.\n"
    assert "Retry-After" not in answers[4].headers
    assert again.status_code == 200
    assert [answer.json() for answer in orders] == [{"order": 1}, {"order": 2}]
    assert [left_of(answer) for answer in orders] == ["1199", "1198"]


def left_of(answer):
    """How many are left. In how many seconds there are more depends on two clocks, of which the node's stands still."""
    return re.fullmatch(r'"default";r=(\d+);t=\d+', answer.headers["RateLimit"])[1]


def added_lines(path):
    """The marked lines of a file, by what is marked."""
    return re.findall(r"# (?:ratelimitd: )?(\d of \d)$", path.read_text(), re.MULTILINE)
