"""Makes one call with grpcio's blocking or asyncio client, and records all that the caller observes."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import grpc
import grpc.aio

MAX_ANSWER_BYTES = 8 << 20
"""Bound of the clients: twice that of a node, so that the node's applies."""

OPTIONS = [("grpc.max_receive_message_length", MAX_ANSWER_BYTES)]

PATIENCE_S = 30.0
"""Deadline of calls that do not test deadlines, far above their duration."""

Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True)
class Asked:
    """A call as a client makes it.

    Attributes:
        kind: kind of the method for the client: ``unary_unary`` or one of its three siblings.
        messages: the requests; exactly one if ``kind`` begins with ``unary``.
        cancel_after: cancel after this number of answers; ``None`` waits for the end.
        hold: never half-close, for a call that is cancelled.
    """

    path: str
    messages: tuple[bytes, ...]
    kind: str = "unary_unary"
    metadata: Metadata = ()
    timeout_s: float | None = PATIENCE_S
    compression: grpc.Compression = grpc.Compression.NoCompression
    cancel_after: int | None = None
    hold: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The other arguments."""
        return {
            "timeout": self.timeout_s,
            "metadata": self.metadata,
            "compression": self.compression,
        }

    def __repr__(self) -> str:
        """Return a text to repeat the call by hand, short even for messages of megabytes."""
        messages = [
            message.hex() if len(message) < 200 else len(message) for message in self.messages
        ]
        return (
            f"{self.kind} {self.path} {messages} metadata={self.metadata!r:.500} timeout={self.timeout_s}"
            f" {self.compression.name} cancel_after={self.cancel_after}"
        )


class Seen(NamedTuple):
    """The end of a call as its caller observes it."""

    code: grpc.StatusCode
    text: str
    initial_metadata: tuple[tuple[str, str | bytes], ...]
    trailing_metadata: tuple[tuple[str, str | bytes], ...]
    answers: tuple[bytes, ...]


class Client(Protocol):
    """A client of one node."""

    async def ask(self, asked: Asked) -> Seen:
        """Make the call and wait for its end."""


class AsyncioClient:
    """grpc.aio."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    async def ask(self, asked: Asked) -> Seen:
        """Make the call in this loop."""
        answers: list[bytes] = []
        questions = _held_open(asked.messages) if asked.hold else _questions(asked)
        call = getattr(self._channel, asked.kind)(asked.path)(questions, **asked.options)
        try:
            if asked.cancel_after == 0:
                call.cancel()
            if asked.kind.endswith("_unary"):
                answers.append(await call)
            else:
                async for answer in call:
                    answers.append(answer)
                    if len(answers) == asked.cancel_after:
                        call.cancel()
        except grpc.aio.AioRpcError:
            pass
        except asyncio.CancelledError:
            if not call.cancelled():
                raise
        return Seen(
            await call.code(),
            await call.details(),
            _pairs(await call.initial_metadata()),
            _pairs(await call.trailing_metadata()),
            tuple(answers),
        )


class BlockingClient:
    """grpc's blocking client, in a thread."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    async def ask(self, asked: Asked) -> Seen:
        """Make the call in a thread."""
        return await asyncio.to_thread(self._ask, asked)

    def _ask(self, asked: Asked) -> Seen:
        method: Any = getattr(self._channel, asked.kind)(asked.path)
        single = asked.kind.endswith("_unary")
        answers: list[bytes] = []
        ended = threading.Event()
        questions = _held(asked.messages, ended) if asked.hold else _questions(asked)
        call = (method.future if single else method)(questions, **asked.options)
        try:
            if asked.cancel_after == 0:
                call.cancel()
            for answer in (call.result(),) if single else call:
                answers.append(answer)
                if len(answers) == asked.cancel_after:
                    call.cancel()
        except (grpc.RpcError, grpc.FutureCancelledError):
            pass
        finally:
            ended.set()
        return Seen(
            call.code(),
            call.details(),
            _pairs(call.initial_metadata()),
            _pairs(call.trailing_metadata()),
            tuple(answers),
        )


def _questions(asked: Asked) -> Any:
    """The first argument of the client's method."""
    return asked.messages[0] if asked.kind.startswith("unary") else iter(asked.messages)


async def _held_open(messages: Iterable[bytes]) -> AsyncIterator[bytes]:
    for message in messages:
        yield message
    await asyncio.Event().wait()


def _held(messages: Iterable[bytes], until: threading.Event) -> Iterable[bytes]:
    yield from messages
    until.wait(PATIENCE_S)


def _pairs(metadata: Iterable[Any] | None) -> tuple[tuple[str, str | bytes], ...]:
    """Metadata in order of arrival."""
    return tuple((key, value) for key, value in metadata or ())


@asynccontextmanager
async def asyncio_client(address: str) -> AsyncIterator[Client]:
    """A channel of grpc.aio."""
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        yield AsyncioClient(channel)


@asynccontextmanager
async def blocking_client(address: str) -> AsyncIterator[Client]:
    """A channel of the blocking client."""
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        yield BlockingClient(channel)


CLIENTS: dict[str, Callable[[str], Any]] = {"aio": asyncio_client, "blocking": blocking_client}
