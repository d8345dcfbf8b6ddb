"""The examples work as documented, against a node with the example book."""

import asyncio
import json
import re
import shlex
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from ratelimitd.rules.rules_file import parse_rules
from ratelimitd.testing import ManualClock, running_node
from ratelimitd_client import RateLimiterClient

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
README = (EXAMPLES / "first_check" / "README.md").read_text(encoding="utf-8")


def example(path):
    """Load a script by its path, since it is not in a package."""
    spec = spec_from_file_location("example", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def snippets(command):
    """Return the indented command lines of the page that begin with ``command``, each in one line."""
    text = README.replace("\\\n", "")
    return [line.strip() for line in re.findall(rf"^    {command} .*$", text, re.MULTILINE)]


async def output_of(*command):
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    return out.decode(), err.decode()


@pytest.fixture
async def node(transport):
    rules = EXAMPLES / "rules.yaml"
    async with running_node(
        clock=ManualClock(), rules_file=rules, log_level="error", transport=transport
    ) as node:
        yield node


def test_the_book_shows_every_algorithm_and_type_and_a_disabled_rule():
    rules = parse_rules((EXAMPLES / "rules.yaml").read_bytes())
    assert {rule.algorithm for rule in rules} == {"token_bucket", "sliding_window", "fixed_window"}
    assert {rule.identifier_type for rule in rules if rule.endpoint == "*"} == {
        "user",
        "ip",
        "api_key",
    }
    assert [rule.endpoint for rule in rules if not rule.enabled] == ["/checkout"]


async def test_the_python_example_answers_as_a_web_application_would(node):
    script = example(EXAMPLES / "first_check" / "first_check.py")

    def seven_times():
        with RateLimiterClient(node.grpc_address, timeout_s=5) as limiter:
            return [script.answer(limiter, "192.0.2.7") for _ in range(7)]

    answers = await asyncio.to_thread(seven_times)
    assert answers[:5] == [f"200 OK ({left} left)" for left in (4, 3, 2, 1, 0)]
    assert answers[5:] == ["429 Too Many Requests (Retry-After: 60)"] * 2


def test_the_python_example_uses_the_target_of_the_command(monkeypatch):
    monkeypatch.setenv("RATELIMITD_TARGET", "127.0.0.1:9191")
    assert example(EXAMPLES / "first_check" / "first_check.py").TARGET == "127.0.0.1:9191"


async def test_the_python_example_fails_open_without_a_node():
    script = example(EXAMPLES / "first_check" / "first_check.py")

    def once():
        with RateLimiterClient("127.0.0.1:1") as limiter:
            return script.answer(limiter, "192.0.2.7")

    assert (await asyncio.to_thread(once)).startswith("200 OK (nobody could be asked")


async def test_the_command_lines_of_the_page_work(node):
    directory = Path(sys.executable).parent
    commands = snippets("ratelimitd")
    assert len(commands) == 3
    for line in commands:
        command = [directory / "ratelimitd", *shlex.split(line)[1:], "--target", node.grpc_address]
        out, err = await output_of(*command)
        assert out
        assert not err


async def test_a_generic_tool_needs_no_proto(node):
    [line] = snippets("buf curl")
    command = shlex.split(line.replace("127.0.0.1:9090", node.grpc_address))
    out, err = await output_of(Path(sys.executable).with_name("buf"), *command[1:])
    assert err == ""
    assert json.loads(out)["allowed"] is True
