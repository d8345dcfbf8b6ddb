"""Maps hash tags to servers, with a link to each.

A hash tag is one of 256: the first octet of a bucket's name. All keys of a tag are on one server.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from ratelimitd.cluster.redis.link import CONNECT_S, Link, LinkOptions, Locate, warn
from ratelimitd.errors import StartupError
from ratelimitd.retry import cancel_all
from ratelimitd.settings.sources import Stamp, stamp_of
from ratelimitd.settings.urls import RedisUrl, Server, TlsFiles

TAGS: Final = 256

START_S: Final = CONNECT_S
"""Longest wait for servers at the start of a node; afterwards it serves without them."""


class Topology(Protocol):
    """The links of a node to its shared state."""

    async def start(self) -> None:
        """Start connecting; returns after at most about ``START_S``, and continues in the background. Never raises."""

    async def close(self) -> None:
        """Close all connections; requests in flight get an error."""

    def of_tag(self, tag: int) -> Link:
        """Return the link to the server of a hash tag. Call it for each request: in a Cluster tags move."""

    def all(self) -> Sequence[Link]:
        """One link for each server."""

    @property
    def connected(self) -> bool:
        """Whether every hash tag has a server, and every server is connected."""

    async def server_of_tag(self, tag: int) -> Server:
        """Return the address of the server of a hash tag; raises StoreUnavailableError while it is unknown."""

    @property
    def is_cluster(self) -> bool:
        """Whether channels belong to servers, as keys do."""

    @property
    def options(self) -> LinkOptions:
        """Options of the links."""


class OneServer:
    """A single server at a time; ``locate`` returns it."""

    is_cluster = False

    def __init__(self, locate: Locate, options: LinkOptions) -> None:
        self.options = options
        self._locate = locate
        self._link = Link(locate, options)

    async def start(self) -> None:
        """Start connecting."""
        self._link.start()
        await settled([self._link])

    async def close(self) -> None:
        """End the connection."""
        await self._link.close()

    def of_tag(self, _tag: int) -> Link:
        """The one link."""
        return self._link

    def all(self) -> Sequence[Link]:
        """The one link."""
        return (self._link,)

    @property
    def connected(self) -> bool:
        """Whether the server is connected."""
        return self._link.connected

    async def server_of_tag(self, _tag: int) -> Server:
        """Return the address of the server."""
        return await self._locate()


def standalone(url: RedisUrl, options: LinkOptions) -> OneServer:
    """Return the topology of a URL that names one server or its socket."""

    async def locate() -> Server:
        return url.servers[0]

    return OneServer(locate, options)


async def settled(links: Sequence[Link]) -> None:
    """Wait until each link is connected or has failed once, for at most ``START_S``."""
    if not links:
        return
    waits = [asyncio.create_task(link.settled()) for link in links]
    _, pending = await asyncio.wait(waits, timeout=START_S)
    await cancel_all(*pending)


class ClientTls:
    """Returns the TLS context of a new connection, made again when one of the files has changed.

    Raises:
        StartupError: a file cannot be used; the message names the option of the URL. Later ``report`` receives it, and
            the former files stay in use.
    """

    def __init__(self, files: TlsFiles, report: Callable[[str], None] = warn) -> None:
        self._files = files
        self._report = report
        self._stamps = self._stamps_now()
        self._context = _context_of(files)

    def __call__(self) -> ssl.SSLContext:
        """Return the context; costs one ``stat`` for each file if nothing has changed."""
        stamps = self._stamps_now()
        if stamps != self._stamps:
            self._stamps = stamps
            try:
                self._context = _context_of(self._files)
            except StartupError as error:
                self._report(f"{error}; the former files stay in use")
        return self._context

    def _stamps_now(self) -> Sequence[Stamp]:
        files = self._files
        return [stamp_of(path) for path in (files.ca_certs, files.certfile, files.keyfile) if path]


def _context_of(files: TlsFiles) -> ssl.SSLContext:
    """Return the TLS context of connections.

    Raises:
        StartupError: a file cannot be used.
    """
    try:
        # A given CA file replaces the system's authorities.
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
    """Return the message for a TLS file; the text of ``ssl.SSLError`` would not help a reader of logs."""
    cause = "it is not valid PEM" if isinstance(error, ssl.SSLError) else str(error.strerror)
    return f"REDIS_URL: {option} cannot be used: {cause}"
