"""One call, asked through grpcio's blocking client or its asyncio one; and all that a caller can see of its end."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import grpc
import grpc.aio

MAX_ANSWER_BYTES = 8 << 20
"""What the clients take: twice what a node sends, so that the bound that is met is the node's."""

OPTIONS = [("grpc.max_receive_message_length", MAX_ANSWER_BYTES)]

PATIENCE_S = 30.0
"""Deadline of a call that is not about deadlines: far above what it takes."""

Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True)
class Asked:
    """A call as a client makes it.

    Attributes:
        kind: ``unary_unary`` and its three siblings: what the client believes the method to be.
        messages: the questions; exactly one where the client's kind begins with ``unary``.
        cancel_after: leave after so many answers; ``None`` waits for the end.
        hold: never say that there are no more questions; for a call that is cancelled.
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
        """Short also for messages of megabytes: what it takes to ask again by hand."""
        messages = [
            message.hex() if len(message) < 200 else len(message) for message in self.messages
        ]
        return (
            f"{self.kind} {self.path} {messages} metadata={self.metadata!r:.500} timeout={self.timeout_s}"
            f" {self.compression.name} cancel_after={self.cancel_after}"
        )


class Seen(NamedTuple):
    """How a call ended, as its caller sees it."""

    code: grpc.StatusCode
    text: str
    initial_metadata: tuple[tuple[str, str | bytes], ...]
    trailing_metadata: tuple[tuple[str, str | bytes], ...]
    answers: tuple[bytes, ...]


class Client(Protocol):
    """A way to ask one node."""

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
    """Metadata in the order they came in."""
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
