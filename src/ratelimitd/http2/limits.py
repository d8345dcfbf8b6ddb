"""Hard limits of a connection, and the meter of frames that cost us more than the peer.

Never reads a clock: the owner of a connection says when a second has passed.
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
    """Bounds of one connection. What each is for is said beside it; tests hold each at the bound and one past it."""

    max_streams: int = 256
    """Open at once (SETTINGS_MAX_CONCURRENT_STREAMS). More than any load that one core answers keeps in flight."""

    # equivalent: a peer may send a byte more
    stream_window_bytes: int = 262_144
    """What a stream may send ahead of its reader: a batch of 1000 checks in one go."""

    connection_window_bytes: int = 1_048_576
    """What all streams together may: this is the most that a peer can make us hold unread."""

    max_header_list_bytes: int = 16_384
    """SETTINGS_MAX_HEADER_LIST_SIZE, as gRPC's own servers have it. A larger request is refused with an error."""

    max_header_block_bytes: int = 32_768
    """Encoded, over all frames of a block. A list within its limit needs less in any honest encoding."""

    max_continuations: int = 16
    """In a block. Frames take 16 KiB, so an honest peer needs two."""

    max_buffered_bytes: int = 4_194_304
    """Answers that wait for the peer's windows. Over it, new requests are refused, which is safe to retry."""

    max_unread_bytes: int = 33_554_432
    """The same, at which the connection ends: what was accepted before may add as much. 256 answers to batches of
    1000 checks are half of it."""

    frames_per_slice: int = 512
    """Handled in one go. A check is two frames and about 5 µs with everything: a slice is 1 to 2 ms."""

    bytes_per_slice: int = 32_768
    """Likewise. Where frames are large the cost is in their octets: batches, or Huffman codes to decode."""


class Allowance(NamedTuple):
    """How many frames of a kind are free: at once, for each piece of work, and in a second.

    Work is a request that was answered, or a frame of DATA that carried something either way: what honest peers send
    is in proportion to it, or to time (keepalive).
    """

    burst: int
    per_work: int
    per_second: int


ALLOWANCES: Final[Mapping[Cause, Allowance]] = MappingProxyType(
    {
        # Requests taken back before they were answered (CVE-2023-44487). A storm of deadlines looks like that, too,
        # but not for long.
        Cause.RAPID_RESET: Allowance(1_000, 1, 100),
        # Streams that we had to reset because of what the peer sent (CVE-2025-8671). Honest peers have none.
        Cause.PROVOKED_RESET: Allowance(100, 0, 10),
        # Streams over max_streams. Honest peers have a few before they have read our SETTINGS.
        Cause.TOO_MANY_STREAMS: Allowance(1_000, 1, 100),
        # Each must be acknowledged. Honest peers send a handful.
        Cause.SETTINGS_FLOOD: Allowance(100, 0, 10),
        # Each must be answered. grpc-go and grpc's core measure the line with one per round trip under load.
        Cause.PING_FLOOD: Allowance(1_000, 2, 10),
        # Two for an answer, the stream's and the connection's, is what an eager peer sends.
        Cause.WINDOW_UPDATE_FLOOD: Allowance(1_000, 4, 100),
        # DATA that carries nothing and ends nothing.
        Cause.EMPTY_DATA_FLOOD: Allowance(100, 1, 10),
        # Ignored, but browsers and old clients send one or two for a request.
        Cause.PRIORITY_FLOOD: Allowance(1_000, 4, 100),
        # Frames for streams that are closed. A client that cancels just when we answer sends one.
        Cause.STALE_FRAME_FLOOD: Allowance(1_000, 2, 100),
        # Frames of types that we do not know, and GOAWAY. Some clients grease.
        Cause.UNKNOWN_FRAME_FLOOD: Allowance(1_000, 1, 100),
    }
)


class AbuseMeter:
    """Counts, by cause, frames that are cheap to send and expensive to receive, and ends connections with too many.

    Each cause is a bucket that leaks with work and time; what leaked is only looked up when the bucket is full, so
    that a frame costs an addition and a comparison.
    """

    __slots__ = ("_levels", "_settled", "_ticks")

    def __init__(self) -> None:
        self._levels = dict.fromkeys(ALLOWANCES, 0)
        self._settled = dict.fromkeys(ALLOWANCES, (0, 0))
        self._ticks = 0

    def tick(self) -> None:
        """A second has passed."""
        self._ticks += 1

    def charge(self, cause: Cause, work: int) -> None:
        """Count a frame; ``work`` is the work done since the connection began.

        Raises:
            ConnectionFailureError: it is one too many.
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
