"""Messages between nodes by the store's publish/subscribe: at most once, with detection of losses.

A message is (sender, number, payload): the sender is drawn at random when a node starts, and numbers its messages per
channel. An empty payload, once a second, is the heartbeat: it shows that a channel is alive, and its number reveals
losses. Nodes publish over the links of their spends, in order with them, and never retry.

One server has one channel. A Cluster would carry an ordinary message to all its servers, so its channels are sharded:
eight, at fixed slots, so that nodes with different maps of the Cluster use the same channels. One per hash tag would
need 256 heartbeats a second.
"""

from __future__ import annotations

import asyncio
import enum
import secrets
import struct
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, NamedTuple

from ratelimitd.cluster.redis.cluster_topology import SLOT_OF_TAG, SLOTS
from ratelimitd.cluster.redis.connection import (
    READ_PAUSE_S,
    Connection,
    Refused,
    ask,
    hand_over,
    login_error_of,
)
from ratelimitd.cluster.redis.link import (
    CONNECT_S,
    LONG_LIFE_S,
    LinkOptions,
    Locate,
    connect,
    pauses,
    repeat_step,
)
from ratelimitd.cluster.redis.topology import TAGS, Topology
from ratelimitd.errors import RateLimitdError, StoreMisconfiguredError, StoreUnavailableError
from ratelimitd.retry import cancel_all


class Channel(NamedTuple):
    """The subscribed channel. A sharded channel of a Cluster exists on the server of its slot only."""

    name: bytes
    sharded: bool = False
    silence_s: float | None = None
    """Longest silence before the connection is presumed dead; ``None``: unlimited."""


class Listener(Connection):
    """A subscribed connection. Its only request is the subscription."""

    def __init__(
        self,
        on_message: Callable[[bytes], None],
        on_lost: Callable[[RateLimitdError], None],
    ) -> None:
        super().__init__(hand_over, on_lost, timeout_s=CONNECT_S)
        self._on_message = on_message

    def unasked(self, reply: object) -> bool:
        """Handle a message, or the end of a subscription whose channel has moved."""
        match reply:
            case [b"message" | b"smessage", _, bytes() as payload]:
                try:
                    self._on_message(payload)
                except Exception as error:  # noqa: BLE001 -- a defect of the listener must not end the connection
                    asyncio.get_running_loop().call_exception_handler(
                        {"message": "a message could not be processed", "exception": error}
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
        """Whether the subscription is active."""
        self._locate = locate
        self._channel = channel
        self._options = options
        self._on_message = on_message
        self._on_begin = on_begin
        self._time_s = time_s
        self._backoff = pauses(options.random)
        self._reported = False
        self._received_s = 0.0
        self._lost = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start connecting."""
        self._keeping = asyncio.create_task(repeat_step(self._keep, self._options.sleep))

    async def close(self) -> None:
        """Disconnect."""
        await cancel_all(self._keeping)

    async def _keep(self) -> None:
        """Listen once, and return when it is time to connect again."""
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
            self._options.handshake,
            self._options.tls,
            lambda: Listener(self._receive, lambda _error: self._lost.set()),
        )
        try:
            verb = b"SSUBSCRIBE" if self._channel.sharded else b"SUBSCRIBE"
            await ask(listener, verb, self._channel.name)
        except Refused as refused:
            listener.drop(StoreUnavailableError("no subscription"))
            raise login_error_of(str(refused), self._options.handshake.peer) from None
        except BaseException:
            listener.drop(StoreUnavailableError("no subscription"))
            raise
        return listener

    def _begin(self) -> None:
        self._received_s = self._time_s()
        self.connected = True
        if self._reported:
            self._reported = False
            self._options.report(f"messages of {self._channel.name.decode()}: received again")
        self._on_begin()

    def _receive(self, payload: bytes) -> None:
        self._received_s = self._time_s()
        self._on_message(payload)

    async def _until_lost(self, listener: Listener) -> None:
        """Wait until the connection is lost; drop it if it is silent for too long."""
        silence_s = self._channel.silence_s
        while not self._lost.is_set():
            left_s = None if silence_s is None else self._left_s(silence_s)
            if left_s is not None and left_s <= 0:
                # If this process was delayed, messages wait in the socket.
                await asyncio.sleep(READ_PAUSE_S)
                if silence_s is not None and self._left_s(silence_s) <= 0:
                    listener.drop(StoreUnavailableError("silent"))
                continue
            try:
                async with asyncio.timeout(left_s):
                    await self._lost.wait()
            except TimeoutError:
                continue

    def _left_s(self, silence_s: float) -> float:
        return self._received_s + silence_s - self._time_s()

    def _report(self, error: StoreUnavailableError) -> None:
        """Log a wrong setting once; the link logs an unavailable server."""
        if isinstance(error, StoreMisconfiguredError) and not self._reported:
            self._reported = True
            self._options.report(f"messages of {self._channel.name.decode()}: {error}")


MAX_SENDERS: Final = 1_024
"""Limit of remembered senders, ended ones included: far more than a cluster has, and 100 KB."""


class Arrival(enum.Enum):
    """Meaning of the number of a message."""

    NEXT = enum.auto()
    """The expected number, or the first of its sender."""
    GAP = enum.auto()
    """Messages before it were lost."""
    OLD = enum.auto()
    """A duplicate, or older than one that was received."""


class Numbering:
    """Tracks the last number of each sender."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: OrderedDict[bytes, int] = OrderedDict()

    def judge(self, sender: bytes, number: int) -> Arrival:
        """Classify a message. Losses before the first message of a sender are unknown."""
        last = self._last.get(sender)
        if last is not None and number <= last:
            return Arrival.OLD
        self._last[sender] = number
        self._last.move_to_end(sender)
        if len(self._last) > MAX_SENDERS:
            self._last.popitem(last=False)
        return Arrival.NEXT if last is None or number == last + 1 else Arrival.GAP

    def forget(self) -> None:
        """After a gap, treat the next message of each sender as its first."""
        self._last.clear()


MAX_PAYLOAD_BYTES: Final = 8_192
"""Longest message. The states of 100 buckets take 5.6 KB; logs are read from the store instead."""

HEARTBEAT_S: Final = 1.0
SILENCE_S: Final = 3.0
"""Three missing heartbeats, including the node's own: the subscription is dead, even if its connection looks alive."""

CLUSTER_CHANNELS: Final = 8

SENDER_BYTES: Final = 8

CHANNEL_TAGS: Final = tuple(
    min(
        range(TAGS),
        key=lambda tag: abs(SLOT_OF_TAG[tag] - (2 * place + 1) * SLOTS // (2 * CLUSTER_CHANNELS)),
    )
    for place in range(CLUSTER_CHANNELS)
)
"""Of each eighth of the slots, the tag nearest to its middle. Messages about a tag use the channel of its eighth, and
so mostly the link of its spends."""

_HEAD: Final = struct.Struct(f">B{SENDER_BYTES}sQ")
_FORM: Final = 1
"""First octet; messages of other versions are ignored."""


class _Stream:
    """One channel: its server, the number of the next message, and the last numbers of other senders."""

    def __init__(self, tag: int, topology: Topology) -> None:
        self.tag = tag
        if topology.is_cluster:
            self.verb, self.name = b"SPUBLISH", b"rl1:{%02x}:bus" % tag
        else:
            # All databases of a server share its channels; the name keeps their clusters apart.
            self.verb, self.name = b"PUBLISH", b"rl1:bus:%d" % topology.options.handshake.database
        self.number = 0
        self.numbering = Numbering()
        self.is_refused = False


class Bus:
    """Messages from and to the other nodes. ``sleep`` and ``time_s`` are parameters for tests."""

    def __init__(
        self,
        topology: Topology,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        time_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.gaps_total = 0
        """Gaps in which messages of others may have been lost."""
        self.undelivered_total = 0
        """Own messages, heartbeats included, that the store did not accept."""
        self._topology = topology
        self._on_message: Callable[[bytes], None]
        self._on_gap: Callable[[], None]
        self._sleep = sleep
        self._sender = secrets.token_bytes(SENDER_BYTES)
        self._beating: asyncio.Task[None] | None = None
        tags = CHANNEL_TAGS if topology.is_cluster else CHANNEL_TAGS[:1]
        self._streams = [_Stream(tag, topology) for tag in tags]
        self._subscriptions = [
            Subscription(
                partial(topology.server_of_tag, stream.tag),
                Channel(stream.name, topology.is_cluster, SILENCE_S),
                topology.options,
                on_message=partial(self._receive, stream),
                on_begin=partial(self._begin, stream),
                time_s=time_s,
            )
            for stream in self._streams
        ]

    @property
    def connected(self) -> bool:
        """Whether all subscriptions are active."""
        return all(subscription.connected for subscription in self._subscriptions)

    async def start(self, on_message: Callable[[bytes], None], on_gap: Callable[[], None]) -> None:
        """Start listening and sending heartbeats, without waiting for the store.

        ``on_message`` takes the payloads of other nodes. ``on_gap`` is called whenever some may have been lost, also
        at the start, once for each gap and so up to once for each message.
        """
        self._on_message, self._on_gap = on_message, on_gap
        for subscription in self._subscriptions:
            subscription.start()
        self._beating = asyncio.create_task(self._beat())

    async def close(self) -> None:
        """Stop listening."""
        await cancel_all(self._beating)
        await asyncio.gather(*(subscription.close() for subscription in self._subscriptions))

    def publish(self, tag: int, payload: bytes) -> None:
        """Publish a message about a bucket of the hash tag to all other nodes; delivery is not guaranteed.

        Raises:
            ValueError: the payload is empty, or has more than ``MAX_PAYLOAD_BYTES``.
        """
        if not 0 < len(payload) <= MAX_PAYLOAD_BYTES:
            message = f"a payload has 1 to {MAX_PAYLOAD_BYTES} bytes"
            raise ValueError(message)
        streams = self._streams
        self._send(streams[SLOT_OF_TAG[tag] * len(streams) // SLOTS], payload)

    def _send(self, stream: _Stream, payload: bytes) -> None:
        stream.number += 1
        message = _HEAD.pack(_FORM, self._sender, stream.number) + payload
        done = partial(self._sent, stream)
        command = stream.verb, stream.name, message
        self._topology.of_tag(stream.tag).send(command, done, is_patient=True)

    def _sent(self, stream: _Stream, reply: object) -> None:
        if isinstance(reply, RateLimitdError):
            self.undelivered_total += 1
        # The link logs an unavailable server. A wrong setting is logged here, since it may affect nothing else.
        if isinstance(reply, StoreMisconfiguredError) and not stream.is_refused:
            stream.is_refused = True
            self._report(stream, f"cannot be sent, {reply}")
        elif stream.is_refused and not isinstance(reply, RateLimitdError):
            stream.is_refused = False
            self._report(stream, "sent again")

    def _report(self, stream: _Stream, what: str) -> None:
        self._topology.options.report(f"messages of {stream.name.decode()}: {what}")

    async def _beat(self) -> None:
        while True:
            for stream in self._streams:
                self._send(stream, b"")
            await self._sleep(HEARTBEAT_S)

    def _begin(self, stream: _Stream) -> None:
        """Handle a new subscription: messages since the last one are lost."""
        stream.numbering.forget()
        self._report_gap()

    def _receive(self, stream: _Stream, message: bytes) -> None:
        if not _HEAD.size <= len(message) <= _HEAD.size + MAX_PAYLOAD_BYTES:
            return
        form, sender, number = _HEAD.unpack_from(message)
        if form != _FORM or sender == self._sender:
            return
        arrival = stream.numbering.judge(sender, number)
        if arrival is Arrival.OLD:
            return
        if arrival is Arrival.GAP:
            self._report_gap()
        if len(message) > _HEAD.size:
            self._on_message(message[_HEAD.size :])

    def _report_gap(self) -> None:
        self.gaps_total += 1
        self._on_gap()
