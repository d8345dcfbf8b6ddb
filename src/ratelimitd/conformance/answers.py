"""What a check was answered, as values that can be compared: field by field, with what each has to be. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple, Self

from ratelimiter.v1 import ratelimiter_pb2 as pb


class Answer(NamedTuple):
    """The fields of a ``RateLimitResponse`` that a case decides, by their names; ``reason`` by that of its value."""

    allowed: bool
    remaining_tokens: int
    reset_time: int
    retry_after_seconds: int
    reason: str
    limit: int
    window_seconds: int

    @classmethod
    def of(cls, response: pb.RateLimitResponse) -> Self:
        """What a server answered; a reason of a later release is shown by its number."""
        known = response.reason in pb.Reason.values()
        return cls(
            response.allowed,
            response.remaining_tokens,
            response.reset_time,
            response.retry_after_seconds,
            pb.Reason.Name(response.reason) if known else str(response.reason),
            response.limit,
            response.window_seconds,
        )

    def later(self, seconds: int) -> Self:
        """What the same check has to be answered when everything happens so many seconds later."""
        return self._replace(reset_time=self.reset_time + seconds)

    def differences(self, got: Answer, *, tolerance_s: int = 0) -> list[str]:
        """The names of the fields in which ``got`` differs; times may by up to ``tolerance_s`` seconds."""
        return [
            name
            for name, wanted, found in zip(self._fields, self, got, strict=True)
            if (
                abs(wanted - found) > tolerance_s
                if name in _TIMES and isinstance(wanted, int) and isinstance(found, int)
                else wanted != found
            )
        ]


_TIMES: Final = frozenset({"reset_time", "retry_after_seconds"})
