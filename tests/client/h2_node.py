"""A server that answers by the h2 library as a test wants it: a node of another make, or a broken one."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import h2.config
import h2.connection
import h2.events
import h2.exceptions
from h2.settings import SettingCodes, Settings

from ratelimiter.v1 import ratelimiter_pb2 as pb

HEADERS = [(":status", "200"), ("content-type", "application/grpc")]
TRAILERS = [("grpc-status", "0")]


class Peer:
    """One connection that the server took."""

    def __init__(self, writer: asyncio.StreamWriter, settings: dict[SettingCodes, int]) -> None:
        self.writer = writer
        config = h2.config.H2Configuration(client_side=False, header_encoding="utf-8")
        self.h2 = h2.connection.H2Connection(config)
        self.h2.local_settings = Settings(client=False, initial_values=settings)
        self.h2.initiate_connection()
        self.headers: dict[int, dict[str, str]] = {}
        self.resets: list[int] = []

    def send(self) -> None:
        """Send what the library has to say."""
        self.writer.write(self.h2.data_to_send())

    def answer(self, stream_id: int) -> None:
        """Allow a check."""
        message = pb.RateLimitResponse(allowed=True).SerializeToString()
        self.h2.send_headers(stream_id, HEADERS)
        self.h2.send_data(stream_id, b"\0" + len(message).to_bytes(4, "big") + message)
        self.h2.send_headers(stream_id, TRAILERS, end_stream=True)
        self.send()


class H2Node:
    """The server: its address, the connections it took, and how it treats a question."""

    def __init__(
        self, behave: Callable[[Peer, int], None], settings: dict[SettingCodes, int]
    ) -> None:
        self.behave = behave
        self.peers: list[Peer] = []
        self.address = ""
        self.told = asyncio.Condition()
        self._settings = settings
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Treat one connection."""
        task = asyncio.current_task()
        assert task
        self._tasks.add(task)
        peer = Peer(writer, self._settings)
        self.peers.append(peer)
        peer.send()
        with suppress(OSError, h2.exceptions.ProtocolError, asyncio.CancelledError):
            while octets := await reader.read(65_536):
                for event in peer.h2.receive_data(octets):
                    self._take(peer, event)
                peer.send()
                async with self.told:
                    self.told.notify_all()
        writer.transport.abort()

    def _take(self, peer: Peer, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.RequestReceived):
            peer.headers[event.stream_id] = dict(event.headers)  # type: ignore[arg-type]
        elif isinstance(event, h2.events.StreamReset):
            peer.resets.append(int(event.error_code or 0))
        elif isinstance(event, h2.events.StreamEnded):
            self.behave(peer, event.stream_id)

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for what octets of clients bring about."""
        async with asyncio.timeout(30), self.told:
            await self.told.wait_for(condition)

    async def end(self) -> None:
        """Break all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def h2_node(
    behave: Callable[[Peer, int], None] = Peer.answer,
    *,
    settings: dict[SettingCodes, int] | None = None,
    **listen: object,
) -> AsyncIterator[H2Node]:
    """A server that treats questions so; ``listen`` are arguments of the loop's ``create_server``."""
    node = H2Node(behave, settings or {})
    where = listen or {"host": "127.0.0.1", "port": 0}
    server = await asyncio.start_server(node.serve, **where)  # type: ignore[arg-type]
    node.address = "{}:{}".format(*server.sockets[0].getsockname()[:2])
    try:
        yield node
    finally:
        server.close()
        await node.end()
        await server.wait_closed()
