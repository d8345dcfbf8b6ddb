"""A load of prebuilt calls in a process of its own: ``python -m bench.replay PORT SCENARIO``; prints a line of JSON.

A closed loop: each connection has exactly ``--streams`` calls open. When a read brings the ends of so many calls, so
many new ones go out in one write, a slice of what was built before the clock started. Only where the server's flow
control holds DATA back are there fewer. With ``--rate`` it is an open loop: calls go out when they are due, at most
``--streams`` at a time. Answers are checked as they come (:mod:`bench.answers`).
"""

import argparse
import contextlib
import gc
import json
import re
import select
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from bench import protocols, scripts
from bench.answers import GREETING, Answers, WrongAnswerError
from bench.scripts import IDENTIFIERS, Script, build
from bench.servers import Server, cpu_seconds

SCENARIOS = scripts.SCENARIOS | protocols.SCENARIOS
READ_BYTES = 262_144
SILENCE_SECONDS = 5.0
"""A server without an answer for this long counts as hung."""
SILENT = f"no answer for {SILENCE_SECONDS:g} s"
CLOSED = "the end of the connection"
PACE_SECONDS = 0.001
"""Longest delay of due calls in an open loop."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """``latency_us`` is the mean: calls in flight / rate; 0 in an open loop. ``cpu_us``: the server's, user and system.

    ``answered`` and ``sent`` count calls including the warm-up; h2load does not report them.
    """

    calls: int
    rate: float
    latency_us: float
    cpu_us: float
    answered: int = 0
    sent: int = 0


class ReplayError(Exception):
    """The load ended early; the text says why."""


class Caller:
    """One connection and the calls on it; ``allowed`` is for :class:`bench.answers.Answers`."""

    def __init__(
        self,
        sock: socket.socket,
        script: Script,
        streams: int,
        allowed: re.Pattern[bytes] | None = None,
    ) -> None:
        self.sock = sock
        self.answered = 0
        self.due = sys.maxsize
        """Number of calls that are due."""
        self._answers = Answers(streams, allowed)
        self._script = script
        self._octets = memoryview(script.octets)
        self._next = 0
        self._free = streams
        self._unsent: bytes | memoryview = GREETING
        sock.settimeout(0)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def sent(self) -> int:
        """Number of calls sent or about to be sent."""
        return self._next

    @property
    def exhausted(self) -> bool:
        """Whether no calls are left."""
        return self._next == len(self._script.starts) - 1

    def turn(self) -> bool:
        """Read answers and send as many calls. Return whether output waits until the socket is writable."""
        try:
            self._receive()
            # Over TLS a read returns one record, and the selector does not see records buffered in the TLS library.
            while isinstance(self.sock, ssl.SSLSocket):
                self._receive()
        except (BlockingIOError, ssl.SSLWantReadError):
            pass
        return self.send()

    def _receive(self) -> None:
        octets = self.sock.recv(READ_BYTES)
        if not octets:
            raise WrongAnswerError(CLOSED)
        answered = self._answers.feed(octets)
        self.answered += answered
        self._free += answered

    def send(self) -> bool:
        """Send pending output and due calls. Return whether the socket accepted only a part."""
        if not self._unsent:
            self._unsent = self._take()
        if not self._unsent:
            return False
        try:
            sent = self.sock.send(self._unsent)
        except (BlockingIOError, ssl.SSLWantWriteError):
            return True
        self._unsent = self._unsent[sent:]
        return bool(self._unsent) or (self._free > 0 and self.send())

    def _take(self) -> bytes | memoryview:
        """Return pending protocol output, else the next calls."""
        if self._answers.to_send:
            octets, self._answers.to_send = self._answers.to_send, b""
            return octets
        starts, body_bytes = self._script.starts, self._script.body_bytes
        count = min(self._free, self.due, len(starts) - 1 - self._next)
        if body_bytes:
            count = min(count, self._answers.credit // body_bytes)
        first, self._next = self._next, self._next + count
        self._free -= count
        self.due -= count
        self._answers.credit -= count * body_bytes
        return self._octets[starts[first] : starts[self._next]]


class Load:
    """All connections on one selector; ``pids`` are processes whose CPU time counts, ``rate`` is for an open loop."""

    def __init__(self, callers: Sequence[Caller], pids: Sequence[int], rate: float = 0.0) -> None:
        self._callers = {caller.sock.fileno(): caller for caller in callers}
        self._pids = pids
        self._rate_per_caller = rate / len(callers)
        for caller in callers if rate else ():
            caller.due = 0
        self._epoll = select.epoll()
        for number, caller in self._callers.items():
            self._epoll.register(number, select.EPOLLIN | select.EPOLLOUT)
            self._wait_for(number, sends=caller.send())

    def run(self, seconds: float) -> tuple[int, float, float]:
        """Run for ``seconds``, or until a connection has no calls left.

        Returns:
            Calls answered, duration in seconds, CPU seconds of the server.
        """
        callers, poll, clock = self._callers, self._epoll.poll, time.perf_counter
        before = sum(caller.answered for caller in callers.values())
        cpu, started = sum(map(cpu_seconds, self._pids)), clock()
        end, used_up, made_due = started + seconds, False, 0
        while (now := clock()) < end and not used_up:
            if self._rate_per_caller:
                due = int((now - started) * self._rate_per_caller)
                self._make_due(due - made_due)
                made_due = due
            ready = poll(PACE_SECONDS if self._rate_per_caller else SILENCE_SECONDS)
            if not ready and not self._rate_per_caller:
                raise WrongAnswerError(SILENT)
            for number, events in ready:
                caller = callers[number]
                sends = caller.turn()
                if sends or events & select.EPOLLOUT:
                    self._wait_for(number, sends=sends)
                used_up = used_up or caller.exhausted
        taken, cpu = now - started, sum(map(cpu_seconds, self._pids)) - cpu
        return sum(caller.answered for caller in callers.values()) - before, taken, cpu

    def _make_due(self, count: int) -> None:
        """Make ``count`` more calls due for each caller."""
        if count:
            for number, caller in self._callers.items():
                caller.due += count
                self._wait_for(number, sends=caller.send())

    def _wait_for(self, number: int, *, sends: bool) -> None:
        self._epoll.modify(number, select.EPOLLIN | (select.EPOLLOUT if sends else 0))


def replay(
    server: Server,
    scenario: str,
    shape: tuple[int, int],
    *,
    seconds: float,
    tls: bool = False,
    rate: float = 0.0,
    warm_up: float = 1.0,
    pids: Sequence[int] | None = None,
) -> Measured:
    """Run this module in a separate process and return its measurement.

    Args:
        server: the server to load.
        scenario: a name in :data:`SCENARIOS`.
        shape: connections, and calls in flight on each.
        seconds: how long to measure.
        tls: speak TLS, without verifying the certificate.
        rate: calls that are due per second; 0: closed loop.
        warm_up: seconds before the measurement.
        pids: processes whose CPU time counts, instead of the server's.

    Raises:
        ReplayError: an answer was not a success.
    """
    command = [
        sys.executable, "-m", "bench.replay", str(server.port), scenario,
        *(f"--pid={pid}" for pid in ([server.pid] if pids is None else pids)),
        "--connections", str(shape[0]), "--streams", str(shape[1]), "--seconds", str(seconds),
        "--warm-up", str(warm_up), "--rate", str(rate), *(["--tls"] if tls else []),
    ]  # fmt: skip
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise ReplayError(done.stderr.strip())
    return Measured(**json.loads(done.stdout))


def main() -> None:
    """Measure as the command line requests."""
    parser = argparse.ArgumentParser(prog="python -m bench.replay", description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument(
        "--pid",
        type=int,
        action="append",
        default=[],
        help="whose CPU time to take; may be repeated",
    )
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--warm-up", type=float, default=1.0, help="seconds")
    parser.add_argument("--rate", type=float, default=0.0, help="calls per second; 0: no pause")
    parser.add_argument("--tls", action="store_true")
    options = parser.parse_args()
    gc.disable()  # a collection would traverse all prebuilt calls
    try:
        measured = _measure(options)
    except (WrongAnswerError, OSError) as error:
        sys.exit(str(error))
    print(json.dumps(asdict(measured)))


def _measure(options: argparse.Namespace) -> Measured:
    scenario = SCENARIOS[options.scenario]
    total = scenario.most_per_second * (options.seconds + options.warm_up)
    prebuilt = _scripts(
        options.scenario, int(total) // options.connections + 1, options.connections
    )
    with contextlib.ExitStack() as stack:
        callers = [
            Caller(
                stack.enter_context(_connected(options)), script, options.streams, scenario.allowed
            )
            for script in prebuilt
        ]
        load = Load(callers, options.pid, options.rate)
        load.run(options.warm_up)
        calls, seconds, cpu = load.run(options.seconds)
    open_at_a_time = options.connections * options.streams
    if seconds < options.seconds / 2:
        sys.exit("the prebuilt calls were used up too early: raise most_per_second")
    return Measured(
        calls=calls,
        rate=calls / seconds,
        latency_us=0.0 if options.rate else seconds * 1e6 * open_at_a_time / calls,
        cpu_us=cpu * 1e6 / calls,
        answered=sum(caller.answered for caller in callers),
        sent=sum(caller.sent for caller in callers),
    )


def _scripts(name: str, calls: int, connections: int) -> Iterator[Script]:
    """Yield one script per connection: the encoder state is the same on each, but the order of identifiers differs."""
    script = build(SCENARIOS[name], calls)
    for number in range(connections):
        if name == "identifiers" and number:
            yield build(SCENARIOS[name], calls, skip=number * IDENTIFIERS // connections)
        else:
            yield script


@contextlib.contextmanager
def _connected(options: argparse.Namespace) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", options.port), SILENCE_SECONDS) as sock:
        if not options.tls:
            yield sock
            return
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        with context.wrap_socket(sock, server_hostname="127.0.0.1") as wrapped:
            yield wrapped


if __name__ == "__main__":
    main()
