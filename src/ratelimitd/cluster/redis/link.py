"""A lasting link to one server: a connection that is remade whenever it is lost, and what error replies lead to.

A request is never sent a second time, but where the server says that it did not run it: when it does not know the
script (it gets it, once), and when another node of a Cluster has the key (that one is asked, once). Whatever was in
flight on a connection that was lost may have run or not; its callers get StoreUnavailableError.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random as random_source
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from ratelimitd.cluster.redis.codec import Script
from ratelimitd.cluster.redis.connection import (
    MAX_REQUESTS,
    NOSCRIPT,
    NOT_PRIMARY,
    REDIRECTIONS,
    Connection,
    Done,
    Handshake,
    Refused,
    Request,
    again,
    ask,
    code_of,
    error_of,
    hand_over,
    log_in,
    login_error_of,
    pack,
)
from ratelimitd.errors import RateLimitdError, StoreMisconfiguredError, StoreUnavailableError
from ratelimitd.retry import Backoff
from ratelimitd.settings.urls import Server

CONNECT_S: Final = 1.0
"""For everything from the first packet to the end of the handshake, TLS included. No check waits for it."""

KEEP_ALIVE: Final = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
"""Seconds of quiet before the first question, seconds between questions, and how many remain unanswered."""

_Connection = TypeVar("_Connection", bound=Connection)


async def connect(
    server: Server,
    handshake: Handshake,
    tls: ssl.SSLContext | None,
    make: Callable[[], _Connection],
    *,
    within_s: float = CONNECT_S,
) -> _Connection:
    """A connection of ``make`` to ``server``, greeted.

    Raises:
        StoreMisconfiguredError: a certificate, a password, a permission or the database is wrong.
        StoreUnavailableError: the server cannot be reached, or cannot serve now.
    """
    try:
        async with asyncio.timeout(within_s):
            connection = await _open(server, tls, make)
            try:
                await log_in(connection, handshake)
            except BaseException:
                connection.drop(StoreUnavailableError("the handshake has failed"))
                raise
            return connection
    except TimeoutError:
        message = f"no connection within {within_s:g} s"
        raise StoreUnavailableError(message) from None
    except ssl.SSLError as error:
        message = f"TLS has failed: {error.reason or 'the server does not speak it'}"
        raise StoreMisconfiguredError(message) from None
    except OSError as error:
        message = f"no connection: {cause_of(error)}"
        raise StoreUnavailableError(message) from None


async def ask_once(
    server: Server,
    handshake: Handshake,
    tls: ssl.SSLContext | None,
    *command: bytes | str,
    within_s: float = CONNECT_S,
) -> Any:
    """The reply to one command, on a connection that is made for it; raises as :func:`connect`."""
    connection = await connect(
        server,
        handshake,
        tls,
        lambda: Connection(hand_over, lambda _error: None, timeout_s=within_s),
        within_s=within_s,
    )
    try:
        return await ask(connection, *command)
    except Refused as refused:
        raise login_error_of(str(refused)) from None
    finally:
        connection.drop(StoreUnavailableError("asked"))


def cause_of(error: OSError) -> str:
    """Why, in the system's words. The error's own text may name addresses, many of them."""
    if isinstance(error, socket.gaierror):
        return "the name of the host is not known"
    return os.strerror(error.errno) if error.errno else "several addresses were tried in vain"


async def _open(
    server: Server, tls: ssl.SSLContext | None, make: Callable[[], _Connection]
) -> _Connection:
    loop = asyncio.get_running_loop()
    if server.is_path:
        return (await loop.create_unix_connection(make, server.host))[1]
    transport, connection = await loop.create_connection(make, server.host, server.port, ssl=tls)
    keep_alive(transport.get_extra_info("socket"))
    return connection


def keep_alive(peer: socket.socket) -> None:
    """Have the system notice within half a minute that the other side is gone, where nothing is sent that would."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE:
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


Sleep = Callable[[float], Awaitable[None]]

FIRST_S: Final = 0.05
LONGEST_S: Final = 1.0
"""A server that is back is found within a second; the attempts of a whole cluster are nothing for it."""


def pauses(random: Callable[[], float]) -> Backoff:
    """Between attempts to connect."""
    return Backoff(FIRST_S, LONGEST_S, random)


async def for_ever(step: Callable[[], Awaitable[None]], sleep: Sleep = asyncio.sleep) -> None:
    """Await ``step`` again and again. What it raises is a defect of ours: it is reported, and must not be the end."""
    while True:
        try:
            await step()
        except Exception as error:  # noqa: BLE001 -- whatever it is, there must be a connection again
            asyncio.get_running_loop().call_exception_handler(
                {
                    "message": "a connection to the shared state could not be kept up",
                    "exception": error,
                }
            )
            await sleep(LONGEST_S)


LONG_LIFE_S: Final = 1.0
"""A connection that lived so long is remade at once; one that did not, after a pause."""

Locate = Callable[[], Awaitable[Server]]
"""Says where the server is now; raises StoreUnavailableError while that is unknown."""

Redirect = Callable[[Request, Server], None]
"""Takes a request that another server of a Cluster has to answer; it has to see to its ``done``."""


_log = logging.getLogger(__name__)


def warn(line: str) -> None:
    """Log one line for the operator."""
    _log.warning("%s", line)


class LinkOptions(NamedTuple):
    """What all links of a node have in common. ``report`` takes one line for the operator."""

    timeout_s: float
    handshake: Handshake = Handshake()
    tls: ssl.SSLContext | None = None
    max_requests: int = MAX_REQUESTS
    report: Callable[[str], None] = warn
    random: Callable[[], float] = random_source.random
    sleep: Sleep = asyncio.sleep


class Link:
    """One pipelining connection to one server, kept up in the background from :meth:`start` to :meth:`close`.

    While it is being remade for the first time, requests wait for it, at most as long as for a reply; when that failed,
    they fail at once.
    """

    def __init__(
        self, locate: Locate, options: LinkOptions, redirect: Redirect | None = None
    ) -> None:
        self.name = ""
        """Where the server is: ``host:port`` or a path. Empty until that is known."""
        self.connections_total = 0
        """Connections that came into service."""
        self._locate = locate
        self._server = Server("", 0)
        self._options = options
        self._redirect = redirect
        self._loop = asyncio.get_running_loop()
        self._backoff = pauses(options.random)
        self._connection: Connection | None = None
        self._down: RateLimitdError = StoreUnavailableError("the shared state is not connected")
        self._parked: list[Request] | None = None
        self._parked_weight = 0
        self._parked_until: asyncio.TimerHandle | None = None
        self._reported: type[RateLimitdError] | None = None
        self._refusal_reported = False
        self._load_errors: dict[bytes, RateLimitdError] = {}
        self._loading: set[bytes] = set()
        self._expected: tuple[str, str] | None = None
        """Which server alone the connection that is being made may be to, and why."""
        self._lost = asyncio.Event()
        self._settled = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        """Whether a connection is in service."""
        return self._connection is not None

    @property
    def in_flight(self) -> int:
        """Requests that are not answered."""
        return self._connection.in_flight if self._connection else len(self._parked or ())

    # Requests

    def send(self, command: Sequence[bytes | int], done: Done) -> None:
        """Send ``command``; ``done`` gets the reply or an error, exactly once, after this method has returned."""
        self.submit(Request(pack(tuple(command)), done))

    def run(  # noqa: PLR0917 - called once a check under strict: keywords would cost it 50 ns
        self,
        script: Script,
        keys: Sequence[bytes],
        arguments: Sequence[bytes | int],
        done: Done,
        weight: int = 1,
    ) -> None:
        """Run ``script`` in the store; ``done`` as with :meth:`send`. It counts as ``weight`` requests."""
        packed = pack((b"EVALSHA", script.sha, len(keys), *keys, *arguments))
        self.submit(Request(packed, done, script, weight))

    def flush(self) -> None:
        """Send what was asked in this turn now, and not at its end."""
        if self._connection is not None:
            self._connection.flush()

    def submit(self, request: Request) -> None:
        """Send ``request``; its ``done`` is called as with :meth:`send`."""
        if self._connection is not None:
            self._connection.submit(request)
        elif self._parked is not None and self._parked_weight < self._options.max_requests:
            self._parked.append(request)
            self._parked_weight += request.weight
        else:
            self._loop.call_soon(request.tell, again(self._down))

    def submit_again(self, request: Request) -> None:
        """Send a request that this server, or the one that named this one, did not run."""
        if request.asking:
            self.submit(Request(pack((b"ASKING",)), lambda _reply: None))
        self.submit(request)

    # From start to close

    def start(self) -> None:
        """Begin to connect."""
        self._park()
        self._keeping = asyncio.create_task(for_ever(self._keep, self._options.sleep))

    async def settled(self) -> None:
        """Wait until it is connected, or the first attempt has failed."""
        await self._settled.wait()

    def drop(self, reason: str) -> None:
        """End the connection and make a new one, to wherever the server is then."""
        if self._connection is not None:
            self._connection.drop(StoreUnavailableError(reason))

    def belongs_to(self, name: str, reason: str) -> None:
        """The server is ``name`` now: leave any other one, also one to which a connection is just being made."""
        if self._connection is None:
            self._expected = name, reason
        elif self.name != name:
            self.drop(reason)

    async def close(self) -> None:
        """End; what is in flight, and what is asked from now on, gets an error."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        self._down = StoreUnavailableError("the connection to the shared state is closed")
        if self._connection is not None:
            self._connection.drop(self._down)
        self._release_parked()

    # Connecting

    async def _keep(self) -> None:
        """Connect, and return when the next connection is due."""
        try:
            connection = await self._connect()
        except StoreUnavailableError as error:
            self._fail(error)
            await self._options.sleep(self._backoff.next_s())
            return
        began_s = time.monotonic()
        self._serve(connection)
        await self._lost.wait()
        if time.monotonic() - began_s >= LONG_LIFE_S:
            self._backoff.reset()
        else:
            await self._options.sleep(self._backoff.next_s())

    async def _connect(self) -> Connection:
        self._lost.clear()
        self._expected = None
        self._server = server = await self._locate()
        self.name = str(server)
        return await connect(
            server,
            self._options.handshake,
            self._options.tls,
            lambda: Connection(
                self._on_error,
                self._on_lost,
                timeout_s=CONNECT_S,
                max_requests=self._options.max_requests,
            ),
        )

    def _serve(self, connection: Connection) -> None:
        if connection.lost is not None:  # in the turn after its handshake
            return
        if self._expected is not None and self._expected[0] != self.name:
            connection.drop(StoreUnavailableError(self._expected[1]))
            return
        connection.timeout_s = self._options.timeout_s
        self._connection = connection
        self._refusal_reported = False
        self._load_errors.clear()
        self._loading.clear()
        self.connections_total += 1
        if self._reported is not None:
            self._reported = None
            self._options.report(f"shared state at {self.name}: connected")
        for request in self._unpark():
            connection.submit(request)
        self._settled.set()

    def _fail(self, error: StoreUnavailableError) -> None:
        self._down = error
        self._release_parked()
        if type(error) is not self._reported:
            self._reported = type(error)
            where = f"shared state at {self.name}" if self.name else "shared state"
            self._options.report(f"{where}: {error}")
        self._settled.set()

    def _on_lost(self, error: RateLimitdError) -> None:
        if (
            self._connection is not None
        ):  # else it was not in service, and its handshake reports the error
            self._connection = None
            self._down = error
            if self._keeping is not None and not self._keeping.done():
                self._park()
        self._lost.set()

    # Waiting for a connection that is being made

    def _park(self) -> None:
        self._parked, self._parked_weight = [], 0
        self._parked_until = self._loop.call_later(self._options.timeout_s, self._release_parked)

    def _release_parked(self) -> None:
        """It takes too long, or has failed: tell those who wait."""
        for request in self._unpark():
            request.tell(again(self._down))

    def _unpark(self) -> Sequence[Request]:
        """Take all waiters; new ones wait for the next connection."""
        if self._parked_until is not None:
            self._parked_until.cancel()  # it would be too early for those who wait then
        parked, self._parked = self._parked or (), None
        return parked

    # Error replies

    def _on_error(self, request: Request, text: str) -> None:
        connection = self._connection
        if connection is None:
            hand_over(request, text)  # still at the handshake
            return
        code = code_of(text)
        if code == NOSCRIPT and request.script is not None:
            self._send_with_script(connection, request, request.script)
            return
        if code in REDIRECTIONS:
            self._hand_on(request, code, text)
            return
        error = error_of(text)
        if isinstance(error, StoreMisconfiguredError) and not self._refusal_reported:
            self._refusal_reported = True
            self._options.report(f"shared state at {self.name}: {error}")
        request.tell(error)
        if code in NOT_PRIMARY:
            connection.drop(error)

    def _send_with_script(self, connection: Connection, request: Request, script: Script) -> None:
        """Load the script, once for all that need it, and send the request again behind it."""
        if request.had_script:
            error = self._load_errors.get(script.sha)
            request.tell(
                again(error)
                if error
                else StoreUnavailableError("the shared state keeps no scripts")
            )
            return
        request.had_script = True
        if script.sha not in self._loading:
            self._loading.add(script.sha)

            def loaded(reply: object) -> None:
                self._loading.discard(script.sha)
                if isinstance(reply, RateLimitdError):
                    self._load_errors[script.sha] = reply

            connection.submit(Request(pack((b"SCRIPT", b"LOAD", script.text)), loaded))
        self.submit_again(request)

    def _hand_on(self, request: Request, code: str, text: str) -> None:
        """Let the server that was named answer: it is known to be another one, and that this one did nothing."""
        if self._redirect is None:
            error = StoreMisconfiguredError("the shared state is a Cluster: use redis+cluster://")
            request.tell(error)
            return
        named = None if request.redirected else self._named(text)
        if named is None:
            request.tell(StoreUnavailableError("the shared state is moving the key"))
            return
        request.redirected = True
        request.asking = code == "ASK"
        self._redirect(request, named)

    def _named(self, text: str) -> Server | None:
        """The server in ``MOVED slot host:port``; without a host it is the one that answered.

        ``?`` is one that the Cluster cannot name.
        """
        host, _, port = text.rsplit(" ", maxsplit=1)[-1].rpartition(":")
        if host == "?" or not (port.isascii() and port.isdigit()):
            return None
        return Server(host or self._server.host, int(port))
