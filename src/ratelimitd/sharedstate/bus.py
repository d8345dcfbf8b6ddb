"""Messages between the nodes of a cluster, by the store's publish/subscribe: at most once, and losses are noticed.

A message is (sender, number, payload): the sender is drawn at random when a node starts, and numbers what it says on
each channel. An empty payload, once a second, is the heartbeat: it shows that a channel is alive, and its number what
was lost before it. Senders publish over their links, in order with what they settle there, and never a second time.

One server has one channel. In a Cluster an ordinary message would be carried to every server of it, so channels are
sharded: eight of them, fixed, so that nodes with different maps of the Cluster never talk past each other, at places
that spread them evenly over the slots. One for each of the 256 hash tags would need as many heartbeats.
"""

from __future__ import annotations

import asyncio
import secrets
import struct
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from ratelimitd.errors import RateLimitdError, StoreMisconfiguredError
from ratelimitd.sharedstate.cluster_map import SLOT_OF_TAG, SLOTS
from ratelimitd.sharedstate.numbering import Arrival, Numbering
from ratelimitd.sharedstate.shards import TAGS, Shards
from ratelimitd.sharedstate.subscription import Channel, Subscription

MAX_PAYLOAD_BYTES: Final = 8_192
"""Messages tell of single buckets. A long log is read from the store by whoever needs it, never sent to everybody."""

HEARTBEAT_S: Final = 1.0
SILENCE_S: Final = 3.0
"""Three heartbeats, one's own included, that did not come: the subscription is dead, though its connection may look
alive."""

CLUSTER_CHANNELS: Final = 8

SENDER_BYTES: Final = 8

CHANNEL_TAGS: Final = tuple(
    min(
        range(TAGS),
        key=lambda tag: abs(SLOT_OF_TAG[tag] - (2 * place + 1) * SLOTS // (2 * CLUSTER_CHANNELS)),
    )
    for place in range(CLUSTER_CHANNELS)
)
"""Of each eighth of the slots the tag that is nearest to its middle. What is said about a tag goes to the channel of
its eighth, and so mostly over the link that its spends take."""

_HEAD: Final = struct.Struct(f">B{SENDER_BYTES}sQ")
_FORM: Final = 1
"""The first octet: what is said in another form is not for this version, and is passed over."""


class _Stream:
    """One channel: where it is, the number of our next message on it, and those of the others' last."""

    def __init__(self, tag: int, shards: Shards) -> None:
        self.tag = tag
        if shards.is_cluster:
            self.verb, self.name = b"SPUBLISH", b"rl1:{%02x}:bus" % tag
        else:
            # Channels do not belong to databases: two clusters in two databases of one server must not meet.
            self.verb, self.name = b"PUBLISH", b"rl1:bus:%d" % shards.options.greeting.database
        self.number = 0
        self.numbering = Numbering()
        self.is_refused = False


class Bus:
    """A node's part in the conversation.

    ``on_message`` takes the payloads of other nodes. ``on_gap`` is called when some may have been lost, at the start
    too, and at most once in a turn of the event loop. ``sleep`` and ``time_s`` are there for tests.
    """

    def __init__(
        self,
        shards: Shards,
        *,
        on_message: Callable[[bytes], None],
        on_gap: Callable[[], None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        time_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.gaps_total = 0
        """Times that messages of others may have been lost."""
        self.undelivered_total = 0
        """Messages of ours, heartbeats included, that the store did not take."""
        self._shards = shards
        self._on_message = on_message
        self._on_gap = on_gap
        self._sleep = sleep
        self._loop = asyncio.get_running_loop()
        self._sender = secrets.token_bytes(SENDER_BYTES)
        self._gap_due = False
        self._beating: asyncio.Task[None] | None = None
        tags = CHANNEL_TAGS if shards.is_cluster else CHANNEL_TAGS[:1]
        self._streams = [_Stream(tag, shards) for tag in tags]
        self._subscriptions = [
            Subscription(
                partial(shards.server_of_tag, stream.tag),
                Channel(stream.name, shards.is_cluster, SILENCE_S),
                shards.options,
                on_message=partial(self._hear, stream),
                on_begin=partial(self._begin, stream),
                time_s=time_s,
            )
            for stream in self._streams
        ]

    @property
    def connected(self) -> bool:
        """Whether every channel is listened to."""
        return all(subscription.connected for subscription in self._subscriptions)

    async def start(self) -> None:
        """Begin to listen, and to show that we are there. Does not wait for the store."""
        for subscription in self._subscriptions:
            subscription.start()
        self._beating = asyncio.create_task(self._beat())

    async def close(self) -> None:
        """End; what others say is heard no more."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        await asyncio.gather(*(subscription.close() for subscription in self._subscriptions))

    def publish(self, tag: int, payload: bytes) -> None:
        """Tell all other nodes something about a bucket of the hash tag; nobody promises that they hear it.

        Raises:
            ValueError: the payload is empty, or has more than ``MAX_PAYLOAD_BYTES``.
        """
        if not 0 < len(payload) <= MAX_PAYLOAD_BYTES:
            message = f"a payload has 1 to {MAX_PAYLOAD_BYTES} bytes"
            raise ValueError(message)
        streams = self._streams
        self._say(streams[SLOT_OF_TAG[tag] * len(streams) // SLOTS], payload)

    def _say(self, stream: _Stream, payload: bytes) -> None:
        stream.number += 1
        message = _HEAD.pack(_FORM, self._sender, stream.number) + payload
        said = partial(self._said, stream)
        self._shards.of_tag(stream.tag).send((stream.verb, stream.name, message), said)

    def _said(self, stream: _Stream, reply: object) -> None:
        if isinstance(reply, RateLimitdError):
            self.undelivered_total += 1
        # That a server is away, its link says; what somebody has to mend is said here, for nothing else would fail.
        if isinstance(reply, StoreMisconfiguredError) and not stream.is_refused:
            stream.is_refused = True
            self._report(stream, f"cannot be sent, {reply}")
        elif stream.is_refused and not isinstance(reply, RateLimitdError):
            stream.is_refused = False
            self._report(stream, "sent again")

    def _report(self, stream: _Stream, what: str) -> None:
        self._shards.options.report(f"messages of {stream.name.decode()}: {what}")

    async def _beat(self) -> None:
        while True:
            for stream in self._streams:
                self._say(stream, b"")
            await self._sleep(HEARTBEAT_S)

    def _begin(self, stream: _Stream) -> None:
        """A subscription has begun, perhaps not for the first time: what was said before is lost."""
        stream.numbering.forget()
        self._gap()

    def _hear(self, stream: _Stream, message: bytes) -> None:
        if not _HEAD.size <= len(message) <= _HEAD.size + MAX_PAYLOAD_BYTES:
            return
        form, sender, number = _HEAD.unpack_from(message)
        if form != _FORM or sender == self._sender:
            return
        arrival = stream.numbering.judge(sender, number)
        if arrival is Arrival.OLD:
            return
        if arrival is Arrival.GAP:
            self._gap()
        if len(message) > _HEAD.size:
            self._on_message(message[_HEAD.size :])

    def _gap(self) -> None:
        self.gaps_total += 1
        if not self._gap_due:
            self._gap_due = True
            self._loop.call_soon(self._tell_of_gap)

    def _tell_of_gap(self) -> None:
        self._gap_due = False
        self._on_gap()
