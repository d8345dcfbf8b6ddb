"""Complete conversations with an independent client: the `h2` library."""

import contextlib
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions
from hypothesis import given, settings
from hypothesis import strategies as st

from ratelimitd.http2.connection import Connection
from ratelimitd.http2.events import DataReceived, RequestReceived, TrailersReceived
from ratelimitd.http2.headers import static_block
from ratelimitd.http2.sending import UnaryAnswer
from tests.http2_peer import POST

HEAD = [(b":status", b"200"), (b"content-type", b"application/grpc")]
TRAILERS = [(b"grpc-status", b"0")]
ANSWER = UnaryAnswer(static_block(HEAD), static_block(TRAILERS))
REQUEST_TRAILERS = [("x-sum", "1")]


class Server:
    """Answers every request with its body, backwards."""

    def __init__(self) -> None:
        self.connection = Connection()
        self.bodies: dict[int, bytes] = {}
        self.trailers: dict[int, list[tuple[bytes, bytes]]] = {}

    def turn(self, octets: bytes) -> bytes:
        for event in self.connection.receive(octets):
            ended = self._told(event)
            if ended is not None:
                self.connection.send_unary(ended, ANSWER, self.bodies[ended][::-1])
        return self.connection.data_to_send()

    def _told(self, event: Any) -> int | None:
        """Process an event; return the stream whose request it ends."""
        if type(event) is tuple:
            stream_id: int = event[0]
            self.bodies[stream_id] = event[2]
            return stream_id
        if isinstance(event, TrailersReceived):
            self.trailers[event.stream_id] = list(event.fields)
            return event.stream_id
        if isinstance(event, RequestReceived):
            self.bodies[event.stream_id] = b""
        elif isinstance(event, DataReceived):
            self.bodies[event.stream_id] += event.data
            self.connection.acknowledge(event.stream_id, event.flow_bytes)
        else:
            return None
        return event.stream_id if event.ended else None


class Client:
    """Sends requests, and reads answers through windows that open gradually."""

    def __init__(self, window_bytes: int, table_bytes: int) -> None:
        config = h2.config.H2Configuration(client_side=True, header_encoding=None)
        self.connection = h2.connection.H2Connection(config)
        self.connection.initiate_connection()
        self.connection.update_settings({1: table_bytes, 4: window_bytes})
        self.heads: dict[int, list] = {}
        self.bodies: dict[int, bytes] = {}
        self.trailers: dict[int, list] = {}
        self.ended: set[int] = set()

    def send(self, stream_id, fields, parts, *, trailers) -> None:
        connection = self.connection
        connection.send_headers(stream_id, [*POST, *fields], end_stream=not (parts or trailers))
        for index, (part, padding) in enumerate(parts):
            last = index == len(parts) - 1 and not trailers
            connection.send_data(stream_id, part, end_stream=last, pad_length=padding)
        if trailers:
            connection.send_headers(stream_id, REQUEST_TRAILERS, end_stream=True)

    def turn(self, octets: bytes) -> bytes:
        for event in self.connection.receive_data(octets):
            match event:
                case h2.events.ResponseReceived():
                    self.heads[event.stream_id] = list(event.headers)
                    self.bodies[event.stream_id] = b""
                    self._open(event.stream_id)
                case h2.events.DataReceived():
                    self.bodies[event.stream_id] += event.data
                    self._open(event.stream_id)
                case h2.events.TrailersReceived():
                    self.trailers[event.stream_id] = list(event.headers)
                case h2.events.StreamEnded():
                    self.ended.add(event.stream_id)
                case _:
                    assert not isinstance(event, h2.events.ConnectionTerminated)
                    assert not isinstance(event, h2.events.StreamReset)
        return self.connection.data_to_send()

    def _open(self, stream_id: int) -> None:
        with contextlib.suppress(h2.exceptions.StreamClosedError):
            self.connection.increment_flow_control_window(100, stream_id)


FIELDS = st.lists(
    st.tuples(
        st.sampled_from(["x-a", "x-b", "grpc-timeout", "user-agent"]),
        st.text(st.characters(codec="ascii", categories=["L", "N"]), max_size=30),
    ),
    max_size=4,
)
PARTS = st.lists(st.tuples(st.binary(max_size=300), st.none() | st.integers(0, 255)), max_size=3)
CALLS = st.lists(st.tuples(FIELDS, PARTS, st.booleans()), min_size=1, max_size=12)


@settings(max_examples=100)
@given(CALLS, st.integers(1, 400), st.integers(0, 400), st.sampled_from([0, 100, 4_096, 8_192]))
def test_calls_of_any_shape_are_received_and_answered(calls, size, window_bytes, table_bytes):
    client, server = Client(window_bytes, table_bytes), Server()
    wanted = {}
    for number, (fields, parts, trailers) in enumerate(calls):
        stream_id = 2 * number + 1
        client.send(stream_id, fields, parts, trailers=trailers)
        wanted[stream_id] = b"".join(part for part, _ in parts)
    octets = client.connection.data_to_send()
    while octets:
        back = b""
        for at in range(0, len(octets), size):
            back += server.turn(octets[at : at + size])
        while server.connection.has_more:
            back += server.turn(b"")
        octets = client.turn(back)
    assert server.bodies == wanted
    assert client.ended == wanted.keys()
    assert client.bodies == {stream_id: body[::-1] for stream_id, body in wanted.items()}
    assert all(head == HEAD for head in client.heads.values())
    assert all(trailers == TRAILERS for trailers in client.trailers.values())
    connection = server.connection
    assert (connection.ended, connection.open_streams, connection.buffered_bytes) == (None, 0, 0)
