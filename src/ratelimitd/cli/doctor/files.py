"""Checks of files that settings name: usable, and private if secret."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

from ratelimitd.backtest.recorder import FILE_NAME as TRACE_NAME
from ratelimitd.buckets.state_dir import LOCK_NAME, is_held
from ratelimitd.cli.doctor.finding import Finding, ok, problem, warning
from ratelimitd.errors import RuleInvalidError, StartupError
from ratelimitd.node.admin_token import FILE_NAME, read_admin_token
from ratelimitd.rpc.tls import CertificateSource, TlsFiles, validities
from ratelimitd.rules.rules_file import parse_rules
from ratelimitd.settings.table import Settings
from ratelimitd.settings.urls import parse_redis_url

_DAY: Final = "%Y-%m-%d %H:%M UTC"

SOON: Final = timedelta(days=14)
"""A certificate that expires within this time is reported."""

MAX_NAMES: Final = 10
"""Maximum number of expired tokens named."""

LITTLE_SPACE_BYTES: Final = 256 * 1024 * 1024
"""Free space to warn below: rewriting the bucket files of a million buckets takes about half of it."""


def check_secrets(secret_files: Mapping[str, Path]) -> Iterator[Finding]:
    """Check files with secrets, by the name of their setting."""
    for name, path in secret_files.items():
        yield _privacy(name, path) or ok(name, f"{path} is private")


def check_admin_token(settings: Settings) -> Iterator[Finding]:
    """Check the token that a node generates if no configured credential has the admin role."""
    if not settings.has_own_admin_token:
        for line in settings.warnings:
            yield warning(
                "LOOPBACK_ADMIN", line, "set ADMIN_TOKEN_FILE, and leave LOOPBACK_ADMIN out"
            )
        return
    path = settings.state_dir / FILE_NAME
    shared = bool(settings.redis_url) or settings.database_url.startswith("postgresql")
    try:
        made = read_admin_token(path) is not None
    except StartupError as error:
        yield problem("ADMIN_TOKEN", str(error), f"run as the node's user; see {path}")
        return
    what = f"not set: {path} {'holds one' if made else 'will be made at the first start'}"
    if shared:
        remedy = "give all nodes one ADMIN_TOKEN_FILE: otherwise each generates its own token"
        yield warning("ADMIN_TOKEN", what, remedy)
    else:
        yield ok(
            "ADMIN_TOKEN", f"{what}; elsewhere, give a copy to --token-file or to the login page"
        )


def check_tls(settings: Settings, now: datetime) -> Iterator[Finding]:
    """Check the server's certificate, its key and the CA of client certificates."""
    files = TlsFiles.of(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
    if files is None:
        if not _is_loopback(settings.listen.host):
            yield warning(
                "TLS_CERT",
                f"not set: on {settings.listen} anyone on the network path can read identifiers and"
                " tokens, and forge answers",
                "set TLS_CERT and TLS_KEY, or listen where only a proxy with TLS can reach",
            )
        return
    listen = settings.http_listen
    if listen is not None and not (settings.http_tls or _is_loopback(listen.host)):
        what = (
            f"off: on {listen} anyone on the network path can read tokens and sessions of the page"
        )
        yield warning(
            "HTTP_TLS", what, "set it on, or listen where only a proxy with TLS can reach"
        )
    reported: list[str] = []
    try:
        certificates = CertificateSource(
            files, reported.append, is_grpcio=settings.transport == "grpcio"
        ).current()
    except StartupError as error:
        setting, _, what = str(error).partition(": ")
        remedy = "replace the file; a running node keeps the old certificate, and loads the new one"
        yield problem(setting, what, remedy)
        return
    for line in reported:
        setting, _, what = line.partition(": ")
        yield warning(setting, what, "issue a certificate with a key of one of these kinds")
    yield _expiry("TLS_CERT", certificates.chain, now)
    if certificates.client_ca is not None:
        yield _expiry("TLS_CLIENT_CA", certificates.client_ca, now)
    yield _privacy("TLS_KEY", files.key) or ok("TLS_KEY", f"{files.key} is private")


def check_store_certificate(settings: Settings, now: datetime) -> Iterator[Finding]:
    """Check a node's certificate for the shared state, and its key; unusable ones fail the check of the connection."""
    files = parse_redis_url(settings.redis_url).tls if settings.redis_url else None
    if files is None or not files.certfile:
        return
    with suppress(OSError, ValueError, IndexError):
        found = _expiry("REDIS_URL", Path(files.certfile).read_bytes(), now)
        yield found._replace(what=f"{files.certfile}: {found.what}")
        key = Path(files.keyfile)
        yield _privacy("REDIS_URL", key) or ok("REDIS_URL", f"{key} is private")


def check_record_dir(settings: Settings) -> Iterator[Finding]:
    """Check the directory of recorded checks."""
    path = settings.record_dir
    if path is None:
        return
    if found := _unless_writable("RECORD_DIR", path):
        yield found
        return
    to_come = settings.record_bytes - _trace_bytes(path)
    remedy = "free disk space, or lower RECORD_BYTES: checks that cannot be written are lost"
    yield _little_space("RECORD_DIR", path, to_come, remedy) or ok(
        "RECORD_DIR", f"{path} is writable"
    )


def _trace_bytes(directory: Path) -> int:
    total = 0
    for path in directory.iterdir():
        if TRACE_NAME.fullmatch(path.name):
            with suppress(OSError):  # a running node renames and removes its files
                total += path.stat().st_size
    return total


def check_rules_file(settings: Settings) -> Iterator[Finding]:
    """Check the file that seeds a new rule book."""
    # Imports the stores, which other commands do without.
    from ratelimitd.node.startup import read_rules_file  # noqa: PLC0415

    path = settings.rules_file
    if path is None:
        return
    try:
        found = len(parse_rules(read_rules_file(path), settings.known_types))
    except OSError as error:
        yield problem(
            "RULES_FILE", f"cannot read {path}: {error.strerror}", "give the path of a file"
        )
    except RuleInvalidError as error:
        for violation in error.violations:
            yield problem(
                "RULES_FILE", f"{violation.field}: {violation.description}", f"mend {path}"
            )
    else:
        yield ok("RULES_FILE", f"{found} rules")


def check_tokens_file(settings: Settings, now: datetime) -> Iterator[Finding]:
    """Check the file of named tokens."""
    # Imports the services, which other commands do without.
    from ratelimitd.node.tokens_file import read_tokens  # noqa: PLC0415

    path = settings.tokens_file
    if path is None:
        return
    try:
        others = {settings.admin_token: "ADMIN_TOKEN", settings.check_token: "CHECK_TOKEN"}
        tokens = read_tokens(path, others)
    except StartupError as error:
        remedy = "fix it; a running node keeps the tokens it has read, and loads the fixed file"
        yield problem("TOKENS_FILE", str(error).partition(": ")[2], remedy)
        return
    expired = [token.name for token in tokens if token.expires_s <= now.timestamp()]
    if expired:
        what = f"expired: {', '.join(expired[:MAX_NAMES])}{', …' * (len(expired) > MAX_NAMES)}"
        yield warning("TOKENS_FILE", what, "remove them, or give them new tokens")
    users = sum(not token.digest for token in tokens)
    if users and not settings.user_header:
        yield warning(
            "TOKENS_FILE", f"{users} users without sha256", "set USER_HEADER, or remove them"
        )
    yield _privacy("TOKENS_FILE", path) or ok("TOKENS_FILE", f"{len(tokens)} tokens")


def check_state_dir(settings: Settings) -> Iterator[Finding]:
    """Check the state directory; with several processes, that of the parent."""
    path = settings.state_dir
    if found := _unless_writable("STATE_DIR", path):
        yield found
        return
    remedy = "free disk space: buckets that cannot be written are lost when the process ends"
    if found := _little_space("STATE_DIR", path, LITTLE_SPACE_BYTES, remedy):
        yield found
    try:
        state = "in use by a running node" if _is_locked(path / LOCK_NAME) else "free"
    except OSError as error:
        yield problem(
            "STATE_DIR", f"{path} cannot be locked: {error.strerror}", "use another file system"
        )
        return
    yield _privacy("STATE_DIR", path) or ok("STATE_DIR", f"{path} is private, {state}")


def _unless_writable(area: str, path: Path) -> Finding | None:
    """Return a finding on a directory that a node must make first, or cannot write into."""
    if not path.exists():
        parent = next(parent for parent in path.absolute().parents if parent.exists())
        if parent.is_dir() and os.access(parent, os.W_OK | os.X_OK):
            return ok(area, f"{path} will be made")
        what = f"{path} cannot be made in {parent}"
        return problem(area, what, "make it, owned by the node's user")
    if not path.is_dir():
        return problem(area, f"{path} is not a directory", "give the path of a directory")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        what = f"{path} is not writable"
        return problem(area, what, "give it to the node's user, mode 0700")
    return None


def _little_space(area: str, path: Path, needed: int, remedy: str) -> Finding | None:
    free = shutil.disk_usage(path).free
    if free >= needed:
        return None
    what = f"{free // 1024 // 1024} MiB are free, and up to {-(-needed // 1024 // 1024)} are needed"
    return warning(area, what, remedy)


def _is_locked(path: Path) -> bool:
    try:
        with path.open("rb") as lock:
            return is_held(lock.fileno())
    except FileNotFoundError:
        return False


def _privacy(area: str, path: Path) -> Finding | None:
    """Return a finding if too many users can read a file. Allows a group, which may be dedicated to it."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        remedy = "put it there, readable by the node's user"
        return problem(area, f"cannot look at {path}: {error.strerror}", remedy)
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        right = "written" if mode & stat.S_IWOTH else "read"
        return warning(
            area, f"{path} can be {right} by every user of this machine", f"chmod o= {path}"
        )
    return None


def _expiry(area: str, pem: bytes, now: datetime) -> Finding:
    found = validities(pem.decode("ascii", "ignore"))
    first, end = found[0], min(each.ends for each in found)
    if first.begins > now:  # those after it are of authorities
        what = f"not valid before {first.begins:{_DAY}}"
        return problem(area, what, "wait, replace it, or correct this machine's clock")
    day = f"{end:{_DAY}}"
    if end <= now:
        return problem(area, f"expired on {day}", "replace it; a running node loads it")
    if end - now < SOON:
        return warning(area, f"expires on {day}", "renew it; a running node loads the new one")
    return ok(area, f"valid until {day}")


def _is_loopback(host: str) -> bool:
    return host in {"localhost", "::1"} or host.startswith("127.")
