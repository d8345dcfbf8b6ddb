"""Spans as the node's parts see them: begun, described, ended. Who sends them is :mod:`ratelimitd.observe.otel`.

An attribute never holds an identifier, a token or a key: traces are read by more people than logs. See ADR 0031.
"""

from __future__ import annotations

import re
from typing import Final, Protocol

TRACEPARENT: Final = "traceparent"
"""The metadata key of W3C Trace Context."""

_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")

_FLAGS_END: Final = slice(54, 55)
_SAMPLED: Final = frozenset("13579bdf")
"""The last digit of the flags, and the values of it that say that a trace is recorded."""


class Span(Protocol):
    """One piece of work, from :meth:`Tracer.begin` to :meth:`end`."""

    def note(self, name: str, value: str | int | bool) -> None:  # noqa: FBT001 -- a value, no switch
        """Say something about it."""

    def end(self, error: str = "") -> None:
        """It is done; ``error`` says how it failed, as a word of a closed set, empty = well."""


class Tracer(Protocol):
    """Begins spans. Never raises, and never waits."""

    def begin(self, name: str, parent: str | None = None) -> Span | None:
        """A span below the caller's ``traceparent``, or at the root of a trace; ``None``: it is not sampled.

        A caller who sampled its trace is followed, one who did not as well; without a caller chance decides.
        """


def is_sampled(traceparent: str | None) -> bool:
    """Whether a caller says that its trace is recorded."""
    # The digit first: this runs for every call that sends the header.
    return (
        traceparent is not None
        and traceparent[_FLAGS_END] in _SAMPLED
        and _TRACEPARENT.fullmatch(traceparent) is not None
    )
