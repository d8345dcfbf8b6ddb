"""Samples as the charts of the overview take them. Each is worked out once, however often it is sent."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from ratelimitd.observe.history import MAX_SAMPLES, Sample

P99: Final = 6
HIT_RATIO: Final = 7
"""Where a row has what the charts are told in words by."""


@lru_cache(maxsize=2 * MAX_SAMPLES)
def row(sample: Sample) -> Sequence[float | None]:
    """A sample as the charts take it.

    Time in ms, allowed, blocked and fail-open a second, the 50th, 95th and 99th percentile in ms, hit ratio, buckets.
    """
    return [
        sample.at_ms,
        *(
            None if value is None else round(value, 3)
            for value in (
                sample.allowed_per_s,
                sample.blocked_per_s,
                sample.fail_open_per_s,
                sample.percentile_ms(0.5),
                sample.percentile_ms(0.95),
                sample.percentile_ms(0.99),
                sample.hit_ratio,
            )
        ),
        sample.buckets,
    ]
