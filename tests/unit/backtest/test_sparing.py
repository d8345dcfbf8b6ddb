from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimitd.algorithms import DECIDE
from ratelimitd.backtest.sparing import sparing
from ratelimitd.model import Algorithm, Limit

AT_US = 1_700_006_400_000_000
WINDOWS = [Algorithm.TOKEN_BUCKET, Algorithm.SLIDING_WINDOW, Algorithm.FIXED_WINDOW]


def limit(tokens, algorithm=Algorithm.FIXED_WINDOW, burst=0):
    return Limit(limit=tokens, window_seconds=60, algorithm=algorithm, burst=burst)


def demand(*checks):
    return array(
        "q", [value for at_s, cost in checks for value in (AT_US + at_s * 1_000_000, cost)]
    )


def spared(tokens, algorithm, demands, burst=0):
    count = 0
    for one in demands:
        state, passed = None, True
        for at_us, cost in zip(one[::2], one[1::2], strict=True):
            outcome = DECIDE[algorithm](state, limit(tokens, algorithm, burst), at_us, cost)
            passed, state = passed and outcome[0], outcome[5]
        count += passed
    return count


demands_of = st.lists(
    st.lists(st.tuples(st.integers(0, 200), st.integers(1, 9)), min_size=1, max_size=12).map(
        lambda checks: demand(*sorted(checks))
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("algorithm", WINDOWS)
@given(demands=demands_of, percent=st.integers(1, 100))
def test_the_sparing_limit_is_the_smallest_that_denies_nothing_to_the_share(
    algorithm, demands, percent
):
    found = sparing(limit(100, algorithm), demands, percent)
    wanted = -(-len(demands) * percent // 100)
    assert spared(found, algorithm, demands) >= wanted
    assert found == 1 or spared(found - 1, algorithm, demands) < wanted


def test_one_of_a_hundred_may_be_denied():
    modest = [demand((0, 3))] * 99
    assert sparing(limit(10), [*modest, demand((0, 900))]) == 3
    assert sparing(limit(10), [*modest[1:], demand((0, 900)), demand((0, 800))]) == 800


def test_a_burst_keeps_its_ratio():
    found = sparing(limit(10, Algorithm.TOKEN_BUCKET, burst=40), [demand((0, 80))])
    assert found == 20


@given(demands=demands_of, percent=st.integers(1, 100), burst=st.integers(1, 300))
def test_the_sparing_limit_with_a_burst_is_the_smallest(demands, percent, burst):
    def spared_by(tokens):
        return spared(tokens, Algorithm.TOKEN_BUCKET, demands, -(-burst * tokens // 100))

    found = sparing(limit(100, Algorithm.TOKEN_BUCKET, burst), demands, percent)
    wanted = -(-len(demands) * percent // 100)
    assert spared_by(found) >= wanted
    assert found == 1 or spared_by(found - 1) < wanted


def test_a_burst_may_be_below_its_limit():
    at_once, in_steps = demand(*[(0, 1)] * 10), demand(*[(at_s, 1) for at_s in range(10)])
    assert sparing(limit(100, Algorithm.TOKEN_BUCKET, burst=3), [at_once]) == 301
    tiny = limit(10**9, Algorithm.TOKEN_BUCKET, burst=1)
    assert sparing(tiny, [in_steps]) == 60
    assert sparing(tiny, [at_once]) == 0


def test_without_demand_or_with_too_much_there_is_no_sparing_limit():
    assert sparing(limit(10), []) == 0
    assert sparing(limit(10), [demand((0, 2**31 - 1), (1, 2**31 - 1))]) == 0


def test_the_sum_of_a_demand_may_exceed_the_largest_limit():
    assert sparing(limit(10), [demand((0, 2**31 - 1), (60, 2**31 - 1))]) == 2**31 - 1
