"""Parses the text of a setting to a value, and formats the value again.

Every parser raises ``ValueError`` with the end of a sentence that begins with the setting's name ("must be …"), and
quotes nothing of the text, which may be a secret.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple, TypeVar
from urllib.parse import unquote

from ratelimitd.model import EVERYBODY, MAX_IDENTITIES, TYPE_NAME, IdentifierType
from ratelimitd.settings.urls import MAX_PORT, parse_database_url, parse_redis_url, require
from ratelimitd_wire.addresses import UNIX, ClientAddresses

T = TypeVar("T")

MASK: Final = "********"

MAX_TOKEN_CHARACTERS: Final = 1024
MAX_NODE_ID_CHARACTERS: Final = 128
MIN_KEY_SECRET_BYTES: Final = 16
MAX_KEY_SECRET_BYTES: Final = 64
"""The longest key BLAKE2b takes."""

FORWARDED_FOR: Final = "x-forwarded-for"

MAX_TEMPLATES: Final = 256
"""Path templates are tried in order: a path that matches none takes some 0.2 ms."""
MAX_ENDPOINT_CHARS: Final = 255
"""As in rules."""

_SEGMENT: Final = r"(?:(?![:<]|\.{1,2}(?:/|$))[^/{}*?#%\s]*|\{\w+\})"
PATH_TEMPLATE: Final = re.compile(
    r"(?:(?P<method>[A-Z]+) )?(?P<host>[a-z0-9-]+(?:\.[a-z0-9-]+)+)?"
    rf"(?P<path>(?:/{_SEGMENT})*/(?:{_SEGMENT}|\{{\w+\.\.\.\}}))"
)
"""Syntax of Go's ServeMux. Refuses ``*``, ``%`` and other frameworks' ``:name`` and ``<name>``, which would be literal
and are seldom meant so, dot segments, which no request has any more, and a host without a dot, which is mostly a path
without its slash.
"""

UNMATCHED: Final = "unmatched"
"""Endpoint of paths without a template, as in the Python middleware: clients cannot invent endpoints."""

WHY_UNMATCHED: Final = (
    f"{UNMATCHED}: paths without a template in AUTH_ENDPOINTS,"
    " or of a proxy that is not in TRUSTED_PROXIES"
)

_PASSWORD_BEFORE_HOST: Final = re.compile(r"(://[^:@/?#]*:).*@")
"""Greedy, up to the last ``@``: masks a password with an unescaped ``/`` or ``@`` whole."""

_SECRET_OPTION: Final = re.compile(r"(?i)password|passwd|secret|token")


class Address(NamedTuple):
    """A host and a TCP port to listen on; port 0 lets the system choose."""

    host: str
    port: int

    def __str__(self) -> str:
        """Return ``host:port``, an IPv6 host in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def address(text: str) -> Address:
    """Parse ``HOST:PORT``, an IPv6 host in brackets."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:\[\]]+)):([0-9]{1,5})", text)
    if match is None or int(match[3]) > MAX_PORT:
        message = "must be HOST:PORT, such as 127.0.0.1:9090 or [::]:9090"
        raise ValueError(message)
    return Address(match[1] or match[2], int(match[3]))


def optional(parse: Callable[[str], T]) -> Callable[[str], T | None]:
    """Return a parser that maps empty text to ``None``, and other text by ``parse``."""
    return lambda text: parse(text) if text else None


def path(text: str) -> Path:
    """Parse a path, which need not exist."""
    require(text and "\0" not in text, "must be a path")
    return Path(text)


def one_of(*choices: str) -> Callable[[str], str]:
    """Return a parser of exactly one of ``choices``."""

    def parse(text: str) -> str:
        require(text in choices, f"must be {', '.join(choices[:-1])} or {choices[-1]}")
        return text

    return parse


def on_off(text: str) -> bool:
    """Parse ``on`` or ``off``."""
    return one_of("on", "off")(text) == "on"


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """Return a parser of integers from ``low`` to ``high`` in ASCII digits."""

    def parse(text: str) -> int:
        fits = re.fullmatch(r"[0-9]{1,18}", text) and low <= int(text) <= high
        require(fits, f"must be a whole number from {low} to {high}")
        return int(text)

    return parse


def fraction(text: str) -> float:
    """Parse a number from 0 to 1, in decimal digits."""
    fits = re.fullmatch(r"0|1|1\.0{1,9}|0?\.[0-9]{1,9}", text)
    require(fits, "must be a number from 0 to 1, such as 0.1")
    return float(text)


def optional_url(text: str) -> str:
    """Parse an ``http`` or ``https`` URL without user and password, which would be shown; empty = none."""
    fits = not text or re.fullmatch(r"https?://[^\s@/?#]+(?:/[^\s@?#]*)?", text)
    require(fits, "must be http://HOST:PORT or https://HOST:PORT, without a user")
    return text


def names(text: str) -> tuple[str, ...]:
    """Parse names separated by commas and optional spaces; empty = none."""
    found = tuple(name.strip() for name in text.split(",")) if text.strip() else ()
    fits = all(name and name.isprintable() for name in found)
    require(fits, "must be names separated by commas")
    return found


def host_names(text: str) -> tuple[str, ...]:
    """Parse names of hosts separated by commas, as clients send them without the port; empty = none."""
    found = names(text)
    # A scheme, a port or a wildcard would match no request.
    fits = all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in found)
    require(fits, "must be names of hosts without scheme and port, separated by commas")
    return found


def certificate_names(text: str) -> tuple[str, ...]:
    """Parse subject alternative names separated by commas, IP addresses in any notation; empty = none."""
    return tuple(map(_canonical_ip, names(text)))


def _canonical_ip(name: str) -> str:
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name


def proxies(text: str) -> tuple[str, ...]:
    """Parse addresses and networks of proxies, and ``unix``, separated by commas; empty = none."""
    found = names(text)
    try:
        ClientAddresses(found)
    except ValueError:
        message = "must be IP addresses, networks or unix, separated by commas"
        raise ValueError(message) from None
    return found


def covers_everything(found: tuple[str, ...]) -> bool:
    """Return whether one of these proxies is a network of all addresses."""
    networks = (name for name in found if name != UNIX)
    return any(ipaddress.ip_network(name, strict=False).prefixlen == 0 for name in networks)


def user_header(text: str) -> str:
    """Parse the name of a header that only a proxy sets; empty = none."""
    fits = re.fullmatch(r"[A-Za-z0-9-]{0,64}", text) and text.lower() not in _OTHER_HEADERS
    require(fits, "must be the name of a header that the proxy sets, such as X-Forwarded-Email")
    return text


_OTHER_HEADERS: Final = frozenset(
    {"accept", "authorization", "connection", "content-length", "content-type", "cookie", "forwarded", "host", "origin",
     "referer", "user-agent", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto"}
)  # fmt: skip
"""Headers with another meaning, which callers send themselves."""


def identifier_keys(text: str) -> Mapping[str, str]:
    """Parse ``KEY=TYPE`` separated by commas, TYPE an identifier type, to types by key; empty = none."""
    pairs = [pair.rpartition("=") for pair in names(text)]
    found = {key: kind for key, _, kind in pairs}
    require(
        all(found) and len(found) == len(pairs) and all(map(_is_type, found.values())),
        "must be KEY=TYPE separated by commas, each KEY once, TYPE an identifier type",
    )
    return found


def identifier_headers(text: str) -> Mapping[str, str]:
    """Parse ``HEADER=TYPE`` as :func:`identifier_keys`; X-Forwarded-For is an address. Header names in lower case."""
    keys = identifier_keys(text)
    found = {header.lower(): kind for header, kind in keys.items()}
    others = [kind for kind in found.values() if kind != IdentifierType.IP]
    require(
        len(found) == len(keys)
        and len({*others}) == len(others)
        and len({*found.values()}) <= MAX_IDENTITIES
        and all(re.fullmatch(r"[a-z0-9_-]+", header) for header in found)
        and found.get(FORWARDED_FOR, IdentifierType.IP) == IdentifierType.IP,
        f"must be HEADER=TYPE separated by commas, each HEADER and each TYPE but ip once, {FORWARDED_FOR}=ip, at"
        f" most {MAX_IDENTITIES} types",
    )
    return found


def path_templates(text: str) -> tuple[str, ...]:
    """Parse path templates, ``[METHOD ][HOST]/path/{name}/{rest...}``, separated by commas; empty = none."""
    found = names(text)
    require(
        len(found) <= MAX_TEMPLATES
        and len(set(found)) == len(found)
        and all(PATH_TEMPLATE.fullmatch(one) and len(one) <= MAX_ENDPOINT_CHARS for one in found)
        and not any(one.startswith("HEAD ") for one in found),  # HEAD counts as GET
        f"must be at most {MAX_TEMPLATES} templates of at most {MAX_ENDPOINT_CHARS} characters, each once, separated by"
        " commas: [METHOD ][HOST]/path, where {name} (not :name) is a whole segment and {name...} the rest; GET"
        " includes HEAD",
    )
    return found


def identifier_types(text: str) -> tuple[str, ...]:
    """Parse identifier types in addition to those of the contract, separated by commas; empty = none."""
    found = names(text)
    all_types = (*found, *IdentifierType)
    require(
        all(map(_is_type, found)) and len({*all_types}) == len(all_types),
        f"must be names of a-z, 0-9 and _, a letter first, at most 32 characters, each once, none of"
        f" {', '.join(IdentifierType)}, {EVERYBODY}",
    )
    return found


def _is_type(name: str) -> bool:
    return name != EVERYBODY and TYPE_NAME.fullmatch(name) is not None


def token(text: str) -> str:
    """Parse a bearer token (RFC 6750 section 2.1); empty = none."""
    require(
        re.fullmatch(r"(?:[A-Za-z0-9._~+/-]+=*)?", text) and len(text) <= MAX_TOKEN_CHARACTERS,
        f"must be at most {MAX_TOKEN_CHARACTERS} letters, digits and -._~+/, = at the end",
    )
    return text


def key_secret(text: str) -> bytes:
    """Parse a secret to its UTF-8 bytes; empty = none."""
    secret = text.encode(errors="surrogateescape")
    fits = not secret or MIN_KEY_SECRET_BYTES <= len(secret) <= MAX_KEY_SECRET_BYTES
    require(fits, f"must have {MIN_KEY_SECRET_BYTES} to {MAX_KEY_SECRET_BYTES} bytes")
    return secret


def node_id(text: str) -> str:
    """Parse a name in visible ASCII, as it is a log field and part of a line on stdout; empty = host:pid."""
    fits = re.fullmatch(r"[!-~]*", text) and len(text) <= MAX_NODE_ID_CHARACTERS
    require(
        fits, f"must be at most {MAX_NODE_ID_CHARACTERS} visible ASCII characters without spaces"
    )
    return text


def database_url(text: str) -> str:
    """Validate a database URL, see :func:`ratelimitd.settings.urls.parse_database_url`."""
    parse_database_url(text)
    return text


def redis_url(text: str) -> str:
    """Validate a URL, see :func:`ratelimitd.settings.urls.parse_redis_url`; empty = none."""
    if text:
        parse_redis_url(text)
    return text


def shown(value: object) -> str:
    """Return a value as text that could be set again."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple) and not isinstance(value, Address):
        return ",".join(value)
    if isinstance(value, Mapping):
        return ",".join(map("=".join, value.items()))
    return "" if value is None else str(value)


def masked(value: object) -> str:
    """Return a mask for a secret that is set."""
    return MASK if value else ""


def masked_url(url: str) -> str:
    """Return a URL without its passwords, before the host and in the query."""
    before, mark, query = url.partition("?")
    options = "&".join(map(_masked_option, query.split("&")))
    return _PASSWORD_BEFORE_HOST.sub(rf"\g<1>{MASK}@", before) + mark + options


def _masked_option(option: str) -> str:
    name, equals, _ = option.partition("=")
    return f"{name}={MASK}" if equals and _SECRET_OPTION.search(unquote(name)) else option
