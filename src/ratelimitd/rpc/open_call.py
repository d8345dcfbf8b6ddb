"""A call that is not answered yet: what has come of it, what runs for it, and what its handler reads.

Never sends anything and never decides a status but those of broken messages.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, NamedTuple

from ratelimitd.rpc.call_head import CallPlan, NativeCall
from ratelimitd.rpc.framing import Encoding, MessageReader, Part, message_of
from ratelimitd.rpc.interface import RpcError, StatusCode

MAX_UNREAD_QUESTIONS: Final = 1_000
"""Of one stream. An empty message takes 5 octets of the stream's window and 50 times that of our memory."""

_TOO_MANY_QUESTIONS: Final = RpcError(
    StatusCode.RESOURCE_EXHAUSTED, "too many messages of the stream are unread"
)


class OpenCall:
    """One call, from its head to the end of its answer.

    Attributes:
        plan: how it is answered.
        call: what its handler is given.
        reader: of the messages of its request.
        part: the message of a call that has one, when it has come.
        held_bytes: of its request, as they are counted against the bounds.
        questions: what a bidi handler reads; ``None`` for other calls.
        task: what runs its handler, once it runs.
        headers_sent: the answer has begun.
        room: set when the transport takes more of a stream again, after a message that it did not take at once.
        began_s: when its head came.
    """

    __slots__ = (
        "began_s",
        "call",
        "headers_sent",
        "held_bytes",
        "part",
        "plan",
        "questions",
        "reader",
        "room",
        "task",
    )

    def __init__(
        self, plan: CallPlan, call: NativeCall, max_message_bytes: int, began_s: float = 0.0
    ) -> None:
        self.began_s = began_s
        self.plan = plan
        self.call = call
        self.reader = MessageReader(max_message_bytes)
        self.part: Part | None = None
        self.held_bytes = 0
        self.questions: Questions | None = None
        self.task: asyncio.Task[None] | None = None
        self.headers_sent = False
        self.room = asyncio.Event()

    def take(self, data: bytes) -> None:
        """Take the next bytes of a call that has one message.

        Raises:
            RpcError: there is more than one, or it is too large.
        """
        for part in self.reader.feed(data):
            if self.part is not None:
                raise RpcError(StatusCode.INTERNAL, "the call has more than one message")
            self.part = part

    def whole(self) -> Part:
        """The one message of a call whose request has ended.

        Raises:
            RpcError: it is not there, or not whole.
        """
        if self.part is None or self.reader.unfinished_bytes:
            raise RpcError(StatusCode.INTERNAL, "the call ended before its message did")
        return self.part

    def cut_off(self) -> RpcError | None:
        """What is wrong with the end of a request, if it ended within a message."""
        if not self.reader.unfinished_bytes:
            return None
        return RpcError(StatusCode.INTERNAL, "the call ended within a message")

    def cancel(self) -> None:
        """Nobody waits for the answer any more.

        Not at once: a task that is cancelled before its first step never runs the ``finally`` of what it was made for.
        That step is due already, and comes first.
        """
        if self.task is not None:
            self.task.get_loop().call_soon(self.task.cancel)

    @property
    def waiting_bytes(self) -> int:
        """What this call makes us hold."""
        part_bytes = 0 if self.part is None else len(self.part.content)
        questions_bytes = 0 if self.questions is None else self.questions.waiting_bytes
        return self.reader.unfinished_bytes + part_bytes + questions_bytes


class _Question(NamedTuple):
    part: Part
    flow_bytes: int


class Questions:
    """The messages of a stream as its handler reads them; an asynchronous iterator.

    What the handler has not read is not acknowledged, so that a peer who asks faster has to wait. Messages are
    inflated when they are read: otherwise a window's worth of compressed ones would become gigabytes. Before each,
    ``my_turn`` is waited for: a handler that never has to wait would otherwise answer a window's worth of them in one
    turn of the loop. ``read`` is called when one was.

    Attributes:
        waiting_bytes: of the messages that were not read. Of a large one most is acknowledged while it arrives.
    """

    __slots__ = (
        "_arrived",
        "_end",
        "_my_turn",
        "_parts",
        "_read",
        "acknowledge",
        "encoding",
        "max_message_bytes",
        "waiting_bytes",
    )

    def __init__(
        self,
        encoding: Encoding,
        max_message_bytes: int,
        acknowledge: Callable[[int], None],
        my_turn: Callable[[], Awaitable[None]],
        *,
        read: Callable[[], object] = lambda: None,
    ) -> None:
        self.encoding = encoding
        self.max_message_bytes = max_message_bytes
        self.acknowledge = acknowledge
        self._my_turn = my_turn
        self._read = read
        self.waiting_bytes = 0
        self._parts: deque[_Question] = deque()
        self._arrived = asyncio.Event()
        self._end: Exception | None = None

    def put(self, part: Part, flow_bytes: int) -> None:
        """Add a message, and what is to be acknowledged when it has been read.

        Raises:
            RpcError: too many are unread.
        """
        if len(self._parts) >= MAX_UNREAD_QUESTIONS:
            raise _TOO_MANY_QUESTIONS
        self._parts.append(_Question(part, flow_bytes))
        self.waiting_bytes += len(part.content)
        self._arrived.set()

    @property
    def ended(self) -> bool:
        """Whether nothing follows."""
        return self._end is not None

    def end(self, error: RpcError | None = None) -> None:
        """Nothing follows; ``error`` is raised behind the messages that came before it. The first end is the end."""
        if self._end is None:
            self._end = error or StopAsyncIteration()
        self._arrived.set()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        while not self._parts:
            if self._end is not None:
                raise self._end
            self._arrived.clear()
            await self._arrived.wait()
        await self._my_turn()
        part, flow_bytes = self._parts.popleft()
        self.waiting_bytes -= len(part.content)
        self._read()
        if flow_bytes:
            self.acknowledge(flow_bytes)
        return message_of(part, self.encoding, self.max_message_bytes)
