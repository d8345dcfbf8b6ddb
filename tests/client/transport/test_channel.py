"""The client's own channel: which nodes it asks, what it does when they leave, and that every call ends."""

import asyncio
import contextvars
import gc
import socket
import ssl
import weakref
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import uvloop
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from ratelimitd import testing
from ratelimitd_client import AsyncRateLimiterClient, Check, Tls, async_sessions
from ratelimitd_client.fail_open import (
    BATCH,
    CHECK,
    EXTEND,
    HOLD,
    MAX_ANSWER_BYTES,
    MAX_HOLD_ANSWER_BYTES,
    SETTLE,
    CallError,
)
from ratelimitd_client.transport import channel as native_channel
from ratelimitd_client.transport import h2_call, payloads
from ratelimitd_client.transport.channel import open_native_channel
from ratelimitd_client.transport.link import FIRST_ASIDE_S, MAX_TIMEOUTS
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests import http2_peer as peer
from tests.client.h2_node import h2_node
from tests.client.hostile import bytes_server, socket_server
from tests.client.kinds import PATIENT_S
from tests.client.transport.certificates import (
    AUTHORITY,
    MUTUAL,
    STRANGER,
    TRUSTING,
    server_credentials,
)
from tests.fake_node import fake_node
from tests.servers import free_port

QUESTION = pb.RateLimitRequest(identifier="alice").SerializeToString()


@pytest.fixture
async def channels():
    """Opens channels, and closes them at the end."""
    opened = []

    def open_channel(target, tls=None):
        opened.append(open_native_channel(target, tls))
        return opened[-1]

    yield open_channel
    for channel in opened:
        await channel.close()


async def ask(channel, timeout_s=PATIENT_S, path=CHECK, metadata=()):
    """Whether a check is allowed, or the name of the status that came in place of an answer."""
    end = asyncio.Event()
    call = channel.begin(
        path, QUESTION, lambda _: end.set(), timeout_s=timeout_s, metadata=metadata
    )
    try:
        await end.wait()
    except asyncio.CancelledError:
        channel.cancel(call)
        raise
    return (
        call.code.name
        if call.answer is None
        else pb.RateLimitResponse.FromString(call.answer).allowed
    )


async def until(condition):
    while not condition():  # noqa: ASYNC110 - of a channel's inside
        await asyncio.sleep(0)


async def test_a_call_says_what_grpc_says(channels):
    async with h2_node() as node:
        channel = channels(node.address)
        await channel.channel_ready()
        assert await ask(channel, 0.5, metadata=(("authorization", "Bearer t"),)) is True
        headers = node.peers[0].headers[1]
    assert headers[":path"] == CHECK
    assert headers[":authority"] == node.address
    assert headers["authorization"] == "Bearer t"
    assert headers["grpc-timeout"] == "500m"


@pytest.mark.parametrize("path", [CHECK, HOLD, SETTLE, EXTEND])
async def test_an_answer_above_the_limit_of_its_method_is_not_taken(channels, path):
    most = MAX_ANSWER_BYTES if path == CHECK else MAX_HOLD_ANSWER_BYTES
    over = pb.RateLimitResponse(error="x" * most).ByteSize() - most
    answers = [
        pb.RateLimitResponse(error="x" * (most - over + more)).SerializeToString()
        for more in (0, 1)
    ]
    with bytes_server(lambda _request, _context: answers.pop(0)) as address:
        channel = channels(address)
        assert await ask(channel, path=path) is False
        assert await ask(channel, path=path) == "RESOURCE_EXHAUSTED"


@pytest.mark.parametrize(
    ("target", "tls"), [("xds:///limiter", None), ("127.0.0.1:1", Tls())], ids=["name", "roots"]
)
async def test_what_takes_grpc_is_left_to_it(target, tls):
    assert open_native_channel(target, tls) is None


async def test_all_addresses_are_asked_in_turn_and_one_that_is_down_is_passed_over(channels):
    async with h2_node() as first, h2_node() as second:
        channel = channels(f"ipv4:{first.address},127.0.0.1:{free_port()},{second.address}")
        await channel.channel_ready()
        await until(lambda: len(channel._ready) == 2)
        assert [await ask(channel) for _ in range(10)] == [True] * 10
        assert [len(node.peers[0].headers) for node in (first, second)] == [5, 5]
        await second.end()
        await until(lambda: len(channel._ready) == 1)
        assert [await ask(channel) for _ in range(4)] == [True] * 4


async def test_a_node_that_returns_is_asked_again(channels):
    port = free_port()
    channel = channels(f"127.0.0.1:{port}")
    assert await ask(channel) == "UNAVAILABLE"
    async with h2_node(host="127.0.0.1", port=port):
        await channel.channel_ready()
        assert await ask(channel) is True
    await until(lambda: not channel._ready)
    assert await ask(channel) == "UNAVAILABLE"


async def test_names_are_looked_up_and_an_unknown_one_fails_at_once(channels, monkeypatch):
    async with h2_node() as node:
        port = int(node.address.rpartition(":")[2])
        assert await ask(channels(f"localhost:{port}")) is True
        assert await ask(channels(f"dns:///localhost:{port}")) is True

    async def unknown(*_arguments, **_more):
        raise socket.gaierror

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", unknown)
    assert await ask(channels("no.such.name:1")) == "UNAVAILABLE"


@pytest.mark.parametrize("is_there", [True, False])
async def test_an_address_that_a_name_loses_is_left_and_a_new_one_taken(
    channels, monkeypatch, is_there
):
    monkeypatch.setattr(native_channel, "LOOKUP_PAUSE_S", 0)
    monkeypatch.setattr(native_channel, "FIRST_BACKOFF_S", 0.001)
    async with h2_node() as old, h2_node(host="127.0.0.2", port=0) as new:
        ports = {node.address.partition(":")[0]: node.address for node in (old, new)}
        hosts = ["127.0.0.1"]

        async def found(*_arguments, **_more):
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0)) for host in hosts]

        loop = asyncio.get_running_loop()
        connect = loop.create_connection

        async def connected(made, host, _port, **more):
            if host == "127.0.0.1" and not is_there:
                raise ConnectionRefusedError
            return await connect(made, host, int(ports[host].partition(":")[2]), **more)

        monkeypatch.setattr(loop, "getaddrinfo", found)
        monkeypatch.setattr(loop, "create_connection", connected)
        channel = channels("limiter:1")
        assert await ask(channel) is (True if is_there else "UNAVAILABLE")
        hosts[:] = ["127.0.0.2"]
        await old.end()
        while not new.peers:
            await new.until(lambda: new.peers)
        await channel.channel_ready()
        assert await ask(channel) is True
        assert [sum(len(peer.headers) for peer in node.peers) for node in (old, new)] == [
            is_there,
            1,
        ]


async def test_a_socket_of_the_machine_is_an_address_too(channels, tmp_path):
    path = tmp_path / "node.sock"
    with fake_node() as node:
        host, _, port = node.address.rpartition(":")

        async def forward(reader, writer):
            there, back = await asyncio.open_connection(host, int(port))

            async def copy(source, sink):
                while octets := await source.read(65_536):
                    sink.write(octets)
                sink.close()

            await asyncio.gather(copy(reader, back), copy(there, writer))

        async with await asyncio.start_unix_server(forward, path):
            channel = channels(f"unix:{path}")
            assert isinstance(await ask(channel), bool)
            await channel.close()


async def test_a_caller_who_leaves_before_there_is_a_connection_is_forgotten(channels):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        channel = channels(f"127.0.0.1:{silent.getsockname()[1]}")
        call = asyncio.ensure_future(ask(channel))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not channel._calls
        assert not channel._waiting


async def test_the_deadline_ends_a_call_and_the_server_is_told(channels):
    async with h2_node(lambda _peer, _stream: None) as node:
        channel = channels(node.address)
        await channel.channel_ready()
        assert await ask(channel, 0.05) == "DEADLINE_EXCEEDED"
        await node.until(lambda: node.peers[0].resets == [ErrorCodes.CANCEL])
        assert await ask(channel, 0) == "DEADLINE_EXCEEDED"


async def test_each_call_has_its_own_deadline_whatever_others_have(channels):
    async with h2_node(lambda _peer, _stream: None) as node:
        channel = channels(node.address)
        patient = asyncio.ensure_future(ask(channel))  # waits for the connection, too
        await asyncio.sleep(0)
        assert await ask(channel, 0.2) == "DEADLINE_EXCEEDED"
        assert await ask(channel, 0.02) == "DEADLINE_EXCEEDED"
        assert not patient.done()
        await node.until(lambda: node.peers and 1 in node.peers[0].headers)
        node.peers[0].answer(1)
        assert await patient is True


class StuckNode:
    """Treats calls of a server that answers pings; while it ``is_stuck`` the deadline of each passes."""

    def __init__(self):
        self.is_stuck = True
        self.received = asyncio.Queue()

    def behave(self, peer, stream_id):
        if self.is_stuck:
            self.received.put_nowait(stream_id)
        else:
            peer.answer(stream_id)

    async def outcome(self, channel, call):
        """What a call ends with."""
        call = asyncio.ensure_future(call)
        received = asyncio.ensure_future(self.received.get())
        await asyncio.wait([call, received], return_when=asyncio.FIRST_COMPLETED)
        if received.done():
            expire(channel)
        received.cancel()
        return await call


async def connected(channels, one, other):
    """Return a channel that has a connection to both nodes."""
    channel = channels(f"ipv4:{one.address},{other.address}")
    await channel.channel_ready()
    await until(lambda: len(channel._ready) == 2)
    return channel


def expire(channel):
    for call in channel._calls:
        call.ends_s = 0
    channel._expire()


async def test_an_address_that_answers_no_calls_is_set_aside_and_tried_again():
    stuck = StuckNode()
    async with (
        h2_node() as good,
        h2_node(stuck.behave) as bad,
        AsyncRateLimiterClient(f"ipv4:{good.address},{bad.address}") as client,
    ):
        assert await client.wait_until_ready(PATIENT_S)
        channel = client._opened().channel
        await until(lambda: len(channel._ready) == 2)
        link = channel._ready[1]

        async def unchecked(count):
            """How many of so many checks were let through unchecked."""
            decisions = [
                await stuck.outcome(
                    channel, client.check("alice", "user", "/x", timeout_s=PATIENT_S)
                )
                for _ in range(count)
            ]
            return sum(decision.fail_open for decision in decisions)

        assert await unchecked(4 * MAX_TIMEOUTS) == MAX_TIMEOUTS
        for pause in range(1, 4):
            assert link._aside_s == FIRST_ASIDE_S * 2**pause
            link._return()
            assert await unchecked(10) == 1  # one timeout is enough now
        stuck.is_stuck = False
        link._return()
        assert await unchecked(10) == 0
        assert channel._ready[1] is link
        stuck.is_stuck = True
        assert await unchecked(4 * MAX_TIMEOUTS) == MAX_TIMEOUTS
        assert link._aside_s == FIRST_ASIDE_S * 2


@asynccontextmanager
async def holding(*nodes):
    """The session of a client that is connected to these nodes, and has no hold under way at the end."""
    addresses = ",".join(node.address for node in nodes)
    async with AsyncRateLimiterClient(f"ipv4:{addresses}") as client:
        assert await client.wait_until_ready(PATIENT_S)
        session = client._opened()
        await until(lambda: len(session.channel._ready) == len(nodes))
        try:
            yield session
        finally:
            expire(session.channel)


async def hold(session):
    """The name of the status that a hold ends with."""
    try:
        await session.call_or_give_back(HOLD, QUESTION, 0.05)
    except CallError as error:
        return error.code.name
    return "OK"


@pytest.mark.parametrize("is_late", [False, True], ids=["never", "late"])
async def test_an_address_that_answers_no_holds_in_time_is_set_aside(is_late, monkeypatch):
    monkeypatch.setattr(async_sessions, "LATE_S", PATIENT_S)
    stuck = StuckNode()
    async with h2_node() as good, h2_node(stuck.behave) as bad, holding(good, bad) as session:
        channel = session.channel
        link = channel._ready[1]
        for _ in range(MAX_TIMEOUTS):
            assert link in channel._ready
            assert await hold(session) == "DEADLINE_EXCEEDED"
            await hold(session)
            if is_late:
                bad.peers[0].answer(await stuck.received.get())
                await until(lambda: not session._under_way)
        assert link not in channel._ready
        link._return()
        expire(channel)
        assert link in channel._ready  # no call is counted twice
        assert await hold(session) == "DEADLINE_EXCEEDED"
        assert link not in channel._ready  # one timeout is enough now


@pytest.mark.parametrize("streams", [None, 0], ids=["waiting", "in line"])
@pytest.mark.parametrize("is_cancelled", [False, True], ids=["late", "cancelled"])
async def test_a_hold_that_was_not_sent_ends_when_its_caller_leaves(
    streams, is_cancelled, monkeypatch
):
    monkeypatch.setattr(async_sessions, "LATE_S", PATIENT_S)
    none = {SettingCodes.MAX_CONCURRENT_STREAMS: 0}
    async with h2_node(settings=none) as node, holding(node) as session:
        channel = session.channel
        [link] = channel._ready
        if streams is None:
            link.pause_writing()
        if is_cancelled:
            call = asyncio.ensure_future(hold(session))
            await until(lambda: channel._waiting or not link.is_idle)
            call.cancel()
            await asyncio.wait([call])
        else:
            assert await hold(session) == "DEADLINE_EXCEEDED"
        assert link.is_idle
        assert not channel._calls
        assert not channel._waiting
        await until(lambda: not session._under_way)


async def test_a_hold_whose_caller_has_left_is_not_sent_again(monkeypatch):
    monkeypatch.setattr(async_sessions, "LATE_S", PATIENT_S)
    stuck = StuckNode()
    async with h2_node(stuck.behave) as node, holding(node) as session:
        assert await hold(session) == "DEADLINE_EXCEEDED"
        [took] = node.peers
        took.h2.reset_stream(await stuck.received.get(), ErrorCodes.REFUSED_STREAM)
        took.send()
        await until(lambda: not session._under_way or not stuck.received.empty())
        assert len(took.headers) == 1


async def test_an_address_set_aside_is_used_where_there_is_no_other(channels):
    stuck = StuckNode()
    async with h2_node(stuck.behave) as bad:
        async with h2_node() as good:
            channel = await connected(channels, good, bad)
            link = channel._ready[1]
            while link in channel._ready:
                await stuck.outcome(channel, ask(channel))
        await until(lambda: link in channel._ready)
        for _ in range(2):
            assert await stuck.outcome(channel, ask(channel)) == "DEADLINE_EXCEEDED"
        stuck.is_stuck = False
        assert await ask(channel) is True


async def test_while_no_address_answers_all_are_used(channels):
    stuck = StuckNode()
    async with h2_node(stuck.behave) as first, h2_node(stuck.behave) as second:
        channel = await connected(channels, first, second)
        for _ in range(2 * MAX_TIMEOUTS):
            assert await stuck.outcome(channel, ask(channel)) == "DEADLINE_EXCEEDED"
        assert len(channel._ready) == 2


async def test_calls_that_time_out_together_count_as_one(channels):
    stuck = StuckNode()
    async with h2_node(stuck.behave) as first, h2_node(stuck.behave) as second:
        channel = await connected(channels, first, second)
        for _ in range(MAX_TIMEOUTS - 1):
            calls = [asyncio.ensure_future(ask(channel)) for _ in range(20)]
            for _ in calls:
                await stuck.received.get()
            expire(channel)
            assert {await call for call in calls} == {"DEADLINE_EXCEEDED"}
        assert not any(link.is_aside for link in channel._ready)


async def test_an_address_that_allows_no_calls_is_set_aside(channels):
    none = {SettingCodes.MAX_CONCURRENT_STREAMS: 0}
    async with h2_node() as good, h2_node(settings=none) as bad:
        channel = await connected(channels, good, bad)
        link = channel._ready[1]
        for timeouts in range(1, MAX_TIMEOUTS + 1):
            calls = [asyncio.ensure_future(ask(channel)) for _ in range(20)]
            await asyncio.wait(calls[1::2])  # the others wait for a stream
            assert link in channel._ready
            expire(channel)
            assert {await call for call in calls[::2]} == {"DEADLINE_EXCEEDED"}
            assert link._timeouts == timeouts  # those that wait together count as one
        assert link not in channel._ready
        assert await ask(channel) is True


async def test_a_call_that_cannot_be_sent_is_an_error_and_ends_once(channels, monkeypatch, caplog):
    async with h2_node() as node:
        channel = channels(node.address)
        await channel.channel_ready()
        [link] = channel._ready

        def breaks(_octets):
            raise OSError

        monkeypatch.setattr(link._transport, "write", breaks)
        with pytest.raises(OSError):
            await ask(channel)
        assert not channel._calls
        link.abort()
        await link.lost
        await asyncio.sleep(0)
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_caller_who_leaves_has_the_call_reset(channels):
    async with h2_node(lambda _peer, _stream: None) as node:
        call = asyncio.ensure_future(ask(channels(node.address)))
        await node.until(lambda: node.peers and node.peers[0].headers)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await node.until(lambda: node.peers[0].resets == [ErrorCodes.CANCEL])


async def test_a_server_that_only_takes_connections_lets_the_deadline_pass(channels):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        channel = channels(f"127.0.0.1:{silent.getsockname()[1]}")
        assert await ask(channel, 0.05) == "DEADLINE_EXCEEDED"


async def test_a_node_that_greets_too_late_has_one_connection_at_a_time(channels, monkeypatch):
    monkeypatch.setattr(native_channel, "CONNECT_S", 0.02)
    monkeypatch.setattr(native_channel, "FIRST_BACKOFF_S", 0.001)
    gone = []

    async def greet_late(reader, writer):
        while await reader.read(65_536):
            pass
        gone.append(writer)
        writer.close()

    server = await asyncio.start_server(greet_late, "127.0.0.1", 0)
    async with server:
        channel = channels("{}:{}".format(*server.sockets[0].getsockname()))
        waiting = asyncio.ensure_future(channel.channel_ready())
        while len(gone) < 3:  # noqa: ASYNC110 - of a real server
            await asyncio.sleep(0.001)
        assert len(channel._links) <= 1
        waiting.cancel()
        await channel.close()


async def test_of_calls_that_end_together_none_is_sent_since_another_has_ended(channels):
    settings = {SettingCodes.MAX_CONCURRENT_STREAMS: 1}
    async with h2_node(lambda _peer, _stream: None, settings=settings) as node:
        channel = channels(node.address)
        await channel.channel_ready()
        ended = []
        calls = [
            channel.begin(CHECK, QUESTION, ended.append, timeout_s=0.05, metadata=())
            for _ in range(20)
        ]
        for call in calls:
            call.ends_s = calls[0].ends_s  # however busy the machine is
        await node.until(lambda: node.peers[0].resets)
        assert ended == calls
        assert list(node.peers[0].headers) == [1]


async def test_a_call_that_cannot_be_sent_when_there_is_a_connection_costs_nobody_else_theirs(
    channels, monkeypatch
):
    async with h2_node() as node:
        channel = channels(node.address)
        milliseconds = h2_call.milliseconds
        refused = []

        def fail_once(left_s):
            if not refused:
                refused.append(left_s)
                raise OverflowError
            return milliseconds(left_s)

        monkeypatch.setattr(h2_call, "milliseconds", fail_once)
        assert await asyncio.gather(ask(channel), ask(channel)) == ["INTERNAL", True]


async def test_a_channel_whose_tasks_somebody_has_cancelled_connects_again(channels):
    async with h2_node() as node:
        channel = channels(node.address)
        assert await ask(channel)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            if task.get_coro().__qualname__.startswith("NativeChannel."):
                task.cancel()
        await asyncio.wait([channel._keeper])
        # The loop may be about to end, and what is begun now would be left.
        assert await ask(channel) == "UNAVAILABLE"
        assert channel._keeper.done()
        channel._restart_s = 0.0
        assert await ask(channel)


async def test_a_node_that_greets_when_time_is_just_over_is_asked(channels, monkeypatch):
    async with h2_node() as node:
        channel = channels(node.address)
        connect = channel._open

        async def greeted_late(address, link):
            await connect(address, link)
            await link.ready
            raise TimeoutError

        monkeypatch.setattr(channel, "_open", greeted_late)
        assert await ask(channel)
        assert len(channel._links) == 1


async def test_an_attempt_that_is_given_up_leaves_no_connection(channels, monkeypatch):
    async with h2_node() as node:
        channel = channels(node.address)
        connect, greeted = channel._open, asyncio.Event()

        async def greeted_and_cancelled(address, link):
            await connect(address, link)
            await link.ready
            greeted.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(channel, "_open", greeted_and_cancelled)
        channel._start()
        await greeted.wait()
        [link] = channel._links
        [kept] = channel._nodes.values()
        kept.keeper.cancel()
        await link.lost


async def test_what_goes_on_in_the_background_keeps_nothing_of_the_request_that_began_it(channels):
    class Request:
        """What an application has in a context variable."""

    variable = contextvars.ContextVar("request")
    seen = []

    async def handle(channel):
        request = Request()
        variable.set(request)
        assert await ask(channel)
        channel.begin(CHECK, QUESTION, ended, timeout_s=0.02, metadata=())
        return weakref.ref(request)

    def ended(_call):
        seen.append(variable.get(None))
        done.set()

    def answer_first(took, stream_id):
        if stream_id == 1:
            took.answer(stream_id)

    done = asyncio.Event()
    async with h2_node(answer_first) as node:
        request = await asyncio.create_task(handle(channels(node.address)))
        await done.wait()
        gc.collect()
        assert request() is None
    assert seen == [None]


async def test_whoever_waits_for_a_connection_is_told_that_the_channel_is_closed(channels):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        channel = channels(f"127.0.0.1:{silent.getsockname()[1]}")
        waiting = asyncio.ensure_future(channel.channel_ready())
        await asyncio.sleep(0)  # the task that connects has not even begun
        await channel.close()
        await waiting


async def test_whoever_asked_and_fails_at_the_answer_costs_nobody_else_theirs(channels):
    def fail(_call):
        message = "a defect"
        raise RuntimeError(message)

    told = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context))
    async with h2_node() as node:
        channel = channels(node.address)
        channel.begin(CHECK, QUESTION, fail, timeout_s=PATIENT_S, metadata=())
        assert await ask(channel)
        channel.begin(CHECK, QUESTION, fail, timeout_s=0.0, metadata=())
        assert await ask(channel)
    assert [str(context["exception"]) for context in told] == ["a defect"] * 2


async def test_a_call_that_was_refused_is_sent_once_more(channels):
    def refuse_first(took, stream_id):
        if stream_id == 1:
            took.h2.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
        else:
            took.answer(stream_id)

    async with h2_node(refuse_first) as node:
        assert await ask(channels(node.address)) is True
        assert len(node.peers[0].headers) == 2

    async with h2_node(
        lambda took, stream_id: took.h2.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
    ) as node:
        assert await ask(channels(node.address)) == "UNAVAILABLE"
        assert len(node.peers[0].headers) == 2


async def test_a_node_that_leaves_costs_nobody_an_answer(channels):
    held = []

    def leave_at_the_third(took, stream_id):
        if len(node.peers) > 1 or stream_id not in {1, 3, 5}:
            took.answer(stream_id)
        elif stream_id == 5:
            took.h2.close_connection(last_stream_id=3)
            took.send()
        else:
            held.append((took, stream_id))

    async with h2_node(leave_at_the_third) as node:
        channel = channels(node.address)
        calls = [asyncio.ensure_future(ask(channel)) for _ in range(3)]
        assert await calls[2] is True  # on a new connection, while the old one still works on two
        assert len(node.peers) == 2
        assert not calls[0].done()
        [old] = channel._links - set(channel._ready)
        for took, stream_id in held:
            # The library takes a connection that it has left for closed, so the answer is sent past it.
            took.writer.write(answer_by_hand(stream_id))
        assert [await call for call in calls] == [True] * 3
        await old.lost


async def test_a_node_that_leaves_with_calls_in_flight_is_connected_to_at_once(
    channels, monkeypatch
):
    pauses = []
    monkeypatch.setattr(native_channel.random, "uniform", lambda *_: pauses.append(1) or 0)

    def leave(took, stream_id):
        took.h2.close_connection(last_stream_id=stream_id)
        took.send()

    async with h2_node(leave) as node:
        channel = channels(node.address)
        for number in range(3):
            call = asyncio.ensure_future(ask(channel))
            await until(lambda n=number: len(node.peers) == n + 2)  # it answers the call after that
            node.peers[number].writer.write(answer_by_hand(1))
            assert await call is True
        assert not pauses
        for number in (3, 4):  # two connections whose calls are not answered
            unanswered = asyncio.ensure_future(ask(channel))
            await until(lambda n=number: len(node.peers) == n + 2)
            assert len(pauses) == number - 3
            unanswered.cancel()


def answer_by_hand(stream_id):
    """The octets of an answer."""
    message = pb.RateLimitResponse(allowed=True).SerializeToString()
    body = b"\0" + len(message).to_bytes(4, "big") + message
    headers = payloads.encode_block([(":status", "200"), ("content-type", "application/grpc")])
    return (
        peer.frame(peer.HEADERS, peer.END_HEADERS, stream_id, headers)
        + peer.frame(peer.DATA, 0, stream_id, body)
        + peer.frame(
            peer.HEADERS,
            peer.END_HEADERS | peer.END_STREAM,
            stream_id,
            payloads.encode_block([("grpc-status", "0")]),
        )
    )


async def test_closing_lets_calls_end(channels):
    async with h2_node(lambda _peer, _stream: None) as node:
        channel = channels(node.address)
        call = asyncio.ensure_future(ask(channel))
        await node.until(lambda: node.peers and node.peers[0].headers)
        closing = asyncio.ensure_future(channel.close())
        await asyncio.sleep(0)
        assert not closing.done()
        node.peers[0].answer(1)
        assert await call is True
        await closing
        assert await ask(channel) == "UNAVAILABLE"


async def test_no_more_calls_are_open_than_a_node_allows(channels):
    async with h2_node(settings={SettingCodes.MAX_CONCURRENT_STREAMS: 1}) as node:
        channel = channels(node.address)
        assert await asyncio.gather(*(ask(channel) for _ in range(20))) == [True] * 20


@pytest.mark.parametrize("tls", [TRUSTING, MUTUAL], ids=["TLS", "mTLS"])
async def test_tls_proves_both_sides(channels, tls):
    with fake_node(server_credentials(mutual=tls is MUTUAL)) as node:
        assert isinstance(await ask(channels(node.address, tls)), bool)
        assert await ask(channels(node.address, STRANGER)) == "UNAVAILABLE"
        assert await ask(channels(node.address)) in {"UNAVAILABLE", "DEADLINE_EXCEEDED"}
        if tls is MUTUAL:
            nameless = channels(node.address, TRUSTING)
            assert await ask(nameless, 0.5) in {"UNAVAILABLE", "DEADLINE_EXCEEDED"}


async def test_an_intermediate_authority_or_the_nodes_own_certificate_is_trusted_alone(channels):
    intermediate = AUTHORITY.create_child_ca()
    served = intermediate.issue_cert("127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["h2"])
    served.configure_cert(context)
    async with h2_node(host="127.0.0.1", port=0, ssl=context) as node:
        for trusted in (intermediate.cert_pem, served.cert_chain_pems[0]):
            assert await ask(channels(node.address, Tls(ca=trusted.bytes()))) is True


@pytest.mark.parametrize(
    ("name", "demanded", "reason"),
    [
        ("elsewhere", ssl.CERT_NONE, "IP address mismatch, certificate is not valid for"),
        ("127.0.0.1", ssl.CERT_REQUIRED, "tlsv13 alert certificate required"),
    ],
)
async def test_why_tls_fails_is_logged_once(name, demanded, reason, caplog, monkeypatch):  # noqa: PLR0917 -- fixtures
    monkeypatch.setattr(native_channel, "FIRST_BACKOFF_S", 0)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["h2"])
    context.verify_mode = demanded
    AUTHORITY.issue_cert(name).configure_cert(context)
    attempts = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def refuse(connection):
        loop.call_soon_threadsafe(attempts.put_nowait, connection)
        context.wrap_socket(connection, server_side=True).close()

    with socket_server(refuse) as address:
        async with AsyncRateLimiterClient(address, tls=TRUSTING) as client:
            assert (await client.check("alice", "user", "/x", timeout_s=PATIENT_S)).fail_open
            for _ in range(3):
                await attempts.get()
    logged = [record.getMessage() for record in caplog.records]
    [warning] = [text for text in logged if "TLS" in text]
    assert warning.startswith(f"no TLS connection to {address}: {reason}")


async def test_a_certificate_of_another_name_or_a_server_without_http2_is_not_spoken_to(channels):
    for names, protocols in ((("elsewhere",), ["h2"]), (("localhost", "127.0.0.1"), [])):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        AUTHORITY.issue_cert(*names).configure_cert(context)
        if protocols:
            context.set_alpn_protocols(protocols)
        async with h2_node(host="127.0.0.1", port=0, ssl=context) as node:
            assert await ask(channels(node.address, TRUSTING)) == "UNAVAILABLE"


async def test_a_loop_that_ends_takes_the_connections_with_it():
    # A transport that stays open is an error of the tests' own.
    async with h2_node() as node:

        def leave():
            async def use():
                assert await ask(open_native_channel(node.address, None), path=BATCH) is True

            asyncio.run(use())

        await asyncio.to_thread(leave)


def test_a_loop_that_is_closed_with_its_tasks_pending_has_no_error():
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # asyncio reports the tasks
    address = f"127.0.0.1:{free_port()}"

    async def use():
        channel = open_native_channel(address, None)
        assert await ask(channel) == "UNAVAILABLE"
        return channel._keeper.get_coro()

    keeper = loop.run_until_complete(use())
    loop.close()
    keeper.close()  # as when it is destroyed


@pytest.mark.parametrize("transport", ["native", "grpcio"])
async def test_a_node_over_either_of_its_own_transports_decides_a_thousand_checks(transport):
    checks = [Check(f"user-{number}", "user", "/x" * 100) for number in range(1_000)]
    async with (
        testing.running_node(log_level="error", transport=transport) as node,
        AsyncRateLimiterClient(node.grpc_address, timeout_s=PATIENT_S) as client,
    ):
        for _ in range(3):
            decisions = await client.check_many(checks)
            assert not any(decision.fail_open for decision in decisions)


async def test_no_check_is_let_through_unchecked_while_one_of_two_nodes_drains():
    async with (
        testing.running_node(log_level="error") as stays,
        AsyncExitStack() as leaves,
    ):
        leaving = await leaves.enter_async_context(testing.running_node(log_level="error"))
        target = f"ipv4:{stays.grpc_address},{leaving.grpc_address}"
        async with AsyncRateLimiterClient(target, timeout_s=PATIENT_S) as client:
            channel = client._opened().channel
            await client.wait_until_ready(PATIENT_S)
            await until(lambda: len(channel._ready) == 2)
            asking = True

            async def ask_on():
                decisions = []
                while asking:
                    decisions += await client.check_many([Check("alice", "user", "/x")])
                return decisions

            callers = [asyncio.ensure_future(ask_on()) for _ in range(8)]
            await asyncio.sleep(0)
            await leaves.aclose()
            await until(lambda: len(channel._ready) == 1)
            asking = False
            for decisions in await asyncio.gather(*callers):
                assert not any(decision.fail_open for decision in decisions)


async def test_waiting_for_a_node_ends_when_the_channel_was_closed_before(channels):
    channel = channels(f"127.0.0.1:{free_port()}")
    await channel.close()
    async with asyncio.timeout(PATIENT_S):
        await channel.channel_ready()


@pytest.mark.parametrize(
    "new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
@pytest.mark.parametrize("tls", [None, TRUSTING], ids=["plain", "TLS"])
def test_a_channel_closes_at_any_moment_of_its_connecting(new_loop, tls):
    failures = []

    async def close_after(iterations, address):
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: failures.append(context)
        )
        channel = open_native_channel(address, tls)
        waiting = asyncio.ensure_future(channel.channel_ready())
        for _ in range(iterations):
            await asyncio.sleep(0)
        links = list(channel._links)
        async with asyncio.timeout(PATIENT_S):
            await channel.close()
        await waiting
        for link in links:
            assert link._timer is None or link._timer.cancelled()

    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with asyncio.Runner(loop_factory=new_loop) as runner:
            for iterations in range(16):
                runner.run(close_after(iterations, address))
    assert not failures
