"""Keeps a grpc server in service: one that grpc gave up by itself is opened again, on the port that it had.

Knows nothing of methods, limits and certificates; what a server is made of is its owner's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from types import CoroutineType
from typing import Final

import grpc
import grpc.aio

from ratelimitd.errors import StartupError
from ratelimitd.rpc.addresses import bound_address

REOPEN_PAUSE_S: Final = 0.05
LONG_GRACE_S: Final = 86_400.0
"""How long calls in flight may go on after ``stop_accepting``: until ``stop`` says otherwise."""

_log = logging.getLogger(__name__)


class RevivedServer:
    """One server at a time.

    ``build`` makes a server, ``credentials`` what its port asks for (``None``: plaintext). Both are called at each
    opening: grpc takes neither a second time. ``lost`` is called for each server that ended by itself.
    """

    def __init__(
        self,
        build: Callable[[], grpc.aio.Server],
        credentials: Callable[[], grpc.ServerCredentials | None],
        lost: Callable[[], None],
    ) -> None:
        self._build = build
        self._credentials = credentials
        self._lost = lost
        self._server: grpc.aio.Server | None = None
        self._ending = False
        self._draining: asyncio.Task[None] | None = None
        self._reopening: asyncio.Task[None] | None = None

    async def open(self, listen: str) -> str:
        """Bind and serve; returns the bound address.

        Raises:
            StartupError: the address cannot be listened on, or the credentials cannot be made.
        """
        credentials = self._credentials()
        server = self._build()
        try:
            port = (
                server.add_insecure_port(listen)
                if credentials is None
                else server.add_secure_port(listen, credentials)
            )
        except RuntimeError:
            message = f"LISTEN: cannot listen on {listen}"
            raise StartupError(message) from None
        address = bound_address(listen, port)
        before = asyncio.all_tasks()
        await server.start()
        for task in asyncio.all_tasks() - before:
            # The one that accepts calls is compiled, and no coroutine to the interpreter.
            if not isinstance(task.get_coro(), CoroutineType):
                task.add_done_callback(partial(self._serving_ended, address))
        self._server = server
        return address

    async def stop_accepting(self) -> None:
        """Refuse new calls; calls in flight go on."""
        self._ending = True
        if self._server is not None and self._draining is None:
            self._draining = asyncio.create_task(self._server.stop(LONG_GRACE_S))
            await asyncio.sleep(0)  # let it say so to the connections

    async def stop(self, grace_s: float) -> None:
        """Wait at most ``grace_s`` seconds for calls in flight, then close everything."""
        self._ending = True
        if self._server is not None:
            await self._server.stop(grace_s)
        if self._draining is not None:
            await self._draining

    def _serving_ended(self, address: str, serving: asyncio.Task[None]) -> None:
        """Open the port again when grpc gave it up: one path that is no UTF-8 ends its loop, and it tells nobody."""
        if self._ending or serving.cancelled() or serving.exception() is None:
            return
        self._lost()
        _log.error("the grpc server ended unexpectedly; it is opened again")
        self._reopening = asyncio.create_task(self._reopen(address))

    async def _reopen(self, address: str) -> None:
        while not self._ending:
            try:
                await self.open(address)
            except StartupError:  # the old one has not let go of the port yet
                await asyncio.sleep(REOPEN_PAUSE_S)
            else:
                return
