"""TLS of the client: its material, and the context of the connections that it opens without gRPC."""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_LABELS: Final = {
    "ca": b"CERTIFICATE-----",
    "cert": b"CERTIFICATE-----",
    "key": b"PRIVATE KEY-----",
}
"""End of a label that each part must contain. Without a certificate no node is verified: checks are let through."""

_OWN_FILES: Final = "/proc/self/fd"
"""Paths of the open files of this process."""


@dataclass(frozen=True, slots=True, repr=False)
class Tls:
    """TLS material, each part the bytes of a PEM file, or its path; later connections read the file again.

    ``ca`` verifies the node (``None``: the roots that gRPC ships). ``cert`` and ``key`` are the client's own, for mTLS.

    Raises:
        ValueError: one of ``cert`` and ``key`` is missing; a part is no PEM of its kind, or damaged; ``key`` is
            encrypted, or that of another certificate.
        TypeError: a part is neither bytes nor a path.
        OSError: a file cannot be read.
    """

    ca: bytes | Path | None = None
    cert: bytes | Path | None = None
    key: bytes | Path | None = None
    _last_read: Tls | None = field(default=None, init=False, compare=False)
    """The material as bytes, if a part is a path."""

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            message = "cert and key are given together or not at all"
            raise ValueError(message)
        for name, label in _LABELS.items():
            part: object = getattr(self, name)
            if not isinstance(part, bytes | Path | None):
                kind = type(part).__name__
                message = f"{name} must be the bytes or the Path of a PEM file, not {kind}"
                raise TypeError(message)
            if isinstance(part, bytes) and label not in part:
                message = f"{name} must be PEM with a {label.decode().strip('-').lower()}"
                raise ValueError(message)
        if any(isinstance(part, Path) for part in (self.ca, self.cert, self.key)):
            self._read_files()
        else:
            open_context(self)

    def read(self) -> Tls:
        """Return the material as bytes: what the files contain, or what they did before they became unusable.

        Returns the same object until they have changed.
        """
        if self._last_read is None:
            return self
        with suppress(ValueError, OSError):
            self._read_files()
        return self._last_read

    def _read_files(self) -> None:
        found = [*map(bytes_of, (self.ca, self.cert, self.key))]
        last = self._last_read
        if last is None or found != [last.ca, last.cert, last.key]:
            object.__setattr__(self, "_last_read", Tls(*found))


def bytes_of(part: bytes | Path | None) -> bytes | None:
    """Return a part, read from its file if it is a path."""
    return part.read_bytes() if isinstance(part, Path) else part


def require_tls(tls: object) -> None:
    """Raise TypeError for what is neither a :class:`Tls` nor ``None``."""
    if not isinstance(tls, Tls | None):
        message = f"tls must be a Tls, not {type(tls).__name__}"
        raise TypeError(message)


def open_context(tls: Tls) -> ssl.SSLContext:
    """Return a context that verifies the server's name and offers HTTP/2 only.

    Raises:
        ValueError: as :class:`Tls`.
        OSError: the key's file cannot be written.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    # As gRPC, and Python from 3.13: an intermediate authority, or the node's own certificate, can be trusted alone.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    # Without roots no certificate is accepted; gRPC's own are used over its channel.
    ca, cert, key = map(bytes_of, (tls.ca, tls.cert, tls.key))
    if ca is not None:
        with _naming("ca"):
            # Comments of a bundle may be in UTF-8.
            context.load_verify_locations(cadata=ca.decode("ascii", "ignore"))
    if cert is not None and key is not None:
        with _naming("cert and key"):
            _load_own(context, cert, key)
    return context


def reason_of(error: ssl.SSLError, default: str = "the handshake failed") -> str:
    """Return the reason in OpenSSL's words, which contain no text of the peer and none of a key."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return error.reason.replace("_", " ").lower() if error.reason else default


@contextmanager
def _naming(parts: str) -> Iterator[None]:
    """Raise what OpenSSL refuses as ValueError with the names of the parts, and nothing of their content."""
    try:
        yield
    except ssl.SSLError as error:
        reason = reason_of(error, "damaged PEM")
        message = f"{parts} cannot be used: {reason}"
        raise ValueError(message) from None


def _load_own(context: ssl.SSLContext, cert: bytes, key: bytes) -> None:
    """Load a certificate and its key, which Python reads from files only."""
    handle, path = _private_file()
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(key + b"\n" + cert)
            file.flush()
            context.load_cert_chain(path, password=_refuse_encrypted)
    finally:
        if not path.startswith(_OWN_FILES):
            Path(path).unlink()


def _refuse_encrypted() -> bytes:
    """Without a password, OpenSSL would prompt for it at the terminal."""
    message = "key must not be encrypted"
    raise ValueError(message)


def _private_file() -> tuple[int, str]:
    """Return the handle and the path of a file that only its owner can read; in memory, since a disk may be read-only.

    On disk only where the system has no such files, as macOS, or forbids them.
    """
    if Path(_OWN_FILES).exists():
        with suppress(AttributeError, OSError):
            handle = os.memfd_create("ratelimitd-client")
            return handle, f"{_OWN_FILES}/{handle}"
    return tempfile.mkstemp(prefix="ratelimitd-client-")
