"""Files that settings name: can they be used, and can others read what is secret in them?"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

from ratelimitd.admin_token import FILE_NAME, read_admin_token
from ratelimitd.buckets.state_dir import LOCK_NAME
from ratelimitd.cli.doctor.certificate import expiries
from ratelimitd.cli.doctor.finding import Finding, ok, problem, warning
from ratelimitd.errors import RuleInvalidError, StartupError
from ratelimitd.rpc.tls import CertificateSource, TlsFiles
from ratelimitd.rules.rules_file import MAX_FILE_BYTES, parse_rules
from ratelimitd.settings import Settings

SOON: Final = timedelta(days=14)
"""A certificate that expires within that time is told."""

LITTLE_SPACE_BYTES: Final = 256 * 1024 * 1024
"""The bucket files of a million buckets take about half of it while they are rewritten."""


def check_secrets(secret_files: Mapping[str, Path]) -> Iterator[Finding]:
    """Files with secrets, by the name of their setting."""
    for name, path in secret_files.items():
        yield _privacy(name, path) or ok(name, f"{path} is private")


def check_admin_token(settings: Settings) -> Iterator[Finding]:
    """The token that a node makes itself, where nothing that is set holds the admin role."""
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
        remedy = "give all nodes one ADMIN_TOKEN_FILE: each makes a token of its own otherwise"
        yield warning("ADMIN_TOKEN", what, remedy)
    else:
        yield ok(
            "ADMIN_TOKEN", f"{what}; elsewhere, give a copy to --token-file or to the login page"
        )


def check_tls(settings: Settings, now: datetime) -> Iterator[Finding]:
    """The server's certificate, its key and the CA of client certificates."""
    if settings.tls_cert is None or settings.tls_key is None:
        if not _is_loopback(settings.listen.host):
            yield warning(
                "TLS_CERT",
                f"not set: on {settings.listen} whoever is between can read identifiers and tokens, and answer",
                "set TLS_CERT and TLS_KEY, or listen where only a proxy with TLS can reach",
            )
        return
    files = TlsFiles(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
    try:
        certificates = CertificateSource(files, lambda _line: None).load()
    except StartupError as error:
        setting, _, what = str(error).partition(": ")
        yield problem(setting, what, "put a PEM file there that the node may read")
        return
    yield _expiry("TLS_CERT", certificates.chain, now)
    if certificates.client_ca is not None:
        yield _expiry("TLS_CLIENT_CA", certificates.client_ca, now)
    yield _privacy("TLS_KEY", settings.tls_key) or ok("TLS_KEY", f"{settings.tls_key} is private")


def check_rules_file(settings: Settings) -> Iterator[Finding]:
    """The file that seeds a new rule book."""
    path = settings.rules_file
    if path is None:
        return
    try:
        with path.open("rb") as file:
            found = len(parse_rules(file.read(MAX_FILE_BYTES + 1)))
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


def check_state_dir(settings: Settings) -> Iterator[Finding]:
    """The directory where a node keeps what must survive it; with several processes, that of their parent."""
    path = settings.state_dir
    if not path.exists():
        parent = next(parent for parent in path.absolute().parents if parent.exists())
        if os.access(parent, os.W_OK | os.X_OK):
            yield ok("STATE_DIR", f"{path} will be made")
        else:
            yield problem(
                "STATE_DIR",
                f"{path} cannot be made in {parent}",
                "make it, owned by the node's user",
            )
        return
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        yield problem(
            "STATE_DIR", f"{path} may not be written", "give it to the node's user, mode 0700"
        )
        return
    free = shutil.disk_usage(path).free
    if free < LITTLE_SPACE_BYTES:
        remedy = "make room: buckets that cannot be written are forgotten with the process"
        yield warning("STATE_DIR", f"{free // 1024 // 1024} MiB are free", remedy)
    state = "in use by a running node" if _is_locked(path / LOCK_NAME) else "free"
    yield _privacy("STATE_DIR", path) or ok("STATE_DIR", f"{path} is private, {state}")


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _privacy(area: str, path: Path) -> Finding | None:
    """What is wrong with who may read a file; ``None``: nothing. A group may be one that was made for it."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        remedy = "put it there, readable by the node's user"
        return problem(area, f"cannot look at {path}: {error.strerror}", remedy)
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        right = "written" if mode & stat.S_IWOTH else "read"
        return warning(
            area, f"{path} can be {right} by everybody on this machine", f"chmod o= {path}"
        )
    return None


def _expiry(area: str, pem: bytes, now: datetime) -> Finding:
    end = min(expiries(pem.decode("ascii", "ignore")))
    day = end.strftime("%Y-%m-%d %H:%M UTC")
    if end <= now:
        return problem(
            area, f"expired on {day}", "put a new one there; a running node takes it by itself"
        )
    if end - now < SOON:
        return warning(
            area, f"expires on {day}", "renew it; a running node takes the new one by itself"
        )
    return ok(area, f"valid until {day}")


def _is_loopback(host: str) -> bool:
    return host in {"localhost", "::1"} or host.startswith("127.")
