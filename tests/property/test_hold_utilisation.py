"""Utilisation of a limit by callers who do not know their costs, compared with callers who do.

Costs are skewed like those of language models: the 99th percentile is 50 times the median. Estimates are four times too
high. Calls take seconds, and some callers always wait.
"""

import heapq
import math
from random import Random

import pytest

from ratelimitd.algorithms import DECIDE
from ratelimitd.buckets.holds import OwnHolds
from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.buckets.table import BucketTable
from ratelimitd.ledger.holds import Hold
from ratelimitd.model import US_PER_S, Algorithm, Limit
from ratelimitd.testing import ManualClock

MEDIAN = 20
SIGMA = math.log(50) / 2.326
"""Of a lognormal distribution whose 99th percentile is 50 times its median."""

TOO_HIGH = 4
CALLERS = 200
WARM_UP_S, SECONDS = 120, 480
"""Warm-up: counting begins when the initially full buckets no longer matter."""

RATE = 1_000
"""Tokens a second."""

CAPACITY = 60 * RATE


async def admitted(seed, algorithm, estimate, *, settles=True):
    """Return the total cost of admitted requests; each holds ``estimate`` of its cost."""
    clock, keys = ManualClock(), BucketKeys(b"k" * 32)
    table = BucketTable(10)
    holds = OwnHolds(table, keys, clock.now_us)
    limit = Limit(limit=CAPACITY, window_seconds=60, algorithm=algorithm)
    charges = [(b"tenant", limit, DECIDE[algorithm])]
    names = [keys.stored(b"tenant")]
    random, total = Random(seed), 0
    costs = [Random(seed + number) for number in range(CALLERS)]
    # (time, caller, its action: a new request, or the end of one)
    due = [(clock.now_us(), number, None) for number in range(CALLERS)]
    begin_us, made = clock.now_us() + WARM_UP_S * US_PER_S, 0
    end_us = begin_us + SECONDS * US_PER_S
    waiting = {}
    while due:
        at_us, caller, running = heapq.heappop(due)
        if at_us >= end_us:
            break
        clock.advance(us=at_us - clock.now_us())
        if running is not None:
            number, cost = running
            if settles:
                await holds.settle(number, dict.fromkeys(names), cost, at_us)
        draw = costs[caller]
        cost = waiting.pop(caller, None) or max(
            1, round(draw.lognormvariate(math.log(MEDIAN), SIGMA))
        )
        held_tokens = min(round(cost * estimate), CAPACITY)
        made += 1
        number = made.to_bytes(16, "big")
        held = await holds.hold(
            Hold(number, b"digest", charges, at_us, held_tokens, 3_600 * US_PER_S)
        )
        if held.expire_us:
            total += cost if at_us >= begin_us else 0
            lasts_us = int(random.uniform(0.5, 3.0) * US_PER_S)
            heapq.heappush(due, (at_us + lasts_us, caller, (number, cost)))
        else:
            waiting[caller] = cost
            retry_us = min(held.outcomes[0][3] * US_PER_S, US_PER_S)
            heapq.heappush(due, (at_us + retry_us, caller, None))
    return total


@pytest.mark.deep
@pytest.mark.parametrize(
    "algorithm", [Algorithm.TOKEN_BUCKET, Algorithm.SLIDING_WINDOW, Algorithm.FIXED_WINDOW]
)
async def test_callers_who_settle_get_nearly_as_much_as_callers_who_know_their_costs(algorithm):
    oracle = await admitted(1, algorithm, 1)
    with_holds = await admitted(1, algorithm, TOO_HIGH)
    without_settles = await admitted(1, algorithm, TOO_HIGH, settles=False)
    assert oracle <= SECONDS * RATE
    assert with_holds >= 0.95 * oracle
    assert without_settles <= 0.26 * oracle
