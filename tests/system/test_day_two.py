"""The second day with a node: what operators do and meet, with the installed command and a real Valkey."""

import json
import logging
import secrets
import signal
import sqlite3
import subprocess
import threading

import grpc
import httpx
import pytest
from fastapi import FastAPI

from ratelimitd_client import AsyncRateLimiterClient, RateLimiterClient
from ratelimitd_client.middleware import limited
from ratelimitd_client.middleware.asgi import RateLimitMiddleware
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.servers import Valkey
from tests.system.process import COMMAND, START_S, Files, clean_environment, until

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

TOKEN_FILE = "admin-token.txt"

PATIENT = ("--redis-timeout-ms", "200")
"""A busy machine does not pass for a fault."""

PAUSE_S = 0.3

TRIES = 1_000
"""More wrong tokens than an address has."""


class Day:
    """A node of a cluster of one, its files, and the command line beside it."""

    def __init__(self, directory, node, valkey):
        self.directory, self.node, self.valkey = directory, node, valkey
        self.admin = ("--token-file", str(directory / TOKEN_FILE))

    def run(self, *arguments, target=None):
        """Run a command that asks the node, or ``target``."""
        return subprocess.run(
            [*COMMAND, *arguments, "--target", target or self.node.grpc_address, *self.admin],
            cwd=self.directory,
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )

    def done(self, *arguments):
        """Run a command that has to succeed; returns what it prints."""
        ended = self.run(*arguments)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def asked(self, *arguments):
        """The same of a command that prints JSON."""
        return json.loads(self.done(*arguments, "--json"))


@pytest.fixture
def valkey(tmp_path):
    with Valkey(tmp_path / "valkey") as server:
        yield server


@pytest.fixture
def day(tmp_path, valkey):
    (tmp_path / TOKEN_FILE).write_text(secrets.token_urlsafe(32))
    files = Files(tmp_path)
    arguments = (*PATIENT, "--redis-url", valkey.url, "--admin-token-file", TOKEN_FILE)
    with files.serving(*arguments) as node:
        yield Day(tmp_path, node, valkey)


def rules_of(limit, *endpoints):
    rows = "".join(
        f"- {{endpoint: {one}, identifier_type: user, limit: {limit}, window: 1h}}\n"
        for one in endpoints
    )
    return f"rules:\n{rows}"


def test_rules_are_code_that_is_compared_applied_and_taken_back(day):
    file = day.directory / "rules.yaml"
    diff = ("rules", "diff", "-f", str(file), "--prune")
    apply = ("rules", "apply", "-f", str(file), "--prune")

    file.write_text(first := rules_of(5, "/orders", "/carts"))
    assert day.run(*diff).returncode == 4
    revision = day.asked(*apply)["revision"]
    assert day.run(*diff).returncode == 0

    file.write_text(rules_of(7, "/orders"))
    differs = day.run(*diff)
    assert (differs.returncode, "/carts" in differs.stdout) == (4, True)
    day.done(*apply)
    assert day.asked("rules", "get", "/orders", "user")["limit"] == 7
    late = day.run(*apply, "--revision", revision)
    assert (late.returncode, "aborted" in late.stderr) == (1, True)

    day.done("rules", "revert", revision, "--dry-run")
    assert day.asked("rules", "get", "/orders", "user")["limit"] == 7
    day.done("rules", "revert", revision)
    file.write_text(first)
    assert day.run(*diff).returncode == 0


def test_an_endpoint_without_a_rule_is_seen_and_given_its_rule(day):
    day.done("rules", "create", "/orders", "user", "--limit", "1", "--window", "1h")
    day.done("rules", "create", "/never", "user", "--limit", "1", "--window", "1h")
    for _ in range(3):
        assert day.node.check("/Orders").reason == pb.NO_RULE

    def unmatched():
        return [one["endpoint"] for one in day.asked("rules", "unmatched")]

    until(lambda: unmatched() == ["/Orders"], "the endpoint is listed")
    explained = day.asked("explain", "user", "u", "/Orders")
    [near] = explained["nearest"]
    assert (near["endpoint"], near["why"]) == ("/orders", "differs in case")
    findings = subprocess.run(
        [*COMMAND, "doctor", "--state-dir", "state", "--admin-token-file", TOKEN_FILE, "--json"],
        cwd=day.directory, env=clean_environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    [finding] = [one for one in json.loads(findings.stdout) if one["area"] == "rules"]
    assert (finding["level"], "/Orders" in finding["what"]) == ("warning", True)

    day.done("rules", "create", "/Orders", "user", "--limit", "1", "--window", "1h")
    assert [day.node.check("/Orders").allowed for _ in range(2)] == [True, False]
    unused = {one["endpoint"] for one in day.asked("rules", "list", "--unused")}
    assert unused == {"/orders", "/never"}


def named_token(name):
    """An admin's entry for TOKENS_FILE, and the token."""
    made = subprocess.run(
        [*COMMAND, "token", name, "--role", "admin"],
        env=clean_environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    return made.stdout, made.stderr.split()[-1]


def test_tokens_are_rotated_while_the_node_runs_and_changes_are_somebodys(tmp_path, valkey):
    tokens, aside = tmp_path / "tokens.yaml", tmp_path / "aside.yaml"

    def put(*entries):
        aside.write_text("tokens:\n" + "".join(entries))
        aside.replace(tokens)

    (old_entry, old), (new_entry, new) = named_token("alice"), named_token("bob")
    put(old_entry)
    arguments = ("--tokens-file", str(tokens), "--admin-token", secrets.token_urlsafe(32))
    files = Files(tmp_path)
    with files.serving(*PATIENT, "--redis-url", valkey.url, *arguments) as node:
        day = Day(tmp_path, node, valkey)

        def passes(token):
            (tmp_path / TOKEN_FILE).write_text(token)
            return day.run("rules", "list").returncode == 0

        assert (passes(old), passes(new)) == (True, False)
        put(old_entry, new_entry)
        until(lambda: passes(new), "the new token is known")
        assert passes(old)
        put(new_entry)
        until(lambda: not passes(old), "the old token is revoked")
        assert passes(new)
        day.done("rules", "create", "/orders", "user", "--limit", "1", "--window", "1h")
    with sqlite3.connect(files.database) as database:
        assert database.execute("SELECT actor FROM rule_audit").fetchall() == [("bob",)]


def test_wrong_tokens_are_slowed_and_the_right_one_passes(day):
    wrong = [("authorization", "Bearer not-the-token-of-this-node")]
    codes = []
    while len(codes) < TRIES and grpc.StatusCode.RESOURCE_EXHAUSTED not in codes:
        with pytest.raises(grpc.RpcError) as caught:
            day.node.rules.ListRateLimits(
                pb.ListRateLimitsRequest(), metadata=wrong, timeout=START_S
            )
        codes.append(caught.value.code())
    assert {*codes[:-1]} == {grpc.StatusCode.UNAUTHENTICATED}
    assert codes[-1] is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "too many wrong tokens" in caught.value.details()
    assert day.node.metric('rate_limiter_token_guesses_total{result="refused"}') == 1
    assert day.asked("rules", "list") == []


def test_a_wrong_port_is_named(day, caplog):
    ended = day.run("rules", "list", target=day.node.http_address)
    assert (ended.returncode, "answers HTTP/1.1, not gRPC" in ended.stderr) == (2, True)
    with (
        caplog.at_level(logging.WARNING),
        RateLimiterClient(day.node.http_address, timeout_s=START_S) as limiter,
    ):
        assert limiter.check("u", "user", "/orders").allowed
    assert "HTTP/1.1" in caplog.text


async def test_a_route_that_is_denied_closed_answers_503_once_the_node_is_killed(day):
    day.done("rules", "create", "/pay", "ip", "--limit", "9", "--window", "1h")
    app = FastAPI()

    @app.get("/pay")
    @limited(on_unavailable="deny")
    async def pay():
        return "paid"

    @app.get("/look")
    async def look():
        return "seen"

    async with AsyncRateLimiterClient(day.node.grpc_address, timeout_s=START_S) as limiter:
        app.add_middleware(RateLimitMiddleware, limiter=limiter)
        transport = httpx.ASGITransport(app, client=("192.0.2.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as browser:
            assert (await browser.get("/pay")).status_code == 200
            day.node.signal(signal.SIGKILL)
            day.node.ended()
            denied, allowed = await browser.get("/pay"), await browser.get("/look")
    assert (denied.status_code, int(denied.headers["Retry-After"]) >= 1) == (503, True)
    assert (allowed.status_code, allowed.json()) == (200, "seen")


def test_a_short_pause_of_the_shared_state_opens_no_breaker(day):
    day.done("rules", "create", "/orders", "user", "--limit", "100000", "--window", "1h")
    assert day.node.check("/orders", "known").reason == pb.WITHIN_LIMIT
    resumed = threading.Event()

    def resume():
        day.valkey.resume()
        resumed.set()

    day.valkey.pause()
    timer = threading.Timer(PAUSE_S, resume)
    timer.start()
    try:
        reasons, number = set(), 0
        while not resumed.is_set():
            number += 1
            reasons.add(day.node.check("/orders", f"new-{number}").reason)
    finally:
        timer.join()
    assert reasons
    assert pb.FAIL_OPEN_BREAKER not in reasons
    until(
        lambda: day.node.check("/orders", f"new-{number}").reason == pb.WITHIN_LIMIT,
        "checks are decided again",
    )
    health = json.loads(day.run("health", "--json").stdout)  # of the last minute: DEGRADED
    assert (health["breaker_state"], health["shared_state_connected"]) == ("closed", True)
