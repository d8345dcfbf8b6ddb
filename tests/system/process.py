"""Real nodes for the end-to-end tests: the installed command in processes of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx

from ratelimiter.v1 import ratelimiter_pb2 as pb
from ratelimiter.v1 import ratelimiter_pb2_grpc as stubs

COMMAND = [str(Path(sys.executable).with_name("ratelimitd"))]

READY = re.compile(r"ratelimitd ready grpc=(\S+) http=(\S+) node=(\S+)\n")

_ADMINISTERED = {"--admin-token", "--admin-token-file", "--admin-sans", "--loopback-admin"}

START_S = 30.0
"""Longest wait for a start or an end: far above what they take, so that only a hang fails."""

PATIENT = ("--redis-timeout-ms", "1000")
"""For the tests of no fault of the store: one that a busy machine delays does not make nodes fail open."""

NEVER_ENDING_S = 2**31 - 1
"""A window that began in 1970 and ends in 2038: no test meets its edge."""


NOTHING_COMPILED = {"PIP_NO_COMPILE": "0"}
"""Environment for pip, which else compiles all that it installs, a third of its time; "1" would mean that it does."""


class Served:
    """One running node."""

    def __init__(
        self, process: subprocess.Popen[str], ready_line: str, state_dir: Path | None = None
    ) -> None:
        match = READY.fullmatch(ready_line)
        assert match, f"no ready line but {ready_line!r}"
        self.process = process
        self.grpc_address, self.http_address, self.node_id = match.groups()
        token = state_dir / "admin-token" if state_dir else None
        self.admin_token = token.read_text().strip() if token and token.exists() else ""
        """That the node made; empty where it is told who administers."""
        self.login_link = ""
        """Its pages, opened once, where it made the token."""
        self.channel = grpc.insecure_channel(self.grpc_address)
        admin = grpc.intercept_channel(self.channel, _AsAdmin(self.admin_token))
        self.checks = stubs.RateLimiterStub(self.channel)
        self.rules = stubs.RateLimiterConfigStub(admin)
        self.holds = stubs.RateLimiterHoldsStub(self.channel)
        self.plans = stubs.RateLimiterPlansStub(admin)
        self.node = stubs.RateLimiterHealthStub(admin)

    @property
    def authorization(self) -> dict[str, str]:
        """The header of who has the node's own token."""
        return {"Authorization": f"Bearer {self.admin_token}"}

    def signal(self, number: int) -> None:
        """Send a signal to the node."""
        self.process.send_signal(number)

    def ended(self) -> tuple[int, str, str]:
        """Wait for the end: status, the rest of stdout, and stderr."""
        out, err = self.process.communicate(timeout=START_S)
        return self.process.returncode, out, err

    def create_rule(
        self,
        endpoint: str,
        limit: int,
        identifier_type: str = "user",
        *,
        window_s: int = NEVER_ENDING_S,
    ) -> str:
        """A rule in a window that does not end while a test runs; returns its id."""
        rule = pb.RateLimit(
            endpoint=endpoint,
            identifier_type=identifier_type,
            limit=limit,
            window_seconds=window_s,
            algorithm="fixed_window",
        )
        request = pb.CreateRateLimitRequest(rate_limit=rule)
        return self.rules.CreateRateLimit(request, timeout=START_S).id

    def check(
        self, endpoint: str, identifier: str = "u", *, peek: bool = False
    ) -> pb.RateLimitResponse:
        """One check by a user."""
        request = pb.RateLimitRequest(
            identifier=identifier, identifier_type="user", endpoint=endpoint, peek=peek
        )
        return self.checks.CheckRateLimit(request, timeout=START_S)

    def check_batch(
        self, endpoint: str, identifiers: Iterable[str]
    ) -> Sequence[pb.RateLimitResponse]:
        """One check by each of some users, in one call."""
        checks = [
            pb.RateLimitRequest(identifier=one, identifier_type="user", endpoint=endpoint)
            for one in identifiers
        ]
        request = pb.BatchRateLimitRequest(requests=checks)
        return self.checks.CheckRateLimitBatch(request, timeout=START_S).responses

    def spent(self, endpoint: str, identifier: str = "u") -> int:
        """What the node remembers of the spends of a user."""
        answer = self.check(endpoint, identifier, peek=True)
        return answer.limit - answer.remaining_tokens - answer.allowed  # it counts itself in

    def reset(self, endpoint: str, identifier: str = "u") -> None:
        """Let a user start afresh."""
        request = pb.ResetRequest(identifier=identifier, identifier_type="user", endpoint=endpoint)
        self.node.ResetRateLimit(request, timeout=START_S)

    def metric(self, name: str) -> float:
        """A number from the page for Prometheus."""
        text = httpx.get(f"http://{self.http_address}/metrics").text
        match = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
        assert match, f"{name} is not exported"
        return float(match[1])


class _AsAdmin(grpc.UnaryUnaryClientInterceptor):
    """Adds the admin token to calls that bring no credentials of their own."""

    def __init__(self, token: str) -> None:
        self._token = token

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        metadata = list(details.metadata or ())
        if self._token and not any(name == "authorization" for name, _ in metadata):
            metadata.append(("authorization", f"Bearer {self._token}"))
        return continuation(details._replace(metadata=metadata), request)


GOING = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
"""What a caller hears of a node on its way out. CANCELLED is the word of grpc's C core for a call that it had read from
the wire, and had not handed to the node, when the node stopped accepting calls; nothing was charged for it."""


class Load(threading.Thread):
    """Checks one user without pause until the node is gone; every answer must be a decision or one of ``GOING``."""

    def __init__(self, node: Served, endpoint: str) -> None:
        super().__init__(daemon=True)
        self.answered_at_s: list[float] = []
        """When each allowed check was answered, on the monotonic clock."""
        self.sent = 0
        self.unexpected: list[grpc.StatusCode] = []
        self._node = node
        self._endpoint = endpoint

    def run(self) -> None:
        """Send until the first failure."""
        while True:
            self.sent += 1
            try:
                if self._node.check(self._endpoint).allowed:
                    self.answered_at_s.append(time.monotonic())
            except grpc.RpcError as error:
                if error.code() not in GOING:
                    self.unexpected.append(error.code())
                return


class Files:
    """The files of a node in a directory, and the command line that uses them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.database = directory / "rules.db"
        self.state_dir = directory / "state"

    def arguments(self, *more: str) -> list[str]:
        """Arguments of ``serve`` on free ports; what comes later wins."""
        return [
            "serve",
            *("--listen", "127.0.0.1:0"),
            *("--http-listen", "127.0.0.1:0"),
            *("--database-url", f"sqlite:///{self.database}"),
            *("--state-dir", str(self.state_dir)),
            *more,
        ]

    def popen(self, *more: str, command: Sequence[str] = COMMAND) -> subprocess.Popen[str]:
        """Start the command."""
        return subprocess.Popen(
            [*command, *self.arguments(*more)],
            cwd=self.directory,
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @contextmanager
    def serving(self, *more: str, command: Sequence[str] = COMMAND) -> Iterator[Served]:
        """A node that is ready; killed at the end of the block if it still runs."""
        process = self.popen(*more, command=command)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, f"the node did not start: {process.communicate(timeout=START_S)[1]}"
            makes_token = _ADMINISTERED.isdisjoint(
                more
            )  # else a file may be there from an earlier start
            node = Served(process, line, self.state_dir if makes_token else None)
            if node.admin_token and node.http_address != "off":
                node.login_link = process.stdout.readline().split()[1]
            yield node
            node.channel.close()
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.communicate(timeout=START_S)

    def refused(self, *more: str, command: Sequence[str] = COMMAND) -> tuple[int, str]:
        """Start a node that must not get ready; returns its status and stderr."""
        process = self.popen(*more, command=command)
        out, err = process.communicate(timeout=START_S)
        assert out == ""
        return process.returncode, err


def clean_environment() -> dict[str, str]:
    """That of this process, without what a node would read."""
    return {name: text for name, text in os.environ.items() if not name.startswith("RATELIMITD_")}


def one_line(text: str) -> bool:
    """Whether stderr holds one line beside the log, whose lines are JSON."""
    lines = [line for line in text.splitlines() if not line.startswith("{")]
    return len(lines) == 1 and text.endswith("\n")


def until(condition: object, what: str) -> None:
    """Wait for something a real process does in its own time; ``condition`` is called again and again."""
    deadline_s = time.monotonic() + START_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline_s, f"waited in vain until {what}"
        time.sleep(0.02)


class Shown:
    """The command while it runs, and what it has shown so far."""

    def __init__(self, process):
        self.process = process
        self.lines = []

    def until(self, text):
        while not any(text in line for line in self.lines):
            line = self.process.stdout.readline()
            assert line, f"it ended: {self.process.communicate(timeout=START_S)}"
            self.lines.append(line)


@contextmanager
def running(command, kind=Shown):
    """A command, and what it shows; ends by Ctrl-C."""
    with subprocess.Popen(
        [*map(str, command)],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield kind(process)
        finally:
            process.send_signal(signal.SIGINT)  # the second of two is nothing new
