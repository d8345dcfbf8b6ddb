"""One connection: that a dead one is noticed, and one that does not read is left alone."""

import asyncio

import pytest

from ratelimitd_client.transport import h2_call
from ratelimitd_client.transport import link as module
from ratelimitd_client.transport.link import Link, NodeCall
from tests import http2_peer as peer

SETTINGS = peer.frame(peer.SETTINGS, 0, 0)


class Line:
    """What the server did, and what it got."""

    def __init__(self):
        self.got = b""
        self.writer = None
        self.more = asyncio.Event()

    async def serve(self, reader, writer):
        self.writer = writer
        while octets := await reader.read(65_536):
            self.got += octets
            self.more.set()
        writer.close()

    async def until(self, kind):
        """The first frame of this kind."""
        async with asyncio.timeout(30):
            while True:
                at = len(peer.PREFACE)
                for frame in peer.frames_of(self.got[at:]):
                    if frame.type == kind:
                        return frame
                self.more.clear()
                await self.more.wait()


@pytest.fixture
async def line():
    line = Line()
    server = await asyncio.start_server(line.serve, "127.0.0.1", 0)
    line.address = server.sockets[0].getsockname()
    yield line
    server.close()
    if line.writer is not None:
        line.writer.transport.abort()
    await server.wait_closed()


async def connected(line):
    loop = asyncio.get_running_loop()
    changes = []
    link = Link(loop, lambda: changes.append(link.is_usable))
    await loop.create_connection(lambda: link, *line.address)
    await line.until(peer.SETTINGS)
    assert not link.is_usable
    line.writer.write(SETTINGS)
    await link.ready
    assert link.is_usable
    return link, changes


class EndingCall(NodeCall):
    """A call, with a future that is done when it has ended."""


def new_call():
    call = EndingCall(
        h2_call.request_block("/s/m", "node", "http", ()),
        b"request",
        100,
        ended_by_link=lambda call: call.end.set_result(None),
        done=lambda _: None,
    )
    call.end = asyncio.get_running_loop().create_future()
    return call


async def test_a_node_that_does_not_answer_a_ping_is_given_up(line, monkeypatch):
    monkeypatch.setattr(module, "KEEPALIVE_S", 0.02)
    monkeypatch.setattr(module, "KEEPALIVE_TIMEOUT_S", 0.01)
    link, changes = await connected(line)
    asked = new_call()
    link.ask(asked)
    await line.until(peer.PING)
    await asked.end
    await link.lost
    assert changes[-1] is False
    assert asked.code.name == "UNAVAILABLE"


async def test_a_node_that_answers_pings_is_kept(line, monkeypatch):
    monkeypatch.setattr(module, "KEEPALIVE_S", 0.02)
    monkeypatch.setattr(module, "KEEPALIVE_TIMEOUT_S", 20)
    link, _ = await connected(line)
    frame = await line.until(peer.PING)
    line.writer.write(peer.frame(peer.PING, peer.ACK, 0, frame.payload))
    line.writer.write(peer.frame(peer.PING, 0, 0, bytes(8)))
    while (await line.until(peer.PING)).flags != peer.ACK:
        line.got = line.got.replace(peer.frame(peer.PING, 0, 0, frame.payload), b"")
    line.got = peer.PREFACE
    link._check_ping()
    await line.until(peer.PING)
    assert link.is_usable
    link.abort()
    await link.lost


async def test_a_link_that_is_paused_takes_no_calls(line):
    link, changes = await connected(line)
    link.pause_writing()
    link.resume_writing()
    assert changes == [False, True]
    link.leave()
    await link.lost
    assert link.over.done()


async def test_a_connection_that_breaks_before_it_was_ready_says_so(line):
    loop = asyncio.get_running_loop()
    link = Link(loop, lambda: None)
    await loop.create_connection(lambda: link, *line.address)
    await line.until(peer.SETTINGS)
    line.writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(ConnectionError, match=r"the peer is an http1\.x server"):
        await link.ready
    assert (await line.until(peer.GOAWAY)).code == peer.FRAME_SIZE_ERROR
    assert not link.has_answered


async def test_a_call_that_is_asked_of_a_link_that_closes_ends(line):
    link, _ = await connected(line)
    asked = new_call()
    link.abort()
    link.ask(asked)
    await asked.end
    assert asked.code.name == "UNAVAILABLE"


async def test_a_connection_that_is_made_after_it_was_aborted_is_closed(line):
    loop = asyncio.get_running_loop()
    link = Link(loop, lambda: None)
    link.abort()
    assert link.lost.done()
    transport, _ = await loop.create_connection(lambda: link, *line.address)
    assert transport.is_closing()
    assert link._timer is None
