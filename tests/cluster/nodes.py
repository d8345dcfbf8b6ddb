"""Several real nodes on one machine, with one rule book, and with a common or separate shared states."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.servers import until
from tests.system.process import COMMAND, START_S, Served, clean_environment

REVISION = "rate_limiter_rules_revision"
NODES = "rate_limiter_cluster_nodes"
QUICK = ("--drain-s", "1", "--log-format", "json")


class Nodes:
    """Processes of ``ratelimitd serve``; ``redis_urls`` is the address of the shared state, for all or for each.

    ``environments`` has additional environment variables for each of the first nodes. Killed nodes can be restarted
    with the same name and ports.
    """

    def __init__(
        self,
        directory: Path,
        redis_urls: str | Sequence[str],
        *arguments: str,
        count: int = 3,
        database_url: str = "",
        environments: Sequence[Mapping[str, str]] = (),
    ) -> None:
        self.directory = directory
        each = [redis_urls] * count if isinstance(redis_urls, str) else list(redis_urls)
        self._redis_urls = each
        self._arguments = (*QUICK, *arguments)
        self._environments = environments
        self._database_url = database_url or f"sqlite:///{directory / 'rules.db'}"
        self.served: list[Served] = []
        self._processes: list[subprocess.Popen[str]] = []
        self._listen = [("127.0.0.1:0", "127.0.0.1:0")] * len(each)

    def __len__(self) -> int:
        return len(self._redis_urls)

    def __getitem__(self, number: int) -> Served:
        return self.served[number]

    @property
    def addresses(self) -> list[str]:
        """Their gRPC addresses."""
        return [listen for listen, _ in self._listen]

    def __enter__(self) -> Self:
        self.directory.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.callback(self._end)
            # The first creates the rule book; the others start concurrently.
            self.served = [self._ready(0, self._popen(0))]
            rest = [(number, self._popen(number)) for number in range(1, len(self))]
            self.served += [self._ready(number, process) for number, process in rest]
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def start(self, number: int) -> Served:
        """Restart a node that has ended."""
        self.served[number] = self._ready(number, self._popen(number))
        return self.served[number]

    def kill(self, number: int) -> None:
        """Kill a node, as a crash would."""
        self._end_one(self.served[number], signal.SIGKILL)

    def stop(self, number: int) -> int:
        """Stop a node by a signal; returns its exit status."""
        return self._end_one(self.served[number], signal.SIGTERM)

    def pause(self, number: int) -> None:
        """Suspend a node."""
        self.served[number].signal(signal.SIGSTOP)

    def resume(self, number: int) -> None:
        """Resume a suspended node."""
        self.served[number].signal(signal.SIGCONT)

    def log(self, number: int) -> str:
        """Return the log of a node."""
        return self._log(number).read_text()

    def rule(self, number: int = 0, **fields: Any) -> pb.RateLimit:
        """Create a rule through one of the nodes, and wait until all have it."""
        fields = {
            "endpoint": "/a",
            "identifier_type": "user",
            "algorithm": "token_bucket",
            **fields,
        }
        request = pb.CreateRateLimitRequest(rate_limit=pb.RateLimit(**fields))
        made = self.served[number].rules.CreateRateLimit(request, timeout=START_S)
        self.agree()
        return made

    def agree(self) -> None:
        """Wait until all running nodes have the same rule book."""
        until(lambda: len(set(self.metric(REVISION))) == 1, "nodes agree")

    def wait_for_members(self) -> None:
        """Wait until all running nodes count each other."""
        count = float(len(self._running))
        until(lambda: set(self.metric(NODES)) == {count}, "nodes know of each other")

    def settled(self) -> None:
        """Wait until all spends are in the shared state."""
        name = "rate_limiter_unsettled_buckets"
        until(lambda: self.metric_sum(name) == 0, "everything is settled")

    def metric(self, name: str) -> list[float]:
        """Return a metric of each running node."""
        return [node.metric(name) for node in self._running]

    def metric_sum(self, name: str) -> float:
        """Return the sum of a metric over the running nodes."""
        return sum(self.metric(name))

    @property
    def _running(self) -> list[Served]:
        return [one for one in self.served if one.process.poll() is None]

    def _log(self, number: int) -> Path:
        return self.directory / f"n{number}.log"

    def _popen(self, number: int) -> subprocess.Popen[str]:
        listen, http_listen = self._listen[number]
        more = self._environments[number] if number < len(self._environments) else {}
        with self._log(number).open("a") as log:
            # A file, because a node under load may log more than an unread pipe holds.
            process = subprocess.Popen(
                [
                    *COMMAND, "serve", "--node-id", f"n{number}", "--listen", listen,
                    "--http-listen", http_listen, "--database-url", self._database_url,
                    "--state-dir", str(self.directory / f"state-{number}"),
                    "--redis-url", self._redis_urls[number], *self._arguments,
                ],
                cwd=self.directory,
                env={**clean_environment(), **more},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )  # fmt: skip
        self._processes.append(process)
        return process

    def _ready(self, number: int, process: subprocess.Popen[str]) -> Served:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"node {number} did not start: {self.log(number)}"
        node = Served(process, line, self.directory / f"state-{number}")
        self._listen[number] = node.grpc_address, node.http_address
        return node

    @staticmethod
    def _end_one(node: Served, number: signal.Signals) -> int:
        node.channel.close()
        node.signal(number)
        node.signal(signal.SIGCONT)
        node.process.communicate(timeout=START_S)
        return node.process.returncode

    def _end(self) -> None:
        for node in self.served:
            node.channel.close()
        for process in self._processes:
            process.send_signal(signal.SIGKILL)
        for process in self._processes:
            process.communicate(timeout=START_S)
