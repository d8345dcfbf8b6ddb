"""The state of one connection: takes calls and received octets, returns octets to send and ended calls. No I/O.

What a correct server never sends ends the connection. What it may send is bounded, so that the memory of a connection
is that of its calls' answers.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

import grpc

from ratelimitd_client.fail_open import HTTP1_PEER
from ratelimitd_client.transport import payloads
from ratelimitd_client.transport.h2_call import Call, status_of_reset
from ratelimitd_client.transport.payloads import PeerError
from ratelimitd_wire import frames
from ratelimitd_wire.codes import ErrorCode
from ratelimitd_wire.frames import Setting

WINDOW_BYTES: Final = 8 * 1024 * 1024
"""Receive window of the connection and of each stream. Longer than any answer, so streams never need an update."""

MAX_BUFFERED_BYTES: Final = 8 * 1024 * 1024
"""Limit of incomplete answers. With a correct node they are about 100 KB."""

MAX_BLOCK_BYTES: Final = 16_384
"""Limit of a header block with its CONTINUATION frames."""

MAX_USELESS_FRAMES: Final = 10_000
"""Limit of frames that advance no call, between two answers or two keepalives. A correct peer sends a few."""

MAX_STREAM_ID: Final = 2**30
"""Stream identifier at which the connection is replaced: they end at 2³¹."""

DEFAULT_WINDOW_BYTES: Final = 65_535
MAX_WINDOW_BYTES: Final = 2**31 - 1

_FRAME_SIZE_LIMITS: Final = (16_384, 2**24 - 1)

_START: Final = (
    payloads.PREFACE
    + frames.settings(
        {
            Setting.HEADER_TABLE_SIZE: 0,
            Setting.ENABLE_PUSH: 0,
            Setting.INITIAL_WINDOW_SIZE: WINDOW_BYTES,
            Setting.MAX_HEADER_LIST_SIZE: payloads.MAX_LIST_BYTES,
        }.items()
    )
    + frames.window_update(0, WINDOW_BYTES - DEFAULT_WINDOW_BYTES)
)

CallT = TypeVar("CallT", bound=Call)


class Connection(Generic[CallT]):
    """A client's connection. After each method, send :meth:`octets_to_send`.

    Attributes:
        is_ready: the peer's SETTINGS came.
        is_draining: no further calls are accepted; those in flight may end.
        answers: number of calls that the peer ended with an answer or a status.
        places: number of calls that had to wait for a stream.
        awaits_ping: a keepalive has not been answered.
    """

    def __init__(self) -> None:
        self.is_ready: bool = False
        self.is_draining: bool = False
        self.answers: int = 0
        self.places: int = 0
        self.awaits_ping: bool = False
        self._out = [_START]
        self._rest = b""
        self._calls: dict[int, CallT] = {}
        self._waiting: dict[CallT, None] = {}
        """Calls that wait for one of the streams that the peer allows."""
        self._blocked: dict[int, CallT] = {}
        """Calls whose bodies wait for the peer's windows."""
        self._ended: list[CallT] = []
        self._next_id = 1
        self._max_calls = MAX_WINDOW_BYTES
        self._peer_window = DEFAULT_WINDOW_BYTES
        self._peer_initial_window = DEFAULT_WINDOW_BYTES
        self._own_window = WINDOW_BYTES
        self._buffered = 0
        self._useless = 0
        self._owes_update = False
        self._may_send_more = False
        """A window has grown, or more streams are allowed. Handled once for all frames received together: each pass
        visits all waiting calls."""
        # A header block that CONTINUATION must complete: its stream, whether it ends the stream, and its octets so far.
        self._block_id = 0
        self._block_ends = False
        self._block = b""

    @property
    def is_idle(self) -> bool:
        """Whether no call is in flight."""
        return not self._calls and not self._waiting

    @property
    def newest_id(self) -> int:
        """The stream of the call that was sent last."""
        return self._next_id - 2

    def octets_to_send(self) -> bytes:
        """Return the octets for the peer; each is returned once."""
        octets = b"".join(self._out)
        self._out.clear()
        return octets

    def begin(self, call: CallT) -> None:
        """Send a call, or queue it until the peer allows another stream."""
        if self._waiting or len(self._calls) >= self._max_calls:
            self._waiting[call] = None
            self.places += 1
            call.place = self.places
        else:
            self._open(call)

    def cancel(self, call: CallT) -> None:
        """Cancel a call; it may have ended."""
        if call in self._waiting:
            del self._waiting[call]
        elif self._calls.get(call.stream_id) is call:
            self._close(call, ErrorCode.CANCEL)

    def ping(self) -> None:
        """Send a keepalive."""
        self._useless = 0
        self.awaits_ping = True
        self._out.append(frames.frame(payloads.PING, 0, 0, bytes(8)))

    def lose(self) -> list[CallT]:
        """End and return all calls of a lost connection."""
        self.is_draining = True
        for call in self._calls.values():
            call.fail(grpc.StatusCode.UNAVAILABLE, "the connection was lost")
        for call in self._waiting:
            call.fail(grpc.StatusCode.UNAVAILABLE, "the connection was lost", unprocessed=True)
        ended = [*self._calls.values(), *self._waiting]
        self._calls.clear()
        self._waiting.clear()
        self._blocked.clear()
        return ended

    def receive(self, octets: bytes) -> list[CallT]:
        """Process received octets, and return the calls that they ended.

        Raises:
            PeerError: the connection must end; see :meth:`give_up`.
        """
        if self._rest:
            octets = self._rest + octets
        at, end = 0, len(octets)
        while end - at >= frames.FRAME_HEADER_BYTES:
            high, low, kind, flags, stream_id = payloads.read_header(octets, at)
            if high or low > frames.DEFAULT_MAX_FRAME_BYTES:
                is_http1 = not self.is_ready and octets.startswith(b"HTTP/1.")
                why = f"the peer is an {HTTP1_PEER}" if is_http1 else "a frame is too long"
                raise PeerError(ErrorCode.FRAME_SIZE_ERROR, why)
            begin = at + frames.FRAME_HEADER_BYTES
            if begin + low > end:
                break
            at = begin + low
            stream_id &= frames.STREAM_ID_MASK
            if self._block_id or not self.is_ready:
                self._check_order(kind, flags, stream_id)
            if kind == payloads.DATA:
                self._take_data(flags, stream_id, octets[begin:at])
            elif kind == payloads.HEADERS:
                self._take_headers(flags, stream_id, octets[begin:at])
            else:
                self._take_other(kind, flags, stream_id, octets[begin:at])
        self._rest = octets[at:]
        if self._may_send_more:
            self._may_send_more = False
            self._send_blocked()
            self._begin_waiting()
        ended, self._ended = self._ended, []
        return ended

    def give_up(self, error: PeerError) -> list[CallT]:
        """Queue GOAWAY, then end and return all calls, with those that ended before the error in the same octets."""
        self._out.append(frames.go_away(0, error.code))
        ended, self._ended = self._ended, []
        return ended + self.lose()

    def _check_order(self, kind: int, flags: int, stream_id: int) -> None:
        """Raise PeerError for a frame that may not come before the peer's SETTINGS or within a header block."""
        if self._block_id and (kind != payloads.CONTINUATION or stream_id != self._block_id):
            raise PeerError(ErrorCode.PROTOCOL_ERROR, "a header block was interrupted")
        if not self.is_ready and (kind != payloads.SETTINGS or flags & frames.ACK):
            raise PeerError(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")

    def _take_other(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Process a frame of another type; unknown types are ignored."""
        if kind == payloads.CONTINUATION:
            self._take_continuation(flags, stream_id, payload)
            return
        self._count_useless()
        if kind == payloads.WINDOW_UPDATE:
            self._take_window_update(stream_id, payload)
        elif kind == payloads.RST_STREAM:
            self._take_reset(stream_id, payload)
        elif kind == payloads.PUSH_PROMISE:
            raise PeerError(ErrorCode.PROTOCOL_ERROR, "a push was forbidden")
        elif kind in _ON_THE_CONNECTION:
            if stream_id:
                raise PeerError(ErrorCode.PROTOCOL_ERROR, "the frame belongs on stream 0")
            _ON_THE_CONNECTION[kind](self, flags, payload)

    def _take_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        # One frame is far smaller than half of the window, so no peer can exceed it.
        self._own_window -= len(payload)
        if self._own_window < WINDOW_BYTES // 2:
            self._out.append(frames.window_update(0, WINDOW_BYTES - self._own_window))
            self._own_window = WINDOW_BYTES
        call = self._calls.get(stream_id) or self._call(stream_id)
        data = payloads.without_padding(flags, payload) if flags & frames.PADDED else payload
        if call is None or not data:
            self._count_useless()
        if call is None:
            return
        if data:
            call.take_data(data)
            self._buffered += len(data)
            if self._buffered > MAX_BUFFERED_BYTES:
                raise PeerError(ErrorCode.ENHANCE_YOUR_CALM, "the answers are too long")
        if flags & frames.END_STREAM and not call.ended:
            call.end_without_trailers()
        if call.ended:
            self._end(call, is_over=bool(flags & frames.END_STREAM))

    def _take_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        block = payloads.without_padding(flags, payload) if flags & frames.PADDED else payload
        if flags & frames.PRIORITY:
            block = block[5:]
        if flags & frames.END_HEADERS:
            self._take_block(stream_id, block, last=bool(flags & frames.END_STREAM))
        else:
            self._block_id = stream_id
            self._block_ends = bool(flags & frames.END_STREAM)
            self._block = block
            self._call(stream_id)

    def _take_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not self._block_id:
            raise PeerError(ErrorCode.PROTOCOL_ERROR, "CONTINUATION came without a header block")
        self._count_useless()
        self._block += payload
        if len(self._block) > MAX_BLOCK_BYTES:
            raise PeerError(ErrorCode.ENHANCE_YOUR_CALM, "a header block is too long")
        if flags & frames.END_HEADERS:
            block, self._block, self._block_id = self._block, b"", 0
            self._take_block(stream_id, block, last=self._block_ends)

    def _take_block(self, stream_id: int, block: bytes, *, last: bool) -> None:
        call = self._calls.get(stream_id) or self._call(stream_id)
        if call is None:  # without a dynamic table the block need not be decoded
            self._count_useless()
            return
        if not last:
            self._count_useless()  # informational blocks may come without end
        call.take_block(block, last=last)
        if call.ended:
            self._end(call, is_over=last)

    def _take_reset(self, stream_id: int, payload: bytes) -> None:
        payloads.require_size(payload, 4)
        call = self._call(stream_id)
        if call is None:
            return
        code = int.from_bytes(payload, "big")
        call.fail(
            status_of_reset(code),
            "the server reset the call",
            unprocessed=code == ErrorCode.REFUSED_STREAM,
        )
        self._end(call, is_over=True)

    def _take_window_update(self, stream_id: int, payload: bytes) -> None:
        payloads.require_size(payload, 4)
        increment = payloads.u32(payload)
        if stream_id == 0:
            if not increment:
                raise PeerError(ErrorCode.PROTOCOL_ERROR, "a window increment is 0")
            self._peer_window += increment
            if self._peer_window > MAX_WINDOW_BYTES:
                raise PeerError(ErrorCode.FLOW_CONTROL_ERROR, "a window is too large")
            self._may_send_more = True
            return
        call = self._call(stream_id)
        if call is None or not call.unsent:
            return
        call.window_bytes += increment
        if not increment or call.window_bytes > MAX_WINDOW_BYTES:
            call.fail(grpc.StatusCode.INTERNAL, "the server sent an invalid window increment")
            self._end(call, is_over=False)
        else:
            self._may_send_more = True

    def _take_settings(self, flags: int, payload: bytes) -> None:
        if flags & frames.ACK:
            payloads.require_size(payload, 0)
            return
        if len(payload) % 6:
            raise PeerError(
                ErrorCode.FRAME_SIZE_ERROR, "a frame has a size that its type does not allow"
            )
        # Of repeated values only the last counts: each could change the windows of all calls.
        for name, value in dict(payloads.read_setting(payload)).items():
            self._set(name, value)
        self.is_ready = True
        self._out.append(frames.frame(payloads.SETTINGS, frames.ACK, 0))
        self._may_send_more = True

    def _set(self, name: int, value: int) -> None:
        if name == Setting.MAX_CONCURRENT_STREAMS:
            self._max_calls = value
        elif name == Setting.INITIAL_WINDOW_SIZE:
            if value > MAX_WINDOW_BYTES:
                raise PeerError(ErrorCode.FLOW_CONTROL_ERROR, "a window is too large")
            for call in self._blocked.values():
                call.window_bytes += value - self._peer_initial_window
            self._peer_initial_window = value
        elif name == Setting.HEADER_TABLE_SIZE:
            self._owes_update = True
        elif name == Setting.MAX_FRAME_SIZE:
            smallest, largest = _FRAME_SIZE_LIMITS
            if not smallest <= value <= largest:
                raise PeerError(ErrorCode.PROTOCOL_ERROR, "the maximum frame size is invalid")
        elif name == Setting.ENABLE_PUSH and value:
            raise PeerError(ErrorCode.PROTOCOL_ERROR, "a push was forbidden")

    def _take_ping(self, flags: int, payload: bytes) -> None:
        payloads.require_size(payload, 8)
        if flags & frames.ACK:
            self.awaits_ping = False
        else:
            self._out.append(frames.frame(payloads.PING, frames.ACK, 0, payload))

    def _take_go_away(self, _flags: int, payload: bytes) -> None:
        if len(payload) < 8:  # noqa: PLR2004 - the last stream and the code
            raise PeerError(
                ErrorCode.FRAME_SIZE_ERROR, "a frame has a size that its type does not allow"
            )
        self.is_draining = True
        last_id = payloads.u32(payload)
        unprocessed = [call for id_, call in self._calls.items() if id_ > last_id]
        for call in unprocessed:
            self._forget(call)
        unprocessed += self._waiting
        self._waiting.clear()
        for call in unprocessed:
            call.fail(grpc.StatusCode.UNAVAILABLE, "the server is leaving", unprocessed=True)
        self._ended += unprocessed

    def _call(self, stream_id: int) -> CallT | None:
        """Return the call on a stream, or ``None`` if it has ended."""
        call = self._calls.get(stream_id)
        if call is None and (not stream_id & 1 or stream_id >= self._next_id):
            raise PeerError(ErrorCode.PROTOCOL_ERROR, "the stream was never opened")
        return call

    def _open(self, call: CallT) -> None:
        call.stream_id = stream_id = self._next_id
        self._next_id = stream_id + 2
        if stream_id >= MAX_STREAM_ID:
            self.is_draining = True
        self._calls[stream_id] = call
        block = call.block
        if self._owes_update:
            self._owes_update = False
            block = payloads.NO_TABLE + block
        self._out.append(frames.headers(stream_id, block, ended=False))
        call.window_bytes = self._peer_initial_window
        if not self._send_body(call):
            self._blocked[stream_id] = call

    def _send_body(self, call: CallT) -> bool:
        """Send what the peer's windows allow; return whether the body is complete."""
        while True:
            unsent = call.unsent
            size = min(unsent, frames.DEFAULT_MAX_FRAME_BYTES, call.window_bytes, self._peer_window)
            if size <= 0:
                return False
            begin = len(call.body) - unsent
            part = call.body[begin : begin + size]
            call.unsent = unsent - size
            call.window_bytes -= size
            self._peer_window -= size
            flags = 0 if call.unsent else frames.END_STREAM
            self._out.append(frames.frame(payloads.DATA, flags, call.stream_id, part))
            if flags:
                return True

    def _send_blocked(self) -> None:
        for stream_id, call in list(self._blocked.items()):
            if self._peer_window <= 0:
                return
            if self._send_body(call):
                del self._blocked[stream_id]

    def _begin_waiting(self) -> None:
        while self._waiting and len(self._calls) < self._max_calls:
            call = next(iter(self._waiting))
            del self._waiting[call]
            self._open(call)

    def _end(self, call: CallT, *, is_over: bool) -> None:
        """Report a call that has ended; ``is_over``: the peer has closed its stream."""
        self.answers += 1
        self._useless = 0
        self._ended.append(call)
        self._close(call, None if is_over and not call.unsent else ErrorCode.CANCEL)

    def _close(self, call: CallT, code: ErrorCode | None) -> None:
        if code is not None:
            self._out.append(frames.rst_stream(call.stream_id, code))
        self._forget(call)
        if self._waiting:
            self._begin_waiting()

    def _forget(self, call: CallT) -> None:
        self._buffered -= len(call.received)
        del self._calls[call.stream_id]
        self._blocked.pop(call.stream_id, None)

    def _count_useless(self) -> None:
        self._useless += 1
        if self._useless > MAX_USELESS_FRAMES:
            raise PeerError(ErrorCode.ENHANCE_YOUR_CALM, "too many frames advance no call")


_ON_THE_CONNECTION: Final = {
    payloads.SETTINGS: Connection._take_settings,  # noqa: SLF001 - a table of its own methods
    payloads.PING: Connection._take_ping,  # noqa: SLF001
    payloads.GOAWAY: Connection._take_go_away,  # noqa: SLF001
}
