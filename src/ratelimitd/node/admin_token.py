"""The admin token that a node generates without a setting for one: its file, and its lookup on the same host.

Loopback is no credential: behind a plain proxy every caller comes from loopback. See ADR 0042.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from ratelimitd.buckets.state_dir import StateDir
from ratelimitd.errors import StartupError
from ratelimitd.rules.last_good import write_private
from ratelimitd.settings.parsing import MAX_TOKEN_CHARACTERS, Address, address, token
from ratelimitd.settings.sources import environment_of

FILE_NAME: Final = "admin-token"

LOCALHOST: Final = "localhost"
LOOPBACK: Final = ("127.0.0.1", "::1")
"""The addresses of that name (RFC 6761 section 6.3)."""

TOKEN_BYTES: Final = 32
"""Random bytes of a token: 256 bits cannot be guessed in any number of attempts."""

STATE_DIRS: Final = (
    Path("ratelimitd-state"),
    Path("/var/lib/ratelimitd/ratelimitd-state"),
)
"""State directories of a node on this host unless RATELIMITD_STATE_DIR is set: the default, and that of the unit."""


def own_admin_token(state_dir: Path) -> str:
    """Return the token in ``state_dir``, generated at the first start. The caller holds the lock of the directory.

    Raises:
        StartupError: the file cannot be used, or others than its owner can; one line says why.
    """
    path = state_dir / FILE_NAME
    return read_admin_token(path) or _make(path)


class FoundToken(NamedTuple):
    """The token of a node on this host, and the only address to send it to; without one, ``why_none``."""

    target: str
    token: str | None = None
    why_none: str = ""


def find_admin_token(target: str, environ: Mapping[str, str], *, tls: bool = False) -> FoundToken:
    """Find the token of the node that answers at ``target``, a ``HOST:PORT`` of this host.

    The token goes to no other address: a running node publishes its address in its state directory. ``localhost``
    becomes the loopback address of that node, since another program may listen at the other one; not with ``tls``,
    where the certificate may be for the name alone.
    """
    given = environ.get(environment_of("STATE_DIR"))
    directories = (Path(given),) if given else STATE_DIRS
    asked = address(target)
    hosts = LOOPBACK if asked.host.lower() == LOCALHOST and not tls else ()
    why = f"no node that generated one runs in {' or '.join(map(str, directories))}"
    for directory in directories:
        try:
            listens_at = StateDir.address_in(directory, made_token=True)
            if not listens_at:
                continue
            for one in (asked, *(Address(host, asked.port) for host in hosts)):
                if _is_reached(address(listens_at), one):
                    # Root may use the token of a node that runs as another user.
                    token = read_admin_token(directory / FILE_NAME, own=False)
                    why_none = "" if token else f"{directory / FILE_NAME} is missing"
                    return FoundToken(str(one) if token else target, token, why_none)
            why = f"the node in {directory} listens on {listens_at}, and another program may on {target}"
        except PermissionError as error:
            why = f"{directory}: {error.strerror}"
        except StartupError as error:
            why = str(error)
        except (OSError, ValueError):
            continue
    return FoundToken(target, why_none=why)


def _is_reached(listen: Address, target: Address) -> bool:
    """Return whether only the listener at ``listen`` can answer at ``target``."""
    if listen.port != target.port:
        return False
    if listen.host == target.host:
        return True
    try:
        wanted, bound = ipaddress.ip_address(target.host), ipaddress.ip_address(listen.host)
    except ValueError:
        return False
    return wanted.is_loopback and bound.is_unspecified and wanted.version <= bound.version


def read_admin_token(path: Path, *, own: bool = True) -> str | None:
    """Return the token in the file, ``None`` if there is no file. ``own``: it must belong to this process's user.

    Without ``own``, links are refused: one may point to a file that only this process can read.

    Raises:
        StartupError: the file cannot be used, or others than its owner can; one line says why.
    """
    try:
        # Opening a pipe without O_NONBLOCK would wait for a writer.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(path, flags if own else flags | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unusable(path, f"cannot be read: {error.strerror}") from None
    try:
        _demand_private(path, os.fstat(descriptor), own=own)
        octets = os.read(descriptor, MAX_TOKEN_CHARACTERS + 2)
    finally:
        os.close(descriptor)
    text = octets.decode("ascii", "replace").strip()
    try:
        found = token(text)
    except ValueError:
        raise _unusable(path, "holds no token") from None
    if not found:
        raise _unusable(path, "is empty")
    return found


def _demand_private(path: Path, status: os.stat_result, *, own: bool) -> None:
    """Refuse a file that other users made or can use. A group may have access (fsGroup of Kubernetes)."""
    if stat.S_ISDIR(status.st_mode):
        raise _unusable(path, "is a directory")
    if not stat.S_ISREG(status.st_mode):
        raise _unusable(path, "is not a file")
    if own and status.st_uid != os.geteuid():
        raise _unusable(path, f"belongs to another user, with the id {status.st_uid}")
    if status.st_mode & stat.S_IRWXO:
        message = f"the admin token {path} can be used by other users: chmod 0600 it, or delete it for a new one"
        raise StartupError(message)


def _make(path: Path) -> str:
    """Generate a token, and write its file atomically."""
    made = secrets.token_urlsafe(TOKEN_BYTES)
    try:
        write_private(path, f"{made}\n".encode())
    except OSError as error:
        message = (
            f"the admin token {path} cannot be written: {error.strerror}; or set ADMIN_TOKEN_FILE"
        )
        raise StartupError(message) from error
    return made


def _unusable(path: Path, reason: str) -> StartupError:
    return StartupError(
        f"the admin token {path} {reason}: delete it, and the next start makes another; or set ADMIN_TOKEN_FILE"
    )
