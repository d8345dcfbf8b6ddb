"""What holds for every test."""

import asyncio.constants
import functools
import gc
import logging
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from hypothesis import HealthCheck, settings

# Tests start servers with a preexec_fn, and a fork beside busy threads of gRPC may crash the child. It reads this once,
# when imported; programs that tests start have its default.
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("GRPC_ENABLE_FORK_SUPPORT", "0")
    import grpc  # noqa: F401

if TYPE_CHECKING:
    from tests.postgres_server import PostgresServer

TESTS = Path(__file__).parent
DEEP = frozenset({"cluster", "simulation", "property"})
"""Directories under tests/ whose tests `make test-deep` runs."""


# A busy machine fails no test: by default an example may take 200 ms.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

# In debug mode asyncio notes the stack of each handle and future, which takes as long as the tests themselves: the last
# frame says where one was made. The futures of C ask for whole stacks, with no limit of their own.
asyncio.constants.DEBUG_STACK_DEPTH = 1  # type: ignore[misc]
traceback.extract_stack.__defaults__ = (None, 1)

# A client of httpx reads the public authorities, which takes 20 ms or more: once is enough.
httpx._transports.default.create_ssl_context = functools.cache(httpx.create_ssl_context)  # type: ignore[attr-defined]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Another server than the Valkey that comes as a wheel; pictures of the pages for the documents."""
    parser.addoption("--store-server", type=Path, help="the redis-server that the tests start")
    parser.addoption(
        "--write-pictures", action="store_true", help="put pictures of the pages into docs/pictures"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Keep asyncio's remark about a slow turn of a busy machine out of tests that count what ratelimitd logs."""
    logging.getLogger("asyncio").addFilter(_is_no_remark_on_speed)
    binary = config.getoption("--store-server")
    if binary is not None:
        from tests.servers import use_binary  # noqa: PLC0415 -- most runs of a few tests need none

        use_binary(binary)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is too long for `make test`: see the markers in pyproject.toml."""
    for item in items:
        directory = item.path.relative_to(TESTS).parts[0]
        if item.get_closest_marker("slice") is None and (
            directory in DEEP or (directory == "rpc" and _is_of_grpcio(item))
        ):
            item.add_marker("deep")


def _is_of_grpcio(item: pytest.Item) -> bool:
    """Return whether a test asks the fallback transport, which must answer as the native one does."""
    called = getattr(item, "callspec", None)
    return called is not None and "grpcio" in called.params.values()


def pytest_collection_finish() -> None:
    """Keep what 8,500 tests are made of out of every collection of garbage: a third of a run's time."""
    gc.collect()
    gc.freeze()


def _is_no_remark_on_speed(record: logging.LogRecord) -> bool:
    return not (record.levelno == logging.WARNING and str(record.msg).startswith("Executing"))


@pytest.fixture(scope="session")
def postgres_server() -> Iterator["PostgresServer"]:
    """One PostgreSQL for the whole run of a worker."""
    from tests.postgres_server import PostgresServer  # noqa: PLC0415 -- most runs of a few tests need none

    with PostgresServer() as server:
        yield server


@pytest.fixture
def postgres(postgres_server: "PostgresServer") -> Iterator["PostgresServer"]:
    """The server, which a test may stop, crash and pause; for the next one it runs again."""
    yield postgres_server
    postgres_server.restore()


@pytest.fixture
def postgresql_url(postgres: "PostgresServer") -> str:
    """A database of the test's own, with the schema and nothing else."""
    return postgres.new_database()


@pytest.fixture
def reports(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """The warnings and errors that ratelimitd logged, a line each."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING, "ratelimitd"):
        logging.getLogger("ratelimitd").addHandler(handler)
        yield lines
        logging.getLogger("ratelimitd").removeHandler(handler)
