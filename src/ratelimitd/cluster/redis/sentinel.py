"""Finds the primary through sentinels."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from ratelimitd.cluster.redis.connection import Handshake, server_named
from ratelimitd.cluster.redis.link import LinkOptions, ask_once, repeat_step
from ratelimitd.cluster.redis.pubsub import Channel, Subscription
from ratelimitd.cluster.redis.topology import OneServer
from ratelimitd.errors import StoreMisconfiguredError, StoreUnavailableError
from ratelimitd.retry import cancel_all
from ratelimitd.settings.urls import RedisUrl, Server

ASK_S: Final = 0.3
"""Timeout of one sentinel. There are others, and no check waits for them."""

POLL_S: Final = 3.0
"""Interval of asking for the primary: a sentinel that hangs announces none. Shortened at random by up to a half."""

SWITCHED: Final = Channel(b"+switch-master")
"""Channel on which sentinels announce a new primary."""


class Sentinels:
    """The sentinels of a URL. The one that answered last is asked first, unless it was put off."""

    def __init__(self, url: RedisUrl, options: LinkOptions) -> None:
        self._service = url.service
        self._sentinels = list(url.servers)
        self._tls = options.tls
        client_name = options.handshake.client_name
        self.handshake = Handshake(
            url.sentinel_login, 0, client_name, wants_primary=False, peer="a sentinel"
        )

    async def primary(self) -> Server:
        """Return the address of the primary.

        Raises:
            StoreMisconfiguredError: the sentinels that answer do not know the service, or refuse the login.
            StoreUnavailableError: no sentinel answers.
        """
        refusal = StoreUnavailableError("no sentinel answers")
        for sentinel in tuple(self._sentinels):
            try:
                return await self._ask(sentinel)
            except StoreMisconfiguredError as error:
                refusal = error
            except StoreUnavailableError:
                pass
            self.put_off(sentinel)
        raise refusal

    @property
    def preferred(self) -> Server:
        """The sentinel that answered last."""
        return self._sentinels[0]

    def put_off(self, sentinel: Server) -> None:
        """Ask ``sentinel`` last next time."""
        self._sentinels.remove(sentinel)
        self._sentinels.append(sentinel)

    async def _ask(self, sentinel: Server) -> Server:
        command = (b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self._service)
        reply = await ask_once(sentinel, self.handshake, self._tls, *command, within_s=ASK_S)
        match reply:
            case [bytes() as host, bytes() as port]:
                primary = _named(host, port)
                if primary is None:
                    message = "the reply of a sentinel names no server"
                    raise StoreUnavailableError(message)
                return primary
            case _:
                message = "the sentinels do not know the service of the URL"
                raise StoreMisconfiguredError(message)


class SentinelTopology(OneServer):
    """The primary of a service, according to its sentinels; follows their announcements of a new one."""

    def __init__(self, url: RedisUrl, options: LinkOptions) -> None:
        self._sentinels = sentinels = Sentinels(url, options)
        self._tried: Server | None = None
        super().__init__(self._primary, options)
        self._service = url.service.encode()
        self._switches = Subscription(
            self._sentinel,
            SWITCHED,
            options._replace(handshake=sentinels.handshake),
            on_message=self._switched,
            on_begin=lambda: None,
        )
        self._polling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start connecting."""
        await super().start()
        self._switches.start()
        self._polling = asyncio.create_task(repeat_step(self._poll, self.options.sleep))

    async def close(self) -> None:
        """Close all connections."""
        await cancel_all(self._polling)
        await self._switches.close()
        await super().close()

    async def server_of_tag(self, _tag: int) -> Server:
        """Return the address of the primary."""
        return await self._sentinels.primary()

    async def _primary(self) -> Server:
        """Return the server for the next connection of the link.

        The connection to the last one has failed or was lost. A sentinel that names it again may be wrong, for example
        cut off from the others, so another is asked next time.
        """
        primary = await self._sentinels.primary()
        if primary == self._tried:
            self._sentinels.put_off(self._sentinels.preferred)
        self._tried = primary
        return primary

    async def _sentinel(self) -> Server:
        """Return the sentinel to subscribe to; also follow a primary whose change was missed."""
        self._follow(await self._sentinels.primary())
        return self._sentinels.preferred

    async def _poll(self) -> None:
        """Follow the primary after a pause; the link reports that no sentinel answers."""
        await self.options.sleep(POLL_S * (1 - self.options.random() / 2))
        with suppress(StoreUnavailableError):
            self._follow(await self._sentinels.primary())

    def _switched(self, message: bytes) -> None:
        """Follow ``service old-host old-port new-host new-port``."""
        match message.split():
            case [self._service, _, _, host, port]:
                primary = _named(host, port)
                if primary is not None:
                    self._follow(primary)

    def _follow(self, primary: Server) -> None:
        (link,) = self.all()
        link.belongs_to(str(primary), "another server has become the primary")


def _named(host: bytes, port: bytes) -> Server | None:
    return server_named(host.decode(errors="replace"), port.decode(errors="replace"))
