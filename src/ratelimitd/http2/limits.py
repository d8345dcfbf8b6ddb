"""Hard limits of a connection, and the meter of frames that cost us more than the peer.

Reads no clock: the owner of a connection calls :meth:`AbuseMeter.tick` once a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from ratelimitd.http2.errors import Cause, ConnectionFailureError
from ratelimitd_wire.codes import ErrorCode


# equivalent: nothing is assigned to it later
@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one connection, each with its reason. Tests check each at the bound and one above."""

    max_streams: int = 256
    """Open streams (SETTINGS_MAX_CONCURRENT_STREAMS): more than one core can keep in flight."""

    # equivalent: a peer may send a byte more
    stream_window_bytes: int = 262_144
    """Initial window of a stream: a batch of 1000 checks without waiting."""

    connection_window_bytes: int = 1_048_576
    """Window of all streams together: the most unread octets that a peer can make us hold."""

    max_header_list_bytes: int = 16_384
    """SETTINGS_MAX_HEADER_LIST_SIZE, as in gRPC's own servers. A larger request is answered with an error."""

    max_header_block_bytes: int = 32_768
    """Encoded octets over all frames of a block. A list within its limit needs less in any honest encoding."""

    max_continuations: int = 16
    """CONTINUATION frames in a block. Frames take 16 KiB, so an honest peer needs two."""

    max_buffered_bytes: int = 4_194_304
    """Answers that wait for the peer's windows. Above it, new requests are refused, which is safe to retry."""

    max_unread_bytes: int = 33_554_432
    """The same, above which the connection ends: requests accepted before the refusals may add more. 256 answers to
    batches of 1000 checks are half of it."""

    frames_per_slice: int = 512
    """Frames handled per call of ``receive``. A check is two frames and takes about 5 µs in all: a slice takes 1 to
    2 ms."""

    bytes_per_slice: int = 32_768
    """Octets handled per call of ``receive``: large frames cost by octet, in batches or Huffman codes."""


class Allowance(NamedTuple):
    """Free frames of a kind: in a burst, per piece of work, and per second.

    Work is an answered request, or a DATA frame with content in either direction. Honest peers send in proportion to
    work, or to time (keepalive).
    """

    burst: int
    per_work: int
    per_second: int


ALLOWANCES: Final[Mapping[Cause, Allowance]] = MappingProxyType(
    {
        # Requests cancelled before they were answered (CVE-2023-44487). A storm of deadlines looks the same, but only
        # for a short time.
        Cause.RAPID_RESET: Allowance(1_000, 1, 100),
        # Streams that we reset after errors of the peer (CVE-2025-8671). Honest peers cause none.
        Cause.PROVOKED_RESET: Allowance(100, 0, 10),
        # Streams over max_streams. Honest peers open a few before they have read our SETTINGS.
        Cause.TOO_MANY_STREAMS: Allowance(1_000, 1, 100),
        # Each must be acknowledged. Honest peers send a handful.
        Cause.SETTINGS_FLOOD: Allowance(100, 0, 10),
        # Each must be answered. grpc-go and grpc's core send one per round trip under load, to measure bandwidth.
        Cause.PING_FLOOD: Allowance(1_000, 2, 10),
        # An eager peer sends two per answer: one for the stream, one for the connection.
        Cause.WINDOW_UPDATE_FLOOD: Allowance(1_000, 4, 100),
        # Empty DATA without END_STREAM.
        Cause.EMPTY_DATA_FLOOD: Allowance(100, 1, 10),
        # Ignored, but browsers and old clients send one or two for a request.
        Cause.PRIORITY_FLOOD: Allowance(1_000, 4, 100),
        # Frames on closed streams. A client that cancels just when we answer sends one.
        Cause.STALE_FRAME_FLOOD: Allowance(1_000, 2, 100),
        # Frames of unknown types, and GOAWAY. Some clients grease.
        Cause.UNKNOWN_FRAME_FLOOD: Allowance(1_000, 1, 100),
    }
)


class AbuseMeter:
    """Counts, by cause, frames that are cheap to send and expensive to receive, and ends connections with too many.

    Each cause is a bucket that leaks with work and time. The leak is computed only when the bucket is full, so a frame
    costs an addition and a comparison.
    """

    __slots__ = ("_levels", "_settled", "_ticks")

    def __init__(self) -> None:
        self._levels = dict.fromkeys(ALLOWANCES, 0)
        self._settled = dict.fromkeys(ALLOWANCES, (0, 0))
        self._ticks = 0

    def tick(self) -> None:
        """Count one second; called once a second."""
        self._ticks += 1

    def charge(self, cause: Cause, work: int) -> None:
        """Count a frame; ``work`` is the work done since the connection began.

        Raises:
            ConnectionFailureError: it exceeds the allowance.
        """
        self._levels[cause] += 1
        if self._levels[cause] > ALLOWANCES[cause].burst:
            self._settle(cause, work)

    def _settle(self, cause: Cause, work: int) -> None:
        burst, per_work, per_second = ALLOWANCES[cause]
        work_before, ticks_before = self._settled[cause]
        earned = (work - work_before) * per_work + (self._ticks - ticks_before) * per_second
        self._settled[cause] = (work, self._ticks)
        level = self._levels[cause] = max(1, self._levels[cause] - earned)
        if level > burst:
            raise ConnectionFailureError(
                ErrorCode.ENHANCE_YOUR_CALM, cause, "too many frames of a kind"
            )
