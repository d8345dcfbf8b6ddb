"""The shop of examples/fastapi: its real command, a real node, and the limit of examples/rules.yaml."""

import asyncio
import contextlib
import os
import re
import sys
from pathlib import Path

import httpx

from ratelimitd import testing

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/fastapi"
LISTENS = re.compile(r"running on (http://127\.0\.0\.1:\d+)")
TIMEOUT_S = "30"
"""Of a check: that of the example is meant for a machine which is not full of tests."""


@contextlib.asynccontextmanager
async def shop(node):
    """The running shop; what it says while it ends is what must not be there."""
    command = [Path(sys.executable).with_name("uvicorn"), "shop:app", "--app-dir", EXAMPLE]
    process = await asyncio.create_subprocess_exec(
        *(*command, "--port", "0", "--no-proxy-headers"),
        env={**os.environ, "RATELIMITD": node.grpc_address, "TIMEOUT_S": TIMEOUT_S},
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
        said = (await process.communicate())[1].decode()
    assert "Error" not in said, said
    assert "Warning" not in said, said


async def test_the_shop_answers_429_at_the_right_request_whatever_callers_say_of_themselves():
    clock = testing.ManualClock()
    async with (
        testing.running_node(clock=clock, rules_file=EXAMPLE.parent / "rules.yaml") as node,
        shop(node) as client,
    ):
        answers = []
        for attempt in range(6):
            headers = {"X-Forwarded-For": f"203.0.113.{attempt}"}
            answers.append(await client.post("/login", headers=headers))
        clock.advance(seconds=float(answers[5].headers["Retry-After"]))
        again = await client.post("/login")
        orders = [await client.get(f"/orders/{number}") for number in (1, 2)]
    assert [answer.status_code for answer in answers] == [200] * 5 + [429]
    assert [policy_of(answer) for answer in answers] == [("5", "60")] * 6
    assert [left_of(answer) for answer in answers] == ["4", "3", "2", "1", "0", "0"]
    assert answers[5].headers["Retry-After"] == "60"
    assert answers[5].text == "Too many requests. Try again in 60 s.\n"
    assert "Retry-After" not in answers[4].headers
    assert again.status_code == 200
    assert [left_of(answer) for answer in orders] == ["1199", "1198"]


def policy_of(answer):
    return re.fullmatch(r'"default";q=(\d+);w=(\d+)', answer.headers["RateLimit-Policy"]).groups()


def left_of(answer):
    return re.fullmatch(r'"default";r=(\d+);t=\d+', answer.headers["RateLimit"])[1]


def test_the_shop_has_three_lines_for_the_limiter():
    marked = [line for line in (EXAMPLE / "shop.py").read_text().splitlines() if " of 3" in line]
    assert [line[-6:] for line in marked] == ["1 of 3", "2 of 3", "3 of 3"]
