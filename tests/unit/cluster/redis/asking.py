"""Helpers to send requests over a link, and to wait for its background work."""

import asyncio
from contextlib import asynccontextmanager, suppress

from ratelimitd.cluster.redis.link import Link, LinkOptions
from ratelimitd.errors import RateLimitdError
from ratelimitd.settings.urls import Server

PATIENT = LinkOptions(timeout_s=5.0)
"""Timeout of tests that do not test timeouts, so that a busy machine does not affect them."""


async def soon(condition):
    """Wait until ``condition`` holds; the time limit of the test is the only one."""
    while not condition():  # noqa: ASYNC110 - most of what is waited for is no event of ours
        await asyncio.sleep(0.002)


def asked(send, *arguments):
    """Call ``send`` with ``arguments`` and a ``done``; the future gets the reply or the error."""
    reply = asyncio.get_running_loop().create_future()
    send(*arguments, reply.set_result)
    assert not reply.done(), "done was called before the call returned"
    return reply


async def ask(link, *command):
    """Return the reply to a command; raises it if it is an error."""
    reply = await asked(link.send, command)
    if isinstance(reply, RateLimitdError):
        raise reply
    return reply


def at(server):
    """Return a ``locate`` for a server of the tests, or a port."""

    async def locate():
        return Server("127.0.0.1", server if isinstance(server, int) else server.port)

    return locate


@asynccontextmanager
async def linked(locate, options=PATIENT, redirect=None):
    """Yield a link that is connected, or has failed once."""
    link = Link(locate, options, redirect)
    link.start()
    await link.settled()
    try:
        yield link
    finally:
        await link.close()


@asynccontextmanager
async def serving(serve):
    """Yield the port of a server that calls ``serve(reader, writer)`` for each connection, then closes it."""
    running = {}

    async def serve_and_close(reader, writer):
        running[asyncio.current_task()] = writer
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await serve(reader, writer)
        writer.close()

    server = await asyncio.start_server(serve_and_close, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for _ in range(10):  # accepted connections may not be served yet
            await asyncio.sleep(0)
        for task, writer in running.items():
            task.cancel()
            writer.close()
        await asyncio.gather(*running, return_exceptions=True)
        await server.wait_closed()


@asynccontextmanager
async def peer(*replies, handshake=True):
    """Yield the port of a server that sends the next of ``replies`` on each input; ``b""`` closes the connection.

    It first answers a handshake, like a primary.
    """
    left = list(replies)

    async def serve(reader, writer):
        if handshake:
            await reader.readuntil(b"ROLE\r\n")
            writer.write(b"+PONG\r\n*3\r\n$6\r\nmaster\r\n:0\r\n*0\r\n")
        while await reader.read(65_536) and (not replies or left):
            reply = left.pop(0) if left else b""
            writer.write(reply)
            if replies and not reply:
                break

    async with serving(serve) as port:
        yield port
