"""The client's side of an HTTP/2 connection, octet for octet: builds what a peer sends, reads what a server answers.

Knows nothing of the code that is tested: it has its own idea of a frame, and the `hpack` library for header blocks.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import hpack

from ratelimitd.http2.connection import Connection
from ratelimitd.http2.events import ConnectionEnded, Event, StreamReset
from ratelimitd.http2.limits import Limits

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = range(5)
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(5, 10)

NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR = range(4)
STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL, COMPRESSION_ERROR = range(5, 10)
ENHANCE_YOUR_CALM = 11

END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITIZED = 0x20

GET = [(":method", "GET"), (":scheme", "http"), (":path", "/"), (":authority", "localhost")]
POST = [(":method", "POST"), *GET[1:], ("content-type", "application/grpc"), ("te", "trailers")]


class Frame(NamedTuple):
    """A frame as it was on the line."""

    type: int
    flags: int
    stream_id: int
    payload: bytes

    @property
    def code(self) -> int:
        """Of RST_STREAM or GOAWAY."""
        return int.from_bytes(self.payload[0 if self.type == RST_STREAM else 4 :][:4], "big")


def frame(type_: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return (
        len(payload).to_bytes(3, "big")
        + bytes((type_, flags))
        + stream_id.to_bytes(4, "big")
        + payload
    )


def frames_of(octets: bytes) -> list[Frame]:
    """Cut octets into frames; there must be nothing left."""
    frames = []
    while octets:
        length = int.from_bytes(octets[:3], "big")
        assert len(octets) >= 9 + length, "half a frame was sent"
        stream_id = int.from_bytes(octets[5:9], "big")
        frames.append(Frame(octets[3], octets[4], stream_id, octets[9 : 9 + length]))
        octets = octets[9 + length :]
    return frames


def settings(**values: int) -> bytes:
    """SETTINGS; a name is ``s`` and the number of the setting."""
    return frame(
        SETTINGS,
        0,
        0,
        b"".join(
            int(name[1:]).to_bytes(2, "big") + value.to_bytes(4, "big")
            for name, value in values.items()
        ),
    )


def data(stream_id: int, payload: bytes = b"", flags: int = 0) -> bytes:
    return frame(DATA, flags, stream_id, payload)


def last_data(stream_id: int, payload: bytes = b"") -> bytes:
    return data(stream_id, payload, END_STREAM)


def ping(payload: bytes) -> bytes:
    return frame(PING, 0, 0, payload)


def continuation(stream_id: int, part: bytes = b"") -> bytes:
    return frame(CONTINUATION, 0, stream_id, part)


def last_continuation(stream_id: int, part: bytes = b"") -> bytes:
    return frame(CONTINUATION, END_HEADERS, stream_id, part)


def rst_stream(stream_id: int, code: int = CANCEL) -> bytes:
    return frame(RST_STREAM, 0, stream_id, code.to_bytes(4, "big"))


def window_update(stream_id: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream_id, increment.to_bytes(4, "big"))


def priority(stream_id: int, depends_on: int = 0, weight: int = 15) -> bytes:
    return frame(PRIORITY, 0, stream_id, depends_on.to_bytes(4, "big") + bytes((weight,)))


SETTINGS_ACK = frame(SETTINGS, ACK, 0)
GREETING = PREFACE + settings()


@dataclass
class Peer:
    """A client and the connection that it talks to; ``sent`` is what the connection has answered since ``take``."""

    limits: Limits = field(default_factory=Limits)
    greeting: bytes = GREETING + SETTINGS_ACK

    def __post_init__(self) -> None:
        self.connection = Connection(self.limits)
        self.encoder = hpack.Encoder()
        self.decoder = hpack.Decoder()
        self.events: list[Event] = []
        self.sent: list[Frame] = []
        if self.greeting:
            self.feed(self.greeting)
            self.forget()

    def forget(self) -> None:
        """Forget what has happened so far."""
        self.events.clear()
        self.sent.clear()

    def feed(self, *parts: bytes) -> list[Event]:
        """Send all at once, and go on until the connection has dealt with it; return the events."""
        events = self.connection.receive(b"".join(parts))
        while self.connection.has_more:
            events += self.connection.receive(b"")
        self.events += events
        self.collect()
        return events

    def collect(self) -> list[Frame]:
        """Read what the connection has to say."""
        frames = frames_of(self.connection.data_to_send())
        self.sent += frames
        return frames

    def block(self, fields: list[tuple[str, str]] | None = None) -> bytes:
        return self.encoder.encode(POST if fields is None else fields)

    def head(
        self, stream_id: int, fields: list[tuple[str, str]] | None = None, flags: int = END_HEADERS
    ) -> bytes:
        return frame(HEADERS, flags, stream_id, self.block(fields))

    def get(self, stream_id: int, fields: list[tuple[str, str]] | None = None) -> bytes:
        """A request without a body."""
        return self.head(stream_id, GET if fields is None else fields, END_HEADERS | END_STREAM)

    def post(self, stream_id: int, body: bytes = b"body") -> bytes:
        """A request as a check sends it."""
        return self.head(stream_id) + last_data(stream_id, body)

    def fields(self, block: bytes) -> list[tuple[bytes, bytes]]:
        """What the connection has said in a header block."""
        return [(bytes(name), bytes(value)) for name, value in self.decoder.decode(block, raw=True)]

    @property
    def resets(self) -> list[tuple[int, int]]:
        """(stream, code) of every RST_STREAM that was sent."""
        return [(sent.stream_id, sent.code) for sent in self.sent if sent.type == RST_STREAM]

    @property
    def goaways(self) -> list[tuple[int, int]]:
        """(last stream, code) of every GOAWAY that was sent."""
        return [
            (int.from_bytes(sent.payload[:4], "big"), sent.code)
            for sent in self.sent
            if sent.type == GOAWAY
        ]

    @property
    def reset_causes(self) -> list[str]:
        return [event.cause.value for event in self.events if isinstance(event, StreamReset)]

    @property
    def end_cause(self) -> str | None:
        ends = [event for event in self.events if isinstance(event, ConnectionEnded)]
        assert len(ends) <= 1
        return ends[0].cause.value if ends else None
