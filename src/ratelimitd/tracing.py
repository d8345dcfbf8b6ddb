"""The interface for spans; :mod:`ratelimitd.observe.otel` exports them.

No attribute contains an identifier, a token or a key: more people read traces than logs. See ADR 0031.
"""

from __future__ import annotations

import re
from typing import Final, Protocol

TRACEPARENT: Final = "traceparent"
"""The metadata key of W3C Trace Context."""

_TRACEPARENT: Final = re.compile(
    # Version ff is forbidden, version 00 has nothing after the flags, and ids of zeros are invalid.
    r"(?!ff|00.{54})[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?"
)

_FLAGS_END: Final = slice(54, 55)
_SAMPLED: Final = frozenset("13579bdf")
"""The last digit of the flags, and its values for a recorded trace."""


class Span(Protocol):
    """One piece of work, from :meth:`Tracer.begin` to :meth:`end`."""

    def set_attribute(self, name: str, value: str | int | bool) -> None:  # noqa: FBT001 -- a value, no switch
        """Set an attribute."""

    def end(self, error: str = "") -> None:
        """End the span; ``error`` is a word of a closed set, empty after success."""


class Tracer(Protocol):
    """Begins spans. Never raises, and never waits."""

    def begin(self, name: str, parent: str | None = None) -> Span | None:
        """Begin a span below the caller's ``traceparent``, or a root span; ``None`` if it is not sampled.

        Follows the caller's sampling decision; without a caller the decision is random.
        """


def is_sampled(traceparent: str | None) -> bool:
    """Whether the caller records its trace."""
    # The cheap comparison first: this runs for every call with the header.
    return (
        traceparent is not None
        and traceparent[_FLAGS_END] in _SAMPLED
        and _TRACEPARENT.fullmatch(traceparent) is not None
    )
