"""REDIS_URL and DATABASE_URL as values.

Both parsers raise ``ValueError`` with the end of a sentence that begins with the setting's name, and quote nothing of
the text, which may be a secret. See ADR 0024 and ADR 0026.
"""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, unquote

REDIS_PORT: Final = 6379
SENTINEL_PORT: Final = 26_379
MAX_PORT: Final = 65_535
MAX_DATABASE: Final = 65_535
"""Servers have 16 databases by default, and refuse a number beyond their own."""

_SERVER: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:,\[\]@/]+))(?::([0-9]{1,5}))?")
"""HOST or HOST:PORT, an IPv6 host in brackets."""

_COMMON_OPTIONS: Final = frozenset({"db"})
_TLS_OPTIONS: Final = frozenset(
    {"ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname"}
)
_SENTINEL_OPTIONS: Final = frozenset({"sentinel_username", "sentinel_password"})
_TRUTHS: Final[Mapping[str, bool]] = {"true": True, "1": True, "false": False, "0": False}


SSL_MODES: Final = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
"""Modes of libpq. The default is libpq's, prefer: TLS is tried, and the server is not verified."""

PARAMETERS: Final = frozenset(
    {
        "host",  # the directory of a socket
        "passfile",
        "port",
        "search_path",
        "sslcert",
        "sslcrl",
        "sslkey",
        "sslmode",
        "sslnegotiation",
        "sslrootcert",
        "target_session_attrs",
    }
)
"""Accepted options. The driver would pass any other to the server, which refuses most."""

_SQLITE: Final = "sqlite:///"

_POSTGRESQL: Final = re.compile(
    r"(?:postgresql|postgres)://"
    r"(?:[^\s:@/?#\[\]]*(?::[^\s:@/?#\[\]]*)?@)?"
    r"(?P<hosts>[^\s@/?#]*)"
    r"/(?P<name>[^\s@/?#]+)"
    r"(?:\?(?P<query>[^\s#]*))?"
)
_ESCAPE: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")


class TopologyKind(enum.StrEnum):
    """How keys are distributed: on one server, on the primary of Sentinel, or by slots."""

    STANDALONE = "standalone"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


class Server(NamedTuple):
    """Address of a server: host and port, or the path of a Unix socket as the host."""

    host: str
    port: int

    @property
    def is_path(self) -> bool:
        """Whether the server listens on a Unix socket."""
        return self.host.startswith("/")

    def __str__(self) -> str:
        """Return the address for logs and metrics."""
        if self.is_path:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Login(NamedTuple):
    """User and password; an empty user is the default one, an empty password is not sent."""

    user: str = ""
    password: str = ""

    def __repr__(self) -> str:
        """Return a text without the password."""
        shown = "********" if self.password else ""
        return f"Login(user={self.user!r}, password={shown!r})"


NO_LOGIN: Final = Login()


class TlsFiles(NamedTuple):
    """Files of a TLS connection; empty paths: the system's authorities, and no client certificate."""

    ca_certs: str = ""
    certfile: str = ""
    keyfile: str = ""
    check_hostname: bool = True


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """The parsed setting; ``servers`` are the sentinels of Sentinel, or some nodes of Cluster."""

    topology: TopologyKind
    servers: tuple[Server, ...]
    login: Login = NO_LOGIN
    database: int = 0
    tls: TlsFiles | None = None
    service: str = ""
    """Name of the primary at the sentinels."""
    sentinel_login: Login = NO_LOGIN


class SqliteFile(NamedTuple):
    """``sqlite:///PATH``; PATH is taken literally, absolute with a fourth slash."""

    path: Path

    @property
    def place(self) -> str:
        """The file, for messages."""
        return str(self.path)


class PostgresqlServer(NamedTuple):
    """``postgresql://user:password@host:port/database?options``."""

    dsns: tuple[str, ...]
    """The URL for the driver, with each host in turn."""
    place: str
    """Hosts and database, without user and password, for messages."""
    target_session_attrs: str | None
    """The option; of several hosts only a primary is used by default, since a standby may have older rules."""

    def __repr__(self) -> str:
        """Return a text without the password."""
        return f"PostgresqlServer({self.place!r})"


DatabaseUrl = SqliteFile | PostgresqlServer

_SCHEMES: Final[Mapping[str, tuple[TopologyKind, bool]]] = {
    "redis": (TopologyKind.STANDALONE, False),
    "rediss": (TopologyKind.STANDALONE, True),
    "unix": (TopologyKind.STANDALONE, False),
    "redis+sentinel": (TopologyKind.SENTINEL, False),
    "rediss+sentinel": (TopologyKind.SENTINEL, True),
    "redis+cluster": (TopologyKind.CLUSTER, False),
    "rediss+cluster": (TopologyKind.CLUSTER, True),
}
"""Scheme → topology, and whether to use TLS."""


def parse_redis_url(text: str) -> RedisUrl:
    """Return the value of REDIS_URL.

    Raises:
        ValueError: see the module.
    """
    scheme, place, path, query = _split(text)
    topology, encrypted = _SCHEMES[scheme]
    known = _COMMON_OPTIONS | (_TLS_OPTIONS if encrypted else frozenset())
    if topology is TopologyKind.SENTINEL:
        known |= _SENTINEL_OPTIONS
    options = _options(query, known)
    credentials, _, hosts = place.rpartition("@")
    if scheme == "unix":
        servers: tuple[Server, ...] = (_socket(hosts, unquote(path)),)
        names: tuple[str, ...] = ()
    else:
        servers = _servers(hosts, topology)
        names = tuple(unquote(name) for name in path.split("/") if name)
    service = names[0] if topology is TopologyKind.SENTINEL and names else ""
    if topology is TopologyKind.SENTINEL:
        names = names[1:]
        require(service, "must name the service after the sentinels: redis+sentinel://HOST/SERVICE")
    return RedisUrl(
        topology,
        servers,
        _login(credentials),
        _database(names, options, topology),
        _tls(options) if encrypted else None,
        service,
        Login(options.get("sentinel_username", ""), options.get("sentinel_password", "")),
    )


def parse_database_url(text: str) -> DatabaseUrl:
    """Return the value of DATABASE_URL.

    Raises:
        ValueError: see the module.
    """
    if text.startswith(("postgresql", "postgres:")):
        return _postgresql(text)
    file = text.removeprefix(_SQLITE)
    require(
        file not in {text, "", ":memory:"},
        "must be sqlite:///PATH, with a fourth slash for an absolute path,"
        " or postgresql://user:password@host:port/database",
    )
    return SqliteFile(Path(file))


def _split(text: str) -> tuple[str, str, str, str]:
    """Return scheme, credentials with servers, path and query. ``urlsplit`` of a newer Python refuses ``a,[::1]``."""
    scheme, _, rest = text.partition("://")
    require(
        text.isprintable() and " " not in text and scheme in _SCHEMES,
        "must be redis://, rediss://, unix://, redis+sentinel://, redis+cluster://, "
        "or one of the last two with rediss, without spaces",
    )
    require("#" not in rest, "must have a # in a password written as %23")
    rest, _, query = rest.partition("?")
    place, slash, path = rest.partition("/")
    return scheme, place, slash + path, query


def _login(credentials: str) -> Login:
    user, _, password = credentials.partition(":")
    require(password or not user, "must have a password where there is a user")
    return Login(unquote(user), unquote(password))


def _socket(hosts: str, path: str) -> Server:
    require(
        not hosts and path.startswith("/") and path != "/" and "\0" not in path,
        "must be unix:// and the absolute path of a socket, such as unix:///run/valkey.sock",
    )
    return Server(path, 0)


def _servers(hosts: str, topology: TopologyKind) -> tuple[Server, ...]:
    default = SENTINEL_PORT if topology is TopologyKind.SENTINEL else REDIS_PORT
    servers = tuple(_server(host, default) for host in hosts.split(","))
    require(
        len(servers) == 1 or topology is not TopologyKind.STANDALONE,
        "must name one server; several need redis+sentinel:// or redis+cluster://",
    )
    return servers


def _server(text: str, default_port: int) -> Server:
    match = _SERVER.fullmatch(text)
    port = int(match[3] or default_port) if match else 0
    if match is None or not 0 < port <= MAX_PORT:
        message = (
            "must name servers as HOST or HOST:PORT, an IPv6 host in brackets, "
            "and have the special characters of a password percent-encoded"
        )
        raise ValueError(message)
    return Server(match[1] or match[2], port)


def _database(names: tuple[str, ...], options: Mapping[str, str], topology: TopologyKind) -> int:
    given = [*names, *([options["db"]] if "db" in options else [])]
    text = given[0] if given else "0"
    require(
        len(given) <= 1
        and re.fullmatch(r"[0-9]{1,5}", text) is not None
        and int(text) <= MAX_DATABASE,
        f"must name at most one database, by a number from 0 to {MAX_DATABASE}",
    )
    require(
        topology is not TopologyKind.CLUSTER or not int(text),
        "must name no database with a cluster",
    )
    return int(text)


def _tls(options: Mapping[str, str]) -> TlsFiles:
    check_hostname = _TRUTHS.get(options.get("ssl_check_hostname", "true"))
    if check_hostname is None:
        message = "must have ssl_check_hostname=true or ssl_check_hostname=false"
        raise ValueError(message)
    files = TlsFiles(
        options.get("ssl_ca_certs", ""),
        options.get("ssl_certfile", ""),
        options.get("ssl_keyfile", ""),
        check_hostname,
    )
    require(
        bool(files.certfile) == bool(files.keyfile),
        "must have both or none of ssl_certfile, ssl_keyfile",
    )
    return files


def _postgresql(text: str) -> PostgresqlServer:
    match = _POSTGRESQL.fullmatch(text)
    hosts = match["hosts"].split(",") if match and match["hosts"] else []
    if match is None or _ESCAPE.search(text) or not all(map(_is_host, hosts)):
        message = (
            "must be postgresql://user:password@host:port/database;"
            " in user and password @ is %40, / is %2F, : is %3A and % is %25"
        )
        raise ValueError(message)
    options = _postgresql_options(match["query"] or "")
    where = match["hosts"] or options.get("host", "localhost")
    before, after = text[: match.start("hosts")], text[match.end("hosts") :]
    return PostgresqlServer(
        tuple(f"{before}{host}{after}" for host in hosts or [""]),
        f"{where}/{unquote(match['name'])}",
        options.get("target_session_attrs", "primary" if len(hosts) > 1 else None),
    )


def _is_host(text: str) -> bool:
    match = _SERVER.fullmatch(text)
    return match is not None and int(match[3] or 0) <= MAX_PORT


def _postgresql_options(query: str) -> dict[str, str]:
    options = _options(query.replace("+", "%2B"), PARAMETERS)
    require(all(options.values()), "must have a value for each option")
    sslmode = options.get("sslmode", SSL_MODES[0])
    require(sslmode in SSL_MODES, f"must have as sslmode one of {', '.join(SSL_MODES)}")
    authorities = options.get("sslrootcert")
    require(
        authorities != "system",
        "must have a file as sslrootcert: the driver does not know system;"
        " the authorities of a Debian system are in /etc/ssl/certs/ca-certificates.crt",
    )
    require(
        authorities or not sslmode.startswith("verify") or _has_default_authorities(),
        f"must have with sslmode={sslmode} an sslrootcert, the file of the trusted authorities",
    )
    require(re.fullmatch(r"[0-9]{1,5}", options.get("port", "1")), "must have a number as port")
    require(
        "," not in options.get("host", ""),
        "must have several hosts before the database: host1,host2/database",
    )
    return options


def _has_default_authorities() -> bool:
    """Return whether the driver finds authorities without ``sslrootcert``."""
    if os.environ.get("PGSSLROOTCERT"):
        return True
    try:
        return (Path.home() / ".postgresql" / "root.crt").exists()
    except (OSError, RuntimeError):  # the home is inaccessible, or there is none
        return False


def _options(query: str, known: frozenset[str]) -> dict[str, str]:
    pairs = parse_qsl(query, keep_blank_values=True)
    options = dict(pairs)
    require(
        options.keys() <= known and len(options) == len(pairs),
        f"must have no options but {', '.join(sorted(known))}, each once",
    )
    return options


def require(condition: object, message: str) -> None:
    """Raise ``ValueError`` with a message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def reachable(address: str) -> str:
    """Return the ``HOST:PORT`` at which programs of the host reach a node: loopback if it listens on all addresses."""
    host, _, port = address.rpartition(":")
    every_host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 -- nothing is bound here
    return f"{every_host.get(host, host)}:{port}"
