import asyncio
import socket
import ssl
from contextlib import aclosing, asynccontextmanager
from urllib.parse import quote

import asyncpg
import pytest
import pytest_asyncio
import sqlalchemy as sa
import trustme
from asyncpg.exceptions import ClientConfigurationError
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from ratelimitd.errors import StartupError, StoreMisconfiguredError, StoreUnavailableError
from ratelimitd.rules.sql import postgresql
from ratelimitd.rules.sql.postgresql import PostgresqlDatabase, error_of
from ratelimitd.settings import urls
from tests.chaos_proxy import ChaosProxy
from tests.postgres_server import PASSWORD

IMPATIENT_S = 0.5
"""Timeout in tests that wait for it to expire: long enough for normal answers on a busy machine."""


@asynccontextmanager
async def opened(url, *, busy_timeout_s=10.0, command_timeout_s=10.0, pool_timeout_s=10.0):
    database = PostgresqlDatabase(
        urls.parse_database_url(url),
        busy_timeout_s=busy_timeout_s,
        command_timeout_s=command_timeout_s,
        pool_timeout_s=pool_timeout_s,
    )
    async with aclosing(database):
        yield database


@pytest_asyncio.fixture
async def database(postgresql_url):
    async with opened(postgresql_url) as found:
        yield found


async def read(database, statement="SELECT 1"):
    async with database.reading() as connection:
        return await connection.scalar(sa.text(statement))


async def write(database, statement="UPDATE rule_revision SET revision = revision + 1"):
    async with database.writing() as connection:
        await connection.exec_driver_sql(statement)


async def write_around(database, between, before_commit=lambda: None):
    """Write twice in one transaction, calling ``between`` between the writes and ``before_commit`` at the end."""
    async with database.writing() as connection:
        await connection.exec_driver_sql("UPDATE rule_revision SET revision = 5")
        between()
        await connection.exec_driver_sql("UPDATE rule_revision SET revision = 6")
        before_commit()


async def revision(database):
    return await read(database, "SELECT revision FROM rule_revision")


async def test_successful_writes_are_stored_and_failed_ones_are_not(database):
    await write(database)
    with pytest.raises(ZeroDivisionError):
        await write_around(database, lambda: 1 // 0)
    assert await revision(database) == 1


async def test_reading_transaction_sees_one_state_and_refuses_writes(database):
    async with database.reading() as connection:
        before = await connection.scalar(sa.text("SELECT revision FROM rule_revision"))
        await write(database)
        after = await connection.scalar(sa.text("SELECT revision FROM rule_revision"))
    assert (before, after, await revision(database)) == (0, 0, 1)
    with pytest.raises(StoreUnavailableError, match="is read-only"):
        async with database.reading() as connection:
            await connection.exec_driver_sql("UPDATE rule_revision SET revision = 7")


async def test_writer_sees_the_writes_of_the_previous_lock_holder(database):
    lock = "SELECT revision FROM rule_revision FOR UPDATE"
    async with database.writing() as connection:
        await connection.exec_driver_sql(lock)
        waiting = asyncio.create_task(read_locked(database, lock))
        await connection.exec_driver_sql("UPDATE rule_revision SET revision = 5")
    assert await waiting == 5


async def read_locked(database, lock):
    async with database.writing() as connection:
        return await connection.scalar(sa.text(lock))


async def test_writer_waits_for_the_lock_up_to_the_busy_timeout(postgresql_url):
    async with opened(postgresql_url, busy_timeout_s=0.05) as database:
        async with database.writing() as connection:
            await connection.exec_driver_sql("UPDATE rule_revision SET revision = 5")
            with pytest.raises(StoreUnavailableError, match="is locked by another writer"):
                await write(database)
        assert await revision(database) == 5


async def test_server_ends_a_command_that_exceeds_the_timeout(postgresql_url):
    async with opened(postgresql_url, command_timeout_s=IMPATIENT_S) as database:
        with pytest.raises(StoreUnavailableError, match="did not answer in time"):
            await read(database, "SELECT 1 FROM pg_sleep(60)")
        assert await read(database) == 1


async def test_server_is_configured_to_release_the_lock_of_a_silent_node(database):
    assert await read(database, "SHOW idle_in_transaction_session_timeout") == "10s"


async def test_server_restart_fails_no_call(postgres, database):
    await asyncio.gather(*(read(database) for _ in range(postgresql.POOL_SIZE)))
    postgres.stop()
    postgres.start()
    for _ in range(postgresql.POOL_SIZE):
        await write(database)


async def test_stopped_server_is_unavailable_until_it_runs_again(postgres, database):
    postgres.stop()
    with pytest.raises(StoreUnavailableError, match=r"cannot be reached: .*Connect call failed"):
        await read(database)
    postgres.start()
    assert await read(database) == 1


async def test_server_shutdown_ends_the_current_transaction(postgres, database):
    with pytest.raises(StoreUnavailableError, match=r"is shutting down|cannot be reached"):
        await write_around(database, postgres.stop)
    postgres.start()
    assert await revision(database) == 0


async def test_server_crash_during_a_write_rolls_it_back(postgres, database):
    with pytest.raises(StoreUnavailableError, match="cannot be reached"):
        await write_around(database, postgres.crash)
    postgres.start()
    assert await revision(database) == 0
    await write(database)


async def test_commit_without_an_answer_reports_an_unknown_outcome(postgres, database):
    with pytest.raises(StoreUnavailableError, match="; the change may have been made nevertheless"):
        await write_around(database, lambda: None, before_commit=postgres.crash)
    postgres.start()
    assert await revision(database) in {0, 6}


async def test_committed_change_with_a_lost_answer_reports_an_unknown_outcome(
    postgres, postgresql_url, database
):
    def lose_answers():
        proxy.down.drop = True

    with ChaosProxy(postgres.port) as proxy:
        url = postgresql_url.replace(str(postgres.port), str(proxy.port))
        async with opened(url, command_timeout_s=IMPATIENT_S) as impatient:
            with pytest.raises(
                StoreUnavailableError,
                match="did not answer in time; the change may have been made nevertheless",
            ):
                await write_around(impatient, lambda: None, before_commit=lose_answers)
            proxy.heal()
            assert await revision(impatient) == 6  # on another connection
    assert await revision(database) == 6


async def test_wait_for_a_hanging_server_ends_at_the_command_timeout(
    postgres, postgresql_url, database
):
    async with opened(postgresql_url, command_timeout_s=IMPATIENT_S) as impatient:
        await read(impatient)
        postgres.pause()
        for attempt in (read, write):  # on the existing connection, and on a new one
            with pytest.raises(StoreUnavailableError, match="did not answer in time"):
                await attempt(impatient)
        postgres.resume()
    assert await revision(database) == 0


async def test_server_that_hangs_during_a_write_rolls_it_back(postgres, postgresql_url, database):
    async with opened(postgresql_url, command_timeout_s=IMPATIENT_S) as impatient:
        with pytest.raises(StoreUnavailableError, match="did not answer in time"):
            await write_around(impatient, postgres.pause)
        postgres.resume()
    await write(database)  # the lock is free
    assert await revision(database) == 1


async def test_cancelled_call_does_not_wait_for_a_hanging_server(postgres, database):
    begun = asyncio.Event()

    def hang():
        postgres.pause()
        begun.set()

    task = asyncio.create_task(write_around(database, hang))
    await begun.wait()
    for _ in range(3):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    postgres.resume()
    assert await revision(database) == 0


async def test_close_does_not_wait_for_a_hanging_server(postgres, postgresql_url, monkeypatch):
    monkeypatch.setattr(postgresql, "CLOSE_TIMEOUT_S", 0.05)
    async with opened(postgresql_url, command_timeout_s=30.0) as database:
        await asyncio.gather(*(read(database) for _ in range(4)))
        postgres.pause()
        await database.aclose()
        postgres.resume()
        await database.aclose()


async def test_wait_for_a_busy_pool_is_bounded(postgresql_url, monkeypatch):
    monkeypatch.setattr(postgresql, "POOL_SIZE", 1)
    async with opened(postgresql_url, pool_timeout_s=0.01) as database, database.reading():
        with pytest.raises(StoreUnavailableError, match=r"every connection .* is busy"):
            await read(database)


SERVER_ERRORS = [
    ("53100", StoreUnavailableError, "cannot grow: the disk is full"),
    ("53300", StoreUnavailableError, "has no connection left"),
    ("53200", StoreUnavailableError, "is short of memory or another resource"),
    ("57P01", StoreUnavailableError, "is shutting down"),
    ("57P03", StoreUnavailableError, "is starting up or shutting down"),
    ("57014", StoreUnavailableError, "did not answer in time"),
    ("40001", StoreUnavailableError, "was changed by another transaction"),
    ("40P01", StoreUnavailableError, "was changed by another transaction"),
    ("58030", StoreUnavailableError, "cannot be read or written: disk error"),
    ("XX001", StoreUnavailableError, "is damaged"),
    ("08006", StoreUnavailableError, "cannot be reached"),
    ("25P03", StoreUnavailableError, "ended a transaction that took too long"),
    ("42501", StoreMisconfiguredError, "forbids its user to read or write the rules"),
    ("28P01", StoreMisconfiguredError, "refuses the user or the password of DATABASE_URL"),
    ("22000", StoreUnavailableError, "failed (22000)"),
]


async def test_server_errors_are_described_without_their_text(postgres):
    async with opened(postgres.url("postgres")) as database:
        for state, error, meaning in SERVER_ERRORS:
            raising = f"DO $$ BEGIN RAISE EXCEPTION 's3cret' USING ERRCODE = '{state}'; END $$"
            with pytest.raises(StoreUnavailableError) as caught:
                await write(database, raising)
            assert type(caught.value) is error, state
            assert str(caught.value) == f"the rule database {meaning}"


async def test_missing_table_asks_for_an_upgrade(database):
    for statement in ("SELECT x FROM rules", "SELECT 1 FROM ruled", "SELECT 1 FROM a.b"):
        with pytest.raises(StoreUnavailableError, match="run `ratelimitd db upgrade`"):
            await read(database, statement)


async def test_missing_database_is_a_configuration_error(postgres):
    async with opened(postgres.url("nonesuch")) as database:
        with pytest.raises(StoreMisconfiguredError, match="the rule database does not exist"):
            await read(database)


async def test_wrong_password_is_a_configuration_error_and_is_not_repeated(
    postgres, postgresql_url
):
    name = postgresql_url.rpartition("/")[2]
    async with opened(postgres.url(name, user="guarded:s3cret")) as database:
        with pytest.raises(StoreMisconfiguredError, match="refuses the user or the pass") as caught:
            await read(database)
    assert "s3cret" not in str(caught.value)


async def test_password_may_contain_any_character_and_insufficient_role_is_reported(
    postgres, postgresql_url
):
    name = postgresql_url.rpartition("/")[2]
    async with opened(postgres.url(name, user=f"guarded:{quote(PASSWORD, safe='')}")) as database:
        assert await read(database) == 1
        with pytest.raises(StoreMisconfiguredError, match="forbids its user"):
            await revision(database)


@pytest.fixture
def tls_url(postgres, postgresql_url, tmp_path):
    """The URL of a server with TLS; ``ca.pem`` holds the authority of its certificate."""
    ca, tls = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(tls)
    tls.set_alpn_protocols(["postgresql"])
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
    with ChaosProxy(postgres.port, tls=tls) as proxy:
        url = postgresql_url.replace(str(postgres.port), str(proxy.port))
        yield f"{url}?sslnegotiation=direct"


async def test_certificate_is_verified_against_the_configured_authority(tls_url, tmp_path):
    async with opened(f"{tls_url}&sslmode=verify-full&sslrootcert={tmp_path}/ca.pem") as database:
        assert await read(database) == 1
    other = f"{tls_url}&sslmode=verify-full&sslrootcert={tmp_path}/other.pem"
    async with opened(other) as database:
        with pytest.raises(StoreMisconfiguredError, match="cannot be verified with sslrootcert"):
            await read(database)


async def test_server_name_is_verified_only_with_verify_full(tls_url, tmp_path):
    named = tls_url.replace("127.0.0.1", "localhost")
    for mode in ("require", "verify-ca"):
        url = f"{named}&sslmode={mode}&sslrootcert={tmp_path}/ca.pem"
        async with opened(url) as database:
            assert await read(database) == 1
    async with opened(f"{named}&sslmode=verify-full&sslrootcert={tmp_path}/ca.pem") as database:
        with pytest.raises(StoreMisconfiguredError, match="cannot be verified with sslrootcert"):
            await read(database)


async def test_tls_follows_sslmode_or_fails(postgresql_url, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))  # where users of libpq keep a certificate
    for options, error, meaning in (
        ("sslmode=require", StoreMisconfiguredError, "refuses TLS, which sslmode requires"),
        ("sslmode=verify-full&sslrootcert=/x", StoreUnavailableError, "No such file"),
    ):
        async with opened(f"{postgresql_url}?{options}") as database:
            with pytest.raises(error, match=meaning):
                await read(database)


NO_MATCH = "no host matches target_session_attrs"


async def test_no_server_of_the_required_kind_is_unavailable(postgresql_url):
    async with opened(f"{postgresql_url}?target_session_attrs=standby") as database:
        with pytest.raises(StoreUnavailableError, match=f"cannot be reached: {NO_MATCH}"):
            await read(database)
    for kind in ("primary", "prefer-standby"):
        async with opened(f"{postgresql_url}?target_session_attrs={kind}") as database:
            assert await read(database) == 1


@pytest_asyncio.fixture
async def port_of():
    """Ports of hosts that refuse connections, answer nothing, and end each connection."""

    async def end(_reader, writer):
        writer.close()

    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with await asyncio.start_server(end, "127.0.0.1", 0) as ending:
            yield {
                "refusing": 1,
                "silent": silent.getsockname()[1],
                "ending": ending.sockets[0].getsockname()[1],
            }


@pytest.mark.parametrize("first", ["refusing", "silent", "ending"])
async def test_first_host_that_answers_is_used(postgresql_url, port_of, first):
    several = postgresql_url.replace("127.0.0.1", f"127.0.0.1:{port_of[first]},127.0.0.1")
    # Each of the two hosts gets half of the timeout.
    async with opened(several, command_timeout_s=4 * IMPATIENT_S) as database:
        assert await read(database) == 1


async def test_standby_is_none_of_several_hosts_unless_asked_for(postgres, postgresql_url):
    several = postgresql_url.replace("127.0.0.1", "127.0.0.1:1,127.0.0.1")
    postgres.become_standby()
    async with opened(several) as database:
        with pytest.raises(StoreUnavailableError, match=NO_MATCH):
            await read(database)
    for kind in ("any", "standby", "prefer-standby"):
        async with opened(f"{several}?target_session_attrs={kind}") as database:
            assert await read(database) == 1


async def test_refused_write_is_the_last_of_a_read_only_session(postgres, postgresql_url, database):
    """As after a switchover: the server is, or the next host of the URL has become, writable again."""
    name = postgresql_url.rpartition("/")[2]
    postgres.sql(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    await asyncio.gather(*(read(database) for _ in range(postgresql.POOL_SIZE)))
    postgres.sql(f"ALTER DATABASE {name} RESET default_transaction_read_only")
    with pytest.raises(StoreUnavailableError, match="is read-only"):
        await write(database)
    for _ in range(postgresql.POOL_SIZE):
        await write(database)


async def test_local_socket_is_supported(postgres, postgresql_url):
    name = postgresql_url.rpartition("/")[2]
    url = f"postgresql://postgres@/{name}?host={postgres.directory}&port={postgres.port}"
    async with opened(url) as database:
        assert await read(database) == 1


class DriverError(Exception):
    """Wraps an error of the driver, as SQLAlchemy does."""

    def __init__(self, cause):
        self.driver_exception = cause


@pytest.mark.parametrize(
    ("error", "kind", "meaning"),
    [
        (PoolTimeoutError(), StoreUnavailableError, "every connection to the rule database is busy"),
        (ArgumentError("x"), StoreUnavailableError, "the rule database failed (ArgumentError)"),
        (ConnectionResetError(), StoreUnavailableError, "the rule database cannot be reached"),
        (ssl.SSLCertVerificationError(), StoreMisconfiguredError,
         "the certificate of the rule database cannot be verified with sslrootcert"),
        (DBAPIError("s3cret", {}, DriverError(asyncpg.InterfaceError("s3cret"))),
         StoreUnavailableError, "the rule database cannot be reached"),
        (DBAPIError("s3cret", {}, DriverError(ClientConfigurationError("s3cret"))),
         StoreMisconfiguredError, "the rule database cannot be reached with the options of DATABASE_URL"),
        (DBAPIError("s3cret", {}, DriverError(asyncpg.DataError("s3cret"))),
         StoreUnavailableError, "the rule database failed (DataError)"),
    ],
)  # fmt: skip
def test_errors_before_a_connection_are_described(error, kind, meaning):
    found = error_of(error)
    assert type(found) is kind
    assert str(found) == meaning


async def test_upgrade_waits_for_a_concurrent_upgrade(database):
    order = []

    async def upgrade(name):
        async with database.upgrading() as connection:
            order.append(f"{name} begins")
            await connection.exec_driver_sql("SELECT pg_sleep(0.01)")
            order.append(f"{name} ends")

    await asyncio.gather(upgrade("a"), upgrade("b"))
    assert [line.split()[1] for line in order] == ["begins", "ends"] * 2


async def test_failed_upgrade_names_the_database(postgres, database):
    for url, error, meaning in (
        (postgres.url("nonesuch"), StoreMisconfiguredError, "does not exist"),
        ("postgresql://postgres@127.0.0.1:1/rules", StoreUnavailableError, "cannot be reached.*"),
    ):
        async with opened(url) as absent:
            with pytest.raises(error, match=f"{meaning}: 127.0.0.1:.*/"):
                async with absent.upgrading():
                    pytest.fail("it opened what is not there")


async def test_upgrade_without_a_schema_is_a_configuration_error(postgres):
    async with opened(postgres.url("postgres") + "?search_path=nonesuch") as database:
        with pytest.raises(StoreMisconfiguredError, match="none of the schemas in its search_path"):
            async with database.upgrading() as connection:
                await connection.exec_driver_sql("CREATE TABLE rules (id int)")


async def test_database_with_an_unsuitable_encoding_is_refused(postgres):
    postgres.sql("CREATE DATABASE latin TEMPLATE template0 ENCODING latin1 LOCALE 'C'")
    async with opened(postgres.url("latin")) as database:
        with pytest.raises(StartupError, match="is encoded in LATIN1; it must be UTF8"):
            async with database.upgrading():
                pytest.fail("it was taken")
    postgres.sql("DROP DATABASE latin")
