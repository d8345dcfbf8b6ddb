import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ratelimitd.buckets.keys import joined
from ratelimitd.counters import CheckStats
from ratelimitd.model import Algorithm, Rule
from ratelimitd.observe.denials import (
    FADED,
    HALF_LIFE_S,
    MAX_PENDING,
    TOP,
    Denials,
    DeniedEndpoint,
    DeniedIdentifier,
    FrequentItems,
)
from ratelimitd.rules.book import RuleBook


class Node:
    def __init__(self):
        self.stats = CheckStats()
        self.denials = Denials(self.stats, digest=lambda name, kind: f"{kind}:{len(name)}")

    def deny(self, name=b"ada.lovelace", endpoint="/a", identifier_type="user", times=1):
        scope = SimpleNamespace(endpoint=endpoint, identifier_type=identifier_type)
        for _ in range(times):
            self.stats.blocked_total += 1
            self.denials.record((name, scope))

    def steady(self, seconds, per_second):
        for _ in range(seconds):
            self.deny(times=per_second)
            self.denials.fold()
            self.denials.fade(1.0)


@pytest.fixture
def node():
    return Node()


def test_most_denied_come_first(node):
    node.deny(b"ada.lovelace", "/a", times=3)
    node.deny(b"grace.hopper", "/b", times=5)
    node.denials.fold()
    assert [one.endpoint for one in node.denials.top_endpoints()] == ["/b", "/a"]
    assert [one.masked for one in node.denials.top_identifiers()] == ["gra…", "ada…"]


def test_nothing_is_denied_at_first(node):
    node.denials.fold()
    assert (node.denials.top_endpoints(), node.denials.top_identifiers()) == ([], [])


def test_steady_rate_yields_the_denials_of_a_minute(node):
    node.steady(seconds=600, per_second=3)
    assert node.denials.top_endpoints() == [DeniedEndpoint("/a", pytest.approx(180, rel=0.02))]


def test_past_denials_halve_every_minute_and_disappear(node):
    node.steady(seconds=600, per_second=3)
    node.denials.fade(HALF_LIFE_S)
    assert node.denials.top_endpoints()[0].per_minute == pytest.approx(90, rel=0.02)
    node.denials.fade(20 * HALF_LIFE_S)
    assert not node.denials.top_endpoints()


def test_denials_beyond_the_queue_are_represented_by_the_last_ones(node):
    node.deny(b"early.bird.1", times=3 * MAX_PENDING)
    node.deny(b"late.comer.2", "/b", times=MAX_PENDING)
    node.denials.fold()
    [late] = node.denials.top_endpoints()
    assert (late.endpoint, late.per_minute) == ("/b", pytest.approx(4 * MAX_PENDING * 0.693, 0.01))


def test_endpoints_without_a_rule_are_ranked_by_checks(node):
    for endpoint, times in (("/a", 2), ("/b", 3 * MAX_PENDING)):
        for _ in range(times):
            node.stats.no_rule_total += 1
            node.denials.record_without_rule(endpoint)
        node.denials.fold()
    often, seldom = node.denials.top_unmatched()
    assert often == ("/b", pytest.approx(3 * MAX_PENDING * 0.693, 0.01))
    assert seldom == ("/a", pytest.approx(2 * 0.693, 0.01))
    node.denials.fade(HALF_LIFE_S)
    assert node.denials.top_unmatched()[1].per_minute == pytest.approx(0.693, 0.01)
    assert node.denials.top_endpoints() == []


def test_an_endpoint_that_gets_a_rule_is_no_longer_without_one(node):
    rule = Rule("a", "/a", "user", limit=1, window_seconds=60, algorithm=Algorithm.FIXED_WINDOW)
    book = RuleBook.of([rule, replace(rule, id="b", endpoint="/b", enabled=False)], 1)

    def check():
        node.stats.no_rule_total += 2
        for endpoint in ("/a", "/b"):
            node.denials.record_without_rule(endpoint)

    check()
    node.denials.fold()
    check()  # and not yet counted
    node.denials.forget_matched(book)
    node.denials.fold()
    assert [one.endpoint for one in node.denials.top_unmatched()] == ["/b"]


def test_denials_of_an_open_breaker_are_not_attributed(node):
    node.stats.blocked_total += 100
    node.stats.breaker_denied_total += 100
    node.deny()
    node.denials.fold()
    assert node.denials.top_endpoints()[0].per_minute == pytest.approx(0.693, 0.01)


def test_reported_items_are_bounded(node):
    for number in range(TOP + 5):
        node.deny(b"user.%02d.name" % number, f"/{number}")
    node.denials.fold()
    assert len(node.denials.top_endpoints()) == len(node.denials.top_identifiers()) == TOP


def test_names_are_reported_on_request_only_and_never_for_api_keys(node):
    node.deny(b"ada.lovelace")
    node.deny(b"sk_live_0123456789", identifier_type="api_key")
    node.denials.fold()
    assert node.denials.top_identifiers(named=True) == [
        DeniedIdentifier("user:12", "user", "ada…", pytest.approx(0.69, 0.1), "ada.lovelace"),
        DeniedIdentifier("api_key:18", "api_key", "sk_l…", pytest.approx(0.69, 0.1), ""),
    ]
    shown = str(node.denials.top_identifiers())
    assert "lovelace" not in shown
    assert "0123" not in shown


def test_one_name_of_two_types_is_two_identifiers(node):
    node.deny(b"10.0.0.1", identifier_type="ip")
    node.deny(b"10.0.0.1", identifier_type="user")
    node.denials.fold()
    assert {one.identifier_type for one in node.denials.top_identifiers()} == {"ip", "user"}


def test_combination_is_reported_by_name_unless_it_has_an_api_key(node):
    node.deny(joined([b"192.0.2.7", b"ada"]), identifier_type="ip+user")
    node.deny(joined([b"sk_live_0123456789", b"ada"]), identifier_type="api_key+user")
    node.deny(b"", identifier_type="all")
    node.denials.fold()
    told = {one.identifier_type: one.name for one in node.denials.top_identifiers(named=True)}
    assert told == {"ip+user": "192.0.2.7+ada", "api_key+user": "", "all": "all"}


def test_counts_of_few_items_are_exact():
    items = FrequentItems(4)
    for item in "abracadabra":
        items.add(item)
    assert items.top(2) == [("a", 5), ("b", 2)]
    assert dict(items.top(9)) == Counter("abracadabra")


@pytest.mark.parametrize("seed", range(3))
def test_frequent_items_among_many_stay_with_a_bounded_error(seed):
    rng, size = random.Random(seed), 20
    items, exact = FrequentItems(size), Counter()
    for _ in range(5_000):
        item = rng.choice([*range(5), rng.randrange(100, 100_000)])
        weight = rng.choice([1, 1, 1, 4])
        items.add(item, weight)
        exact[item] += weight
        assert len(items) < 2 * size
    assert {item for item, _ in items.top(5)} == set(range(5))
    most_lost = exact.total() / size
    for item, count in items.top(2 * size):
        assert exact[item] - most_lost <= count <= exact[item]


def test_counts_fade_until_they_are_dropped():
    items = FrequentItems(4)
    items.add("a", 8)
    items.add("b", 2 * FADED)
    items.fade(0.5)
    assert items.top(9) == [("a", 4.0)]
