"""Resets of shared buckets: asked for together, awaited together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from ratelimitd.cluster.store import SharedStore
from ratelimitd.errors import RateLimitdError, StoreOverloadedError, StoreUnavailableError
from ratelimitd.ledger.shared_state import SharedState, generation_at
from ratelimitd.model import Rule

_Answer = asyncio.Future[RateLimitdError | None]

Heard = Callable[[bytes, SharedState], None]
"""Takes the name of a bucket that was reset, and what it is now."""


async def reset_buckets(
    store: SharedStore,
    names: Sequence[bytes],
    rules: Sequence[Rule],
    heard: Heard,
    *,
    now_us: int,
) -> None:
    """Make buckets full, each with its rule; ``now_us`` is the time of all nodes.

    ``heard`` is called for each as soon as it is, also when others of them fail: whoever goes by what it was before
    must be told in any case.

    Raises:
        StoreUnavailableError: not known to be done.
        StoreOverloadedError: at least one was not asked for.
    """
    loop = asyncio.get_running_loop()
    answers: list[_Answer] = []
    least = generation_at(now_us)
    for name, rule in zip(names, rules, strict=True):
        answers.append(loop.create_future())
        store.reset(name, rule, least, partial(_answered, answers[-1], name, heard))
    for answer in answers:
        error = await answer
        if isinstance(error, StoreOverloadedError):
            raise error
        if error is not None:
            message = "the shared state did not answer: the bucket may be as it was"
            raise StoreUnavailableError(message) from error


def _answered(
    answer: _Answer, name: bytes, heard: Heard, shared: SharedState | RateLimitdError
) -> None:
    error = shared if isinstance(shared, RateLimitdError) else None
    if not isinstance(shared, RateLimitdError):
        heard(name, shared)
    if not answer.done():
        answer.set_result(error)
