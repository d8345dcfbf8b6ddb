"""Handlers that take their time: a unary one that has to wait, and those that answer with a stream.

Each runs in a task of its own, and ends its call; whoever has ended the call before has cancelled the task, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Protocol

from ratelimitd.rpc.interface import RpcError, StatusCode
from ratelimitd.rpc.native_shared import SharedCalls
from ratelimitd.rpc.open_call import OpenCall

CANCELLED = RpcError(StatusCode.CANCELLED, "the call was cancelled")


class Calls(Protocol):
    """What a running handler needs of the calls of its connection."""

    shared: SharedCalls

    def is_open(self, stream_id: int, open_call: OpenCall) -> bool:
        """Whether the call is not answered yet."""

    def answer(self, stream_id: int, message: bytes) -> None:
        """End a unary call well."""

    def send(self, stream_id: int, open_call: OpenCall, message: bytes) -> bool:
        """Send one message of a stream. Returns whether it is on its way: if not, wait for ``open_call.room``."""

    def finish(self, stream_id: int) -> None:
        """End a stream well."""

    def fail(self, stream_id: int, error: RpcError) -> None:
        """End a call with a status."""


async def run_unary(
    calls: Calls, stream_id: int, open_call: OpenCall, answer: Awaitable[bytes]
) -> None:
    """Wait for the answer of a unary handler, and give it."""
    error: RpcError | None = None
    message = b""
    try:
        message = await answer
    except asyncio.CancelledError:
        error = CANCELLED
    except Exception as raised:  # noqa: BLE001 -- whatever it is, it is the end of this call alone
        error = calls.shared.status_of(raised)
    finally:
        calls.shared.unary_in_progress -= 1
    if not calls.is_open(stream_id, open_call):
        return
    if error is None:
        calls.answer(stream_id, message)
    else:
        calls.fail(stream_id, error)


async def run_stream(
    calls: Calls, stream_id: int, open_call: OpenCall, answers: AsyncIterator[bytes]
) -> None:
    """Send what a streaming handler answers, as fast as the peer reads."""
    error: RpcError | None = None
    try:
        async for message in answers:
            if not calls.send(stream_id, open_call, message):
                await open_call.room.wait()
            # Whether the peer reads shows when what was sent is written, which is in another turn of the loop.
            await calls.shared.turnstile.passed()
    except asyncio.CancelledError:
        error = CANCELLED
    except Exception as raised:  # noqa: BLE001 -- as above
        error = calls.shared.status_of(raised)
    finally:
        calls.shared.streams_in_progress -= 1
        await _close(answers)
    if not calls.is_open(stream_id, open_call):
        return
    if error is None:
        calls.finish(stream_id)
    else:
        calls.fail(stream_id, error)


async def _close(answers: AsyncIterator[bytes]) -> None:
    """Let a generator that was left in the middle run its ``finally`` now, not when it is collected."""
    close = getattr(answers, "aclose", None)
    if close is not None:
        await close()
