"""The parent of several workers: owns ports, metrics, probes, ready line and exit status; serves no checks.

A composition root like :mod:`ratelimitd.node.node`, but a minimal process: without rules, buckets and calls, so that
only its workers can fail.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import socket
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Final

from ratelimitd.buckets.state_dir import StateDir
from ratelimitd.errors import StartupError
from ratelimitd.node import process
from ratelimitd.node.admin_token import own_admin_token
from ratelimitd.node.process import EXIT_OK, StopSignals
from ratelimitd.observe import logs
from ratelimitd.rpc.acceptor import demand_free, listening_sockets
from ratelimitd.rpc.tls import TlsFiles, web_context
from ratelimitd.settings.parsing import MAX_NODE_ID_CHARACTERS, Address
from ratelimitd.settings.table import Settings
from ratelimitd.web.app import worker_application
from ratelimitd.web.pages.sessions import Sessions, login_link
from ratelimitd.web.server import HttpServer
from ratelimitd.web.worker_proxy import PassingOn
from ratelimitd.workers.child import ChecksGuard, WorkerProcess
from ratelimitd.workers.pool import Respawner, WorkerPool
from ratelimitd.workers.private_store import PrivateStore

OVERDUE_S: Final = 4.0
"""Time beyond DRAIN_S for the workers to end; longer than a worker's own."""

_log = logging.getLogger(__name__)


def run(settings: Settings) -> int:
    """Run the workers until a signal ends them; returns the exit status.

    0 if all drained, 1 if one could not start or ended with an error; the reason is one line on stderr.
    """
    # Fixed before the workers start: a node's name does not change with its processes.
    settings = dataclasses.replace(settings, node_id=settings.node_name)
    logs.configure(
        level=settings.log_level,
        log_format=settings.log_format,
        context=logs.LogContext(settings.node_id),
    )
    return process.run_process(lambda: _serve(settings))


def settings_of(settings: Settings, number: int) -> Settings:
    """Return the settings of one worker: a node with its own name and state directory.

    Raises:
        StartupError: the node's name leaves no room for the worker's number.
    """
    node_id = f"{settings.node_id}/{number}"
    if len(node_id) > MAX_NODE_ID_CHARACTERS:
        room = MAX_NODE_ID_CHARACTERS - len(f"/{settings.workers - 1}")
        message = f"NODE_ID must be at most {room} characters with {settings.workers} WORKERS"
        raise StartupError(message)
    return dataclasses.replace(settings, node_id=node_id, state_dir=settings.state_dir_of(number))


async def _serve(settings: Settings) -> int:
    async with AsyncExitStack() as opened:
        state_dir = StateDir.lock(settings.state_dir)
        opened.callback(state_dir.close)
        has_own_token = settings.has_own_admin_token
        if has_own_token:
            # One for all workers: a caller cannot choose which of them answers.
            settings = settings.with_own_admin_token(own_admin_token(settings.state_dir))
        store = None
        if not settings.redis_url:
            private = PrivateStore.of(settings)
            settings = settings.with_private_store(private.url)
            store = Respawner("the private Valkey", private.start)
        settings = await _with_own_ports(settings, opened)
        workers = [settings_of(settings, number) for number in range(settings.workers)]
        guard = ChecksGuard()
        respawners = [
            Respawner(f"worker {number}", partial(WorkerProcess.start, each, guard))
            for number, each in enumerate(workers)
        ]
        pool = WorkerPool(respawners, store)
        stop = StopSignals(partial(_leave, pool))
        grpc_address = str(settings.listen)
        http = await opened.enter_async_context(AsyncExitStack())
        http_address = await _start_http(settings, pool, workers, http)
        starting = asyncio.create_task(pool.start())
        try:
            if not await stop.comes_before(starting):
                starting.result()
                link = ""
                state_dir.publish(grpc_address, made_token=has_own_token)
                if has_own_token:
                    link = http_address and login_link(
                        settings.http_scheme, http_address, settings.admin_token, time.time()
                    )
                process.announce(grpc_address, http_address, settings.node_id, link)
                await stop.wait()
        finally:
            _log.info("draining %d workers", settings.workers)
            failures = await pool.stop(
                settings.drain_s + OVERDUE_S, http.aclose, calls_s=settings.calls_s
            )
        _log.info("drained")
    return process.failed(failures) if failures else EXIT_OK


async def _with_own_ports(settings: Settings, opened: AsyncExitStack) -> Settings:
    """Reserve the ports that the workers share; return the settings with them.

    Raises:
        StartupError: an address cannot be listened on.
    """
    listen = await _own_port(settings.listen, "LISTEN", opened)
    spoe_listen = settings.spoe_listen
    if spoe_listen is not None:
        spoe_listen = await _own_port(spoe_listen, "SPOE_LISTEN", opened)
    return dataclasses.replace(settings, listen=listen, spoe_listen=spoe_listen)


async def _own_port(listen: Address, setting: str, opened: AsyncExitStack) -> Address:
    """Reserve a port for the workers, which cannot detect another program that listens on it.

    The sockets never listen. While they are open, only workers can take the port, also after a restart, and port 0 is
    the same port for all.

    Raises:
        StartupError: the address cannot be listened on; the message names ``setting``.
    """
    await demand_free(str(listen), setting=setting)
    sockets = await listening_sockets(str(listen), setting=setting, reuse_port=True)
    for sock in sockets:
        opened.callback(sock.close)
        # Needed to bind despite connections in TIME_WAIT. While it is set, any server that sets it, too, as most do,
        # could take the port at a moment when no worker listens.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return listen._replace(port=sockets[0].getsockname()[1])


async def _start_http(
    settings: Settings, pool: WorkerPool, workers: Sequence[Settings], opened: AsyncExitStack
) -> str:
    """Start the HTTP server, which outlives each worker; returns its address, empty when it is off.

    Metrics and probes are answered here for all workers, every other request by one of them.
    """
    if settings.http_listen is None:
        return ""
    files = TlsFiles.of(settings.tls_cert, settings.tls_key)
    sessions = Sessions(settings.admin_token, time.time)
    sockets = [worker.http_socket for worker in workers]
    pages = PassingOn(sockets, pool.answers, sessions.opened_by)
    app = worker_application(points=pool.points, readiness=pool.readiness, others=pages)
    tls = web_context(files) if settings.http_tls else None
    server = HttpServer(app, *settings.http_listen, tls=tls)
    opened.push_async_callback(server.stop)
    return await server.start()


def _leave(pool: WorkerPool, status: int) -> None:
    pool.kill()
    process.leave(status)
