"""What is wrong with a peer whose connection cannot go on."""

from __future__ import annotations

from ratelimitd_wire.codes import ErrorCode


class PeerError(Exception):
    """The peer broke a rule, or sends more than an honest one does. The text is ours and holds nothing of the peer's.

    Attributes:
        code: what GOAWAY tells it.
    """

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code
