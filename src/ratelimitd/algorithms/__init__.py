"""The algorithms, each a pure function ``decide(state, rule, now_us, cost) -> Outcome``.

A new algorithm is one module here, one row in ``DECIDE``, and one member of :class:`ratelimitd.model.Algorithm`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from ratelimitd.algorithms import concurrency, fixed_window, sliding_window, token_bucket
from ratelimitd.model import Algorithm, Limit, Outcome

Decide = Callable[[Any, Limit, int, int], Outcome]

DECIDE: Final[Mapping[Algorithm, Decide]] = MappingProxyType(
    {
        Algorithm.TOKEN_BUCKET: token_bucket.decide,
        Algorithm.SLIDING_WINDOW: sliding_window.decide,
        Algorithm.FIXED_WINDOW: fixed_window.decide,
        Algorithm.CONCURRENCY: concurrency.decide,
    }
)
"""Algorithm → its ``decide``. ``state`` is that of the previous outcome, ``None`` for a fresh bucket."""
