import asyncio

import pytest

from ratelimitd.cluster.redis.connection import Connection, Handshake, Refused, ask, hand_over
from ratelimitd.cluster.redis.link import connect
from ratelimitd.errors import StoreMisconfiguredError, StoreUnavailableError
from ratelimitd.settings.urls import Login, Server
from tests.servers import Valkey, free_port
from tests.unit.cluster.redis.asking import peer

PASSWORD = "right-secret"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    with Valkey(tmp_path_factory.mktemp("guarded"), password=PASSWORD) as server:
        server.ask("ACL", "SETUSER", "node", "on", ">pw", "~rl1:*", "&rl1:*", "-@all", "+get")
        server.ask("ACL", "SETUSER", "small", "on", ">pw", "-@all")
        yield server


def unconnected():
    return Connection(hand_over, lambda _error: None, timeout_s=5)


async def connected(port, handshake):
    return await connect(Server("127.0.0.1", port), handshake, None, unconnected)


async def info(connection):
    told = await ask(connection, b"CLIENT", b"INFO")
    connection.drop(StoreUnavailableError("end"))
    return told


async def test_the_default_user_needs_a_password_only(guarded):
    connection = await connected(guarded.port, Handshake(Login(password=PASSWORD)))
    assert b" user=default " in await info(connection)


async def test_user_database_and_name_are_sent_to_the_server(guarded):
    guarded.ask("ACL", "SETUSER", "all", "on", ">pw", "+@all")
    connection = await connected(guarded.port, Handshake(Login("all", "pw"), 3, "ratelimitd:a/0"))
    told = await info(connection)
    for part in (b" user=all ", b" db=3 ", b" name=ratelimitd:a/0 "):
        assert part in told


async def test_a_user_without_optional_permissions_can_log_in(guarded):
    """It may not use PING, CLIENT SETNAME or ROLE."""
    connection = await connected(guarded.port, Handshake(Login("node", "pw"), 0, "ratelimitd"))
    assert await ask(connection, b"GET", b"rl1:{00}:absent") is None
    connection.drop(StoreUnavailableError("end"))


@pytest.mark.parametrize(
    ("handshake", "code"),
    [
        (Handshake(), "NOAUTH"),
        (Handshake(Login(password="wrong-secret")), "WRONGPASS"),
        (Handshake(Login("nobody", PASSWORD)), "WRONGPASS"),
        (Handshake(Login("small", "pw"), 1), "NOPERM"),
        (Handshake(Login(password=PASSWORD), 99), "refuses us: ERR"),
    ],
)
async def test_a_refused_login_is_a_misconfiguration_without_the_secret(guarded, handshake, code):
    with pytest.raises(StoreMisconfiguredError, match=code) as refused:
        await connected(guarded.port, handshake)
    assert "secret" not in str(refused.value)


async def test_a_password_for_a_server_without_one_is_a_misconfiguration(valkey):
    with pytest.raises(StoreMisconfiguredError):
        await connected(valkey.port, Handshake(Login(password="x")))


async def test_a_replica_is_unavailable(valkey):
    valkey.ask("REPLICAOF", "127.0.0.1", free_port())
    try:
        with pytest.raises(StoreUnavailableError, match="replica"):
            await connected(valkey.port, Handshake())
        connection = await connected(valkey.port, Handshake(wants_primary=False))
        connection.drop(StoreUnavailableError("end"))
    finally:
        valkey.ask("REPLICAOF", "NO", "ONE")


@pytest.mark.parametrize(
    ("reply", "told"), [(b"-LOADING wait\r\n-LOADING wait\r\n", "LOADING"), (b"", "lost")]
)
async def test_a_server_that_loads_or_breaks_the_handshake_off_is_unavailable(reply, told):
    async with peer(reply, handshake=False) as port:
        with pytest.raises(StoreUnavailableError, match=told):
            await connected(port, Handshake())


async def test_a_server_that_hangs_up_is_unavailable():
    async with peer(b"+PONG\r\n", b"", handshake=False) as port:
        connection = await connected(port, Handshake(wants_primary=False))
        with pytest.raises(StoreUnavailableError, match="lost"):
            await ask(connection, b"GET", b"k")


async def test_an_error_reply_is_raised_with_its_text(valkey):
    connection = await connected(valkey.port, Handshake())
    with pytest.raises(Refused, match="ERR wrong number"):
        await ask(connection, b"GET")
    connection.drop(StoreUnavailableError("end"))


async def test_a_reply_after_the_caller_left_is_dropped(valkey):
    connection = await connected(valkey.port, Handshake())
    waiting = asyncio.create_task(ask(connection, b"PING"))
    await asyncio.sleep(0)
    waiting.cancel()
    assert await ask(connection, b"ECHO", b"next") == b"next"
    connection.drop(StoreUnavailableError("end"))
