"""Asks checks, alone and in batches. A check that the server refuses has its words for an answer, and ends nothing.

Never judges an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from ratelimitd.cli.failures import CliError
from ratelimiter.v1 import ratelimiter_pb2 as pb

if TYPE_CHECKING:
    import grpc

    from ratelimitd_client import NodeClient

ENDS_ALL: Final = frozenset(
    {
        "CANCELLED",
        "DEADLINE_EXCEEDED",
        "PERMISSION_DENIED",
        "UNAUTHENTICATED",
        "UNAVAILABLE",
        "UNIMPLEMENTED",
    }
)
"""Statuses that are about the server or the caller: no other check would fare better."""


class Refusal(NamedTuple):
    """What the server said instead of deciding a check."""

    words: str

    @classmethod
    def of(cls, name: str, text: str) -> Self:
        """By the name of the status or reason, and what is said beside it."""
        return cls(f"{name}: {text}" if text else name)


Answered = pb.RateLimitResponse | Refusal


class Asking:
    """Asks one server."""

    def __init__(self, client: NodeClient) -> None:
        self._client = client

    def alone(self, request: pb.RateLimitRequest) -> Answered:
        """The answer to one check.

        Raises:
            grpc.RpcError: the server answers no check at all.
        """
        import grpc  # noqa: PLC0415 - see target.py

        try:
            response = self._client.check(
                request.identifier,
                request.identifier_type,
                request.endpoint,
                cost=request.tokens_requested,
                timestamp=request.timestamp,
            )
        except grpc.RpcError as error:
            return _refusal(error)
        return _answered(response)

    def together(self, requests: Sequence[pb.RateLimitRequest]) -> list[Answered]:
        """The answers to any number of checks, asked in as few batches as it takes.

        Raises:
            CliError: there are more or fewer.
            grpc.RpcError: the server answers no check at all.
        """
        from ratelimitd_client.check import MAX_BATCH  # noqa: PLC0415 - see target.py

        answers: list[Answered] = []
        for start in range(0, len(requests), MAX_BATCH):
            answers += self._batch(requests[start : start + MAX_BATCH])
        return answers

    def _batch(self, requests: Sequence[pb.RateLimitRequest]) -> list[Answered]:
        import grpc  # noqa: PLC0415 - see target.py

        try:
            responses = self._client.check_batch(requests)
        except grpc.RpcError as error:
            refusal = _refusal(error)
            if len(requests) == 1:
                return [refusal]
            # Which of them it was is found one by one.
            return [answer for request in requests for answer in self._batch([request])]
        if len(responses) != len(requests):
            message = f"the server gave {len(responses)} answers to a batch of {len(requests)}"
            raise CliError(message)
        return list(map(_answered, responses))


def _answered(response: pb.RateLimitResponse) -> Answered:
    """The answer, or in its place what a server says of a check of a batch that is not valid."""
    if response.reason == pb.INVALID_REQUEST:
        return Refusal.of("INVALID_REQUEST", response.error)
    return response


def _refusal(error: grpc.RpcError) -> Refusal:
    """What the server said to one check; raises the error that is about more."""
    code: str = error.code().name
    if code in ENDS_ALL:
        raise error
    return Refusal.of(code, error.details() or "")
