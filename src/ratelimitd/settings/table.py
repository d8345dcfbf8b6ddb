"""The settings of a node: names, defaults, bounds, descriptions, and forbidden combinations.

One frozen value, read once from the environment and the flags of ``serve``; it never shows a secret. To add a setting,
add a row here and in ``docs/operations.md``, and read the attribute where it is used. See ADR 0019.
"""

from __future__ import annotations

import os
import socket
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, Self

from ratelimitd.errors import SettingsError
from ratelimitd.model import IdentifierType
from ratelimitd.settings import sources as lookup
from ratelimitd.settings.parsing import (
    Address,
    address,
    certificate_names,
    covers_everything,
    database_url,
    fraction,
    host_names,
    identifier_headers,
    identifier_keys,
    identifier_types,
    key_secret,
    masked,
    masked_url,
    node_id,
    on_off,
    one_of,
    optional,
    optional_url,
    path,
    path_templates,
    proxies,
    redis_url,
    shown,
    token,
    user_header,
    whole_number,
)
from ratelimitd_wire.ratelimit_headers import NEWEST_REVISION, REVISIONS

WORKER_RECORD_BYTES: Final = 10_000_000
"""Smallest part of RECORD_BYTES for a worker: 16 files of some blocks each."""

CLOSING_SHARE: Final = 0.3
MAX_CLOSING_S: Final = 3.0
"""Part of DRAIN_S reserved for writing buckets and closing stores after the last call."""

STATE_DIR_SOURCE: Final = "state directory"
"""Source of values that a parent makes for its workers: an admin token, the URL of a private store."""


class SettingSpec(NamedTuple):
    """One setting; ``default`` is text, parsed like any other."""

    default: str
    parse: Callable[[str], Any]
    help: str
    show: Callable[[Any], str] = shown
    filled: bool = False
    """Whether an empty text is refused: a deployment that lost the value must not open the node."""
    name: str = ""

    @property
    def secret(self) -> bool:
        """Whether the value is never shown whole, and may come from a file."""
        return self.show is not shown


class SettingInUse(NamedTuple):
    """One row of ``config show``: the value (secrets masked) and its source.

    ``source`` is ``default``, ``environment``, ``flag`` or ``file``.
    """

    name: str
    value: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Settings:
    """Every setting of a node; built and validated by :meth:`load`.

    Attribute ``http_listen`` is ``RATELIMITD_HTTP_LISTEN`` in the environment and the flag ``--http-listen``.
    """

    # A table: one setting per line where it fits.
    # fmt: off
    listen: Annotated[Address, SettingSpec("127.0.0.1:9090", address,
        "gRPC address as HOST:PORT; port 0 picks a free one")]
    http_listen: Annotated[Address | None, SettingSpec("127.0.0.1:8080", optional(address),
        "HTTP address for the page, JSON, metrics and probes; empty = off")]
    http_hosts: Annotated[tuple[str, ...], SettingSpec("", host_names,
        "further Host names of the HTTP page, comma-separated")]
    database_url: Annotated[str, SettingSpec("sqlite:///ratelimitd.db", database_url,
        "rule database, sqlite:///PATH or postgresql://…", masked_url)]
    redis_url: Annotated[str, SettingSpec("", redis_url,
        "shared state of a cluster; empty = this node's memory", masked_url)]
    redis_timeout_ms: Annotated[int, SettingSpec("20", whole_number(1, 1000),
        "longest wait of a check for one round trip to the shared state, ms")]
    state_dir: Annotated[Path, SettingSpec("./ratelimitd-state", path,
        "directory of the bucket snapshot and the last good rule book")]
    consistency: Annotated[str, SettingSpec("eventual", one_of("eventual", "strict"),
        "strict: the shared state decides every check")]
    accuracy: Annotated[str, SettingSpec("normal", one_of("normal", "tight"),
        "tight: a node of a cluster allows less before it asks the shared state")]
    timestamps: Annotated[str, SettingSpec("bounded", one_of("bounded", "server", "caller"),
        "which timestamps of callers are used")]
    on_breaker_open: Annotated[str, SettingSpec("fail_open", one_of("fail_open", "local", "deny"),
        "answer while the circuit breaker is open")]
    rules_file: Annotated[Path | None, SettingSpec("", optional(path), "YAML rules that seed a new rule book")]
    admin_token: Annotated[str, SettingSpec("", token,
        "bearer token of the admin role; unset = generated once, in STATE_DIR/admin-token", masked, filled=True)]
    check_token: Annotated[str, SettingSpec("", token,
        "bearer token of the check role; unset = everyone", masked, filled=True)]
    admin_sans: Annotated[tuple[str, ...], SettingSpec("", certificate_names,
        "SANs of client certificates with the admin role, comma-separated", filled=True)]
    check_sans: Annotated[tuple[str, ...], SettingSpec("", certificate_names,
        "SANs of client certificates with the check role, comma-separated", filled=True)]
    tokens_file: Annotated[Path | None, SettingSpec("", optional(path),
        "YAML or JSON of names with a role and the digest of a token; loaded again when it changes", filled=True)]
    loopback_admin: Annotated[bool, SettingSpec("off", on_off,
        "on: without ADMIN_TOKEN and ADMIN_SANS, callers from loopback have the admin role; unsafe behind a proxy")]
    trusted_proxies: Annotated[tuple[str, ...], SettingSpec("", proxies,
        "proxies whose X-Forwarded headers count for wrong tokens and /v1/auth, comma-separated; unix for a socket")]
    user_header: Annotated[str, SettingSpec("", user_header,
        "header in which TRUSTED_PROXIES name the user of a page, such as X-Forwarded-Email; empty = off")]
    key_secret: Annotated[bytes, SettingSpec("", key_secret,
        "key of the hash of bucket keys; unset = generated once, in the database", masked, filled=True)]
    tls_cert: Annotated[Path | None, SettingSpec("", optional(path),
        "server certificate chain, PEM", filled=True)]
    tls_key: Annotated[Path | None, SettingSpec("", optional(path),
        "private key of the certificate, PEM", filled=True)]
    tls_client_ca: Annotated[Path | None, SettingSpec("", optional(path),
        "CA of client certificates, PEM; enables mTLS", filled=True)]
    http_tls: Annotated[bool, SettingSpec("off", on_off,
        "on: HTTP_LISTEN speaks TLS with TLS_CERT and TLS_KEY; it asks for no client certificate")]
    workers: Annotated[int, SettingSpec("1", whole_number(1, 64),
        "processes on one port; without REDIS_URL more than 1 share a private Valkey")]
    transport: Annotated[str, SettingSpec("native", one_of("native", "grpcio"),
        "gRPC server: native, or Google's grpcio")]
    max_concurrent_rpcs: Annotated[int, SettingSpec("1000", whole_number(1, 100_000),
        "maximum calls in progress; others are answered RESOURCE_EXHAUSTED")]
    sync_interval_ms: Annotated[int, SettingSpec("100", whole_number(10, 60_000),  # batches of a sender are 10 ms apart
        "interval of batches of spends to the shared state, ms")]
    cache_entries: Annotated[int, SettingSpec("1000000", whole_number(1, 100_000_000),
        "maximum buckets in memory; the least recently used are evicted")]
    cache_ttl_s: Annotated[int, SettingSpec("300", whole_number(1, 3_000),  # the store drops one after an hour
        "lifetime of an unused bucket in the cache, s")]
    max_holds: Annotated[int, SettingSpec("100000", whole_number(1, 10_000_000),
        "maximum holds in flight that a node has made; more are refused")]
    max_holds_per_bucket: Annotated[int, SettingSpec("10000", whole_number(1, 100_000),
        "maximum holds in flight on one bucket; more are refused")]
    breaker_failures: Annotated[int, SettingSpec("5", whole_number(1, 1000),
        "failed round trips that open the circuit breaker")]
    breaker_silence_ms: Annotated[int, SettingSpec("1000", whole_number(100, 60_000),
        "silence of the shared state after which it counts as down, not slow, ms")]
    breaker_recovery_s: Annotated[int, SettingSpec("30", whole_number(1, 3600),
        "delay before an open circuit breaker probes, s")]
    drain_s: Annotated[int, SettingSpec("10", whole_number(0, 3600),
        "longest wait of a stopping node for calls in progress, s")]
    node_id: Annotated[str, SettingSpec("", node_id, "name of this node; empty = host:pid")]
    log_level: Annotated[str, SettingSpec("info", one_of("debug", "info", "warning", "error"),
        "minimum level that is logged")]
    log_format: Annotated[str, SettingSpec("auto", one_of("auto", "json", "console"),
        "auto: console on a terminal, else json")]
    record_dir: Annotated[Path | None, SettingSpec("", optional(path),
        "directory of the trace that checks are recorded to; empty = off")]
    record_share: Annotated[float, SettingSpec("0.01", fraction,
        "fraction of the identities whose checks are recorded, 0 to 1")]
    record_bytes: Annotated[int, SettingSpec("1000000000", whole_number(WORKER_RECORD_BYTES, 1_000_000_000_000),
        "maximum size of the trace of all WORKERS, bytes; the oldest checks are dropped")]
    otel_endpoint: Annotated[str, SettingSpec("", optional_url,
        "OTLP/HTTP collector of traces, http://HOST:4318; empty = off")]
    otel_sample_ratio: Annotated[float, SettingSpec("1", fraction,
        "fraction of the traces started by this node that are recorded, 0 to 1")]
    reflection: Annotated[bool, SettingSpec("on", on_off, "gRPC server reflection")]
    identifier_types: Annotated[tuple[str, ...], SettingSpec("", identifier_types,
        "identifier types of requests beside user, ip and api_key, such as tenant,model; comma-separated")]
    envoy_identifiers: Annotated[Mapping[str, str], SettingSpec(
        "remote_address=ip,ip=ip,user=user,user_id=user,x-user-id=user,api_key=api_key,authorization=api_key",
        identifier_keys, "Envoy descriptor keys that hold the identifier, with its type: KEY=TYPE, comma-separated")]
    envoy_fields: Annotated[str, SettingSpec("all", one_of("all", "standard", "none"),
        "header fields for Envoy to add; standard: no X-RateLimit-*")]
    ratelimit_headers: Annotated[str, SettingSpec(NEWEST_REVISION, one_of(*REVISIONS),
        "revision of the IETF draft that RateLimit fields follow, for /v1/check, /v1/auth and Envoy")]
    spoe_listen: Annotated[Address | None, SettingSpec("", optional(address),
        "address for HAProxy's stream processing offload (SPOE), decided like /v1/auth; empty = off")]
    auth_identifiers: Annotated[Mapping[str, str], SettingSpec("x-api-key=api_key,x-forwarded-for=ip",
        identifier_headers, "headers that identify callers of proxies for /v1/auth: HEADER=TYPE, comma-separated")]
    auth_endpoints: Annotated[tuple[str, ...], SettingSpec("", path_templates,
        "endpoints of /v1/auth by the path of the request, the first that matches: [METHOD ][HOST]/path/{name}")]
    # fmt: on

    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Setting name → ``environment``, ``flag`` or ``file``; absent = default."""

    @classmethod
    def load(cls, environ: Mapping[str, str], flags: Mapping[str, str | None]) -> Self:
        """Read every setting; a flag overrides the environment.

        Args:
            environ: the process environment.
            flags: setting name (``HTTP_LISTEN``; for a secret's file ``ADMIN_TOKEN_FILE``) → text, ``None`` = not
                given.

        Raises:
            SettingsError: names all wrong and unknown settings in one line, without secrets.
        """
        problems = lookup.unknown_names(environ, flags, _KNOWN)
        parsed: dict[str, Any] = {}
        origins: dict[str, str] = {}
        failed: set[str] = set()
        for setting in SETTINGS:
            name = setting.name
            parsed[name.lower()] = setting.parse(setting.default)
            try:
                found = lookup.find(name, environ, flags, with_file=setting.secret)
                if found is not None:
                    parsed[name.lower()] = _parse(setting, found)
                    origins[name] = found.source
            except SettingsError as error:
                problems.append(str(error))
                failed.add(name)
        settings = cls(**parsed, sources=origins)
        problems += [
            bad.problem
            for bad in _COMBINATIONS
            if failed.isdisjoint(bad.names) and bad.clashes(settings)
        ]
        if problems:
            raise SettingsError("; ".join(problems))
        return settings

    def describe(self) -> tuple[SettingInUse, ...]:
        """Return every setting in the order of the documentation, secrets masked, with its source."""
        return tuple(
            SettingInUse(
                setting.name,
                setting.show(getattr(self, setting.name.lower())),
                self.sources.get(setting.name, "default"),
            )
            for setting in SETTINGS
        )

    @property
    def node_name(self) -> str:
        """``node_id``, or ``host:pid`` of this process."""
        return self.node_id or f"{socket.gethostname()}:{os.getpid()}"

    @property
    def known_types(self) -> tuple[str, ...]:
        """The identifier types that requests may name."""
        return (*IdentifierType, *self.identifier_types)

    @property
    def has_own_admin_token(self) -> bool:
        """Whether the node makes its admin token, because no setting grants the admin role."""
        return not (self.admin_token or self.admin_sans or self.loopback_admin)

    @property
    def admin_token_name(self) -> str:
        """Origin of the admin token, as shown to callers."""
        made = self.has_own_admin_token or self.sources.get("ADMIN_TOKEN") == STATE_DIR_SOURCE
        return "in STATE_DIR/admin-token" if made else "ADMIN_TOKEN"

    def with_own_admin_token(self, made: str) -> Self:
        """Return these settings for a worker of a parent that made the admin token for all."""
        sources = {**self.sources, "ADMIN_TOKEN": STATE_DIR_SOURCE}
        return replace(self, admin_token=made, sources=sources)

    def state_dir_of(self, worker: int) -> Path:
        """Return the state directory of a worker, by its number."""
        return self.state_dir / f"worker-{worker}"

    def with_private_store(self, url: str) -> Self:
        """Return these settings for workers whose parent keeps their shared state, at ``url``."""
        return replace(self, redis_url=url, sources={**self.sources, "REDIS_URL": STATE_DIR_SOURCE})

    @property
    def warnings(self) -> Sequence[str]:
        """Warnings for the operator at each start, a line each."""
        if not self.loopback_admin:
            return ()
        line = (
            "LOOPBACK_ADMIN is on: every caller from loopback may change the rules, and behind a proxy on this host"
            " every caller comes from loopback"
        )
        if self.admin_token or self.admin_sans:
            line = "LOOPBACK_ADMIN has no effect: ADMIN_TOKEN or ADMIN_SANS is set"
        return (line,)

    @property
    def calls_s(self) -> float:
        """Part of DRAIN_S for calls in flight."""
        return self.drain_s - min(MAX_CLOSING_S, CLOSING_SHARE * self.drain_s)

    @property
    def http_names(self) -> frozenset[str]:
        """The Host names that pages are served for: those of HTTP_LISTEN and HTTP_HOSTS."""
        own = () if self.http_listen is None else (self.http_listen.host,)
        return frozenset((*own, *self.http_hosts))

    @property
    def http_scheme(self) -> str:
        """``https`` if HTTP_LISTEN speaks TLS, else ``http``."""
        return "https" if self.http_tls else "http"

    @property
    def http_socket(self) -> Path:
        """Socket of a worker's HTTP server, for its parent."""
        return self.state_dir / "http.sock"

    def __repr__(self) -> str:
        """Return the settings that are not defaults, secrets masked."""
        given = (f"{row.name}={row.value!r}" for row in self.describe() if row.source != "default")
        return f"Settings({', '.join(given)})"


SETTINGS: Final = tuple(
    hint.__metadata__[0]._replace(name=name.upper())
    for name, hint in typing.get_type_hints(
        Settings, globals(), globals(), include_extras=True
    ).items()
    if typing.get_origin(hint) is Annotated
)
"""Every setting, in the order of the documentation."""

_KNOWN: Final = frozenset(setting.name for setting in SETTINGS) | {
    lookup.file_of(setting.name) for setting in SETTINGS if setting.secret
}


def _parse(setting: SettingSpec, found: lookup.Found) -> object:
    if setting.filled and not found.text.strip():
        message = f"{found.origin} is empty: give it a value, or leave it out"
        raise SettingsError(message)
    try:
        return setting.parse(found.text)
    except ValueError as error:
        # With @ or ? it may be a URL with a password.
        unshown = setting.secret or "@" in found.text or "?" in found.text
        got = "" if unshown else f", not {found.text[:80]!r}"
        message = f"{found.origin} {error}{got}"
        raise SettingsError(message) from None


class _Combination(NamedTuple):
    """A forbidden combination; not checked when one of ``names`` is invalid."""

    names: tuple[str, ...]
    clashes: Callable[[Settings], bool]
    problem: str


_COMBINATIONS: Final = (
    _Combination(
        ("AUTH_IDENTIFIERS", "IDENTIFIER_TYPES"),
        lambda s: not {*s.auth_identifiers.values()} <= {*s.known_types},
        "AUTH_IDENTIFIERS: each TYPE must be user, ip, api_key or one of IDENTIFIER_TYPES",
    ),
    _Combination(
        ("ENVOY_IDENTIFIERS", "IDENTIFIER_TYPES"),
        lambda s: not {*s.envoy_identifiers.values()} <= {*s.known_types},
        "ENVOY_IDENTIFIERS: each TYPE must be user, ip, api_key or one of IDENTIFIER_TYPES",
    ),
    _Combination(
        ("CONSISTENCY", "ON_BREAKER_OPEN", "REDIS_URL", "WORKERS"),
        lambda s: (
            s.consistency == "strict"
            and s.on_breaker_open == "local"
            and (bool(s.redis_url) or s.workers > 1)
        ),
        "ON_BREAKER_OPEN: local needs CONSISTENCY=eventual, because a strict node has no buckets to decide"
        " by and would allow everything; choose fail_open or deny",
    ),
    _Combination(
        ("TLS_CERT", "TLS_KEY"),
        lambda s: (s.tls_cert is None) != (s.tls_key is None),
        "TLS_CERT and TLS_KEY are set together or not at all",
    ),
    _Combination(
        ("HTTP_TLS", "TLS_CERT"),
        lambda s: s.http_tls and s.tls_cert is None,
        "HTTP_TLS needs TLS_CERT and TLS_KEY",
    ),
    _Combination(
        ("TLS_CERT", "TLS_CLIENT_CA"),
        lambda s: s.tls_client_ca is not None and s.tls_cert is None,
        "TLS_CLIENT_CA needs TLS_CERT and TLS_KEY: client certificates are shown on TLS connections only",
    ),
    _Combination(
        ("ADMIN_SANS", "CHECK_SANS", "TLS_CLIENT_CA"),
        lambda s: bool(s.admin_sans or s.check_sans) and s.tls_client_ca is None,
        "ADMIN_SANS and CHECK_SANS need TLS_CLIENT_CA, which verifies the certificates that carry them",
    ),
    _Combination(
        ("ADMIN_TOKEN", "CHECK_TOKEN"),
        lambda s: bool(s.admin_token) and s.admin_token == s.check_token,
        "ADMIN_TOKEN and CHECK_TOKEN are equal: every caller that may check could change the rules",
    ),
    _Combination(
        ("TOKENS_FILE", "LOOPBACK_ADMIN"),
        lambda s: s.tokens_file is not None and s.loopback_admin,
        "LOOPBACK_ADMIN and TOKENS_FILE exclude each other: a caller from loopback would need no token",
    ),
    _Combination(
        ("USER_HEADER", "TRUSTED_PROXIES", "TOKENS_FILE"),
        lambda s: bool(s.user_header) and not (s.trusted_proxies and s.tokens_file),
        "USER_HEADER needs TRUSTED_PROXIES, which may send it, and TOKENS_FILE, which has the roles of the users",
    ),
    _Combination(
        ("USER_HEADER", "TRUSTED_PROXIES"),
        lambda s: bool(s.user_header) and covers_everything(s.trusted_proxies),
        "USER_HEADER and a network of all addresses in TRUSTED_PROXIES would let every caller be any user",
    ),
    _Combination(
        ("ADMIN_SANS", "CHECK_SANS"),
        lambda s: bool(set(s.admin_sans) & set(s.check_sans)),
        "ADMIN_SANS and CHECK_SANS share a name; the admin role includes the check role",
    ),
    _Combination(
        ("SPOE_LISTEN", "TRUSTED_PROXIES"),
        lambda s: s.spoe_listen is not None and not s.trusted_proxies,
        "SPOE_LISTEN needs TRUSTED_PROXIES: connections of other addresses are closed, and HAProxy lets requests pass",
    ),
    _Combination(
        ("RECORD_BYTES", "RECORD_DIR", "WORKERS"),
        lambda s: s.record_dir is not None and s.record_bytes < s.workers * WORKER_RECORD_BYTES,
        f"RECORD_BYTES must be at least {WORKER_RECORD_BYTES} for each of the WORKERS",
    ),
    _Combination(
        ("LISTEN", "HTTP_LISTEN"),
        lambda s: s.listen == s.http_listen and s.listen.port != 0,
        "LISTEN and HTTP_LISTEN are the same address",
    ),
    _Combination(
        ("LISTEN", "HTTP_LISTEN", "SPOE_LISTEN"),
        lambda s: (
            s.spoe_listen in {s.listen, s.http_listen}
            and bool(s.spoe_listen and s.spoe_listen.port)
        ),
        "SPOE_LISTEN is the same address as LISTEN or HTTP_LISTEN",
    ),
)
