"""Limits of a user, its tenant and everybody, per second and per day, on several real nodes.

Each limit is kept, and callers get what the tightest allows.
"""

from dataclasses import replace

import pytest

from ratelimitd.algorithms import DECIDE
from ratelimitd.algorithms.several import decide_all, passes
from ratelimitd.model import Algorithm, Rule
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.cluster.admissions import Log, excess, tokens
from tests.cluster.load import offer, steady
from tests.cluster.nodes import Nodes
from tests.servers import Valkey
from tests.system.process import PATIENT

COUNT = 3
LOAD = 4
"""As a multiple of the limit for everybody."""
KEYS = ("u1@t1", "u2@t1", "u3@t2", "u4@t2")
DAY_S = 86_400
ROUND_TRIP_S = 0.01


def limit_of(kind, limit, algorithm, window_s=1):
    return Rule(kind, f"/{kind}", kind, limit=limit, window_seconds=window_s, algorithm=algorithm)


LIMITS = {
    "user": [
        limit_of("user", 40, Algorithm.TOKEN_BUCKET),
        limit_of("user", 100_000, Algorithm.FIXED_WINDOW, DAY_S),
    ],
    "api_key": [limit_of("api_key", 60, Algorithm.SLIDING_WINDOW)],
    "all": [limit_of("all", 80, Algorithm.TOKEN_BUCKET)],
}
SETTINGS = {
    "eventual": ["--redis-timeout-ms", "200"],
    "strict": ["--consistency", "strict", *PATIENT],
}


def bucket_of(kind, key):
    user, tenant = key.split("@")
    return {"user": user, "api_key": tenant, "all": ""}[kind]


def entitled_by_all(log):
    """Return the tokens that one node would have allowed."""
    states, total = {}, 0
    for entry in log.entries:
        places = [
            (kind, bucket_of(kind, entry.key), number)
            for kind, limits in LIMITS.items()
            for number in range(len(limits))
        ]
        limits = [LIMITS[kind][number] for kind, _, number in places]
        buckets = [
            (states.get(place), limit, DECIDE[limit.algorithm])
            for place, limit in zip(places, limits, strict=True)
        ]
        now_us = int((entry.sent_s + log.wall_s) * 1_000_000)
        outcomes = decide_all(buckets, now_us, [entry.cost] * len(buckets))
        states |= {place: outcome[5] for place, outcome in zip(places, outcomes, strict=True)}
        total += entry.cost if passes(limits, outcomes) else 0
    return total


@pytest.fixture(scope="module", params=SETTINGS)
def nodes(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("nodes")
    with (
        Valkey(directory / "valkey") as valkey,
        Nodes(directory, valkey.url, *SETTINGS[request.param], count=COUNT) as nodes,
    ):
        nodes.wait_for_members()
        for kind, limits in LIMITS.items():
            listed = [
                pb.Limit(
                    name=f"of-{one.window_seconds}",
                    limit=one.limit,
                    window_seconds=one.window_seconds,
                    algorithm=one.algorithm,
                )
                for one in limits
            ]
            nodes.rule(endpoint="*", identifier_type=kind, limits=listed, algorithm="")
        nodes.mode = request.param
        yield nodes


def measure(nodes, seconds):
    rate_per_s = LOAD * LIMITS["all"][0].limit
    schedule = steady(rate_per_s, seconds, nodes=COUNT, keys=KEYS)
    log = offer(nodes.addresses, schedule).log
    assert not log.unknown
    assert log.reasons.keys() <= {"WITHIN_LIMIT", "LIMIT_EXCEEDED"}, log.reasons
    lag_s = ROUND_TRIP_S + max(nodes.metric("rate_limiter_loop_lag_seconds"))
    edges = 0.0
    for kind, limits in LIMITS.items():
        of_kind = Log(
            [replace(one, key=bucket_of(kind, one.key)) for one in log.entries], log.wall_s
        )
        for limit in limits:
            drift = COUNT * limit.limit / limit.window_seconds * lag_s + COUNT
            most = 0.0 if nodes.mode == "strict" else 0.51 * limit.limit + drift
            assert excess(of_kind, limit, slack_s=ROUND_TRIP_S) <= most, (kind, limit.limit)
            edges = max(edges, drift)
    ideal, admitted = entitled_by_all(log), tokens(log.admitted)
    given_back = nodes.metric_sum("rate_limiter_given_back_tokens_total")
    print(f"\n{nodes.mode}: {admitted} of {ideal}, {given_back:.0f} were given back")  # noqa: T201
    assert admitted >= 0.97 * ideal - edges


def test_each_limit_is_kept_and_the_tightest_is_used_up(nodes):
    measure(nodes, 4.0)


@pytest.mark.long
@pytest.mark.timeout(120)
def test_each_limit_is_kept_in_a_long_run(nodes):
    measure(nodes, 60.0)
