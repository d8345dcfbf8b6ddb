"""One unary call: what is sent for it, and what becomes of the frames that answer it.

Never knows of other calls, windows or the line.
"""

from __future__ import annotations

from typing import Final

import grpc

from ratelimitd_client.http2 import heads
from ratelimitd_client.http2.heads import Head

PREFIX_BYTES: Final = 5
"""Of a message: whether it is compressed, and its length in 4 octets."""


class Call:
    """A question, and in the end its answer or the status that came in place of it.

    Args:
        block: the header block of the question.
        message: the question itself.
        max_answer_bytes: what is longer is not read.

    Attributes:
        stream_id: 0 until it is sent.
        body: what is sent for it behind the block.
        unsent: how many of its octets, the last ones, still wait for the peer's windows.
        window_bytes: how much of it the peer takes on this stream; kept while something waits.
        ended: whether there is an outcome: ``answer``, or else ``code`` and ``details``.
        unprocessed: no server has begun to work on it, so that it may be sent once more.
    """

    __slots__ = (
        "_begun",
        "_max_answer_bytes",
        "answer",
        "block",
        "body",
        "code",
        "details",
        "ended",
        "received",
        "stream_id",
        "unprocessed",
        "unsent",
        "window_bytes",
    )

    def __init__(self, block: bytes, message: bytes, max_answer_bytes: int) -> None:
        self.body: bytes = b"\0" + len(message).to_bytes(4, "big") + message
        self._max_answer_bytes = max_answer_bytes
        self.block: bytes = block
        self.restart()

    def restart(self) -> None:
        """Make it a call that is yet to be sent."""
        self.unsent: int = len(self.body)
        self.window_bytes: int = 0
        self.stream_id: int = 0
        self.received: bytes | bytearray = b""
        self.answer: bytes | None = None
        self.code: grpc.StatusCode = grpc.StatusCode.OK
        self.details: str = ""
        self.ended: bool = False
        self.unprocessed: bool = False
        self._begun = False

    def fail(self, code: grpc.StatusCode, details: str = "", *, unprocessed: bool = False) -> None:
        """End with a status."""
        self.code = code
        self.details = details
        self.unprocessed = unprocessed
        self.ended = True

    def take_block(self, block: bytes, *, last: bool) -> None:
        """A header block came.

        Raises:
            PeerError: it is malformed.
        """
        head = heads.read(block)
        if last:
            self._end(head)
        elif self._begun:
            self.fail(grpc.StatusCode.INTERNAL, "the trailers do not end the answer")
        elif head.is_informational:
            pass
        elif head.refusal is not None:
            self.fail(head.refusal, "the answer is none of gRPC")
        else:
            self._begun = True

    def take_data(self, data: bytes) -> None:
        """A part of the body came."""
        if not self._begun:
            self.received = data  # as all that was taken
            self.fail(grpc.StatusCode.INTERNAL, "the answer has no headers")
            return
        # One part is the rule. Were more of them added to ``bytes``, each would copy all before it.
        if not self.received:
            self.received = data
        else:
            if isinstance(self.received, bytes):
                self.received = bytearray(self.received)
            self.received += data
        received = self.received
        if len(received) < PREFIX_BYTES:
            return
        size = int.from_bytes(received[1:PREFIX_BYTES], "big")
        if received[0]:
            self.fail(grpc.StatusCode.INTERNAL, "the answer is compressed")
        elif size > self._max_answer_bytes:
            self.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "the answer is too long")
        elif len(received) > PREFIX_BYTES + size:
            self.fail(grpc.StatusCode.INTERNAL, "more than one message came")

    def end_without_trailers(self) -> None:
        """The stream ended with its body."""
        self.fail(grpc.StatusCode.UNKNOWN, "the answer has no status")

    def _end(self, head: Head) -> None:
        received = self.received
        if head.status is None:
            refusal = None if self._begun else head.refusal
            self.fail(refusal or grpc.StatusCode.UNKNOWN, "the answer has no status")
        elif head.status is not grpc.StatusCode.OK:
            self.fail(head.status, head.text)
        elif len(received) < PREFIX_BYTES or len(received) != PREFIX_BYTES + int.from_bytes(
            received[1:PREFIX_BYTES], "big"
        ):
            self.fail(grpc.StatusCode.INTERNAL, "no whole message came")
        else:
            self.answer = bytes(received[PREFIX_BYTES:])
            self.ended = True
