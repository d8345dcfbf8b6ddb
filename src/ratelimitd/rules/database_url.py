"""What DATABASE_URL may say: a SQLite file, or a PostgreSQL database with the options that libpq's users expect.

Never connects, and never puts any of the URL into a message: it may hold a password. See ADR 0024.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import unquote

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

MAX_PORT: Final = 65_535


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


def parse(text: str) -> DatabaseUrl:
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
    options = _options(match["query"] or "")
    where = match["hosts"] or options.get("host", "localhost")
    return PostgresqlServer(text, f"{where}/{unquote(match['name'])}")


def _is_host(text: str) -> bool:
    match = _HOST.fullmatch(text)
    return match is not None and int(match["port"] or 0) <= MAX_PORT


def _options(query: str) -> dict[str, str]:
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
