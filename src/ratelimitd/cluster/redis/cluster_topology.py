"""A Cluster: a link to each primary, and the map of hash tags, which follows the Cluster.

The map is read at the start, after a redirection, and every few seconds; more often while a server of the map is
unreachable or answers CLUSTERDOWN, since a failover may follow. A server that is down affects its own tags only.
"""

from __future__ import annotations

import asyncio
from binascii import crc_hqx
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from ratelimitd.cluster.redis.connection import Request, answer_of, server_named
from ratelimitd.cluster.redis.link import Link, LinkOptions, ask_once, repeat_step
from ratelimitd.cluster.redis.topology import START_S, TAGS, settled
from ratelimitd.errors import RateLimitdError, StoreCorruptError, StoreUnavailableError
from ratelimitd.retry import cancel_all
from ratelimitd.settings.urls import RedisUrl, Server

SLOTS: Final = 16_384

Map = tuple[Server | None, ...]
"""Server by hash tag; ``None`` for slots without a server."""


def slot_of_tag(tag: int) -> int:
    """Return the slot of keys with ``{xx}``: the CRC-16/XMODEM of the text between the braces."""
    return crc_hqx(b"%02x" % tag, 0) % SLOTS


SLOT_OF_TAG: Final = tuple(slot_of_tag(tag) for tag in range(TAGS))


def map_of(reply: object, asked: Server) -> Map:
    """Parse the reply to CLUSTER SLOTS of the server ``asked``.

    Raises:
        StoreCorruptError: it is malformed.
    """
    if not isinstance(reply, list):
        message = "the reply to CLUSTER SLOTS is malformed"
        raise StoreCorruptError(message)
    ranges = list(_ranges(reply, asked))
    return tuple(
        next((server for first, last, server in ranges if first <= slot <= last), None)
        for slot in SLOT_OF_TAG
    )


def _ranges(reply: list[object], asked: Server) -> Iterator[tuple[int, int, Server | None]]:
    """Yield first slot, last slot and primary of each range; replicas are not used."""
    for entry in reply:
        match entry:
            case [int() as first, int() as last, [bytes() | None as host, int() as port, *_], *_]:
                yield first, last, _server(host, port, asked)
            case _:
                message = "the reply to CLUSTER SLOTS is malformed"
                raise StoreCorruptError(message)


def _server(host: bytes | None, port: int, asked: Server) -> Server | None:
    """Return a server of the map; without a host it has that of the one asked, ``?`` is unknown."""
    return server_named(host.decode(errors="replace") if host else asked.host, str(port))


POLL_S: Final = 5.0
"""Interval of reading the map without a change; a request for a moved slot is redirected at once."""

POLL_TROUBLED_S: Final = 0.5
"""Interval while a server is not connected or answers CLUSTERDOWN. Both are shortened at random by up to a half."""

RETIRE_S: Final = 1.0
"""Time for a link without tags to finish its requests: longer than any timeout."""

PAUSE_S: Final = 0.05
"""Shortest interval between two readings of the map."""

CLUSTER_SLOTS: Final = (b"CLUSTER", b"SLOTS")


class ClusterTopology:
    """The links to the primaries."""

    is_cluster = True

    def __init__(self, url: RedisUrl, options: LinkOptions) -> None:
        self.options = options
        self._seeds = url.servers
        self._links: dict[Server, Link] = {}
        self._map: Map = (None,) * TAGS
        # A link that never connects: requests for tags without a server fail there.
        self._nowhere = Link(self._no_server, self.options)
        self._of_tag: tuple[Link, ...] = (self._nowhere,) * TAGS
        self._wanted = asyncio.Event()
        self._read_once = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        self._retiring: dict[asyncio.Task[None], Link] = {}
        self._reported: type[RateLimitdError] | None = None

    async def start(self) -> None:
        """Read the map and start connecting."""
        self._following = asyncio.create_task(repeat_step(self._follow, self.options.sleep))
        with suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                await self._read_once.wait()
                await settled(self.all())

    async def close(self) -> None:
        """Close all connections."""
        retiring = dict(self._retiring)
        await cancel_all(*retiring, self._following)
        for link in (*retiring.values(), *self._links.values()):
            await link.close()

    def of_tag(self, tag: int) -> Link:
        """Return the link to the server that has the tag, by the current map."""
        return self._of_tag[tag]

    def all(self) -> Sequence[Link]:
        """One link for each primary."""
        return tuple(self._links.values())

    @property
    def connected(self) -> bool:
        """Whether the map was read, every hash tag has a server, and every server is connected."""
        return None not in self._map and all(link.connected for link in self._links.values())

    async def server_of_tag(self, tag: int) -> Server:
        """Return the address of the server of the tag."""
        server = self._map[tag]
        if server is None:
            return await self._no_server()
        return server

    @staticmethod
    async def _no_server() -> Server:
        message = "no server of the Cluster has the slot"
        raise StoreUnavailableError(message)

    # The map

    async def _follow(self) -> None:
        """Read the map, and return when it is time to read it again."""
        self._wanted.clear()
        try:
            self._take(await self._read())
        except RateLimitdError as error:
            self._fail(error)
        self._read_once.set()
        await self.options.sleep(PAUSE_S)
        await self._until_due()

    async def _until_due(self) -> None:
        """Wait until it is time to read the map again."""
        shorter = 1 - self.options.random() / 2
        ticks = 1 if self._is_troubled else round(POLL_S / POLL_TROUBLED_S)
        while ticks and not self._wanted.is_set():
            ticks = min(ticks, 2) - 1 if self._is_troubled else ticks - 1
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_TROUBLED_S * shorter):
                    await self._wanted.wait()

    @property
    def _is_troubled(self) -> bool:
        return not self.connected or any(link.reports_cluster_down for link in self._links.values())

    async def _read(self) -> Map:
        """Return the map from any server that answers; raises the error of the last one if none does."""
        connected = [server for server, link in self._links.items() if link.connected]
        others = [server for server in (*self._links, *self._seeds) if server not in connected]
        start = int(self.options.random() * len(connected))
        connected = connected[start:] + connected[:start]
        # Late servers are asked last: one that is away answers nothing until its connection is given up. A server that
        # answers CLUSTERDOWN may be cut off from the others, and so may its map.
        links = self._links
        connected.sort(key=lambda one: (links[one].reports_cluster_down, links[one].is_late))
        for link in self._links.values():
            link.reports_cluster_down = False
        failure: RateLimitdError = StoreUnavailableError("no server of the Cluster answers")
        for server in (*connected, *dict.fromkeys(others)):
            try:
                return await self._read_from(server)
            except RateLimitdError as error:
                failure = error
        raise failure

    async def _read_from(self, server: Server) -> Map:
        link = self._links.get(server)
        if link is not None and link.connected:
            # Patient: if all servers are slower than the timeout, their maps would never be read otherwise, and no
            # failover followed.
            reply = await answer_of(partial(link.send, CLUSTER_SLOTS, is_patient=True))
        else:
            reply = await ask_once(server, self.options.handshake, self.options.tls, *CLUSTER_SLOTS)
        read = map_of(reply, server)
        if not any(read):
            message = "the server is not part of a Cluster"
            raise StoreUnavailableError(message)
        return read

    def _take(self, read: Map) -> None:
        self._map = read
        for server in set(read):
            if server is not None:
                self._link_to(server)
        for server in self._links.keys() - set(read):
            self._retire(server, self._links.pop(server))
        self._of_tag = tuple(
            self._nowhere if server is None else self._links[server] for server in read
        )
        if self._reported is not None:
            self._reported = None
            self.options.report("the map of the Cluster can be read again")

    def _fail(self, error: RateLimitdError) -> None:
        if type(error) is not self._reported:
            self._reported = type(error)
            self.options.report(f"the map of the Cluster cannot be read: {error}")

    # The links

    def _link_to(self, server: Server) -> Link:
        link = self._links.get(server)
        if link is None:

            async def locate() -> Server:
                return server

            link = self._links[server] = Link(locate, self.options, self._redirect)
            link.start()
        return link

    def _redirect(self, request: Request, server: Server) -> None:
        """Handle a redirection: permanent (the map is outdated), or while a slot is being moved."""
        self._link_to(server).submit_again(request)
        if not request.asking:
            self._wanted.set()

    def _retire(self, server: Server, link: Link) -> None:
        if not link.connected:  # its failure was reported
            self.options.report(f"shared state at {server}: no longer serves any keys")

        async def close_later() -> None:
            await self.options.sleep(RETIRE_S)
            await link.close()

        task = asyncio.create_task(close_later())
        self._retiring[task] = link
        task.add_done_callback(self._retiring.pop)
