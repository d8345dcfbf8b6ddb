"""Which server of a Cluster has which hash tag. Pure: reads what a server told, and asks none."""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Iterator
from typing import Final

from ratelimitd.errors import StoreCorruptError
from ratelimitd.sharedstate.shards import TAGS
from ratelimitd.sharedstate.url import Server

SLOTS: Final = 16_384

Map = tuple[Server | None, ...]
"""The server of each hash tag; ``None`` where no server has its slot."""


def slot_of_tag(tag: int) -> int:
    """The slot of every key with ``{xx}`` in it: the server hashes what is between the braces with CRC-16/XMODEM."""
    return crc_hqx(b"%02x" % tag, 0) % SLOTS


SLOT_OF_TAG: Final = tuple(slot_of_tag(tag) for tag in range(TAGS))


def map_of(reply: object, asked: Server) -> Map:
    """The map in a reply to CLUSTER SLOTS of the server ``asked``.

    Raises:
        StoreCorruptError: it is none.
    """
    if not isinstance(reply, list):
        message = "the reply to CLUSTER SLOTS is none"
        raise StoreCorruptError(message)
    ranges = list(_ranges(reply, asked))
    return tuple(
        next((server for first, last, server in ranges if first <= slot <= last), None)
        for slot in SLOT_OF_TAG
    )


def _ranges(reply: list[object], asked: Server) -> Iterator[tuple[int, int, Server | None]]:
    """First slot, last slot and primary; the replicas, which follow it, are of no use to us."""
    for entry in reply:
        match entry:
            case [int() as first, int() as last, [bytes() | None as host, int() as port, *_], *_]:
                yield first, last, _server(host, port, asked)
            case _:
                message = "the reply to CLUSTER SLOTS is none"
                raise StoreCorruptError(message)


def _server(host: bytes | None, port: int, asked: Server) -> Server | None:
    """A server without a host is where the one asked is; ``?`` is one that the Cluster cannot name."""
    if host == b"?":
        return None
    return Server(host.decode(errors="replace") if host else asked.host, port)
