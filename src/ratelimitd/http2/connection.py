"""The server side of one HTTP/2 connection: octets in; events and octets out. See ADR 0020.

Performs no I/O, reads no clock, and does not raise on any input. The owner's loop:

    for event in connection.receive(data): …    # then send_unary and the like
    transport.write(connection.data_to_send())  # once per event-loop iteration
    if connection.ended: close
    elif connection.has_more: stop reading, and call receive(b"") in the next event-loop iteration

While its transport pauses writing, the owner must not call ``receive``: the replies to a peer that does not read would
grow without bound.
"""

from __future__ import annotations

from typing import Final

from ratelimitd.http2.errors import Cause, ConnectionFailureError
from ratelimitd.http2.events import ConnectionEnded, Event
from ratelimitd.http2.limits import AbuseMeter, Limits
from ratelimitd.http2.receiving import Receiver
from ratelimitd.http2.sending import Sender
from ratelimitd.http2.settings import PREFACE, mistaken_protocol, undecided
from ratelimitd.http2.streams import DEFAULT_WINDOW_BYTES, UNTOUCHED, ReceiveWindow, Streams
from ratelimitd_wire import frames
from ratelimitd_wire.codes import ErrorCode
from ratelimitd_wire.frames import Setting

_PLAIN_HEADERS: Final = frames.FrameType.HEADERS << 8 | frames.END_HEADERS
_LAST_DATA: Final = frames.FrameType.DATA << 8 | frames.END_STREAM

_NOT_HTTP2: Final = (Cause.HTTP1, Cause.TLS)
"""Causes of peers that speak another protocol: they are answered in it, and could not read a GOAWAY."""


class Connection:
    """The state of one connection.

    Attributes:
        ended: why the connection ended, None while it is open.
        has_more: ``receive`` has stopped at the bound of a slice; ``receive(b"")`` continues.
        send_unary, send_headers, send_data, send_trailers: see :class:`ratelimitd.http2.sending.Sender`.
    """

    __slots__ = (
        "_at",
        "_buffer",
        "_limits",
        "_meter",
        "_preface_seen",
        "_receiver",
        "_sender",
        "_streams",
        "ended",
        "has_more",
        "send_data",
        "send_headers",
        "send_trailers",
        "send_unary",
    )

    def __init__(self, limits: Limits | None = None) -> None:
        limits = limits or Limits()
        self._limits = limits
        self._meter = AbuseMeter()
        self._streams = Streams()
        window = ReceiveWindow(limits.connection_window_bytes)
        sender = self._sender = Sender(self._streams, window, limits)
        self._receiver = Receiver(
            streams=self._streams, window=window, sender=sender, meter=self._meter, limits=limits
        )
        self._buffer = b""
        self._at = 0
        self._preface_seen = False
        self.ended: ConnectionEnded | None = None
        self.has_more = False
        # The sender's own methods: a call in between would cost each answer 50 ns.
        self.send_unary = sender.send_unary
        self.send_headers = sender.send_headers
        self.send_data = sender.send_data
        self.send_trailers = sender.send_trailers

    # State for the owner

    @property
    def drained(self) -> bool:
        """Whether the last GOAWAY was sent, after which no request begins."""
        return self._streams.final_id is not None

    @property
    def open_streams(self) -> int:
        """Requests that are not answered yet."""
        return len(self._streams.live)

    @property
    def buffered_bytes(self) -> int:
        """Octets of answers that wait for the peer's flow-control windows."""
        return self._sender.buffered_bytes

    @property
    def progress(self) -> int:
        """A counter that grows with every ended answer and with data in either direction."""
        return self._receiver.work + self._sender.drained_bytes

    @property
    def owes(self) -> Cause | None:
        """Cause to close with while the connection waits for input of the peer; None if it does not wait.

        If it stays the same for too long without ``progress``, the owner closes the connection with it.
        """
        if not self._receiver.settings_received:
            return Cause.SLOW_PREFACE
        if self._receiver.block_open:
            return Cause.SLOW_HEADERS
        if self._sender.buffered_bytes:
            return Cause.STALLED_WINDOW
        if self._buffer and not self.has_more:
            return Cause.SLOW_FRAME
        if not self._receiver.settings_acknowledged:
            return Cause.SETTINGS_TIMEOUT
        return None

    # Octets in and out

    def receive(self, data: bytes) -> list[Event]:
        """Add input of the peer, and handle at most one slice; return its events."""
        events: list[Event] = []
        if self.ended is not None:
            return events
        self._receiver.events = events
        if data:
            self._buffer = self._buffer[self._at :] + data if self._buffer else data
            self._at = 0
        try:
            if self._preface_seen or self._begin():
                self._slice(self._buffer)
        except ConnectionFailureError as failure:
            self._receiver.announce_all()
            events.append(self._end(failure.code, failure.cause, failure.message))
        if not self.has_more:
            # Keep a copy of the incomplete frame, not the whole read of up to 256 KiB.
            self._buffer, self._at = self._buffer[self._at :], 0
        return events

    def data_to_send(self) -> bytes:
        """Return and remove the octets to write; may be empty."""
        if self._sender.overflowed and self.ended is None:
            self.end(
                ErrorCode.ENHANCE_YOUR_CALM, Cause.SEND_BUFFER, "too much waits for the windows"
            )
        return self._sender.take()

    def acknowledge(self, stream_id: int, flow_bytes: int) -> None:
        """Reopen the flow-control windows by data that was handled."""
        self._receiver.acknowledge(stream_id, flow_bytes)

    def ping(self, payload: bytes) -> None:
        """Send PING with a payload of 8 octets."""
        self._sender.frame(frames.ping(payload))

    def tick(self) -> None:
        """Refill the peer's allowances of control frames; called once a second."""
        self._meter.tick()

    def go_away(self) -> None:
        """Begin a graceful shutdown: new requests are ignored once the peer has acknowledged the first GOAWAY.

        The owner closes when ``open_streams`` is 0 and ``drained``. A second call does not wait for the peer.
        """
        self._receiver.drain()

    def end(self, code: ErrorCode, cause: Cause, message: str) -> None:
        """End the connection now with GOAWAY; ``message`` is debug data for the peer."""
        if self.ended is None:
            self._end(code, cause, message)

    # The slice

    def _slice(self, data: bytes) -> None:  # noqa: C901, PLR0915 -- a call costs what half a frame does
        """Handle the frames in ``data`` from ``_at`` on, up to the bounds of a slice.

        A check is HEADERS without END_STREAM and one DATA with it. Both are handled here, as in the transition table
        (idle → open → remote_closed); the receiver handles unusual ones and all other frames. The two branches
        duplicate functions of the general path: ``Receiver.request`` and ``Receiver.announce`` (HEADERS),
        ``Receiver._data`` (DATA). A test checks that both paths behave alike.
        """
        streams, receiver, limits = self._streams, self._receiver, self._limits
        live, opening = streams.live, streams.opening
        kept, read = receiver.reader.kept, receiver.reader.read
        read_header, add_event = frames.read_header, receiver.events.append
        at, size = self._at, len(data)
        last_start = min(size, at + limits.bytes_per_slice) - frames.FRAME_HEADER_BYTES
        room, taken, complete = receiver.window.left, 0, 0
        next_id, end_id = streams.next_id, self._end_id()
        for _ in range(limits.frames_per_slice):
            if at > last_start:
                break
            top, length, kind, stream_id = read_header(data, at)
            start = at + frames.FRAME_HEADER_BYTES
            end = start + length
            if top or length > frames.DEFAULT_MAX_FRAME_BYTES:
                # Clients may retry every stream above the one in GOAWAY (RFC 9113 §6.8), and would be charged twice.
                streams.next_id = next_id
                self._settle(taken, complete)
                raise ConnectionFailureError(
                    ErrorCode.FRAME_SIZE_ERROR, Cause.FRAME_SIZE, "a frame is too large"
                )
            if end > size:
                break

            if kind == _LAST_DATA and stream_id in opening:
                first = opening[stream_id]
                promised = first.content_length
                if (promised is None or promised == length) and length <= room - taken:
                    del opening[stream_id]
                    live[stream_id] = UNTOUCHED
                    add_event((stream_id, first, data[start:end]))
                    taken += length
                    complete += 1
                    at = end
                    continue
            elif kind == _PLAIN_HEADERS and stream_id == next_id and stream_id < end_id:
                block = data[start:end]
                head = kept.get(block)
                if head is None:
                    streams.next_id = next_id
                    head = read(block)
                if head.flaw is None:
                    opening[stream_id] = head
                    next_id += 2
                else:
                    receiver.refuse(stream_id, head)
                    next_id = streams.next_id
                at = end
                continue

            streams.next_id = next_id
            self._settle(taken, complete)
            receiver.frame(kind, stream_id, data[start:end])
            room, taken, complete = receiver.window.left, 0, 0
            next_id, end_id = streams.next_id, self._end_id()
            at = end

        streams.next_id = next_id
        self._settle(taken, complete)
        if opening:
            receiver.announce_all()
        self._at = at
        self.has_more = at < size and self._whole_frame_at(at)

    def _end_id(self) -> int:
        """The first stream identifier that must take the general path, which checks the limits."""
        streams, receiver = self._streams, self._receiver
        if not receiver.settings_received or receiver.block_open or streams.final_id is not None:
            return 0
        # equivalent: at the bound the general path lets the stream begin
        if self._sender.buffered_bytes > self._limits.max_buffered_bytes:
            return 0  # equivalent: no identifier is below 1, either
        used = len(streams.live) + len(streams.opening)
        return streams.next_id + 2 * (self._limits.max_streams - used)

    def _settle(self, taken: int, complete: int) -> None:
        """Count requests of the fast path, and acknowledge their octets at once: the number of requests is limited."""
        if complete:
            self._streams.opened_total += complete
            self._receiver.window.left -= taken  # the loop has checked the window
            self._sender.credit(taken)

    def _whole_frame_at(self, at: int) -> bool:
        """Return whether a whole frame follows, or the header of a frame that is too large."""
        left = len(self._buffer) - at
        if left < frames.FRAME_HEADER_BYTES:
            return False
        length = int.from_bytes(self._buffer[at : at + 3], "big")
        return length > frames.DEFAULT_MAX_FRAME_BYTES or length + frames.FRAME_HEADER_BYTES <= left

    # Beginning and end

    def _begin(self) -> bool:
        """Read the preface and send ours (§3.4); False while it is incomplete.

        Raises:
            ConnectionFailureError: the peer speaks another protocol.
        """
        octets = self._buffer
        if octets.startswith(PREFACE):
            self._preface_seen = True
            self._at = len(PREFACE)
            self._send_preface()
            return True
        if undecided(octets):
            return False
        cause, answer = mistaken_protocol(octets)
        if answer:
            self._sender.frame(answer)
        else:
            self._send_preface()
        raise ConnectionFailureError(
            ErrorCode.PROTOCOL_ERROR, cause, "the connection does not begin with the preface"
        )

    def _send_preface(self) -> None:
        limits = self._limits
        own = (
            (Setting.MAX_CONCURRENT_STREAMS, limits.max_streams),
            (Setting.INITIAL_WINDOW_SIZE, limits.stream_window_bytes),
            (Setting.MAX_HEADER_LIST_SIZE, limits.max_header_list_bytes),
        )
        self._sender.frame(frames.settings(own))
        more = limits.connection_window_bytes - DEFAULT_WINDOW_BYTES
        if more > 0:
            self._sender.frame(frames.window_update(0, more))

    def _end(self, code: ErrorCode, cause: Cause, message: str) -> ConnectionEnded:
        if cause not in _NOT_HTTP2:
            self._sender.frame(frames.go_away(self._streams.last_id, code, message.encode()))
        self._sender.drop_all()
        self._buffer, self._at, self.has_more = b"", 0, False
        self.ended = ConnectionEnded(code, cause, message)
        return self.ended
