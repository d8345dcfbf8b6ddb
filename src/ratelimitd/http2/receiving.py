"""The receiving half of a connection: one method for each type of frame (RFC 9113 §6).

``connection.py`` splits octets into frames, and handles the two frames of a common request for speed; this module
handles every frame.
"""

from __future__ import annotations

from typing import ClassVar, Final, NamedTuple, NoReturn

from ratelimitd.http2.errors import (
    Cause,
    ConnectionFailureError,
    StreamFailureError,
    demand_connection,
    demand_size,
    demand_stream,
    without_padding,
)
from ratelimitd.http2.events import (
    DataReceived,
    Event,
    HeadTooLarge,
    RequestReceived,
    StreamReset,
    TrailersReceived,
    WindowOpened,
)
from ratelimitd.http2.headers import Flaw, HeadReader, RequestHead
from ratelimitd.http2.limits import AbuseMeter, Limits
from ratelimitd.http2.sending import Sender
from ratelimitd.http2.streams import (
    UNTOUCHED,
    Input,
    ReceiveWindow,
    State,
    Stream,
    Streams,
    transition,
)
from ratelimitd_wire import frames
from ratelimitd_wire.codes import ErrorCode
from ratelimitd_wire.frames import FrameType

DRAIN_PING: Final = b"draining"
"""Payload of the PING after a GOAWAY; its answer shows that the peer has read both."""

_IGNORED_CLOSED: Final = (State.CLOSED, State.DISCARDED)


class _OpenBlock(NamedTuple):
    """An incomplete header block; only its CONTINUATION may follow (§6.10)."""

    stream_id: int
    ended: bool
    fragments: list[bytes]


class Receiver:
    """Handles the frames that a connection receives.

    Attributes:
        streams: streams of the connection.
        reader: reads its header blocks.
        window: receive window of the connection.
        events: list that events are appended to; the owner of this object replaces it.
        block_open: CONTINUATION must follow.
        data_frames: DATA frames with content, without those of the check path.
        draining: the first GOAWAY was sent.
        settings_received: the peer's first frame, which must be SETTINGS, has arrived.
        settings_acknowledged: the peer has applied our SETTINGS.
    """

    __slots__ = (
        "_block",
        "_limits",
        "_meter",
        "_sender",
        "block_open",
        "data_frames",
        "draining",
        "events",
        "reader",
        "settings_acknowledged",
        "settings_received",
        "streams",
        "window",
    )

    def __init__(
        self,
        *,
        streams: Streams,
        window: ReceiveWindow,
        sender: Sender,
        meter: AbuseMeter,
        limits: Limits,
    ) -> None:
        self.block_open = False
        self._block: _OpenBlock | None = None
        self._limits = limits
        self._meter = meter
        self._sender = sender
        self.data_frames = 0
        self.draining = False
        self.events: list[Event] = []
        self.reader = HeadReader(limits.max_header_list_bytes)
        self.settings_acknowledged = False
        self.settings_received = False
        self.streams = streams
        self.window = window

    @property
    def work(self) -> int:
        """Credits of the peer; see :class:`ratelimitd.http2.limits.Allowance`."""
        return self.streams.answered_total + self.data_frames + self._sender.data_frames

    def frame(self, kind: int, stream_id: int, payload: bytes) -> None:
        """Handle a frame; ``kind`` is type << 8 | flags.

        Raises:
            ConnectionFailureError: the connection must end.
        """
        frame_type, flags = kind >> 8, kind & 0xFF
        stream_id &= frames.STREAM_ID_MASK
        if self._block is not None and (
            frame_type != FrameType.CONTINUATION or stream_id != self._block.stream_id
        ):
            _protocol_error("a frame came within a header block")
        if not self.settings_received and (frame_type != FrameType.SETTINGS or flags & frames.ACK):
            _protocol_error("the first frame is not SETTINGS")  # §3.4
        if stream_id in self.streams.opening:
            self.announce(stream_id)
        if frame_type >= len(self._MEANINGS):  # §5.5
            self._charge(Cause.UNKNOWN_FRAME_FLOOD)
            return
        try:
            self._MEANINGS[frame_type](self, flags, stream_id, payload)
        except StreamFailureError as failure:
            self._fail_stream(stream_id, failure)

    def announce(self, stream_id: int) -> None:
        """Report a request that does not arrive in one piece to the owner."""
        streams = self.streams
        head = streams.opening.pop(stream_id)
        window = ReceiveWindow(self._limits.stream_window_bytes)
        streams.add(stream_id, Stream(State.OPEN, window, head.content_length))
        self.events.append(RequestReceived(stream_id, head, ended=False))

    def announce_all(self) -> None:
        """Report all such requests."""
        for stream_id in list(self.streams.opening):
            self.announce(stream_id)

    def request(self, stream_id: int, head: RequestHead, *, ended: bool) -> None:
        """Open an idle stream whose identifier is the next or higher.

        Raises:
            StreamFailureError: a limit is reached, or the head is malformed.
        """
        streams, limits = self.streams, self._limits
        streams.begin(stream_id)
        if (
            len(streams.live) + len(streams.opening) >= limits.max_streams
            or self._sender.buffered_bytes > limits.max_buffered_bytes
        ):
            raise StreamFailureError(ErrorCode.REFUSED_STREAM, Cause.TOO_MANY_STREAMS)
        if head.flaw is Flaw.MALFORMED or (ended and head.content_length):
            raise _malformed()
        if ended:
            streams.add(stream_id, UNTOUCHED)
        else:
            window = ReceiveWindow(limits.stream_window_bytes)
            streams.add(stream_id, Stream(State.OPEN, window, head.content_length))
        if head.flaw is Flaw.TOO_LARGE:
            self.events.append(HeadTooLarge(stream_id, ended))
        else:
            self.events.append(RequestReceived(stream_id, head, ended))

    def refuse(self, stream_id: int, head: RequestHead) -> None:
        """Open an idle stream with a flawed head, from HEADERS without END_STREAM."""
        try:
            self.request(stream_id, head, ended=False)
        except StreamFailureError as failure:
            self._fail_stream(stream_id, failure)

    def acknowledge(self, stream_id: int, flow_bytes: int) -> None:
        """Reopen the windows by the octets that the owner has handled.

        The octets of a removed stream were acknowledged on its removal.
        """
        stream = self.streams.live.get(stream_id)
        if stream is None or not stream.held_bytes:
            return
        flow_bytes = min(flow_bytes, stream.held_bytes)
        stream.held_bytes -= flow_bytes
        self._credit(stream_id, stream, flow_bytes)

    def drain(self) -> None:
        """Take the first or second step of a graceful shutdown (§6.8).

        The first GOAWAY asks the peer to begin no more streams, but refuses none, since some may be in flight. The
        answer to the PING behind it shows that none is; to end without waiting, call this a second time.
        """
        if self.draining:
            self.refuse_streams()
        else:
            self.draining = True
            self._sender.frame(frames.go_away(frames.STREAM_ID_MASK, ErrorCode.NO_ERROR))
            self._sender.frame(frames.ping(DRAIN_PING))

    def refuse_streams(self) -> None:
        """Ignore streams that begin from now on; GOAWAY names the last one that is handled."""
        if self.streams.final_id is None:
            self.streams.final_id = self.streams.last_id
            self._sender.frame(frames.go_away(self.streams.last_id, ErrorCode.NO_ERROR))

    def _credit(self, stream_id: int, stream: Stream, flow_bytes: int) -> None:
        self._sender.credit(flow_bytes)
        if stream.receive_window is not None:
            increment = stream.receive_window.give(flow_bytes)
            if increment:
                self._sender.frame(frames.window_update(stream_id, increment))

    def _charge(self, cause: Cause) -> None:
        self._meter.charge(cause, self.work)

    def _fail_stream(self, stream_id: int, failure: StreamFailureError) -> None:
        """Reset a stream after an error of the peer (§5.4.2)."""
        self._sender.reset(stream_id, failure.code)
        self.events.append(StreamReset(stream_id, failure.code, failure.cause))
        refused = failure.cause is Cause.TOO_MANY_STREAMS
        self._charge(Cause.TOO_MANY_STREAMS if refused else Cause.PROVOKED_RESET)

    # Frames by type. Each may raise StreamFailureError for its stream, or ConnectionFailureError.

    def _data(self, flags: int, stream_id: int, payload: bytes) -> None:
        demand_stream(stream_id)
        flow_bytes = len(payload)
        if not self.window.take(flow_bytes):
            raise ConnectionFailureError(
                ErrorCode.FLOW_CONTROL_ERROR,
                Cause.FLOW_CONTROL,
                "more data came than the connection's window allows",
            )
        data = without_padding(flags, payload)
        ended = bool(flags & frames.END_STREAM)
        try:
            after = transition(
                self.streams.state_of(stream_id), Input.DATA_END if ended else Input.DATA
            )
            if after is State.DISCARDED:
                self._sender.credit(flow_bytes)
                self._charge(Cause.STALE_FRAME_FLOOD)
                return
            stream = self.streams.own(stream_id)
            _take_body(stream, flow_bytes, len(data), ended=ended)
        except StreamFailureError:
            self._sender.credit(flow_bytes)
            raise
        stream.state = after
        if ended:
            stream.receive_window = None
        if data or ended:
            self.data_frames += bool(data)
            stream.held_bytes += flow_bytes
            self.events.append(DataReceived(stream_id, data, flow_bytes, ended))
        else:
            self._credit(stream_id, stream, flow_bytes)
            self._charge(Cause.EMPTY_DATA_FLOOD)

    def _headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        demand_stream(stream_id)
        if not self.streams.may_begin(stream_id):
            _protocol_error("HEADERS came with an identifier that no request can have")
        fragment = without_padding(flags, payload)
        depends_on_itself = False
        if flags & frames.PRIORITY:
            if len(fragment) < 5:
                raise ConnectionFailureError(
                    ErrorCode.FRAME_SIZE_ERROR, Cause.FRAME_SIZE, "HEADERS ends within its priority"
                )
            depends_on_itself = frames.u32(fragment) & frames.STREAM_ID_MASK == stream_id
            fragment = fragment[5:]
        if depends_on_itself:  # RFC 7540 §5.3.1; an honest peer never does it
            _protocol_error("a stream depends on itself")
        ended = bool(flags & frames.END_STREAM)
        if flags & frames.END_HEADERS:
            self._block_ended(stream_id, fragment, ended=ended)
        else:
            self.announce_all()  # DATA of a pending head takes the fast path, which does not check for an open block
            self._block = _OpenBlock(stream_id, ended, [])
            self.block_open = True
            self._add_fragment(self._block, fragment)

    def _continuation(self, flags: int, _stream_id: int, payload: bytes) -> None:
        block = self._block
        if block is None:
            _protocol_error("CONTINUATION came without a header block")
        self._add_fragment(block, payload)
        if flags & frames.END_HEADERS:
            self._block = None
            self.block_open = False
            self._block_ended(block.stream_id, b"".join(block.fragments), ended=block.ended)

    def _add_fragment(self, block: _OpenBlock, fragment: bytes) -> None:
        block.fragments.append(fragment)
        limits = self._limits
        if (
            len(block.fragments) > limits.max_continuations + 1
            or sum(map(len, block.fragments)) > limits.max_header_block_bytes
        ):
            raise ConnectionFailureError(
                ErrorCode.ENHANCE_YOUR_CALM, Cause.HEADER_BLOCK, "a header block is too large"
            )

    def _block_ended(self, stream_id: int, block: bytes, *, ended: bool) -> None:
        """Handle a complete header block. It is always decoded, for the dynamic table (§4.3)."""
        state = self.streams.state_of(stream_id)
        if state is State.IDLE:
            self.request(stream_id, self.reader.read(block), ended=ended)
            return
        fields = self.reader.trailers(block)
        after = transition(state, Input.HEADERS_END if ended else Input.HEADERS)
        if after is State.DISCARDED:
            self._charge(Cause.STALE_FRAME_FLOOD)
            return
        stream = self.streams.own(stream_id)
        if fields is None or stream.body_left:
            raise _malformed()
        stream.state = after
        stream.receive_window = None
        self.events.append(TrailersReceived(stream_id, fields))

    def _priority(self, _flags: int, stream_id: int, payload: bytes) -> None:
        """Check PRIORITY (§6.3). Priorities are not used (§5.3.2)."""
        demand_stream(stream_id)
        demand_size(payload, 5)
        if frames.u32(payload) & frames.STREAM_ID_MASK == stream_id:
            _protocol_error("a stream depends on itself")
        self._charge(Cause.PRIORITY_FLOOD)

    def _rst_stream(self, _flags: int, stream_id: int, payload: bytes) -> None:
        demand_stream(stream_id)
        demand_size(payload, 4)
        transition(self.streams.state_of(stream_id), Input.RST_STREAM)
        if stream_id in self.streams.live:
            self._sender.forget(stream_id, discard=False)
            self.events.append(StreamReset(stream_id, frames.u32(payload), Cause.PEER_RESET))
            self._charge(Cause.RAPID_RESET)
        else:
            self._charge(Cause.STALE_FRAME_FLOOD)

    def _settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        demand_connection(stream_id)
        if flags & frames.ACK:
            demand_size(payload, 0)
            if self.settings_acknowledged:
                _protocol_error("SETTINGS were acknowledged that were never sent")
            self.settings_acknowledged = True
            return
        self._charge(Cause.SETTINGS_FLOOD)
        self.settings_received = True
        self._opened(self._sender.settings_changed(payload))

    def _push_promise(self, _flags: int, _stream_id: int, _payload: bytes) -> None:
        _protocol_error("a client cannot push")  # §8.4

    def _ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        demand_connection(stream_id)
        demand_size(payload, 8)
        self._charge(Cause.PING_FLOOD)
        if not flags & frames.ACK:
            self._sender.frame(frames.ping(payload, ack=True))
        elif payload == DRAIN_PING and self.draining:
            self.refuse_streams()

    def _go_away(self, _flags: int, stream_id: int, payload: bytes) -> None:
        """Check GOAWAY (§6.8). A client sends no requests after it, and those under way are answered."""
        demand_connection(stream_id)
        if len(payload) < 8:  # equivalent: demand_size lets 8 pass
            demand_size(payload, 8)
        self._charge(Cause.UNKNOWN_FRAME_FLOOD)

    def _window_update(self, _flags: int, stream_id: int, payload: bytes) -> None:
        demand_size(payload, 4)
        increment = frames.u32(payload) & frames.STREAM_ID_MASK
        self._charge(Cause.WINDOW_UPDATE_FLOOD)
        if not stream_id:
            if not increment:
                _protocol_error("a window increment is 0")
            self._opened(self._sender.connection_window_grown(increment))
            return
        if transition(self.streams.state_of(stream_id), Input.WINDOW_UPDATE) in _IGNORED_CLOSED:
            return
        if not increment:
            raise StreamFailureError(ErrorCode.PROTOCOL_ERROR, Cause.PROTOCOL)
        self._opened(self._sender.stream_window_grown(stream_id, increment))

    def _opened(self, stream_ids: list[int]) -> None:
        self.events.extend(map(WindowOpened, stream_ids))

    _MEANINGS: ClassVar = (
        _data,
        _headers,
        _priority,
        _rst_stream,
        _settings,
        _push_promise,
        _ping,
        _go_away,
        _window_update,
        _continuation,
    )
    """Handlers by :class:`FrameType`."""


def _take_body(stream: Stream, flow_bytes: int, size: int, *, ended: bool) -> None:
    """Count data against a stream's window and the content length (§8.1.1).

    Raises:
        StreamFailureError: it is too much, or at the end too little.
    """
    if stream.receive_window is None or not stream.receive_window.take(flow_bytes):
        raise StreamFailureError(ErrorCode.FLOW_CONTROL_ERROR, Cause.FLOW_CONTROL)
    if stream.body_left is not None:
        stream.body_left -= size
        if stream.body_left < 0 or (ended and stream.body_left):
            raise _malformed()


def _malformed() -> StreamFailureError:
    return StreamFailureError(ErrorCode.PROTOCOL_ERROR, Cause.MALFORMED)


def _protocol_error(message: str) -> NoReturn:
    raise ConnectionFailureError(ErrorCode.PROTOCOL_ERROR, Cause.PROTOCOL, message)
