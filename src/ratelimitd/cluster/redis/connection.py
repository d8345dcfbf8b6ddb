"""One connection to one server: requests are sent in order, and replies matched in order.

All requests of one event-loop iteration are sent in one write. Connecting, logging in, reconnecting and sending again
are the task of :mod:`ratelimitd.cluster.redis.link`.

One timer serves all requests. A request that times out fails at once, unless it is patient, and keeps its place, so
that its late reply is dropped. A connection whose oldest request has waited for ``silence_s`` is presumed dead. If the
timer itself is late, this process was delayed and replies may wait in the socket: the socket is read first, a few times
while replies come.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple, cast

from hiredis import Reader, ReplyError, pack_command

from ratelimitd.cluster.redis.codec import Script
from ratelimitd.errors import (
    RateLimitdError,
    StoreClusterDownError,
    StoreCorruptError,
    StoreMisconfiguredError,
    StoreMovingError,
    StoreOverloadedError,
    StoreSlowError,
    StoreUnavailableError,
)
from ratelimitd.settings.urls import MAX_PORT, Login, Server

Done = Callable[[Any], None]
"""Takes the reply (bytes, int, list or None), or an instance of an error of :mod:`ratelimitd.errors`."""

pack: Final = cast("Callable[[tuple[bytes | int | str, ...]], bytes]", pack_command)
"""A command as the server reads it. (The library's own annotation allows commands of one word only.)"""


class Request:
    """A command, and ``done``: ``None`` once it was called."""

    __slots__ = (
        "asking",
        "done",
        "had_script",
        "is_patient",
        "packed",
        "redirected",
        "script",
        "weight",
    )

    def __init__(
        self,
        packed: bytes,
        done: Done,
        script: Script | None = None,
        weight: int = 1,
        *,
        is_patient: bool = False,
    ) -> None:
        self.packed = packed
        self.weight = weight
        """Its cost to the server, in requests."""
        self.done: Done | None = done
        self.script = script
        """The script to load if the server does not know it."""
        self.is_patient = is_patient
        """A late reply is taken: it fails only with its connection."""
        self.had_script = False
        """The script was loaded for this request."""
        self.redirected = False
        """It was redirected by a server of a Cluster."""
        self.asking = False
        """The new server is importing the slot, and needs ASKING first."""

    def resolve(self, reply: object) -> None:
        """Call ``done``, unless it was called."""
        done, self.done = self.done, None
        if done is not None:
            deliver(done, reply)


def deliver(done: Done, reply: object) -> None:
    """Call ``done``. A defect in a callback must not cost others their replies."""
    try:
        done(reply)
    except Exception as error:  # noqa: BLE001 -- see above
        asyncio.get_running_loop().call_exception_handler(
            {"message": "the callback of a reply failed", "exception": error}
        )


async def answer_of(request: Callable[[Done], None]) -> Any:
    """Return what ``request`` passes to its ``done``; raise it if it is an error."""
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def done(value: object) -> None:
        if not answer.done():  # else the caller has left
            answer.set_result(value)

    request(done)
    value = await answer
    if isinstance(value, Exception):
        raise value
    return value


SHARED_STATE: Final = "the shared state"

UNAVAILABLE: Final = {
    "BUSY": StoreUnavailableError,
    "CLUSTERDOWN": StoreClusterDownError,
    "LOADING": StoreUnavailableError,
    "MASTERDOWN": StoreUnavailableError,
    "MISCONF": StoreUnavailableError,
    "NOREPLICAS": StoreUnavailableError,
    "OOM": StoreUnavailableError,
    "READONLY": StoreUnavailableError,
    "TRYAGAIN": StoreMovingError,
}
"""Temporary errors. Reads may still work, but spends cannot be settled."""

MISCONFIGURED: Final = frozenset({"DENIED", "NOAUTH", "NOPERM", "NOPROTO", "WRONGPASS"})
"""Errors that last until a password or a permission is corrected."""

REFUSING: Final = frozenset({"BUSY", "MISCONF", "NOREPLICAS", "OOM"})
"""Temporary errors of a connected server that last until an operator acts: a failed sync opens no breaker, which would
report them."""

NOT_PRIMARY: Final = frozenset({"MASTERDOWN", "READONLY"})
"""Errors of a server that is no longer the primary: the connection is closed."""

NOSCRIPT: Final = "NOSCRIPT"
REDIRECTIONS: Final = frozenset({"ASK", "MOVED"})

_CODE: Final = re.compile(r"[A-Z]{2,20}")
_SCRIPT_LINE: Final = re.compile(r"user_script:([0-9]{1,6})")
_FULL: Final = "ERR max number of clients"
_FORBIDDEN: Final = ("ERR ACL failure in script", "ERR The user executing the script")
"""Texts of Valkey and of Redis 7.0 for a command that the user may not run in a script."""


def code_of(text: str) -> str:
    """Return the error code: the first word, in capitals."""
    found = _CODE.match(text)
    return found[0] if found else ""


def server_named(host: str, port: str) -> Server | None:
    """Return the server named in a reply; ``None`` if it is unknown (``?``) or the address is impossible."""
    is_number = port.isascii() and port.isdigit() and len(port) <= len(str(MAX_PORT))
    if host in {"", "?"} or not is_number or not 0 < int(port) <= MAX_PORT:
        return None
    return Server(host, int(port))


def error_of(text: str, peer: str = SHARED_STATE) -> RateLimitdError:
    """Return the error for the sender of the command; ``peer`` is what it calls the server."""
    code = code_of(text)
    if code in UNAVAILABLE:
        return UNAVAILABLE[code](f"{peer} answered {code}")
    if text.startswith(_FULL):
        return StoreUnavailableError(f"{peer} has reached its maximum of clients")
    line = _SCRIPT_LINE.search(text)
    where = f" in line {line[1]} of a script" if line else ""
    if text.startswith(_FORBIDDEN):
        code = "NOPERM"
    if code in MISCONFIGURED:
        return StoreMisconfiguredError(f"{peer} answered {code}{where}")
    return StoreCorruptError(f"{peer} answered {code or 'an error'}{where}")


def login_error_of(text: str, peer: str) -> StoreUnavailableError:
    """Return the error of a handshake with ``peer``; one that is not temporary counts as a wrong setting."""
    if code_of(text) in REDIRECTIONS:
        return StoreUnavailableError("the map of the Cluster is not up to date yet")
    error = error_of(text, peer)
    if isinstance(error, StoreUnavailableError):
        return error
    return StoreMisconfiguredError(f"{peer} refuses us: {code_of(text) or 'an error'}")


MAX_REQUESTS: Final = 8_192
"""Limit of requests in flight, by weight. A server answers as many in 50 to 200 ms; a longer queue would hold requests
that have timed out."""

MAX_BYTES: Final = 16 * 1024 * 1024
"""Limit of octets in flight: the memory that a hanging server may cost this process."""

REQUEST_S: Final = 0.000_05
"""Added to the timeout for each request ahead, by weight: three times the cost of a script, its cost on a busy machine.
Otherwise the last of 1,000 requests sent together would count as a slow answer, also for the breaker."""

SILENCE_S: Final = 1.0
"""Silence after which a server is presumed dead; BREAKER_SILENCE_MS overrides it. Many times the longest sensible
timeout, so that slow is not mistaken for dead.
"""

SILENT_TIMEOUTS: Final = 1.5
"""Least silence, in timeouts, so that late requests fail first."""

LATE_S: Final = 0.002
"""A timer that is later than this was delayed by this process."""

READ_PAUSE_S: Final = 0.001
"""Pause for reading the socket after a late timer. Any value works: the event loop reads sockets before it calls
timers.
"""

MAX_READ_PAUSES: Final = 8
"""Limit of such pauses: 2 MiB of replies. A process that is always late must apply its timeouts in the end."""

_NOTHING: Final = object()

_TOO_LONG: Final = re.compile(rb"\r\n(?:[*%~>|][0-9]{6}|[$=!][0-9]{7})")
"""A header that announces at least 100,000 elements or 1 MB in one, more than any reply to our requests. hiredis
allocates an array when it reads the header: 2,147,483,647 elements took 20 s and 16 GB."""

# equivalent: any bound of MiB does
MAX_REPLY_BYTES: Final = 32 * 1024 * 1024
"""Limit of octets without the end of a reply: a batch of 100 logs of 16,384 entries has 26 MB."""

_SEAM_BYTES: Final = 10
"""Octets at the ends of a read that may be part of such a header."""


class Connection(asyncio.Protocol):
    """An open connection. Each request's ``done`` is called exactly once, and never inside :meth:`submit`.

    ``on_error`` takes a request whose caller still waits or that runs a script, and the error reply to it; it must call
    its ``done``, if there is one.
    ``on_lost`` is called once, before the requests in flight fail. ``timeout_s`` applies to requests that are not sent
    yet.
    """

    def __init__(
        self,
        on_error: Callable[[Request, str], None],
        on_lost: Callable[[RateLimitdError], None],
        *,
        timeout_s: float,
        silence_s: float = SILENCE_S,
        max_requests: int = MAX_REQUESTS,
        max_bytes: int = MAX_BYTES,
        time_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.timeout_s = timeout_s
        self._silence_s = silence_s
        self.lost: RateLimitdError | None = None
        self._on_error = on_error
        self._on_lost = on_lost
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._time_s = time_s
        self._loop = asyncio.get_running_loop()
        self._reader = Reader(notEnoughData=_NOTHING)
        self._seam = b"\r\n"
        self._unfinished_bytes = 0
        self._transport: asyncio.Transport
        self._outgoing: list[bytes] = []
        self._waiting: deque[Request] = deque()
        self._bytes = 0
        # Weight of the waiting requests, and of those among them that have timed out.
        self._weight = self._expired_weight = 0
        # Requests are numbered in order: `_answered` precede the oldest that waits, `_expired` the oldest whose caller
        # still waits. A write is (time, number of the first request after it, deadline).
        self._answered = 0
        self._expired = 0
        self._writes: deque[tuple[float, int, float]] = deque()
        self._late_writes: deque[tuple[float, int, float]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_s = 0.0
        self._read_pauses = 0
        self._answered_at_pause = 0

    @property
    def in_flight(self) -> int:
        """Unanswered requests."""
        return len(self._waiting)

    @property
    def is_late(self) -> bool:
        """Whether an unanswered request has timed out."""
        return self._expired > self._answered

    def submit(self, request: Request) -> None:
        """Send ``request`` with the others of this iteration; refuse it if too much is in flight, or after a loss."""
        size = len(request.packed)
        if self._weight >= self._max_requests or self._bytes + size > self._max_bytes:
            self._refuse(
                request, StoreOverloadedError("too many requests wait for the shared state")
            )
            return
        if self.lost is not None:
            self._refuse(request, again(self.lost))
            return
        self._bytes += size
        self._weight += request.weight
        self._waiting.append(request)
        outgoing = self._outgoing
        if not outgoing:
            self._loop.call_soon(self.flush)
        outgoing.append(request.packed)

    def flush(self) -> None:
        """Send the requests of this iteration now, not at its end."""
        outgoing, self._outgoing = self._outgoing, []
        if self.lost is not None or not outgoing:
            return
        self._transport.write(b"".join(outgoing))
        now_s = self._time_s()
        end = self._answered + len(self._waiting)
        ahead = self._weight - self._expired_weight
        due_s = now_s + self.timeout_s + ahead * REQUEST_S
        self._writes.append((now_s, end, due_s))
        # An existing timer may be one for silence or the handshake, and too late for these requests.
        # equivalent: one that is due at the same time is replaced by its like
        if self._timer is None or self._timer_due_s > due_s:
            self._set_timer(due_s - now_s, now_s)

    def drop(self, error: RateLimitdError) -> None:
        """Close the connection; requests in flight get ``error``."""
        if self.lost is None:
            self._transport.abort()
            self._lose(error)

    # Callbacks of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Pass each complete reply to the oldest unanswered request."""
        reader, waiting = self._reader, self._waiting
        if self._announces_too_much(data):
            self._drop_garbage()
            return
        reader.feed(data)
        while True:
            try:
                reply = reader.gets()
            except Exception:  # noqa: BLE001 - it raises its own, and what Python does of a length or a key beyond reason
                self._drop_garbage()
                return
            if reply is _NOTHING:
                return
            # equivalent: a byte more in a bound of MiB has no effect
            self._unfinished_bytes = 0
            if not waiting:
                if self.unasked(reply):
                    continue
                return
            request = waiting.popleft()
            self._answered += 1
            self._bytes -= len(request.packed)
            self._weight -= request.weight
            if self._answered <= self._expired:
                self._expired_weight -= request.weight
            if reply.__class__ is ReplyError and (request.done or request.script):
                self._on_error(request, str(reply))
            elif request.done is not None:
                request.resolve(reply)

    def _announces_too_much(self, data: bytes) -> bool:
        """Return whether a header announces too much, or a reply has become too long. Two reads may split a header."""
        self._unfinished_bytes += len(data)
        seam = self._seam + data[:_SEAM_BYTES]
        self._seam = (seam if len(data) <= _SEAM_BYTES else data)[-_SEAM_BYTES:]
        found = _TOO_LONG.search(data) or _TOO_LONG.search(seam)
        return found is not None or self._unfinished_bytes > MAX_REPLY_BYTES

    def _drop_garbage(self) -> None:
        self.drop(StoreUnavailableError("the shared state does not speak the Redis protocol"))

    def unasked(self, reply: object) -> bool:
        """Handle an error before a close, or a reply without a request; return whether to continue."""
        if isinstance(reply, ReplyError):
            self.drop(error_of(str(reply)))
        else:
            self.drop(StoreUnavailableError("the shared state sent a reply without a request"))
        return False

    def connection_lost(self, _error: Exception | None) -> None:
        """Fail all requests of the closed connection."""
        if self.lost is None:
            self._lose(StoreUnavailableError("the connection to the shared state was lost"))

    # Time

    def look(self) -> None:
        """Apply the timeouts; called by the timer."""
        self._timer = None
        now_s = self._time_s()
        answered = self._answered
        for writes in (self._late_writes, self._writes):
            while writes and writes[0][1] <= answered:
                writes.popleft()
        if self.lost is not None or not (self._writes or self._late_writes):
            return
        if self._reads_first(late=now_s - self._timer_due_s > LATE_S):
            self._set_timer(READ_PAUSE_S, now_s)
            return
        oldest_s = (self._late_writes or self._writes)[0][0]
        silence_s = max(self._silence_s, SILENT_TIMEOUTS * self.timeout_s)
        if now_s - oldest_s >= silence_s:
            self.drop(StoreUnavailableError(f"the shared state was silent for {silence_s:g} s"))
            return
        next_s = oldest_s + silence_s
        if self._expire(now_s):
            next_s = min(next_s, self._writes[0][2])
        self._set_timer(max(READ_PAUSE_S, next_s - now_s), now_s)

    def _reads_first(self, *, late: bool) -> bool:
        """Return whether to read the socket first, because this process was late."""
        came = self._answered != self._answered_at_pause
        if (self._read_pauses and came and self._read_pauses < MAX_READ_PAUSES) or (
            late and not self._read_pauses
        ):
            self._read_pauses += 1
            self._answered_at_pause = self._answered
            return True
        self._read_pauses = 0
        return False

    def _expire(self, now_s: float) -> bool:
        """Fail the requests that have timed out; return whether others are left."""
        writes = self._writes
        while writes and writes[0][2] <= now_s:
            write = writes.popleft()
            self._late_writes.append(write)
            late = islice(
                self._waiting, max(0, self._expired - self._answered), write[1] - self._answered
            )
            self._expired = write[1]
            for request in list(late):
                self._expired_weight += request.weight
                if not request.is_patient:
                    request.resolve(StoreSlowError("the shared state was too slow"))
        return bool(writes)

    def _set_timer(self, seconds: float, now_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due_s = now_s + seconds
        self._timer = self._loop.call_later(seconds, self.look)

    # Private

    def _refuse(self, request: Request, error: RateLimitdError) -> None:
        self._loop.call_soon(request.resolve, error)

    def _lose(self, error: RateLimitdError) -> None:
        self.lost = error
        if self._timer is not None:
            self._timer.cancel()  # equivalent: without it, it finds the connection lost
            self._timer = None
        waiting = list(self._waiting)
        self._waiting.clear()
        self._on_lost(error)
        for request in waiting:
            request.resolve(again(error))


def again(error: RateLimitdError) -> RateLimitdError:
    """Return a copy: raising an error adds a traceback, and a shared one would grow without end."""
    return type(error)(*error.args)


class Handshake(NamedTuple):
    """Commands at the start of each connection of a link."""

    login: Login = Login()
    database: int = 0
    client_name: str = ""
    """Shown by CLIENT LIST; no spaces."""
    wants_primary: bool = True
    """Refuse a replica. In a Cluster every node redirects, in any role."""
    peer: str = SHARED_STATE
    """What error messages call the server."""


class Refused(Exception):  # noqa: N818 -- it carries an error reply and never leaves this package
    """The server answered with an error."""


async def ask(connection: Connection, *command: bytes | int | str) -> Any:
    """Return the reply to one command on a connection whose errors go to :func:`hand_over`.

    Raises:
        StoreUnavailableError: no reply came.
        Refused: the reply was an error; the exception has its text.
    """
    return await answer_of(lambda done: connection.submit(Request(pack(command), done)))


def hand_over(request: Request, text: str) -> None:
    """Pass an error reply to the caller of :func:`ask`."""
    request.resolve(Refused(text))


async def log_in(connection: Connection, handshake: Handshake) -> None:
    """Send the handshake in one round trip, then check the replies.

    Raises:
        StoreMisconfiguredError: the server refuses the user, the password or the database.
        StoreUnavailableError: it cannot serve now, or is a replica.
    """
    login = handshake.login
    must: list[Sequence[bytes | int | str]] = []
    if login.password:
        names = (login.user,) if login.user else ()
        must.append((b"AUTH", *names, login.password))
    if handshake.database:
        must.append((b"SELECT", handshake.database))
    # Optional: a user without these permissions still works.
    may: list[Sequence[bytes | int | str]] = [(b"PING",)]
    if handshake.client_name:
        may.append((b"CLIENT", b"SETNAME", handshake.client_name))
    if handshake.wants_primary:
        may.append((b"ROLE",))
    asked = [ask(connection, *command) for command in (*must, *may)]
    replies = await asyncio.gather(*asked, return_exceptions=True)
    for place, reply in enumerate(replies):
        if isinstance(reply, Refused):
            if place < len(must) or code_of(str(reply)) != "NOPERM":
                raise login_error_of(str(reply), handshake.peer) from None
        elif isinstance(reply, BaseException):
            raise reply
    role = replies[-1] if handshake.wants_primary else None
    if isinstance(role, list) and role[:1] != [b"master"]:
        message = "the server is a replica"
        raise StoreUnavailableError(message)
