"""Reads and verifies the server's certificate, its key and the CA of client certificates; reloads them on change.

Transports receive verified files only: after a broken change the old ones stay in service.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import re
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Final, NamedTuple, Self

from ratelimitd.errors import StartupError
from ratelimitd.rpc.interface import TransportError
from ratelimitd.settings.sources import Stamp, stamp_of

CERT_SETTING: Final = "TLS_CERT"
KEY_SETTING: Final = "TLS_KEY"
CLIENT_CA_SETTING: Final = "TLS_CLIENT_CA"

GRPCIO_KEYS: Final[Mapping[str, bytes]] = {
    "RSA": bytes.fromhex("300d 0609 2a864886f70d010101 0500"),
    "P-256": bytes.fromhex("3013 0607 2a8648ce3d0201 0608 2a8648ce3d030107"),
    "P-384": bytes.fromhex("3010 0607 2a8648ce3d0201 0605 2b81040022"),
    "P-521": bytes.fromhex("3010 0607 2a8648ce3d0201 0605 2b81040023"),
    "Ed25519": bytes.fromhex("302a 3005 0603 2b6570 0321 00"),
}
"""Kinds of public keys that the C core of grpc can use, as certificates encode them (RFC 5280 section 4.1.2.7).

OpenSSL has more, such as RSA-PSS. The core ignores a new certificate with such a key, and reports nothing.
"""

CERTIFICATE: Final = re.compile(
    "-----BEGIN (X509 |TRUSTED |)CERTIFICATE-----(.+?)-----END \\1CERTIFICATE-----", re.DOTALL
)

# The standard library shows the dates only of authorities, or of a peer's certificate after a handshake.
_VALIDITY: Final = re.compile(
    rb"\x30[\x1e\x20\x22](?:\x17\x0d(\d{12})|\x18\x0f(\d{14}))Z(?:\x17\x0d(\d{12})|\x18\x0f(\d{14}))Z"
)
"""The validity in the DER of a certificate (RFC 5280 section 4.1.2.5): a SEQUENCE of two times, each a UTCTime, whose
year has two digits, or a GeneralizedTime."""

_YEARS_OF_1900: Final = 50
"""Two-digit years from this on are of the last century."""

_OTHER_KEY: Final = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")
"""Reasons of OpenSSL for a key of another certificate; the last two for one of another kind."""
_TOO_WEAK: Final = ("_TOO_SMALL", "_TOO_WEAK")
"""Ends of its reasons for a certificate below its security level, such as ``EE_KEY_TOO_SMALL``."""

_log = logging.getLogger(__name__)


class TlsFiles(NamedTuple):
    """Paths of the PEM files; with ``client_ca`` every client must present a certificate of that CA."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    @classmethod
    def of(cls, cert: Path | None, key: Path | None, client_ca: Path | None = None) -> Self | None:
        """Return the files of the settings; ``None`` if certificate and key are not both set."""
        return None if cert is None or key is None else cls(cert, key, client_ca)


class Certificates(NamedTuple):
    """PEM texts that were verified together."""

    chain: bytes
    key: bytes
    client_ca: bytes | None

    def expiry_s(self) -> dict[str, float]:
        """Return the Unix time at which the first certificate of each file expires, by setting."""
        found = {CERT_SETTING: self.chain, CLIENT_CA_SETTING: self.client_ca or b""}
        ends = {setting: _first_end_s(pem) for setting, pem in found.items()}
        return {setting: end for setting, end in ends.items() if end is not None}


class CertificateSource:
    """Reads the files of a server and detects changes.

    ``report`` receives one line for every unusable change, and for a kind of key beyond :data:`GRPCIO_KEYS`;
    with ``is_grpcio`` such a key is refused. :meth:`current` may run in any thread.
    """

    def __init__(
        self,
        files: TlsFiles,
        report: Callable[[str], None],
        *,
        is_grpcio: bool = False,
    ) -> None:
        """Read the files.

        Raises:
            StartupError: they cannot be used; the message names the setting and the file.
        """
        self.files = files
        self._report = report
        self._is_grpcio = is_grpcio
        self._lock = Lock()
        self._expiry_s = lru_cache(maxsize=1)(Certificates.expiry_s)  # 4 ms for 150 authorities
        self._stamp = self._stamp_now()
        self._current = self._read()

    def current(self) -> Certificates:
        """Return the certificates in service; reads the files again if they changed, and never raises.

        Called at each handshake; without a change it costs one ``stat`` per file.
        """
        with self._lock:
            if (stamp := self._stamp_now()) != self._stamp:
                try:
                    found = self._read()
                except StartupError as error:
                    self._stamp = stamp
                    self._report(f"{error}; the old certificate stays in service")
                else:
                    # If they were written to while they were read, the next call reads them again.
                    if self._stamp_now() == stamp:
                        self._stamp, self._current = stamp, found
            return self._current

    def expiry_s(self) -> Mapping[str, float]:
        """Return :meth:`Certificates.expiry_s` of those in service."""
        return self._expiry_s(self.current())

    def _read(self) -> Certificates:
        found = _read(self.files)
        if not _has_common_key(found.chain):
            who = "this TRANSPORT cannot use" if self._is_grpcio else "many clients do not accept"
            message = (
                f"{CERT_SETTING}: {self.files.cert} has a kind of key that {who};"
                f" use {', '.join(GRPCIO_KEYS)}"
            )
            if self._is_grpcio:
                raise StartupError(message)
            self._report(message)
        return found

    def _stamp_now(self) -> tuple[Stamp, ...]:
        return tuple(stamp_of(path) for path in self.files if path is not None)


def logged_and_counted(count: Callable[[TransportError], None]) -> Callable[[str], None]:
    """Return the ``report`` of a :class:`CertificateSource` whose handshakes may be in a thread of grpc."""
    loop = asyncio.get_running_loop()

    def report(line: str) -> None:
        _log.error("%s", line)
        loop.call_soon_threadsafe(count, TransportError.TLS_FILES)

    return report


def _read(files: TlsFiles) -> Certificates:
    chain = _content(files.cert, CERT_SETTING)
    key = _content(files.key, KEY_SETTING)
    client_ca = None if files.client_ca is None else _content(files.client_ca, CLIENT_CA_SETTING)
    _demand_certificates(chain, files.cert, CERT_SETTING)
    if files.client_ca is not None and client_ca is not None:
        _demand_certificates(client_ca, files.client_ca, CLIENT_CA_SETTING)
    _demand_matching_key(files)
    return Certificates(chain, key, client_ca)


def _content(path: Path, setting: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        message = f"{setting}: cannot read {path}: {error.strerror}"
        raise StartupError(message) from None


def _demand_certificates(pem: bytes, path: Path, setting: str) -> None:
    text = pem.decode("ascii", "ignore")  # comments beside the PEM blocks may be in any language
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError):
        message = f"{setting}: {path} holds no PEM certificate, or a damaged one"
        raise StartupError(message) from None


def _demand_matching_key(files: TlsFiles) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # A given password keeps OpenSSL from asking the terminal for that of an encrypted key.
        context.load_cert_chain(files.cert, files.key, password="")
    except OSError as error:  # SSLError is one, too
        reason = getattr(error, "reason", None) or ""
        if reason in _OTHER_KEY:
            message = (
                f"{KEY_SETTING}: {files.key} is not the key of the certificate in {CERT_SETTING}"
            )
        elif reason.endswith(_TOO_WEAK):
            weakness = reason.lower().replace("_", " ")
            message = f"{CERT_SETTING}: {files.cert} is too weak for OpenSSL: {weakness}"
        else:
            message = f"{KEY_SETTING}: {files.key} holds no unencrypted PEM private key"
        raise StartupError(message) from None


def _has_common_key(chain: bytes) -> bool:
    first = CERTIFICATE.search(chain.decode("ascii", "replace"))
    der = b"" if first is None else base64.b64decode(first[2])
    return any(kind in der for kind in GRPCIO_KEYS.values())


def _first_end_s(pem: bytes) -> float | None:
    try:
        return min(each.ends for each in validities(pem.decode("ascii", "ignore"))).timestamp()
    except ValueError:  # none, or dates that OpenSSL accepts and RFC 5280 does not
        return None


class Validity(NamedTuple):
    """When a certificate becomes valid, and when it expires."""

    begins: datetime
    ends: datetime


def validities(pem: str) -> list[Validity]:
    """Return when each certificate of a PEM text is valid, in their order.

    Raises:
        ValueError: one of them is invalid.
    """
    return [validity(base64.b64decode(match[2])) for match in CERTIFICATE.finditer(pem)]


def validity(der: bytes) -> Validity:
    """Return when a certificate is valid.

    Raises:
        ValueError: it is no certificate.
    """
    found = _VALIDITY.search(der)
    if found is None:
        message = "not a certificate"
        raise ValueError(message)
    return Validity(_time(found[1], found[2]), _time(found[3], found[4]))


def _time(short: bytes | None, full: bytes | None) -> datetime:
    text = (short or full or b"").decode()
    if short:
        text = ("19" if int(text[:2]) >= _YEARS_OF_1900 else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%S").replace(tzinfo=UTC)


HTTP2: Final = "h2"
HTTP1: Final = "http/1.1"


class TlsContexts:
    """The context to listen with; each handshake uses the current files.

    ``protocol`` is offered by ALPN (RFC 7301).
    """

    def __init__(self, source: CertificateSource, protocol: str = HTTP2) -> None:
        self._source = source
        self._protocol = protocol
        self._used = source.current()
        self._current = _context(source.files, protocol)
        self.listening = _context(source.files, protocol)
        # Called for every ClientHello, even without a server name.
        self.listening.sni_callback = self._choose

    def _choose(
        self, handshake: ssl.SSLObject, _name: str | None, _listening: ssl.SSLContext
    ) -> None:
        if (found := self._source.current()) != self._used:
            # Files that changed again since they were verified are read at the next handshake.
            with suppress(OSError):
                self._current = _context(self._source.files, self._protocol)
                self._used = found
        handshake.context = self._current


def web_context(files: TlsFiles | None) -> ssl.SSLContext | None:
    """Return the context of the HTTP port; ``None`` without files. It requests no client certificate.

    Raises:
        StartupError: the files cannot be used; the message names the setting and the file.
    """
    if files is None:
        return None
    files = files._replace(client_ca=None)
    source = CertificateSource(files, lambda line: _log.error("HTTP_TLS: %s", line))
    return TlsContexts(source, HTTP1).listening


def _context(files: TlsFiles, protocol: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([protocol])
    # A resumed session presents no certificate, so it would admit one of a removed CA.
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET
    context.load_cert_chain(files.cert, files.key, password="")
    if files.client_ca is not None:
        context.load_verify_locations(files.client_ca)
        # As grpcio does: an intermediate authority may be trusted without its root.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.verify_mode = ssl.CERT_REQUIRED
    return context
