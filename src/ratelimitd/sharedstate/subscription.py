"""One channel of a server, listened to on a connection of its own that is remade whenever it is lost or silent.

What was said while there was no connection is lost, and so may be what was said just before its end: whoever listens
hears of each beginning, and has to find out otherwise.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from ratelimitd.errors import RateLimitdError, StoreMisconfiguredError, StoreUnavailableError
from ratelimitd.sharedstate.connecting import CONNECT_S, connect
from ratelimitd.sharedstate.connection import TURN_S, Connection
from ratelimitd.sharedstate.link import LONG_LIFE_S, LinkOptions, Locate
from ratelimitd.sharedstate.login import Refused, ask, hand_over
from ratelimitd.sharedstate.reconnecting import for_ever, pauses
from ratelimitd.sharedstate.replies import login_error_of


class Channel(NamedTuple):
    """What is listened to. A sharded channel of a Cluster is known to the server of its slot only."""

    name: bytes
    sharded: bool = False
    silence_s: float | None = None
    """Something is said at least so often, or the connection is presumed dead; ``None``: it may be silent."""


class Listener(Connection):
    """A connection that hears messages. It asks for one thing only, its channel, and that before the first message."""

    def __init__(
        self,
        on_message: Callable[[bytes], None],
        on_lost: Callable[[RateLimitdError], None],
    ) -> None:
        super().__init__(hand_over, on_lost, timeout_s=CONNECT_S)
        self._on_message = on_message

    def unasked(self, reply: object) -> bool:
        """A message; or the server has moved the channel elsewhere, and this connection is of no use any more."""
        match reply:
            case [b"message" | b"smessage", _, bytes() as payload]:
                try:
                    self._on_message(payload)
                except Exception as error:  # noqa: BLE001 -- a defect of the listener must not end the connection
                    asyncio.get_running_loop().call_exception_handler(
                        {"message": "a message could not be taken", "exception": error}
                    )
                return True
            case _:
                return super().unasked(reply)


class Subscription:
    """Listens to ``channel`` from :meth:`start` to :meth:`close`.

    ``on_begin`` is called whenever a connection begins to listen, ``on_message`` with each payload.
    """

    def __init__(
        self,
        locate: Locate,
        channel: Channel,
        options: LinkOptions,
        *,
        on_message: Callable[[bytes], None],
        on_begin: Callable[[], None],
        time_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.connected = False
        """Whether messages are heard."""
        self._locate = locate
        self._channel = channel
        self._options = options
        self._on_message = on_message
        self._on_begin = on_begin
        self._time_s = time_s
        self._backoff = pauses(options.random)
        self._reported = False
        self._heard_s = 0.0
        self._lost = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to connect."""
        self._keeping = asyncio.create_task(for_ever(self._keep, self._options.sleep))

    async def close(self) -> None:
        """End."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)

    async def _keep(self) -> None:
        """Listen, and return when the next connection is due."""
        try:
            listener = await self._subscribe()
        except StoreUnavailableError as error:
            self._report(error)
            await self._options.sleep(self._backoff.next_s())
            return
        began_s = self._time_s()
        try:
            self._begin()
            await self._until_lost(listener)
        finally:
            self.connected = False
            listener.drop(StoreUnavailableError("the subscription has ended"))
        if self._time_s() - began_s >= LONG_LIFE_S:
            self._backoff.reset()
        else:
            await self._options.sleep(self._backoff.next_s())

    async def _subscribe(self) -> Listener:
        self._lost.clear()
        server = await self._locate()
        listener = await connect(
            server,
            self._options.greeting,
            self._options.tls,
            lambda: Listener(self._hear, lambda _error: self._lost.set()),
        )
        try:
            verb = b"SSUBSCRIBE" if self._channel.sharded else b"SUBSCRIBE"
            await ask(listener, verb, self._channel.name)
        except Refused as refused:
            listener.drop(StoreUnavailableError("no subscription"))
            raise login_error_of(str(refused)) from None
        except BaseException:
            listener.drop(StoreUnavailableError("no subscription"))
            raise
        return listener

    def _begin(self) -> None:
        self._heard_s = self._time_s()
        self.connected = True
        if self._reported:
            self._reported = False
            self._options.report(f"messages of {self._channel.name.decode()}: heard again")
        self._on_begin()

    def _hear(self, payload: bytes) -> None:
        self._heard_s = self._time_s()
        self._on_message(payload)

    async def _until_lost(self, listener: Listener) -> None:
        """Return when the connection is lost, or drop it when it was silent for too long."""
        silence_s = self._channel.silence_s
        while not self._lost.is_set():
            left_s = None if silence_s is None else self._left_s(silence_s)
            if left_s is not None and left_s <= 0:
                await asyncio.sleep(
                    TURN_S
                )  # if it was this process that slept, the messages lie in the socket
                if silence_s is not None and self._left_s(silence_s) <= 0:
                    listener.drop(StoreUnavailableError("silent"))
                continue
            try:
                async with asyncio.timeout(left_s):
                    await self._lost.wait()
            except TimeoutError:
                continue

    def _left_s(self, silence_s: float) -> float:
        return self._heard_s + silence_s - self._time_s()

    def _report(self, error: StoreUnavailableError) -> None:
        """Say once that somebody has to mend something; that a server is away, its link says."""
        if isinstance(error, StoreMisconfiguredError) and not self._reported:
            self._reported = True
            self._options.report(f"messages of {self._channel.name.decode()}: {error}")
