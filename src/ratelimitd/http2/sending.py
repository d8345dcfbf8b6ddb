"""The sending half of a connection: frames of answers, within the peer's flow-control windows.

The receiving half reports changes by the peer. Octets are collected here, and ``take`` returns all at once, so that an
event-loop iteration needs one write.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from ratelimitd.http2.errors import Cause, ConnectionFailureError, StreamFailureError
from ratelimitd.http2.headers import TABLE_UPDATE
from ratelimitd.http2.hpack_decoder import DEFAULT_MAX_BYTES
from ratelimitd.http2.limits import Limits
from ratelimitd.http2.settings import PeerSettings
from ratelimitd.http2.streams import (
    DEFAULT_WINDOW_BYTES,
    MAX_WINDOW_BYTES,
    UNTOUCHED,
    ReceiveWindow,
    State,
    Stream,
    Streams,
    grown,
)
from ratelimitd_wire import frames
from ratelimitd_wire.codes import ErrorCode
from ratelimitd_wire.frames import (
    DEFAULT_MAX_FRAME_BYTES,
    END_HEADERS,
    END_STREAM,
    FrameType,
    frame,
)

_KEPT_SIZES: Final = 1_024
"""DATA headers of shorter messages are prepared; those of longer ones are built each time, in 150 ns."""

_pack_stream_id = struct.Struct(">I").pack


class UnaryAnswer:
    """A prepared answer: HEADERS, one DATA frame and trailers.

    Only the stream identifier, in the three frame headers, depends on the stream. An answer is therefore four parts
    joined by the four octets of the identifier: 100 ns; building three frames one by one takes 500.

    Attributes:
        head_block: header block of the HEADERS.
        trailer_block: header block of the trailers.
        prefix_bytes: length of every prefix.
        prefix_of: maps the length of a message to its prefix, the framing of the owner's protocol.
    """

    __slots__ = (
        "_before_message",
        "_behind_message",
        "_first",
        "_middles",
        "_prefixes",
        "head_block",
        "prefix_bytes",
        "prefix_of",
        "trailer_block",
    )

    def __init__(
        self,
        head_block: bytes,
        trailer_block: bytes,
        prefix_of: Callable[[int], bytes] = lambda _size: b"",
    ) -> None:
        self.head_block = head_block
        self.trailer_block = trailer_block
        head = frame(FrameType.HEADERS, END_HEADERS, 0, head_block)
        trailers = frame(FrameType.HEADERS, END_HEADERS | END_STREAM, 0, trailer_block)
        self._first = head[:5]
        self._before_message = head_block
        self._behind_message = trailers[:5]
        self.prefix_of = prefix_of
        self._prefixes = [prefix_of(size) for size in range(_KEPT_SIZES)]
        self.prefix_bytes = len(prefix_of(0))
        self._middles = [
            head_block + _data_header(self.prefix_bytes + size) for size in range(_KEPT_SIZES)
        ]

    def octets(self, stream_id: int, message: bytes) -> bytes:
        """Return the whole answer; prefix and message must fit into one frame."""
        size = len(message)
        if size < _KEPT_SIZES:
            middle, prefix = self._middles[size], self._prefixes[size]
        else:
            middle = self._before_message + _data_header(self.prefix_bytes + size)
            prefix = self.prefix_of(size)
        return _pack_stream_id(stream_id).join(
            (self._first, middle, prefix + message + self._behind_message, self.trailer_block)
        )


def _data_header(size: int) -> bytes:
    """Return the header of a DATA frame without its stream identifier."""
    if size > DEFAULT_MAX_FRAME_BYTES:
        raise ValueError(size)
    return size.to_bytes(3, "big") + bytes((FrameType.DATA, 0))


class Sender:
    """Sends the frames of a connection.

    Sending on a removed stream has no effect: the owner has received or will receive its StreamReset.

    Attributes:
        buffered_bytes: octets of messages that wait for a window.
        drained_bytes: total octets of messages that had to wait and no longer do.
        data_frames: DATA frames that were sent one by one.
        overflowed: ``buffered_bytes`` exceeded its limit; octets are dropped, and the connection must end.
    """

    __slots__ = (
        "_limits",
        "_out",
        "_receive_window",
        "_streams",
        "_table_is_empty",
        "_table_update_is_due",
        "_unary_bytes",
        "_waiting",
        "_window",
        "buffered_bytes",
        "data_frames",
        "drained_bytes",
        "overflowed",
        "peer",
    )

    def __init__(self, streams: Streams, receive_window: ReceiveWindow, limits: Limits) -> None:
        self._streams = streams
        self._receive_window = receive_window
        self._limits = limits
        self._table_update_is_due = self._table_is_empty = False
        self._out: list[bytes] = []
        self._window = DEFAULT_WINDOW_BYTES
        # Live streams with pending octets and an open window, in rotation.
        self._waiting: dict[int, Stream] = {}
        # Longest message for the fast path: limited by the window of a new stream and by a frame; -1 while a table
        # size update has to be sent first.
        self._unary_bytes = frames.DEFAULT_MAX_FRAME_BYTES
        self.peer = PeerSettings()
        self.buffered_bytes = 0
        self.drained_bytes = 0
        self.data_frames = 0
        self.overflowed = False

    def take(self) -> bytes:
        """Return and remove the octets to write."""
        out = self._out
        octets = b"".join(out)
        out.clear()
        return octets

    def frame(self, octets: bytes) -> None:
        """Send a frame that is not flow-controlled."""
        self._out.append(octets)

    # Answers

    def send_unary(self, stream_id: int, answer: UnaryAnswer, message: bytes) -> None:
        """Answer a request with one message.

        The fast path applies if nothing was sent on the stream yet, and the message fits into the windows and one
        frame. It is equivalent to the general path.
        """
        size = answer.prefix_bytes + len(message)
        live = self._streams.live
        stream = live.pop(stream_id, None)
        if stream is UNTOUCHED and size <= self._unary_bytes and size <= self._window:
            self._window -= size
            self._out.append(answer.octets(stream_id, message))
        elif stream is not None:
            live[stream_id] = stream
            self.send_headers(stream_id, answer.head_block)
            self.send_data(stream_id, answer.prefix_of(len(message)) + message)
            self.send_trailers(stream_id, answer.trailer_block)

    def send_headers(self, stream_id: int, block: bytes, *, ended: bool = False) -> None:
        """Begin an answer; ``ended`` if it has no body."""
        if stream_id in self._streams.live:
            self._headers(stream_id, block, ended=ended)
            if ended:
                self._finish(stream_id, self._streams.live[stream_id])

    def send_data(self, stream_id: int, data: bytes, *, ended: bool = False) -> bool:
        """Send a part of a body; ``ended`` if it is the last.

        Returns whether all of it was sent. If not, wait for WindowOpened: sending more fills a buffer that ends the
        connection above ``max_unread_bytes``.
        """
        if stream_id not in self._streams.live:
            return True
        stream = self._streams.own(stream_id)
        stream.ended = ended
        if not stream.pending:
            sent = self._data(stream_id, stream, data, ended=ended)
            if sent == len(data):
                if ended:
                    self._finish(stream_id, stream)
                return True
            data = data[sent:]
        self._keep(stream_id, stream, data)
        return False

    def send_trailers(self, stream_id: int, block: bytes) -> None:
        """End an answer with trailers, after everything before them."""
        if stream_id not in self._streams.live:
            return
        stream = self._streams.own(stream_id)
        stream.ended = True
        if stream.pending:
            stream.trailers = block
        else:
            self._headers(stream_id, block, ended=True)
            self._finish(stream_id, stream)

    def reset(self, stream_id: int, code: int) -> None:
        """Send RST_STREAM and remove the stream."""
        self.frame(frames.rst_stream(stream_id, code))
        self.forget(stream_id, discard=True)

    # Called by the receiving half

    def forget(self, stream_id: int, *, discard: bool) -> None:
        """Drop what is pending on a stream that was reset."""
        stream = self._streams.drop(stream_id, discard=discard)
        if stream is not None and stream is not UNTOUCHED:
            self._release(stream_id, stream)

    def credit(self, size: int) -> None:
        """Open the connection's receive window by ``size`` octets; send WINDOW_UPDATE when it is due."""
        increment = self._receive_window.give(size)
        if increment:
            self.frame(frames.window_update(0, increment))

    def settings_changed(self, payload: bytes) -> list[int]:
        """Apply and acknowledge the peer's SETTINGS; return the streams without pending octets.

        Raises:
            ConnectionFailureError: they cannot be applied.
        """
        peer = self.peer
        if peer.apply(payload) < DEFAULT_MAX_BYTES and not self._table_is_empty:
            # A table size update must confirm the change (RFC 7541 §4.2). Size 0 satisfies any later setting.
            self._table_is_empty = self._table_update_is_due = True
        live = self._streams.live
        most_credit = max((stream.send_credit for stream in live.values()), default=0)
        if grown(peer.initial_window_bytes, most_credit) is None:
            raise ConnectionFailureError(
                ErrorCode.FLOW_CONTROL_ERROR,
                Cause.FLOW_CONTROL,
                "the initial window makes that of a stream too large",
            )
        self.frame(frames.SETTINGS_ACK)
        # equivalent: no size is negative, so any number below 0 does
        self._unary_bytes = -1 if self._table_update_is_due else self._longest_unary()
        self._waiting = {
            stream_id: stream
            for stream_id, stream in live.items()
            if stream.pending and self._stream_window(stream) > 0
        }
        return self._flush()

    def connection_window_grown(self, increment: int) -> list[int]:
        """Open the connection's window; return the streams without pending octets.

        Raises:
            ConnectionFailureError: the window would exceed its maximum.
        """
        window = grown(self._window, increment)
        if window is None:
            raise ConnectionFailureError(
                ErrorCode.FLOW_CONTROL_ERROR, Cause.FLOW_CONTROL, "the window is too large"
            )
        self._window = window
        return self._flush()

    def stream_window_grown(self, stream_id: int, increment: int) -> list[int]:
        """Open the window of a live stream; return the stream if it has no pending octets left.

        Raises:
            StreamFailureError: the window would exceed its maximum.
        """
        stream = self._streams.own(stream_id)
        if self._stream_window(stream) + increment > MAX_WINDOW_BYTES:
            raise StreamFailureError(ErrorCode.FLOW_CONTROL_ERROR, Cause.FLOW_CONTROL)
        stream.send_credit += increment
        # equivalent: a flush sends nothing of a stream without a window
        if not stream.pending or self._stream_window(stream) <= 0:
            return []
        self._waiting[stream_id] = stream
        return self._flush()

    # Frames of a stream

    def _stream_window(self, stream: Stream) -> int:
        """Return the window of a stream; negative after the peer lowered the initial window (§6.9.2)."""
        return self.peer.initial_window_bytes + stream.send_credit

    def _longest_unary(self) -> int:
        return min(frames.DEFAULT_MAX_FRAME_BYTES, self.peer.initial_window_bytes)

    def _headers(self, stream_id: int, block: bytes, *, ended: bool) -> None:
        """Send a header block, the first one with a table size update if one is due."""
        if self._table_update_is_due:
            self._table_update_is_due = False
            self._unary_bytes = self._longest_unary()
            block = TABLE_UPDATE + block
        max_bytes = self.peer.max_frame_bytes
        self.frame(frames.headers(stream_id, block, ended=ended, max_bytes=max_bytes))

    def _data(self, stream_id: int, stream: Stream, data: bytes, *, ended: bool) -> int:
        """Send as many octets as the windows allow, with END_STREAM on the last frame; return their number."""
        room = min(self._window, self._stream_window(stream))
        size = len(data)
        if size > room:
            size, ended = max(0, room), False
        elif not size:
            # An empty frame needs no window (§6.9.1), and matters only as the end.
            if ended:
                self.frame(frames.frame(frames.FrameType.DATA, frames.END_STREAM, stream_id))
            return 0
        # Larger frames than the default would save little and delay other streams longer.
        step = frames.DEFAULT_MAX_FRAME_BYTES
        for at in range(0, size, step):
            flags = frames.END_STREAM if ended and at + step >= size else 0
            part = data[at : min(at + step, size)]
            self.frame(frames.frame(frames.FrameType.DATA, flags, stream_id, part))
            self.data_frames += 1
        self._window -= size
        stream.send_credit -= size
        return size

    def _keep(self, stream_id: int, stream: Stream, data: bytes) -> None:
        stream.pending += data
        self.buffered_bytes += len(data)
        if self.buffered_bytes > self._limits.max_unread_bytes:
            self.overflowed = True
            self.drop_all()
        elif self._stream_window(stream) > 0:
            self._waiting[stream_id] = stream

    def _flush(self) -> list[int]:
        """Send pending octets, one frame per stream in rotation; return the streams that may send more."""
        through: list[int] = []
        while self._window > 0 and self._waiting:
            stream_id = next(iter(self._waiting))
            stream = self._waiting.pop(stream_id)
            part = bytes(stream.pending[: frames.DEFAULT_MAX_FRAME_BYTES])
            last = len(part) == len(stream.pending)
            ended = last and stream.ended and stream.trailers is None
            sent = self._data(stream_id, stream, part, ended=ended)
            del stream.pending[:sent]
            self.buffered_bytes -= sent
            self.drained_bytes += sent
            if not stream.pending:
                self._through(stream_id, stream, through)
            elif self._stream_window(stream) > 0:
                self._waiting[stream_id] = stream
        return through

    def _through(self, stream_id: int, stream: Stream, through: list[int]) -> None:
        """End a stream without pending octets, or report that it may send more."""
        if stream.trailers is not None:
            self._headers(stream_id, stream.trailers, ended=True)
        if stream.ended:
            self._finish(stream_id, stream)
        else:
            through.append(stream_id)

    def _finish(self, stream_id: int, stream: Stream) -> None:
        """Close a stream after its answer; refuse the rest of an unfinished request (§8.1)."""
        if stream.state is State.OPEN:
            self.reset(stream_id, ErrorCode.NO_ERROR)
            return
        del self._streams.live[stream_id]
        if stream is not UNTOUCHED:
            self._release(stream_id, stream)

    def _release(self, stream_id: int, stream: Stream) -> None:
        """Drop pending and unacknowledged octets of a closed stream."""
        self._waiting.pop(stream_id, None)
        self.buffered_bytes -= len(stream.pending)
        self.credit(stream.held_bytes)

    def drop_all(self) -> None:
        """Drop all pending octets of a closed connection."""
        self._waiting.clear()
        self._streams.live.clear()
        self._streams.opening.clear()  # equivalent: it only frees memory
        self.buffered_bytes = 0
