"""REDIS_URL as a value: which servers, in which topology, as whom, and over which kind of connection.

Never connects, never reads a file, and never puts a part of the text into a message: it may be a secret.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

REDIS_PORT: Final = 6379
SENTINEL_PORT: Final = 26_379
MAX_PORT: Final = 65_535
MAX_DATABASE: Final = 65_535
"""Servers have 16 databases unless configured otherwise; one past what a server has is refused by that server."""

_SERVER: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:\[\]@/]+))(?::([0-9]{1,5}))?")

_COMMON_OPTIONS: Final = frozenset({"db"})
_TLS_OPTIONS: Final = frozenset(
    {"ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname"}
)
_SENTINEL_OPTIONS: Final = frozenset({"sentinel_username", "sentinel_password"})
_TRUTHS: Final[Mapping[str, bool]] = {"true": True, "1": True, "false": False, "0": False}


class Topology(enum.StrEnum):
    """How the servers share the keys: one holds all, one of them is the primary, or each holds some slots."""

    STANDALONE = "standalone"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


class Server(NamedTuple):
    """Where one server listens: a host and a port, or the path of a Unix socket in place of the host."""

    host: str
    port: int

    @property
    def is_path(self) -> bool:
        """Whether the server listens on a Unix socket."""
        return self.host.startswith("/")

    def __str__(self) -> str:
        """For logs and metrics."""
        if self.is_path:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Login(NamedTuple):
    """A user of the server; without a user the default one, without a password none is sent."""

    user: str = ""
    password: str = ""

    def __repr__(self) -> str:
        """Without the password."""
        shown = "********" if self.password else ""
        return f"Login(user={self.user!r}, password={shown!r})"


NO_LOGIN: Final = Login()


class TlsFiles(NamedTuple):
    """What a TLS connection is checked with; empty paths: the system's authorities, and no certificate of ours."""

    ca_certs: str = ""
    certfile: str = ""
    keyfile: str = ""
    check_hostname: bool = True


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """The parsed setting. ``servers`` are the sentinels with Sentinel, some of the nodes with Cluster."""

    topology: Topology
    servers: tuple[Server, ...]
    login: Login = NO_LOGIN
    database: int = 0
    tls: TlsFiles | None = None
    service: str = ""
    """With Sentinel: the name under which the sentinels know the primary."""
    sentinel_login: Login = NO_LOGIN


_SCHEMES: Final[Mapping[str, tuple[Topology, bool]]] = {
    "redis": (Topology.STANDALONE, False),
    "rediss": (Topology.STANDALONE, True),
    "unix": (Topology.STANDALONE, False),
    "redis+sentinel": (Topology.SENTINEL, False),
    "rediss+sentinel": (Topology.SENTINEL, True),
    "redis+cluster": (Topology.CLUSTER, False),
    "rediss+cluster": (Topology.CLUSTER, True),
}
"""Scheme → topology and whether connections are TLS."""


def parse_redis_url(text: str) -> RedisUrl:
    """The value of ``text``.

    Raises:
        ValueError: the end of a sentence that begins with the setting's name; it quotes nothing of ``text``.
    """
    parts = _split(text)
    topology, encrypted = _SCHEMES[parts.scheme]
    options = _options(parts.query, topology, encrypted=encrypted)
    credentials, _, hosts = parts.netloc.rpartition("@")
    if parts.scheme == "unix":
        servers: tuple[Server, ...] = (_socket(hosts, unquote(parts.path)),)
        names: tuple[str, ...] = ()
    else:
        servers = _servers(hosts, topology)
        names = tuple(unquote(name) for name in parts.path.split("/") if name)
    service = names[0] if topology is Topology.SENTINEL and names else ""
    if topology is Topology.SENTINEL:
        names = names[1:]
        _require(
            service, "must name the service after the sentinels: redis+sentinel://HOST/SERVICE"
        )
    return RedisUrl(
        topology,
        servers,
        _login(credentials),
        _database(names, options, topology),
        _tls(options) if encrypted else None,
        service,
        Login(options.get("sentinel_username", ""), options.get("sentinel_password", "")),
    )


def _split(text: str) -> SplitResult:
    known = text.isprintable() and " " not in text and text.partition("://")[0] in _SCHEMES
    _require(
        known,
        "must be redis://, rediss://, unix://, redis+sentinel://, redis+cluster://, "
        "or one of the last two with rediss, without spaces",
    )
    try:
        parts = urlsplit(text)
    except ValueError:
        message = "must have an IPv6 host in brackets"
        raise ValueError(message) from None
    _require(not parts.fragment, "must have a # in a password written as %23")
    return parts


def _options(query: str, topology: Topology, *, encrypted: bool) -> dict[str, str]:
    known = _COMMON_OPTIONS
    if encrypted:
        known |= _TLS_OPTIONS
    if topology is Topology.SENTINEL:
        known |= _SENTINEL_OPTIONS
    pairs = parse_qsl(query, keep_blank_values=True)
    options = dict(pairs)
    _require(
        options.keys() <= known and len(options) == len(pairs),
        f"must have no options but {', '.join(sorted(known))}, each once",
    )
    return options


def _login(credentials: str) -> Login:
    user, _, password = credentials.partition(":")
    _require(password or not user, "must have a password where there is a user")
    return Login(unquote(user), unquote(password))


def _socket(hosts: str, path: str) -> Server:
    _require(
        not hosts and path.startswith("/") and path != "/" and "\0" not in path,
        "must be unix:// and the absolute path of a socket, such as unix:///run/valkey.sock",
    )
    return Server(path, 0)


def _servers(hosts: str, topology: Topology) -> tuple[Server, ...]:
    default = SENTINEL_PORT if topology is Topology.SENTINEL else REDIS_PORT
    servers = tuple(_server(host, default) for host in hosts.split(","))
    _require(
        len(servers) == 1 or topology is not Topology.STANDALONE,
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


def _database(names: tuple[str, ...], options: Mapping[str, str], topology: Topology) -> int:
    given = [*names, *([options["db"]] if "db" in options else [])]
    text = given[0] if given else "0"
    _require(
        len(given) <= 1
        and re.fullmatch(r"[0-9]{1,5}", text) is not None
        and int(text) <= MAX_DATABASE,
        f"must name at most one database, by a number from 0 to {MAX_DATABASE}",
    )
    _require(
        topology is not Topology.CLUSTER or not int(text), "must name no database with a cluster"
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
    _require(
        bool(files.certfile) == bool(files.keyfile),
        "must have both or none of ssl_certfile, ssl_keyfile",
    )
    return files


def _require(condition: object, message: str) -> None:
    if not condition:
        raise ValueError(message)


# What DATABASE_URL may say: a SQLite file, or a PostgreSQL database with the options that libpq's users expect.
#
# Never connects, and never puts any of the URL into a message: it may hold a password. See ADR 0024.

SSL_MODES: Final = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
"""Of libpq. The default is its own, too: prefer, which TLS is tried with, but nobody is verified."""

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
"""What may stand behind the question mark. The driver would hand any other to the server, which refuses most."""

_SQLITE: Final = "sqlite:///"

_POSTGRESQL: Final = re.compile(
    r"(?:postgresql|postgres)://"
    r"(?:[^\s:@/?#\[\]]*(?::[^\s:@/?#\[\]]*)?@)?"
    r"(?P<hosts>[^\s@/?#]*)"
    r"/(?P<name>[^\s@/?#]+)"
    r"(?:\?(?P<query>[^\s#]*))?"
)
_HOST: Final = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[^\s:,\[\]]+)(?::(?P<port>[0-9]{1,5}))?")
_ESCAPE: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")


class SqliteFile(NamedTuple):
    """``sqlite:///PATH``; PATH is taken as it stands, absolute with a fourth slash."""

    path: Path

    @property
    def place(self) -> str:
        """What a message calls it."""
        return str(self.path)


class PostgresqlServer(NamedTuple):
    """``postgresql://user:password@host:port/database?options``, as the driver takes it."""

    dsn: str
    place: str
    """What a message calls it: hosts and database, without user and password."""

    def __repr__(self) -> str:
        """Without the password."""
        return f"PostgresqlServer({self.place!r})"


DatabaseUrl = SqliteFile | PostgresqlServer


def parse_database_url(text: str) -> DatabaseUrl:
    """What ``text`` names.

    Raises:
        ValueError: it names neither; the message is the end of a sentence that begins with the setting's name.
    """
    if text.startswith(("postgresql", "postgres:")):
        return _postgresql(text)
    file = text.removeprefix(_SQLITE)
    if file in {text, "", ":memory:"}:
        message = (
            "must be sqlite:///PATH, with a fourth slash for an absolute path,"
            " or postgresql://user:password@host:port/database"
        )
        raise ValueError(message)
    return SqliteFile(Path(file))


def _postgresql(text: str) -> PostgresqlServer:
    match = _POSTGRESQL.fullmatch(text)
    hosts = match["hosts"].split(",") if match and match["hosts"] else []
    if match is None or _ESCAPE.search(text) or not all(map(_is_host, hosts)):
        message = (
            "must be postgresql://user:password@host:port/database;"
            " in user and password @ is %40, / is %2F, : is %3A and % is %25"
        )
        raise ValueError(message)
    options = _database_url_options(match["query"] or "")
    where = match["hosts"] or options.get("host", "localhost")
    return PostgresqlServer(text, f"{where}/{unquote(match['name'])}")


def _is_host(text: str) -> bool:
    match = _HOST.fullmatch(text)
    return match is not None and int(match["port"] or 0) <= MAX_PORT


def _database_url_options(query: str) -> dict[str, str]:
    pairs = [pair.partition("=")[::2] for pair in query.split("&")] if query else []
    options = {name: unquote(value) for name, value in pairs}
    if len(options) < len(pairs) or not all(options.values()):
        message = "names a parameter twice, or without a value"
        raise ValueError(message)
    if not options.keys() <= PARAMETERS:
        message = f"names an unknown parameter; known are {', '.join(sorted(PARAMETERS))}"
        raise ValueError(message)
    if options.get("sslmode", SSL_MODES[0]) not in SSL_MODES:
        message = f"names an unknown sslmode; known are {', '.join(SSL_MODES)}"
        raise ValueError(message)
    if not re.fullmatch(r"[0-9]{1,5}", options.get("port", "1")):
        message = "names a port that is no number"
        raise ValueError(message)
    return options
