"""TLS for the connections that the client opens itself. What gRPC opens has gRPC's own."""

from __future__ import annotations

import os
import ssl
import tempfile
from pathlib import Path

from ratelimitd_client.channel import Tls


def open_context(tls: Tls) -> ssl.SSLContext:
    """Return the context: the server's name is checked, and HTTP/2 is all that may be spoken.

    Raises:
        OSError: something of it is no PEM (``ssl.SSLError``), or a key's file cannot be written.
        ValueError: the roots hold characters that no PEM has.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    if tls.ca is None:
        context.load_default_certs()
    else:
        context.load_verify_locations(cadata=tls.ca.decode("ascii"))
    if tls.cert is not None and tls.key is not None:
        _load_own(context, tls.cert, tls.key)
    return context


def _load_own(context: ssl.SSLContext, cert: bytes, key: bytes) -> None:
    """Load a certificate and its key, which Python reads from files alone: one that only its owner can open."""
    handle, path = tempfile.mkstemp(prefix="ratelimitd-client-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(key + b"\n" + cert)
        # Without a password OpenSSL would ask for one at the terminal, should the key have one.
        context.load_cert_chain(path, password=bytes)
    finally:
        Path(path).unlink()
