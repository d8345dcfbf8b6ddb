"""A rule with a limit per calendar month, on nodes that share it: one count until the month ends."""

import datetime as dt
import itertools
import time

import pytest

from ratelimitd.algorithms.calendar_window import window_at
from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.cluster.redis.codec import bucket_key
from ratelimitd.model import Algorithm, Calendar, IdentifierType, Period, Rule
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.cluster.shared import KEY_SECRET, Shared
from tests.servers import until
from tests.system.process import PATIENT, START_S

LIMIT = 30
FIRST_DAY = 1 if 5 < dt.datetime.now(dt.UTC).day < 25 else 15
"""No month ends during the tests."""
MONTH = Calendar(Period.MONTH, "Europe/Berlin", FIRST_DAY)


@pytest.fixture(scope="module", params=["eventual", "strict"])
def cluster(tmp_path_factory, request):
    arguments = ("--consistency", request.param, *PATIENT)
    with Shared(tmp_path_factory.mktemp("shared"), *arguments) as shared:
        shared.is_strict = request.param == "strict"
        yield shared


@pytest.fixture
def endpoint(cluster):
    number = next(cluster._numbers)
    month = pb.Limit(limit=LIMIT, algorithm="fixed_window", period=pb.MONTH)
    month.time_zone, month.anchor_day = MONTH.time_zone, MONTH.anchor_day
    cluster.nodes.rule(endpoint=f"/{number}", limits=[month], algorithm="fixed_window")
    return f"/{number}"


def end_s():
    return window_at(MONTH, time.time_ns() // 1_000).end_s


def spend(cluster, endpoint, checks, identifier="ada"):
    """Send checks to the nodes in turn; return the number allowed."""
    nodes = itertools.cycle(cluster.nodes.served)
    return sum(next(nodes).check(endpoint, identifier).allowed for _ in range(checks))


def most_allowed(cluster):
    """Return the most that one limit allows: exact if strict, else with the ledger's bound."""
    return LIMIT if cluster.is_strict else LIMIT * 3 // 2


def test_nodes_share_one_count_that_ends_with_the_month(cluster, endpoint):
    assert LIMIT <= spend(cluster, endpoint, 2 * LIMIT) <= most_allowed(cluster)
    cluster.settled()
    for node in cluster.nodes.served:
        answer = node.check(endpoint, "ada")
        assert (answer.allowed, answer.reset_time, answer.window_seconds) == (
            False, end_s(), 2_592_000,
        )  # fmt: skip
        assert 0 <= answer.retry_after_seconds - (end_s() - int(time.time())) <= 1
        assert node.check(endpoint, "bob").allowed


def test_a_denied_cost_above_the_limit_reports_the_length_of_the_month(cluster, endpoint):
    window = window_at(MONTH, time.time_ns() // 1_000)
    request = pb.RateLimitRequest(
        identifier="ada", identifier_type="user", endpoint=endpoint, tokens_requested=LIMIT + 1
    )
    for _ in range(2):
        answer = cluster[0].checks.CheckRateLimit(request, timeout=START_S)
        assert answer.reason == pb.COST_EXCEEDS_LIMIT
        assert answer.retry_after_seconds == window.end_s - window.start_s
        assert cluster[0].check(endpoint, "ada").allowed


def test_the_longest_delay_of_costs_above_the_limits_is_found_among_months_and_windows(
    cluster, endpoint
):
    month = pb.Limit(limit=LIMIT, algorithm="fixed_window", period=pb.MONTH)
    quarter = pb.Limit(name="quarter", limit=LIMIT, algorithm="sliding_window")
    quarter.window_seconds = 90 * 86_400
    endpoint += "/quarter"
    cluster.nodes.rule(endpoint=endpoint, limits=[month, quarter], algorithm="fixed_window")
    request = pb.RateLimitRequest(
        identifier="ada", identifier_type="user", endpoint=endpoint, tokens_requested=LIMIT + 1
    )
    checked = cluster[0].checks.CheckRateLimit(request, timeout=START_S)
    explained = cluster[0].node.ExplainRateLimit(request, timeout=START_S).answer
    for answer in (checked, explained):
        assert (answer.limit_name, answer.retry_after_seconds) == (
            "quarter",
            quarter.window_seconds,
        )


def test_a_reset_frees_the_month_on_every_node(cluster, endpoint):
    spend(cluster, endpoint, 2 * LIMIT)
    request = pb.ResetRequest(identifier="ada", identifier_type="user", endpoint=endpoint)
    cluster[0].node.ResetRateLimit(request, timeout=START_S)
    for node in cluster.nodes.served:
        until(lambda node=node: node.check(endpoint, "ada").allowed, "the reset has arrived")


def test_the_server_keeps_a_bucket_until_the_end_of_the_month(cluster, endpoint):
    cluster[0].check(endpoint, "cleo")
    cluster.settled()
    keys = BucketKeys(KEY_SECRET.encode())
    rule = Rule(
        "", endpoint, IdentifierType.USER, limit=LIMIT, window_seconds=2_592_000,
        algorithm=Algorithm.FIXED_WINDOW, calendar=MONTH,
    )  # fmt: skip
    start_s = window_at(MONTH, time.time_ns() // 1_000).start_s
    name = keys.stored(b"cleo" + keys.scope(rule, endpoint, rule, start_s))
    left_s = end_s() - time.time()
    assert left_s < cluster.valkey.ask("TTL", bucket_key(name)) <= left_s + 3_700


def test_a_flushed_server_costs_at_most_one_limit_and_known_denials_stay(cluster, endpoint):
    spend(cluster, endpoint, 2 * LIMIT)
    cluster.settled()
    knows = cluster[0]
    assert not knows.check(endpoint, "ada").allowed
    cluster.valkey.ask("FLUSHALL")
    if not cluster.is_strict:
        assert not knows.check(endpoint, "ada").allowed
    allowed = 0
    for _ in range(3):
        allowed += spend(cluster, endpoint, LIMIT)
        cluster.settled()
    assert allowed <= most_allowed(cluster)


def test_out_of_bounds_timestamps_select_no_other_month(cluster, endpoint):
    for at_s in (end_s() + 1, end_s() - 40 * 86_400):
        request = pb.RateLimitRequest(
            identifier="dan", identifier_type="user", endpoint=endpoint, timestamp=at_s
        )
        for _ in range(LIMIT):
            cluster[0].checks.CheckRateLimit(request, timeout=START_S)
    assert not cluster[0].check(endpoint, "dan").allowed
