"""The TLS side of a connection to the store."""

from __future__ import annotations

import ssl

from ratelimitd.errors import StartupError
from ratelimitd.sharedstate.url import TlsFiles


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """What connections are checked with.

    Raises:
        StartupError: a file cannot be used; the message names the option of the URL.
    """
    try:
        # With an authority of one's own, those of the system are trusted no more.
        context = ssl.create_default_context(cafile=files.ca_certs or None)
    except OSError as error:
        raise StartupError(_unusable("ssl_ca_certs", error)) from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = files.check_hostname
    if files.certfile:
        try:
            context.load_cert_chain(files.certfile, files.keyfile)
        except OSError as error:
            raise StartupError(_unusable("ssl_certfile or ssl_keyfile", error)) from None
    return context


def _unusable(option: str, error: OSError) -> str:
    """``ssl.SSLError`` is an ``OSError`` whose text names no cause that a reader of logs would know."""
    cause = "it is not valid PEM" if isinstance(error, ssl.SSLError) else str(error.strerror)
    return f"REDIS_URL: {option} cannot be used: {cause}"
