"""TLS as asyncio wants it: contexts that speak HTTP/2 only, made anew when the files change.

Never reads a PEM file that was not judged before: see :mod:`ratelimitd.rpc.tls`.
"""

from __future__ import annotations

import ssl
from typing import Final

from ratelimitd.rpc.tls import CertificateSource, TlsFiles

_ALPN: Final = ["h2"]


class TlsContexts:
    """The context to listen with; each handshake goes on with one of the files as they are then."""

    def __init__(self, files: TlsFiles, source: CertificateSource) -> None:
        """Load the files.

        Raises:
            StartupError: they cannot be used; the message names the setting and the file.
        """
        self._files = files
        self._source = source
        source.load()
        self._current = _context(files)
        self.listening = _context(files)
        self.listening.sni_callback = (
            self._choose
        )  # called with every ClientHello, also without a name

    def _choose(
        self, handshake: ssl.SSLObject, _name: str | None, _listening: ssl.SSLContext
    ) -> None:
        if self._source.newer() is not None:
            try:
                self._current = _context(self._files)
            except OSError:  # changed again since it was judged: the next handshake looks again
                self._source.forget()
        handshake.context = self._current


def _context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(_ALPN)
    # A session that is taken up again shows no certificate: one of a CA that was taken away would get in.
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET
    context.load_cert_chain(files.cert, files.key, password="")
    if files.client_ca is not None:
        context.load_verify_locations(files.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
