"""A lasting link to one server: reconnects when the connection is lost, and handles error replies.

A request is sent again only if the server did not run it: once after loading an unknown script, and once to the node of
a Cluster that has the key. Requests in flight on a lost connection may have run; their callers get
StoreUnavailableError.
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
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from ratelimitd.cluster.redis.codec import Script
from ratelimitd.cluster.redis.connection import (
    MAX_REQUESTS,
    NOSCRIPT,
    NOT_PRIMARY,
    REDIRECTIONS,
    REFUSING,
    SILENCE_S,
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
    server_named,
)
from ratelimitd.errors import (
    RateLimitdError,
    StoreClusterDownError,
    StoreMisconfiguredError,
    StoreUnavailableError,
)
from ratelimitd.retry import Backoff, cancel_all
from ratelimitd.settings.urls import Server

CONNECT_S: Final = 1.0
"""Timeout from the first packet to the end of the handshake, including TLS. No check waits for it."""

# equivalent: a second more or less has no effect
KEEP_ALIVE: Final = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
"""Idle seconds before the first probe, seconds between probes, and unanswered probes before the end."""

_Connection = TypeVar("_Connection", bound=Connection)


Tls: TypeAlias = Callable[[], ssl.SSLContext]
"""Returns the context of a new connection."""


async def connect(
    server: Server,
    handshake: Handshake,
    tls: Tls | None,
    make: Callable[[], _Connection],
    *,
    within_s: float = CONNECT_S,
) -> _Connection:
    """Return a connection of ``make`` to ``server``, after its handshake.

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
    tls: Tls | None,
    *command: bytes | str,
    within_s: float = CONNECT_S,
) -> Any:
    """Return the reply to one command, on its own connection; raises like :func:`connect`."""
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
        raise login_error_of(str(refused), handshake.peer) from None
    finally:
        connection.drop(StoreUnavailableError("asked"))


def cause_of(error: OSError) -> str:
    """Return the cause in the system's words. The error's own text may contain many addresses."""
    if isinstance(error, socket.gaierror):
        return "the host name cannot be resolved"
    return (
        os.strerror(error.errno) if error.errno else "none of the host's addresses could be reached"
    )


async def _open(server: Server, tls: Tls | None, make: Callable[[], _Connection]) -> _Connection:
    loop = asyncio.get_running_loop()
    if server.is_path:
        return (await loop.create_unix_connection(make, server.host))[1]
    context = None if tls is None else tls()
    transport, connection = await loop.create_connection(
        make, server.host, server.port, ssl=context
    )
    keep_alive(transport.get_extra_info("socket"))
    return connection


def keep_alive(peer: socket.socket) -> None:
    """Let the system detect within half a minute that the peer of an idle connection is gone."""
    # equivalent: any number but 0 means yes
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE:
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


Sleep = Callable[[float], Awaitable[None]]

FIRST_S: Final = 0.05
LONGEST_S: Final = 1.0
"""A server that comes back is found within a second; the load of a whole cluster's attempts is negligible."""


def pauses(random: Callable[[], float]) -> Backoff:
    """Return the delays between attempts to connect."""
    return Backoff(FIRST_S, LONGEST_S, random)


async def repeat_step(step: Callable[[], Awaitable[None]], sleep: Sleep = asyncio.sleep) -> None:
    """Await ``step`` repeatedly. An exception is a defect: it is reported, and the loop continues."""
    while True:
        try:
            await step()
        except Exception as error:  # noqa: BLE001 -- there must be a connection again after any error
            asyncio.get_running_loop().call_exception_handler(
                {
                    "message": "a connection to the shared state failed unexpectedly",
                    "exception": error,
                }
            )
            await sleep(LONGEST_S)


LONG_LIFE_S: Final = 1.0
"""A connection that lived this long is replaced at once; others after a delay."""

REPORT_AGAIN_S: Final = 60.0
"""A connection lasts for weeks: a server that refuses again, or still, is reported at most this often."""

Locate = Callable[[], Awaitable[Server]]
"""Returns the current address of the server; raises StoreUnavailableError while it is unknown."""

Redirect = Callable[[Request, Server], None]
"""Takes over a request that another server of a Cluster has to answer, including its ``done``."""


_log = logging.getLogger(__name__)


def warn(line: str) -> None:
    """Log one line for the operator."""
    _log.warning("%s", line)


class LinkOptions(NamedTuple):
    """Options of all links of a node. ``report`` takes one line for the operator."""

    timeout_s: float
    handshake: Handshake = Handshake()
    tls: Tls | None = None
    max_requests: int = MAX_REQUESTS
    report: Callable[[str], None] = warn
    random: Callable[[], float] = random_source.random
    sleep: Sleep = asyncio.sleep
    silence_s: float = SILENCE_S


class Link:
    """One pipelining connection to one server, maintained in the background from :meth:`start` to :meth:`close`.

    Requests wait for the first attempt to connect, at most as long as for a reply. Once it has failed, they fail at
    once.
    """

    def __init__(
        self, locate: Locate, options: LinkOptions, redirect: Redirect | None = None
    ) -> None:
        self.name = ""
        """Address of the server: ``host:port`` or a path; empty until known."""
        self.connections_total = 0
        """Connections that were used."""
        self.reports_cluster_down = False
        """The server has answered CLUSTERDOWN since the map of the Cluster was last read; reset by the reader."""
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
        self._refusal_reported_s: float | None = None
        self._load_errors: dict[bytes, RateLimitdError] = {}
        self._loading: set[bytes] = set()
        self._expected: tuple[str, str] | None = None
        """The only server that the connection in progress may reach, and the reason."""
        self._lost = asyncio.Event()
        self._settled = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        """Whether a connection is in use."""
        return self._connection is not None

    @property
    def in_flight(self) -> int:
        """Unanswered requests."""
        return self._connection.in_flight if self._connection else len(self._parked or ())

    @property
    def is_late(self) -> bool:
        """Whether the server owes the answer to a request that has timed out."""
        return self._connection is not None and self._connection.is_late

    # Requests

    def send(self, command: Sequence[bytes | int], done: Done, *, is_patient: bool = False) -> None:
        """Send ``command``; ``done`` gets the reply or an error, exactly once, after this method has returned.

        With ``is_patient`` a late reply is taken, too.
        """
        self.submit(Request(pack(tuple(command)), done, is_patient=is_patient))

    def run(  # noqa: PLR0917 - called once a check under strict: keywords would cost it 50 ns
        self,
        script: Script,
        keys: Sequence[bytes],
        arguments: Sequence[bytes | int],
        done: Done,
        weight: int = 1,
        *,
        is_patient: bool = False,
    ) -> None:
        """Run ``script`` in the store; it counts as ``weight`` requests. The rest as with :meth:`send`."""
        packed = pack((b"EVALSHA", script.sha, len(keys), *keys, *arguments))
        self.submit(Request(packed, done, script, weight, is_patient=is_patient))

    def flush(self) -> None:
        """Send the requests of this iteration now, not at its end."""
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
            self._loop.call_soon(request.resolve, again(self._down))

    def submit_again(self, request: Request) -> None:
        """Send a request that was not run by this server or by the one that redirected it here."""
        if request.asking:
            self.submit(Request(pack((b"ASKING",)), lambda _reply: None))
        self.submit(request)

    # From start to close

    def start(self) -> None:
        """Start connecting."""
        self._park()
        self._keeping = asyncio.create_task(repeat_step(self._keep, self._options.sleep))

    async def settled(self) -> None:
        """Wait for the end of the first attempt to connect."""
        await self._settled.wait()

    def drop(self, reason: str) -> None:
        """Close the connection and connect again, to the server's address at that time."""
        if self._connection is not None:
            self._connection.drop(StoreUnavailableError(reason))

    def belongs_to(self, name: str, reason: str) -> None:
        """Close connections, also those in progress, to servers other than ``name``."""
        if self._connection is None:
            self._expected = name, reason
        elif self.name != name:
            self.drop(reason)

    async def close(self) -> None:
        """Close; requests in flight and later ones get an error."""
        await cancel_all(self._keeping)
        self._down = StoreUnavailableError("the connection to the shared state is closed")
        if self._connection is not None:
            self._connection.drop(self._down)
        self._release_parked()

    # Connecting

    async def _keep(self) -> None:
        """Connect once, and return when it is time for the next attempt."""
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
                silence_s=self._options.silence_s,
                max_requests=self._options.max_requests,
            ),
        )

    def _serve(self, connection: Connection) -> None:
        if connection.lost is not None:  # lost right after its handshake
            return
        if self._expected is not None and self._expected[0] != self.name:
            connection.drop(StoreUnavailableError(self._expected[1]))
            return
        connection.timeout_s = self._options.timeout_s
        self._connection = connection
        self._refusal_reported_s = None
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
        # Callers get this text without the address, which the log names.
        self._down = type(error)(f"the shared state cannot be reached: {error}")
        self._release_parked()
        if type(error) is not self._reported:
            self._reported = type(error)
            where = f"shared state at {self.name}" if self.name else "shared state"
            self._options.report(f"{where}: {error}")
        self._settled.set()

    def _on_lost(self, error: RateLimitdError) -> None:
        # Else it was not in service, and its handshake reports the error.
        if self._connection is not None:
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
        """Fail the requests that wait for a connection."""
        for request in self._unpark():
            request.resolve(again(self._down))

    def _unpark(self) -> Sequence[Request]:
        """Return and remove the waiting requests; later ones wait for the next connection."""
        if self._parked_until is not None:
            self._parked_until.cancel()  # would be too early for later requests
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
        if request.done is None:
            return  # its caller has left
        if code in REDIRECTIONS:
            self._follow_redirect(request, code, text)
            return
        error = error_of(text)
        if isinstance(error, StoreClusterDownError):
            self.reports_cluster_down = True
        if isinstance(error, StoreMisconfiguredError) or code in REFUSING:
            self._report_refusal(error)
        request.resolve(error)
        if code in NOT_PRIMARY:
            connection.drop(error)

    def _report_refusal(self, error: RateLimitdError) -> None:
        now_s = self._loop.time()
        if self._refusal_reported_s is None or now_s - self._refusal_reported_s >= REPORT_AGAIN_S:
            self._refusal_reported_s = now_s
            self._options.report(f"shared state at {self.name}: {error}")

    def _send_with_script(self, connection: Connection, request: Request, script: Script) -> None:
        """Load the script, once for all that need it; send the request again behind it unless its caller has left."""
        if request.had_script:
            error = self._load_errors.get(script.sha)
            request.resolve(
                again(error)
                if error
                else StoreUnavailableError("the shared state does not keep the script it was sent")
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
        if request.done is not None:
            self.submit_again(request)

    def _follow_redirect(self, request: Request, code: str, text: str) -> None:
        """Pass a request on to the server that the reply names; this one did not run it."""
        if self._redirect is None:
            error = StoreMisconfiguredError("the shared state is a Cluster: use redis+cluster://")
            request.resolve(error)
            return
        named = None if request.redirected else self._named(text)
        if named is None:
            request.resolve(StoreUnavailableError("the shared state is moving the key"))
            return
        request.redirected = True
        request.asking = code == "ASK"
        self._redirect(request, named)

    def _named(self, text: str) -> Server | None:
        """Return the server in ``MOVED slot host:port``; no host means the server that answered, ``?`` unknown."""
        host, _, port = text.rsplit(" ", maxsplit=1)[-1].rpartition(":")
        return server_named(host or self._server.host, port)
