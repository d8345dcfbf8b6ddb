"""Streams of a connection (RFC 9113 §5.1): the state machine as a table, and the live streams.

``TRANSITIONS`` maps each pair of state and input to the next state:

    state           HEADERS      +END_STREAM    DATA         +END_STREAM    RST_STREAM   WINDOW_UPDATE  PRIORITY
    idle            open         remote_closed  !! PROTOCOL  !! PROTOCOL    !! PROTOCOL  !! PROTOCOL    idle
    open            ! PROTOCOL   remote_closed  open         remote_closed  closed       open           open
    remote_closed   ! CLOSED     ! CLOSED       ! CLOSED     ! CLOSED       closed       remote_closed  remote_closed
    closed          !! CLOSED    !! CLOSED      ! CLOSED     ! CLOSED       closed       closed         closed
    discarded       discarded …

``!`` is an error of the stream, ``!!`` of the connection. The second HEADERS of an open stream are trailers, which must
end it (§8.1). No stream is half-closed (local): if the answer ends before the request does, RST_STREAM with NO_ERROR
follows at once (§8.1) and the stream is discarded. Reserved streams exist only with server push.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from ratelimitd.http2.errors import Cause, ConnectionFailureError, StreamFailureError
from ratelimitd.http2.headers import RequestHead
from ratelimitd_wire.codes import ErrorCode

DEFAULT_WINDOW_BYTES: Final = 65_535
"""Initial window of connection and streams (§6.9.2)."""

MAX_WINDOW_BYTES: Final = 2**31 - 1


def grown(window_bytes: int, increment: int) -> int | None:
    """Return a window after an increment; None if it exceeds the maximum (§6.9.1)."""
    window_bytes += increment
    return window_bytes if window_bytes <= MAX_WINDOW_BYTES else None


class ReceiveWindow:
    """The octets that the peer may still send, and those that were handled but not acknowledged.

    Credit is granted at half of the window: often enough that a peer does not wait while we keep up, and one frame of
    13 octets covers thousands of small checks.

    Attributes:
        left: octets the peer may send.
    """

    __slots__ = ("_credit", "_update_threshold", "left")

    def __init__(self, window_bytes: int) -> None:
        self.left = window_bytes
        self._credit = 0
        self._update_threshold = max(1, window_bytes // 2)

    def take(self, size: int) -> bool:
        """Count received octets; return False and count nothing if they exceed the window."""
        if size > self.left:
            return False
        self.left -= size
        return True

    def give(self, size: int) -> int:
        """Count handled octets; return the increment to send, 0 if none is due."""
        credit = self._credit = self._credit + size
        if credit < self._update_threshold:
            return 0
        self._credit = 0
        self.left += credit
        return credit


_MAX_DISCARDED: Final = 256
"""Limit of remembered streams that we reset, whose late frames are ignored. A forgotten one costs an honest peer a
second RST_STREAM."""

_MAX_GAPS: Final = 64
"""Limit of runs of skipped stream identifiers. Honest peers skip none, or the first."""


class State(enum.Enum):
    """States of a stream, from the peer's side."""

    IDLE = "idle"
    OPEN = "open"
    REMOTE_CLOSED = "remote_closed"
    """The request is complete: half-closed (remote)."""
    CLOSED = "closed"
    DISCARDED = "discarded"
    """We closed it before the peer did; late frames of the peer are ignored."""


class Input(enum.Enum):
    """Frames of the peer on a stream."""

    HEADERS = "HEADERS"
    HEADERS_END = "HEADERS with END_STREAM"
    DATA = "DATA"
    DATA_END = "DATA with END_STREAM"
    RST_STREAM = "RST_STREAM"
    WINDOW_UPDATE = "WINDOW_UPDATE"
    PRIORITY = "PRIORITY"


class Refusal(NamedTuple):
    """An error in place of a state."""

    code: ErrorCode
    of_connection: bool


_PROTOCOL: Final = Refusal(ErrorCode.PROTOCOL_ERROR, of_connection=False)
_PROTOCOL_ALL: Final = Refusal(ErrorCode.PROTOCOL_ERROR, of_connection=True)
_CLOSED: Final = Refusal(ErrorCode.STREAM_CLOSED, of_connection=False)
_CLOSED_ALL: Final = Refusal(ErrorCode.STREAM_CLOSED, of_connection=True)

_ROWS: Final[Mapping[State, Sequence[State | Refusal]]] = {
    State.IDLE: (
        State.OPEN,
        State.REMOTE_CLOSED,
        _PROTOCOL_ALL,
        _PROTOCOL_ALL,
        _PROTOCOL_ALL,
        _PROTOCOL_ALL,
        State.IDLE,
    ),
    State.OPEN: (
        _PROTOCOL,
        State.REMOTE_CLOSED,
        State.OPEN,
        State.REMOTE_CLOSED,
        State.CLOSED,
        State.OPEN,
        State.OPEN,
    ),
    State.REMOTE_CLOSED: (
        _CLOSED,
        _CLOSED,
        _CLOSED,
        _CLOSED,
        State.CLOSED,
        State.REMOTE_CLOSED,
        State.REMOTE_CLOSED,
    ),
    State.CLOSED: (
        _CLOSED_ALL,
        _CLOSED_ALL,
        _CLOSED,
        _CLOSED,
        State.CLOSED,
        State.CLOSED,
        State.CLOSED,
    ),
    State.DISCARDED: (State.DISCARDED,) * len(Input),
}

TRANSITIONS: Final[Mapping[tuple[State, Input], State | Refusal]] = MappingProxyType(
    {
        (state, given): after
        for state, row in _ROWS.items()
        for given, after in zip(Input, row, strict=True)
    }
)


def transition(state: State, given: Input) -> State:
    """Return the state after an input.

    Raises:
        StreamFailureError, ConnectionFailureError: the input is an error in this state.
    """
    after = TRANSITIONS[state, given]
    if isinstance(after, State):
        return after
    cause = Cause.STREAM_CLOSED if after.code is ErrorCode.STREAM_CLOSED else Cause.PROTOCOL
    if after.of_connection:
        raise ConnectionFailureError(
            after.code, cause, "a frame came that the state of its stream does not allow"
        )
    raise StreamFailureError(after.code, cause)


class Stream:
    """A live stream.

    Attributes:
        state: OPEN or REMOTE_CLOSED.
        send_credit: the send window minus the peer's SETTINGS_INITIAL_WINDOW_SIZE (§6.9.2), so that a change of the
            setting does not touch every stream.
        receive_window: None once the request is complete.
        held_bytes: flow-control octets passed to the owner and not acknowledged.
        body_left: remaining octets of the body by content-length, None without one.
        pending: octets of DATA that wait for a window.
        trailers: header block of the trailers that wait behind ``pending``, or None.
        ended: the answer ends with ``pending`` and ``trailers``.
    """

    __slots__ = (
        "body_left",
        "ended",
        "held_bytes",
        "pending",
        "receive_window",
        "send_credit",
        "state",
        "trailers",
    )

    def __init__(
        self,
        state: State,
        receive_window: ReceiveWindow | None = None,
        body_left: int | None = None,
    ) -> None:
        self.state = state
        self.receive_window = receive_window
        self.body_left = body_left
        self.send_credit = 0
        self.held_bytes = 0
        self.pending = bytearray()
        self.trailers: bytes | None = None
        self.ended = False  # equivalent: each part of a body sets it before it is read


UNTOUCHED: Final = Stream(State.REMOTE_CLOSED)
"""Shared by all streams with a complete request, no answer yet, and the initial window. Immutable: :meth:`Streams.own`
replaces it by a copy before a change. Nearly all requests are answered without a copy, which saves 300 ns."""


class Streams:
    """The streams of a connection. The check path works on ``live`` and ``opening`` directly.

    Attributes:
        live: open streams that were announced to the owner, by identifier.
        opening: heads of open streams not announced yet, since the rest of the request may follow at once. Empty after
            each slice of input.
        next_id: the lowest identifier that the peer can still use.
        final_id: the highest identifier that will be served, as in the last GOAWAY; None before.
        opened_total: streams that were ever in ``live``.
        reset_total: those of them that were reset by either side, or discarded.
    """

    __slots__ = (
        "_discarded",
        "_gaps",
        "final_id",
        "live",
        "next_id",
        "opened_total",
        "opening",
        "reset_total",
    )

    def __init__(self) -> None:
        self.live: dict[int, Stream] = {}
        self.opening: dict[int, RequestHead] = {}
        self.next_id = 1
        self.final_id: int | None = None
        self.opened_total = 0
        self.reset_total = 0
        self._discarded: dict[int, None] = {}
        self._gaps: list[tuple[int, int]] = []

    @property
    def answered_total(self) -> int:
        """Streams whose answer has ended."""
        return self.opened_total - self.reset_total - len(self.live)

    @property
    def last_id(self) -> int:
        """The identifier for GOAWAY: the highest that was or may have been handled."""
        last_id = max(0, self.next_id - 2)
        return last_id if self.final_id is None else min(self.final_id, last_id)

    def state_of(self, stream_id: int) -> State:
        """Return the state of a stream that is not in ``opening``."""
        stream = self.live.get(stream_id)
        if stream is not None:
            return stream.state
        if self.final_id is not None and stream_id > self.final_id:
            return State.DISCARDED
        if stream_id >= self.next_id or not stream_id & 1:
            return State.IDLE
        return State.DISCARDED if stream_id in self._discarded else State.CLOSED

    def may_begin(self, stream_id: int) -> bool:
        """Return whether HEADERS may have this identifier: odd, and not skipped before (§5.1.1)."""
        return bool(stream_id & 1) and not any(low <= stream_id < high for low, high in self._gaps)

    def begin(self, stream_id: int) -> None:
        """Take a stream and all lower ones out of the idle state."""
        if stream_id > self.next_id and len(self._gaps) < _MAX_GAPS:
            self._gaps.append((self.next_id, stream_id))
        self.next_id = stream_id + 2

    def add(self, stream_id: int, stream: Stream) -> None:
        """Add a live stream."""
        self.live[stream_id] = stream
        self.opened_total += 1

    def own(self, stream_id: int) -> Stream:
        """Return a live stream as a mutable object."""
        stream = self.live[stream_id]
        if stream is UNTOUCHED:
            stream = self.live[stream_id] = Stream(State.REMOTE_CLOSED)
        return stream

    def drop(self, stream_id: int, *, discard: bool) -> Stream | None:
        """Remove a stream that was reset; return it if it was live. ``discard``: ignore frames that still arrive."""
        if discard:
            if len(self._discarded) == _MAX_DISCARDED:
                del self._discarded[next(iter(self._discarded))]
            self._discarded[stream_id] = None
        stream = self.live.pop(stream_id, None)
        if stream is not None:
            self.reset_total += 1
        return stream
