import asyncio
from itertools import chain, repeat

from ratelimitd.cluster.redis.connection import Handshake
from ratelimitd.cluster.redis.pubsub import Channel, Subscription
from ratelimitd.settings.urls import Login
from tests.servers import free_port
from tests.unit.cluster.redis.asking import PATIENT, at, serving, soon

SUBSCRIBED = b"*3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1\r\n"
MESSAGE = b"*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$2\r\nhi\r\n"
GREETED = b"+PONG\r\n*3\r\n$6\r\nmaster\r\n:0\r\n*0\r\n"


class Subscriber:
    """A subscription, with a record of its messages and reports."""

    def __init__(self, locate, channel=Channel(b"c"), options=PATIENT, **more):  # noqa: B008
        self.began = 0
        self.messages = []
        self.subscription = Subscription(
            locate,
            channel,
            options,
            on_message=self.messages.append,
            on_begin=self._begin,
            **more,
        )

    def _begin(self):
        self.began += 1

    async def __aenter__(self):
        self.subscription.start()
        return self

    async def __aexit__(self, *_):
        await self.subscription.close()


async def no_pause(_seconds):
    await asyncio.sleep(0)


async def test_messages_are_received_from_the_start_of_the_subscription(valkey):
    async with Subscriber(at(valkey)) as subscriber:
        await soon(lambda: subscriber.began)
        assert subscriber.subscription.connected
        valkey.ask("PUBLISH", "c", b"one")
        valkey.ask("PUBLISH", "d", b"elsewhere")
        valkey.ask("PUBLISH", "c", b"two")
        await soon(lambda: subscriber.messages == [b"one", b"two"])
    assert not subscriber.subscription.connected
    await soon(lambda: valkey.ask("PUBSUB", "NUMSUB", "c") == [b"c", 0])


async def test_a_subscription_that_was_never_started_can_be_closed(valkey):
    subscriber = Subscriber(at(valkey))
    await subscriber.subscription.close()
    assert subscriber.began == 0


async def test_a_lost_connection_is_renewed(valkey):
    async with Subscriber(at(valkey), options=PATIENT._replace(sleep=no_pause)) as subscriber:
        await soon(lambda: subscriber.began == 1)
        valkey.ask("CLIENT", "KILL", "TYPE", "pubsub")
        await soon(lambda: subscriber.began == 2)
        valkey.ask("PUBLISH", "c", b"again")
        await soon(lambda: subscriber.messages == [b"again"])


async def test_a_long_lived_connection_is_renewed_without_a_pause(valkey, monkeypatch):
    monkeypatch.setattr("ratelimitd.cluster.redis.pubsub.LONG_LIFE_S", 0.0)
    slept = []
    options = PATIENT._replace(sleep=slept.append)
    async with Subscriber(at(valkey), options=options) as subscriber:
        await soon(lambda: subscriber.began == 1)
        valkey.ask("CLIENT", "KILL", "TYPE", "pubsub")
        await soon(lambda: subscriber.began == 2)
    assert slept == []


async def test_an_unavailable_server_is_retried_without_reports():
    pauses, lines = [], []

    async def sleep(seconds):
        pauses.append(seconds)
        await asyncio.sleep(0)

    options = PATIENT._replace(sleep=sleep, report=lines.append, random=lambda: 0.0)
    async with Subscriber(at(free_port()), options=options) as subscriber:
        await soon(lambda: len(pauses) >= 3)
        assert pauses[:3] == [0.05, 0.1, 0.2]
    assert (lines, subscriber.began) == ([], 0)


async def test_a_missing_permission_to_subscribe_is_reported_once_until_granted(valkey):
    valkey.ask("ACL", "SETUSER", "node", "on", ">pw", "resetchannels", "+@all")
    lines = []
    options = PATIENT._replace(
        handshake=Handshake(Login("node", "pw")), report=lines.append, sleep=no_pause
    )
    async with Subscriber(at(valkey), options=options) as subscriber:
        await soon(lambda: lines)
        assert lines == ["messages of c: the shared state answered NOPERM"]
        valkey.ask("ACL", "SETUSER", "node", "&c")
        await soon(lambda: subscriber.began)
    assert lines[1:] == ["messages of c: received again"]
    valkey.ask("ACL", "DELUSER", "node")


async def test_a_connection_closed_before_the_subscription_is_retried():
    connections = []

    async def serve(reader, writer):
        connections.append(1)
        await reader.readuntil(b"ROLE\r\n")
        writer.write(GREETED)
        await reader.readuntil(b"\r\nc\r\n")
        if len(connections) > 1:
            writer.write(SUBSCRIBED + MESSAGE)
            await reader.read()

    async with (
        serving(serve) as port,
        Subscriber(at(port), options=PATIENT._replace(sleep=no_pause)) as subscriber,
    ):
        await soon(lambda: subscriber.messages == [b"hi"])
        assert (subscriber.began, len(connections)) == (1, 2)


async def test_a_channel_dropped_by_the_server_is_located_again():
    connections = []

    async def serve(reader, writer):
        connections.append(1)
        await reader.readuntil(b"ROLE\r\n")
        writer.write(GREETED)
        await reader.readuntil(b"\r\nc\r\n")
        writer.write(SUBSCRIBED)
        if len(connections) == 1:
            writer.write(b"*3\r\n$12\r\nsunsubscribe\r\n$1\r\nc\r\n:0\r\n")
        await reader.read()

    async with (
        serving(serve) as port,
        Subscriber(at(port), options=PATIENT._replace(sleep=no_pause)) as subscriber,
    ):
        await soon(lambda: subscriber.began == 2)


async def test_too_long_a_silence_ends_the_connection(valkey):
    options = PATIENT._replace(sleep=no_pause)
    async with Subscriber(at(valkey), Channel(b"c", silence_s=0.01), options) as subscriber:
        await soon(lambda: subscriber.began >= 2)


async def test_a_delayed_process_reads_messages_first(valkey):
    clock = [0.0]
    channel = Channel(b"c", silence_s=0.1)
    async with Subscriber(at(valkey), channel, time_s=lambda: clock[0]) as subscriber:
        await soon(lambda: subscriber.began)
        for count in range(1, 4):
            valkey.ask("PUBLISH", "c", b"one")
            clock[0] += 10.0
            await soon(lambda count=count: len(subscriber.messages) == count)
        assert subscriber.began == 1


async def test_messages_during_a_delay_are_read_before_the_silence_is_checked(valkey):
    """The clock jumps once, when the silence is checked."""
    clock = chain([0.0, 0.0, 100.0], repeat(0.0))
    channel = Channel(b"c", silence_s=0.02)
    async with Subscriber(at(valkey), channel, time_s=lambda: next(clock)) as subscriber:
        await soon(lambda: subscriber.began)
        valkey.ask("PUBLISH", "c", b"one")
        await soon(lambda: subscriber.messages)
        assert subscriber.began == 1


async def test_a_failing_listener_is_reported_and_gets_further_messages(valkey):
    reported = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: reported.append(type(context["exception"]))
    )
    async with Subscriber(at(valkey)) as subscriber:
        subscriber.subscription._on_message = {b"known": 1}.__getitem__
        await soon(lambda: subscriber.began)
        valkey.ask("PUBLISH", "c", b"strange")
        valkey.ask("PUBLISH", "c", b"known")
        valkey.ask("PUBLISH", "c", b"strange")
        await soon(lambda: reported == [KeyError, KeyError])
        assert subscriber.began == 1
