"""The command line against a real node: every group of commands, and exits that only a process can show."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from ratelimitd.cli import main
from ratelimitd.testing import ManualClock, running_node

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
COMMAND = Path(sys.executable).with_name("ratelimitd")
HEEDS_CTRL_C = (
    sys.executable,
    "-c",
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])",
)
"""Starts a command as a terminal would: background processes of a script inherit an ignored SIGINT."""

UNKNOWN_ID = "0b1f2c3d-0000-4000-8000-00000000000a"

LOGIN = ("ip", "192.0.2.7", "/login")


class Ended(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def ask(capsys, monkeypatch):
    """Run a command line in a thread, since the node needs this event loop."""
    monkeypatch.delenv("RATELIMITD_TOKEN", raising=False)

    async def run(node, *arguments):
        status = await asyncio.to_thread(
            main, [*map(str, arguments), "--target", node.grpc_address]
        )
        captured = capsys.readouterr()
        return Ended(status, captured.out, captured.err)

    return run


@pytest.fixture
async def node(transport):
    async with running_node(clock=ManualClock(), log_level="error", transport=transport) as node:
        yield node


async def test_a_limit_is_made_used_up_and_reset(node, ask):
    created = await ask(
        node, "rules", "create", "/login", "ip", "--limit", 2, "--window-seconds", 60, "--json"
    )
    assert created.status == 0
    rule = json.loads(created.out)
    many = await ask(node, "check", *LOGIN, "--count", 3, "--json")
    answers = json.loads(many.out)
    assert many.status == 3
    assert [answer["remaining_tokens"] for answer in answers] == [1, 0, 0]
    assert [answer["reason"] for answer in answers[1:]] == ["WITHIN_LIMIT", "LIMIT_EXCEEDED"]
    assert answers[2]["retry_after_seconds"] == 30
    assert answers[2]["rule_id"] == rule["id"]
    denied = await ask(node, "check", *LOGIN)
    assert denied.status == 3
    assert "retry after  30 s" in denied.out
    assert (await ask(node, "reset", *LOGIN)).status == 0
    assert (await ask(node, "check", *LOGIN, "--peek")).status == 0
    assert "remaining  1\n" in (await ask(node, "check", *LOGIN)).out


async def test_checks_above_the_batch_size_are_all_sent(node, ask):
    await ask(node, "rules", "create", "*", "user", "--limit", 1001, "--window-seconds", 60)
    ended = await ask(node, "check", "user", "alice", "/x", "--count", 1002)
    assert ended.status == 3
    assert ended.out.endswith("\n1001 allowed, 1 denied\n")


async def test_an_explanation_names_a_month_as_such(node, ask):
    month = ("--limit", 100, "--period", "month", "--anchor-day", 15, "--algorithm", "fixed_window")
    created = await ask(node, "rules", "create", "/x", "user", *month)
    assert created.status == 0, created.err
    explained = await ask(node, "explain", "user", "alice", "/x")
    assert explained.out.count("100 per month from day 15 (UTC)") == 2


async def test_the_example_book_is_applied_and_exported_without_a_difference(node, ask, tmp_path):
    apply = ("rules", "apply", "-f")
    first = await ask(node, *apply, EXAMPLES / "rules.yaml", "--prune")
    assert first.status == 0
    assert first.out.splitlines()[-2] == "8 created, 0 updated, 0 deleted"
    assert (await ask(node, *apply, EXAMPLES / "rules.yaml", "--prune")).out == "no changes\n"
    exported = tmp_path / "exported.yaml"
    exported.write_text((await ask(node, "rules", "export")).out)
    assert (await ask(node, *apply, exported, "--prune")).out == "no changes\n"
    async with running_node(log_level="error") as other:
        assert (await ask(other, *apply, exported)).status == 0
        assert (await ask(other, "rules", "export")).out == exported.read_text()


async def test_one_apply_moves_rules_into_each_others_places(node, ask, tmp_path):
    file = tmp_path / "rules.yaml"
    fields = "identifier_type: user, limit: 5, window_seconds: 60, algorithm: token_bucket"
    ids = [f"00000000-0000-4000-8000-00000000000{number}" for number in range(3)]

    async def apply(*places):
        lines = [f"  - {{id: {rule}, endpoint: {place}, {fields}}}\n" for rule, place in places]
        file.write_text("rules:\n" + "".join(lines))
        return await ask(node, "rules", "apply", "-f", file, "--prune")

    await apply((ids[0], "/a"), (ids[1], "/b"))
    ended = await apply((ids[0], "/b"), (ids[1], "/c"), (ids[2], "/a"))
    assert ended.out.splitlines()[-2] == "1 created, 2 updated, 0 deleted"
    listed = json.loads((await ask(node, "rules", "list", "--json")).out)
    assert [(rule["endpoint"], rule["id"]) for rule in listed] == [
        ("/a", ids[2]),
        ("/b", ids[0]),
        ("/c", ids[1]),
    ]
    swapped = await apply((ids[0], "/c"), (ids[1], "/b"), (ids[2], "/a"))
    assert swapped.out.splitlines()[-2] == "0 created, 2 updated, 0 deleted"


async def test_a_file_is_compared_and_applied_only_if_no_rule_was_changed_since(
    node, ask, tmp_path
):
    file = tmp_path / "rules.yaml"
    fields = "identifier_type: user, limit: 5, window_seconds: 60, algorithm: token_bucket"
    file.write_text(f"rules:\n  - {{endpoint: /a, {fields}}}\n")
    compared = await ask(node, "rules", "diff", "-f", file)
    assert compared.status == 4
    assert compared.out.endswith("the rules are at revision 0\n")
    assert (await ask(node, "rules", "apply", "-f", file, "--json")).status == 0
    assert (await ask(node, "rules", "diff", "-f", file, "--prune")).status == 0
    create = ("rules", "create", "/b", "user", "--limit", 5, "--window-seconds", 60)
    assert (await ask(node, *create)).status == 0
    refused = await ask(node, "rules", "apply", "-f", file, "--prune", "--revision", 1)
    assert refused.status == 1
    assert "rules were changed after 1: the revision is 2 now" in refused.err
    file.write_text(f"rules:\n  - {{id: {UNKNOWN_ID}, endpoint: /a, {fields}}}\n")
    taken = await ask(node, "rules", "diff", "-f", file)
    assert taken.status == 1
    assert "  rules[0].id: the rule for this endpoint and identifier_type has the id" in taken.err


async def test_rules_revert_from_the_command_line(node, ask, tmp_path):
    create = ("rules", "create", "/a", "user", "--limit", 5, "--window-seconds", 60)
    assert (await ask(node, *create)).status == 0
    exported = (await ask(node, "rules", "export")).out
    file = tmp_path / "empty.yaml"
    file.write_text("rules: []\n")
    assert (await ask(node, "rules", "apply", "-f", file, "--prune")).status == 0
    shown = await ask(node, "rules", "revert", 1, "--dry-run")
    assert shown.out == (
        "+ create /a user: 5 per 1 min, token_bucket\n"
        "1 to create, 0 to update, 0 to delete; this was a dry run\n"
    )
    refused = await ask(node, "rules", "revert", 1, "--revision", 1)
    assert (refused.status, "changed after 1" in refused.err) == (1, True)
    assert (await ask(node, "rules", "revert", 1)).out.endswith(
        "1 created, 0 updated, 0 deleted\n"
        "the rules are at revision 3; to go back: ratelimitd rules revert 2\n"
    )
    assert (await ask(node, "rules", "export")).out == exported
    assert (await ask(node, "rules", "revert", 1)).out == "no changes\n"
    future = await ask(node, "rules", "revert", 99)
    reason = "there is no such revision: the newest is 3"
    assert future.err == f"Error: the rules cannot be reverted to revision 99: {reason}\n"
    assert future.status == 1
    assert (await ask(node, "rules", "revert", 0)).status == 2


async def test_a_change_prints_the_command_that_reverts_it(node, ask):
    create = ("rules", "create", "/a", "user", "--limit", 5, "--window", "1m")
    assert (await ask(node, *create)).out.endswith("\nthe rules are at revision 1\n")
    same = await ask(node, "rules", "update", "/a", "user", "--limit", 5)
    assert (same.status, "revision" in same.out) == (0, False)
    for change in (("update", "/a", "user", "--limit", 7), ("delete", "/a", "user")):
        before = (await ask(node, "rules", "export")).out
        changed = await ask(node, "rules", *change)
        _, back = changed.out.rstrip().split("to go back: ratelimitd ")
        assert (await ask(node, *back.split())).status == 0
        assert (await ask(node, "rules", "export")).out == before


async def test_every_wrong_field_of_a_rule_is_named(node, ask):
    ended = await ask(node, "rules", "create", "", "user", "--limit", 0, "--window-seconds", -1)
    assert ended.status == 1
    assert ended.err.count("\n") == 1
    for field in ("endpoint: ", "limit: ", "window_seconds: "):
        assert field in ended.err


async def test_an_update_changes_named_fields_only_and_a_stale_etag_none(node, ask):
    create = ("rules", "create", "/x", "user", "--limit", 5, "--window-seconds", 60, "--json")
    rule = json.loads((await ask(node, *create)).out)
    update = ("rules", "update", rule["id"], "--limit", 7, "--disable", "--etag", rule["etag"])
    changed = json.loads((await ask(node, *update, "--json")).out)
    assert (changed["limit"], changed["window_seconds"], changed["enabled"]) == (7, 60, False)
    late = await ask(node, *update)
    assert late.status == 1
    assert "aborted" in late.err
    assert "no rule applies" in (await ask(node, "check", "user", "alice", "/x")).out
    assert (await ask(node, "rules", "delete", rule["id"])).status == 0
    assert (await ask(node, "rules", "delete", rule["id"])).status == 1


async def test_a_second_rule_for_the_same_place_is_refused(node, ask):
    create = ("rules", "create", "/x", "user", "--limit", 5, "--window-seconds", 60)
    assert (await ask(node, *create)).status == 0
    ended = await ask(node, *create)
    assert ended.status == 1
    assert ended.err.startswith("Error: already exists: ")


async def test_a_node_that_serves_is_ready(node, ask):
    ended = await ask(node, "health", "--ready")
    assert (ended.status, ended.out) == (0, "SERVING\n")


async def test_health_and_metrics_are_shown(node, ask):
    health = await ask(node, "health", "--json")
    assert health.status == 0
    assert json.loads(health.out)["status"] == "HEALTHY"
    metrics = await ask(node, "metrics", "rate_limiter_requests_allowed_total")
    assert metrics.status == 0
    assert len(metrics.out.splitlines()) == 2
    unknown = await ask(node, "metrics", "no_such_metric")
    assert unknown.status == 1
    assert unknown.err.startswith("Error: invalid argument: ")


@pytest.mark.parametrize("options", [[], ["--count", 2]])
async def test_an_invalid_address_is_an_error_and_not_a_denial(node, ask, options):
    ended = await ask(node, "check", "ip", "not-an-address", "/login", *options)
    assert ended.status == 1
    assert ended.err.startswith("Error: invalid argument: identifier: ")
    assert "not-an-address" not in ended.err


async def test_a_token_grants_access_and_is_never_shown(ask, tmp_path, transport):
    token = tmp_path / "token"
    token.write_text("an-admin-token\n")
    async with running_node(
        admin_token="an-admin-token", log_level="error", transport=transport
    ) as node:
        without = await ask(node, "rules", "list")
        assert without.status == 1
        assert "--token-file" in without.err
        assert (await ask(node, "rules", "list", "--token-file", token)).status == 0
        wrong = await ask(node, "rules", "list", "--token", "another-token")
        assert wrong.status == 1
        assert "another-token" not in wrong.err
        assert (await ask(node, "check", "user", "alice", "/x")).status == 0


async def test_the_error_for_an_http_port_names_it(capsys):
    async with running_node(log_level="error") as node:
        command = ["health", "--target", node.http_address]
        assert await asyncio.to_thread(main, command) == 2
    told = capsys.readouterr().err
    assert f"{node.http_address} answers HTTP/1.1, not gRPC" in told
    assert "9090 by default" in told


def test_ctrl_c_while_waiting_is_quiet():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        process = subprocess.Popen(
            [*HEEDS_CTRL_C, COMMAND, "health", "--target", address, "--timeout", "60"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        connection, _ = silent.accept()
        with connection:
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, b"", b"")


def test_a_closed_stdout_is_quiet():
    process = subprocess.Popen(
        [COMMAND, "config", "show"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=30) == 1
