import asyncio
from functools import partial

import pytest

from ratelimitd.cluster.redis import link as link_module
from ratelimitd.cluster.redis.codec import Script
from ratelimitd.cluster.redis.connection import Handshake, Request, pack
from ratelimitd.cluster.redis.link import Link, connect
from ratelimitd.errors import (
    StoreCorruptError,
    StoreMisconfiguredError,
    StoreOverloadedError,
    StoreSlowError,
    StoreUnavailableError,
)
from ratelimitd.settings.urls import Login, Server
from tests.chaos_proxy import ChaosProxy
from tests.servers import Valkey, free_port
from tests.unit.cluster.redis.asking import PATIENT, ask, asked, at, linked, peer, soon

INCREMENT = Script(b"return redis.call('INCRBY', KEYS[1], ARGV[1])")
ECHO = Script(b"return ARGV[1]")


async def no_pause(_seconds):
    await asyncio.sleep(0)


class Naps:
    """Pauses that last until the test ends them."""

    def __init__(self):
        self.slept = []
        self.over = asyncio.Event()

    async def sleep(self, seconds):
        self.slept.append(seconds)
        self.over.clear()
        await self.over.wait()


async def test_a_command_gets_a_reply_of_any_type(valkey):
    async with linked(at(valkey)) as link:
        assert await ask(link, b"SET", b"k", 12) == b"OK"
        assert await ask(link, b"GET", b"k") == b"12"
        assert await ask(link, b"INCR", b"k") == 13
        assert await ask(link, b"GET", b"absent") is None
        assert await ask(link, b"MGET", b"k", b"absent") == [b"13", None]
        assert link.name == valkey.address


async def test_replies_are_matched_to_their_requests(valkey):
    async with linked(at(valkey)) as link:
        replies = [asked(link.send, (b"ECHO", number)) for number in range(2_000)]
        assert link.in_flight == 2_000
        assert await asyncio.gather(*replies) == [b"%d" % number for number in range(2_000)]
        assert link.in_flight == 0


async def test_an_unknown_script_runs_once_for_each_request(valkey):
    async with linked(at(valkey)) as link:
        replies = [asked(link.run, INCREMENT, (b"k",), (1,)) for _ in range(50)]
        assert sorted(await asyncio.gather(*replies)) == list(range(1, 51))
        assert valkey.ask("GET", "k") == b"50"
        assert valkey.info("commandstats")["cmdstat_script|load"]["calls"] == 1


async def test_a_flushed_script_is_loaded_again(valkey):
    async with linked(at(valkey)) as link:
        assert await asked(link.run, ECHO, (), (b"a",)) == b"a"
        valkey.ask("SCRIPT", "FLUSH")
        assert await asked(link.run, ECHO, (), (b"b",)) == b"b"


async def test_a_script_is_loaded_although_the_server_asks_for_it_late(valkey):
    valkey.ask("SCRIPT", "FLUSH")
    async with linked(at(valkey), PATIENT._replace(timeout_s=0.05)) as link:
        valkey.pause()
        try:
            reply = await asked(link.run, INCREMENT, (b"late",), (1,))
        finally:
            valkey.resume()
        assert isinstance(reply, StoreSlowError)
        await soon(lambda: valkey.ask("SCRIPT", "EXISTS", INCREMENT.sha) == [1])
        assert valkey.ask("GET", "late") is None  # not run after its caller has left


async def test_a_script_that_cannot_be_loaded_fails_with_the_reason(valkey):
    async with linked(at(valkey)) as link:
        reply = await asked(link.run, Script(b"this is no Lua"), (), ())
    assert isinstance(reply, StoreCorruptError)


async def test_a_store_that_keeps_no_scripts_is_unavailable():
    noscript = b"-NOSCRIPT No matching script.\r\n"
    async with peer(noscript, b"+OK\r\n" + noscript) as port, linked(at(port)) as link:
        reply = await asked(link.run, ECHO, (), ())
    assert isinstance(reply, StoreUnavailableError)


async def test_a_script_error_is_reported_without_its_arguments(valkey):
    failing = Script(b"return redis.call('GET', KEYS[1], ARGV[1])")
    async with linked(at(valkey)) as link:
        reply = await asked(link.run, failing, (b"key-of-somebody",), (b"secret",))
    assert isinstance(reply, StoreCorruptError)
    assert "somebody" not in str(reply)
    assert "secret" not in str(reply)


async def test_before_the_start_and_after_the_end_requests_fail(valkey):
    link = Link(at(valkey), PATIENT)
    assert isinstance(await asked(link.send, (b"PING",)), StoreUnavailableError)
    link.start()
    await link.settled()
    pending = asked(link.send, (b"BLPOP", b"nothing", 0))
    await asyncio.sleep(0)
    await link.close()
    assert isinstance(await pending, StoreUnavailableError)
    assert isinstance(await asked(link.send, (b"PING",)), StoreUnavailableError)
    assert not link.connected


async def test_a_link_can_be_closed_while_it_connects():
    async with peer(handshake=False) as port:
        link = Link(at(port), PATIENT)
        link.start()
        parked = asked(link.send, (b"PING",))
        await asyncio.sleep(0.01)
        await link.close()
        assert isinstance(await parked, StoreUnavailableError)


async def test_requests_wait_for_the_first_connection(valkey):
    link = Link(at(valkey), PATIENT)
    link.start()
    reply = asked(link.send, (b"PING",))
    assert (link.in_flight, link.connected) == (1, False)
    assert await reply == b"PONG"
    await link.close()


async def test_requests_wait_for_a_connection_at_most_as_long_as_for_a_reply():
    async with peer(handshake=False) as port:
        link = Link(at(port), PATIENT._replace(timeout_s=0.01))
        link.start()
        assert isinstance(await asked(link.send, (b"PING",)), StoreUnavailableError)
        assert not link.connected
        await link.close()


async def test_requests_that_wait_for_a_connection_are_bounded():
    async with peer(handshake=False) as port:
        link = Link(at(port), PATIENT._replace(max_requests=1))
        link.start()
        first = asked(link.send, (b"PING",))
        assert isinstance(await asked(link.send, (b"PING",)), StoreUnavailableError)
        assert not first.done()
        await link.close()


async def test_requests_that_wait_for_a_connection_count_by_weight():
    async with peer(handshake=False) as port:
        link = Link(at(port), PATIENT._replace(max_requests=30))
        link.start()
        heavy = []
        link.run(Script(b"return 1"), [], [], heavy.append, 30)
        assert isinstance(await asked(link.send, (b"PING",)), StoreUnavailableError)
        assert heavy == []
        await link.close()


async def test_a_lost_connection_is_renewed_and_requests_wait_for_it(valkey):
    async with linked(at(valkey), PATIENT._replace(sleep=no_pause)) as link:
        pending = asked(link.send, (b"BLPOP", b"nothing", 0))
        await soon(lambda: valkey.info("clients")["blocked_clients"] == 1)
        valkey.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert isinstance(await pending, StoreUnavailableError)
        assert await ask(link, b"PING") == b"PONG"
        assert link.connections_total == 2


async def test_requests_in_flight_on_a_lost_connection_are_not_sent_again(valkey):
    with ChaosProxy(valkey.port) as proxy:
        async with linked(at(proxy.port), PATIENT._replace(sleep=no_pause)) as link:
            await ask(link, b"PING")
            proxy.down.hold = True
            reply = asked(link.send, (b"INCR", b"k"))
            await soon(lambda: valkey.ask("GET", "k") == b"1")
            proxy.reset()
            assert isinstance(await reply, StoreUnavailableError)
            proxy.heal()
            await soon(lambda: link.connected)
            assert await ask(link, b"INCR", b"k") == 2


async def test_a_late_reply_is_dropped_and_later_ones_are_matched(valkey):
    with ChaosProxy(valkey.port) as proxy:
        async with linked(at(proxy.port), PATIENT._replace(timeout_s=0.05)) as link:
            proxy.down.hold = True
            assert isinstance(await asked(link.send, (b"ECHO", b"late")), StoreUnavailableError)
            assert link.in_flight == 1
            proxy.down.hold = False
            await soon(lambda: link.in_flight == 0)
            assert link.connections_total == 1
            for word in (b"one", b"two"):
                reply = await asked(link.send, (b"ECHO", word))
                assert reply == word or isinstance(reply, StoreUnavailableError)


async def test_an_unavailable_server_is_retried_with_growing_pauses_and_reported_once(valkey):
    port, naps, lines = free_port(), Naps(), []
    options = PATIENT._replace(sleep=naps.sleep, random=lambda: 0.0, report=lines.append)
    async with linked(at(port), options) as link:
        for count in range(1, 8):
            await soon(lambda count=count: len(naps.slept) == count)
            refusal = await asked(link.send, (b"PING",))
            assert isinstance(refusal, StoreUnavailableError)
            assert (
                str(refusal)
                == "the shared state cannot be reached: no connection: Connection refused"
            )
            naps.over.set()
        assert naps.slept[:7] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
        assert lines == [f"shared state at 127.0.0.1:{port}: no connection: Connection refused"]
        await soon(lambda: len(naps.slept) == 8)
        with Valkey(valkey.directory / "late", port=port):
            naps.over.set()
            await soon(lambda: link.connected)
            assert lines[1:] == [f"shared state at 127.0.0.1:{port}: connected"]
            assert await ask(link, b"PING") == b"PONG"


async def test_an_unknown_server_address_is_retried_until_known(valkey):
    knows, nobody = asyncio.Event(), StoreUnavailableError("no sentinel answers")

    async def locate():
        if not knows.is_set():
            raise nobody
        return Server("127.0.0.1", valkey.port)

    lines = []
    async with linked(locate, PATIENT._replace(report=lines.append)) as link:
        assert not link.connected
        assert lines == ["shared state: no sentinel answers"]
        assert (
            str(await asked(link.send, (b"PING",)))
            == "the shared state cannot be reached: no sentinel answers"
        )
        knows.set()
        await soon(lambda: link.connected)


async def test_a_short_lived_connection_is_renewed_after_a_pause():
    naps = Naps()
    async with peer(b"") as port, linked(at(port), PATIENT._replace(sleep=naps.sleep)) as link:
        assert isinstance(await asked(link.send, (b"PING",)), StoreUnavailableError)
        await soon(lambda: naps.slept)


async def test_a_long_lived_connection_is_renewed_without_a_pause(valkey, monkeypatch):
    monkeypatch.setattr("ratelimitd.cluster.redis.link.LONG_LIFE_S", 0.0)
    naps = Naps()
    async with linked(at(valkey), PATIENT._replace(sleep=naps.sleep)) as link:
        link.drop("the primary has moved")
        assert not link.connected
        await soon(lambda: link.connected)
        assert link.connections_total == 2
        assert not naps.slept


async def test_a_connection_to_a_superseded_server_is_not_used(valkey, monkeypatch):
    made = []

    async def connect_and_hear_of_a_switch(*arguments):
        made.append(await connect(*arguments))
        if len(made) == 1:
            link.belongs_to("192.0.2.7:6379", "another server has become the primary")
        return made[-1]

    monkeypatch.setattr("ratelimitd.cluster.redis.link.connect", connect_and_hear_of_a_switch)
    link = Link(at(valkey), PATIENT._replace(sleep=no_pause))
    link.start()
    await soon(lambda: link.connected)
    assert str(made[0].lost) == "another server has become the primary"
    assert (len(made), link.connections_total) == (2, 1)
    link.belongs_to(link.name, "it is this one")
    assert link.connected
    link.belongs_to("192.0.2.7:6379", "it is another one")
    assert not link.connected
    await link.close()


async def test_dropping_an_unconnected_link_has_no_effect():
    link = Link(at(1), PATIENT)
    link.drop("no reason")
    assert not link.connected
    await link.close()


async def test_a_wrong_password_is_a_misconfiguration_until_corrected(tmp_path):
    lines = []
    wrong = PATIENT._replace(
        handshake=Handshake(Login(password="wrong-secret")), report=lines.append, sleep=no_pause
    )
    with Valkey(tmp_path, password="right-secret") as server:
        async with linked(at(server), wrong) as link:
            assert isinstance(await asked(link.send, (b"PING",)), StoreMisconfiguredError)
            assert lines == [
                f"shared state at {server.address}: the shared state answered WRONGPASS"
            ]
            server.ask("CONFIG", "SET", "requirepass", "wrong-secret")
            await soon(lambda: link.connected)
            assert await ask(link, b"PING") == b"PONG"
            assert len(lines) == 2


async def test_a_missing_permission_is_reported_once_in_a_while(valkey, monkeypatch):
    valkey.ask("ACL", "SETUSER", "node", "on", ">pw", "~*", "+@all", "-get")
    lines = []
    options = PATIENT._replace(handshake=Handshake(Login("node", "pw")), report=lines.append)
    async with linked(at(valkey), options) as link:
        for _ in range(3):
            assert isinstance(await asked(link.send, (b"GET", b"k")), StoreMisconfiguredError)
        assert await ask(link, b"PING") == b"PONG"
        line = f"shared state at {valkey.address}: the shared state answered NOPERM"
        assert lines == [line]
        monkeypatch.setattr(link_module, "REPORT_AGAIN_S", 0.0)
        assert isinstance(await asked(link.send, (b"GET", b"k")), StoreMisconfiguredError)
    assert lines == [line, line]


async def test_a_connection_to_a_primary_that_became_a_replica_is_closed(valkey):
    naps = Naps()
    async with linked(at(valkey), PATIENT._replace(sleep=naps.sleep)) as link:
        valkey.ask("REPLICAOF", "127.0.0.1", free_port())
        try:
            reply = await asked(link.send, (b"SET", b"k", 1))
            assert str(reply) == "the shared state answered READONLY"
            assert not link.connected
            await soon(lambda: naps.slept)
            naps.over.set()
            await soon(lambda: len(naps.slept) == 2)
            reply = await asked(link.send, (b"GET", b"k"))
            assert str(reply) == "the shared state cannot be reached: the server is a replica"
        finally:
            valkey.ask("REPLICAOF", "NO", "ONE")
        naps.over.set()
        await soon(lambda: link.connected)


@pytest.mark.parametrize(
    ("option", "code"), [("maxmemory", "OOM"), ("min-replicas-to-write", "NOREPLICAS")]
)
async def test_a_server_that_cannot_write_is_unavailable_although_it_reads(valkey, option, code):
    lines = []
    async with linked(at(valkey), PATIENT._replace(report=lines.append)) as link:
        valkey.ask("CONFIG", "SET", option, 1)
        try:
            assert await ask(link, b"GET", b"k") is None
            with pytest.raises(StoreUnavailableError, match=f"answered {code}$"):
                await ask(link, b"SET", b"k", 1)
            reply = await asked(link.run, INCREMENT, (b"k",), (1,))
            assert str(reply) == f"the shared state answered {code}"
        finally:
            valkey.ask("CONFIG", "SET", option, 0)
        assert await asked(link.run, INCREMENT, (b"k",), (1,)) == 1
        assert link.connections_total == 1
    assert lines == [f"shared state at {valkey.address}: the shared state answered {code}"]


async def test_a_server_at_its_maximum_of_clients_is_unavailable(valkey):
    lines = []
    async with linked(at(valkey)) as first:
        await ask(first, b"CONFIG", b"SET", b"maxclients", 1)
        try:
            async with linked(at(valkey), PATIENT._replace(report=lines.append)) as second:
                assert not second.connected
                reply = await asked(second.send, (b"PING",))
                assert str(reply).endswith("the shared state has reached its maximum of clients")
                assert len(lines) == 1
        finally:
            await ask(first, b"CONFIG", b"SET", b"maxclients", 1_000)


async def test_a_server_that_runs_an_endless_script_is_unavailable(valkey):
    valkey.ask("CONFIG", "SET", "busy-reply-threshold", 1)
    endless = Script(b"while true do end")
    async with linked(at(valkey)) as first, linked(at(valkey)) as second:
        pending = asked(first.run, endless, (), ())
        while (reply := await asked(second.send, (b"GET", b"k"))) is None:
            pass
        assert str(reply) == "the shared state answered BUSY"
        assert await ask(second, b"SCRIPT", b"KILL") == b"OK"
        assert isinstance(await pending, StoreCorruptError)


async def test_too_many_requests_in_flight_are_an_overload(valkey):
    async with linked(at(valkey), PATIENT._replace(max_requests=2)) as link:
        replies = [asked(link.send, (b"PING",)) for _ in range(3)]
        first, second, third = await asyncio.gather(*replies)
    assert (first, second) == (b"PONG", b"PONG")
    assert isinstance(third, StoreOverloadedError)


async def test_a_redirection_outside_of_a_cluster_is_a_misconfiguration():
    async with peer(b"-MOVED 1 127.0.0.1:7001\r\n") as port, linked(at(port)) as link:
        assert isinstance(await asked(link.send, (b"GET", b"k")), StoreMisconfiguredError)


@pytest.mark.parametrize(
    ("reply", "server", "asking"),
    [
        (b"-MOVED 1 127.0.0.1:7001\r\n", Server("127.0.0.1", 7001), False),
        (b"-ASK 1 ::1:7001\r\n", Server("::1", 7001), True),
        (b"-MOVED 1 :7001\r\n", Server("127.0.0.1", 7001), False),
    ],
)
async def test_a_redirection_is_passed_on_once(reply, server, asking):
    handed = []

    def redirect(request, to):
        handed.append((to, request.asking))
        link.submit(request)

    async with peer(reply, reply) as port, linked(at(port), redirect=redirect) as link:
        assert isinstance(await asked(link.send, (b"GET", b"k")), StoreUnavailableError)
    assert handed == [(server, asking)]


@pytest.mark.parametrize(
    "reply",
    [
        b"-MOVED 1 ?:7001\r\n",
        b"-MOVED\r\n",
        b"-ASK 1 host:port\r\n",
        b"-MOVED 1 host:65536\r\n",
        b"-MOVED 1 host:0\r\n",
        b"-MOVED 1 host:" + b"7" * 5_000 + b"\r\n",
    ],
)
async def test_a_redirection_to_nowhere_is_not_followed(reply):
    handed = []

    def redirect(request, to):
        handed.append(to)
        request.resolve(None)

    async with peer(reply, b"+PONG\r\n") as port, linked(at(port), redirect=redirect) as link:
        assert isinstance(await asked(link.send, (b"GET", b"k")), StoreUnavailableError)
        assert await ask(link, b"PING") == b"PONG"
    assert handed == []


async def test_an_asking_request_is_preceded_by_asking(valkey):
    async with linked(at(valkey)) as link:
        reply = asyncio.get_running_loop().create_future()
        request = Request(pack((b"GET", b"k")), reply.set_result)
        request.asking = True
        link.submit_again(request)
        assert link.in_flight == 2
        assert await reply is None


async def test_a_failing_callback_does_not_affect_others(valkey):
    failures = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: failures.append(context["exception"])
    )

    def fails(_reply):
        raise ValueError

    async with linked(at(valkey)) as link:
        link.send((b"PING",), fails)
        assert await ask(link, b"PING") == b"PONG"
    assert [type(failure) for failure in failures] == [ValueError]


async def test_malformed_replies_end_the_connection():
    naps = Naps()
    async with (
        peer(b"HTTP/1.1 400 Bad Request\r\n") as port,
        linked(at(port), PATIENT._replace(sleep=naps.sleep)) as link,
    ):
        replies = [asked(link.send, (b"PING",)) for _ in range(3)]
        assert {type(reply) for reply in await asyncio.gather(*replies)} == {StoreUnavailableError}
        assert not link.connected


async def test_each_request_is_resolved_once_and_runs_at_most_once_on_any_network_fault(valkey):
    """No request gets another's reply (as in redis-py#2624), and every request reported as run has run."""
    told, sent = {}, 0
    with ChaosProxy(valkey.port, seed=1) as proxy:
        options = PATIENT._replace(timeout_s=0.05, sleep=no_pause)
        async with linked(at(proxy.port), options) as link:
            for number in range(60):
                if number % 6 == 0:
                    proxy.down.cut_after_bytes = 11 * number
                if number % 10 == 9:
                    proxy.reset()
                proxy.down.slice_bytes = number % 3
                proxy.down.latency_ms = 60.0 * (number % 15 == 14)
                for _ in range(20):
                    sent += 1
                    script = Script(b"redis.call('INCR', KEYS[1]) return ARGV[1]")
                    link.run(script, (b"k",), (sent,), partial(told.setdefault(sent, []).append))
                await soon(lambda sent=sent: all(told[n] for n in range(sent - 19, sent + 1)))
            proxy.heal()
            await soon(lambda: link.in_flight == 0)
    ran = {number for number, (reply,) in told.items() if reply == b"%d" % number}
    lost = {n for n, (reply,) in told.items() if isinstance(reply, StoreUnavailableError)}
    assert ran | lost == set(told)
    assert ran
    assert lost
    assert len(ran) <= int(valkey.ask("GET", "k")) <= sent


async def test_a_server_with_a_socket_is_reached_by_its_path(valkey):
    async def locate():
        return Server(str(valkey.unix_path), 0)

    async with linked(locate) as link:
        assert await ask(link, b"PING") == b"PONG"
        assert link.name == str(valkey.unix_path)


async def test_a_connection_lost_right_after_its_handshake_is_not_used(
    valkey,
):
    link = Link(at(valkey), PATIENT)
    connection = await link._connect()
    connection.drop(StoreUnavailableError("lost"))
    link._serve(connection)
    assert (link.connected, link.connections_total) == (False, 0)
    await link.close()
