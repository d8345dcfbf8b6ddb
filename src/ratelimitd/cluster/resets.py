"""Resets of shared buckets: asked for together, awaited together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from ratelimitd.cluster.store import SharedStore
from ratelimitd.errors import RateLimitdError, StoreOverloadedError, StoreUnavailableError
from ratelimitd.ledger.shared_state import SharedState
from ratelimitd.model import Rule


async def reset_buckets(
    store: SharedStore, names: Sequence[bytes], rules: Sequence[Rule]
) -> Sequence[SharedState]:
    """Make buckets full, each with its rule; returns what they are now.

    Raises:
        StoreUnavailableError: not known to be done.
        StoreOverloadedError: at least one was not asked for.
    """
    loop = asyncio.get_running_loop()
    answers: list[asyncio.Future[SharedState | RateLimitdError]] = []
    for name, rule in zip(names, rules, strict=True):
        answers.append(loop.create_future())
        store.reset(name, rule, partial(_tell, answers[-1]))
    states = []
    for answer in answers:
        shared = await answer
        if isinstance(shared, StoreOverloadedError):
            raise shared
        if isinstance(shared, RateLimitdError):
            message = "the shared state did not answer: the bucket may be as it was"
            raise StoreUnavailableError(message) from shared
        states.append(shared)
    return states


def _tell(
    answer: asyncio.Future[SharedState | RateLimitdError], shared: SharedState | RateLimitdError
) -> None:
    if not answer.done():
        answer.set_result(shared)
