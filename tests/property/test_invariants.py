"""The invariants in docs/ARCHITECTURE.md of a single node, each tested through the limiter."""

from dataclasses import replace

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from ratelimitd.buckets.snapshot_format import latest_us, unpack
from ratelimitd.buckets.table import BucketTable
from ratelimitd.counters import CheckStats
from ratelimitd.ledger.accounts import ACCOUNTS
from ratelimitd.model import Algorithm, Check, IdentifierType, Reason, Rule
from ratelimitd.rules.book import RuleBook
from ratelimitd.testing import ManualClock
from tests.conflict_rule import StoredState, merge
from tests.unit.limiter.nodes import limiter_of

pytestmark = pytest.mark.slice

USER = IdentifierType.USER
SECOND = 1_000_000
START_US = 1_700_006_400_000_000


class Node:
    """A limiter whose time is given with each check, and may step back."""

    def __init__(self, *rules, timestamps="server", max_entries=10_000):
        self.clock, self.stats = ManualClock(START_US), CheckStats()
        self.table = BucketTable(max_entries)
        self.limiter = limiter_of(self.clock, self.stats, timestamps, buckets=self.table)
        self.put(*rules)

    def put(self, *rules):
        self.limiter.replace_book(RuleBook.of(rules, 1))

    def check(self, at_us, cost=1, name=b"ada", **fields):
        self.clock.step(at_us - self.clock.now_us())
        return self.limiter.check(Check(name, fields.pop("kind", USER), "/e", cost, **fields))

    def peek(self, at_us, cost=1, name=b"ada"):
        return self.check(at_us, cost, name, peek=True)

    def value(self):
        """Return the value of the only bucket, or None."""
        keys = [key for index in range(self.table.shard_count) for key in self.table.keys(index)]
        return self.table.value(keys[0]) if keys else None


algorithms = st.sampled_from(list(ACCOUNTS))
windows = st.one_of(st.integers(1, 5), st.integers(1, 100_000))
limits = st.one_of(st.integers(1, 5), st.integers(1, 1_000))


bursts = st.one_of(st.just(0), st.integers(1, 5), st.integers(1, 3_000))


def rules_of(algorithm):
    return st.builds(
        lambda limit, window, burst: Rule(
            "1", "/e", USER, limit=limit, window_seconds=window, algorithm=algorithm, burst=burst
        ),
        limits,
        windows,
        bursts if algorithm is Algorithm.TOKEN_BUCKET else st.just(0),
    )


any_rule = algorithms.flatmap(rules_of)


@st.composite
def courses(draw, rule, *, back=True, max_size=40):
    """Draw (time, cost) of checks, most of them about as far apart as the rule allows."""
    window_us = rule.window_us
    gaps = st.one_of(
        st.integers(0, max(1, 3 * window_us // rule.limit)),
        st.sampled_from([0, 1, window_us // rule.limit, window_us - 1, window_us, window_us + 1]),
        st.integers(-2 * window_us if back else 0, 2 * window_us),
    )
    costs = st.one_of(st.just(1), st.integers(1, rule.capacity + 1))
    at_us, course = START_US + draw(st.integers(0, window_us)), []
    for gap_us, cost in draw(st.lists(st.tuples(gaps, costs), min_size=1, max_size=max_size)):
        at_us = max(at_us + gap_us, 1)
        course.append((at_us, cost))
    return course


def rules_and_courses(rules=any_rule, **options):
    return rules.flatmap(lambda rule: st.tuples(st.just(rule), courses(rule, **options)))


def admits(rule, course):
    """Return (effective time, cost) of every admitted check."""
    node, admitted, latest = Node(rule), [], 0
    for at_us, cost in course:
        if node.check(at_us, cost).allowed:
            latest = max(latest, at_us)
            admitted.append((latest, cost))
    return admitted


@given(rules_and_courses(rules_of(Algorithm.TOKEN_BUCKET)))
def test_a_token_bucket_admits_at_most_its_capacity_and_refill_in_any_interval(case):
    """I1: over every interval, admitted ≤ capacity + T × limit / window, without any rounding."""
    rule, course = case
    admitted = admits(rule, course)
    for first, (from_us, _) in enumerate(admitted):
        total = 0
        for to_us, cost in admitted[first:]:
            total += cost
            most = rule.capacity * rule.window_us + rule.limit * (to_us - from_us)
            assert total * rule.window_us <= most


@given(rules_and_courses(rules_of(Algorithm.SLIDING_WINDOW)))
def test_a_sliding_window_admits_at_most_its_limit_in_any_window(case):
    """I2: in every (t − window, t]."""
    rule, course = case
    admitted = admits(rule, course)
    for last, (to_us, _) in enumerate(admitted):
        inside = [cost for at_us, cost in admitted[: last + 1] if at_us > to_us - rule.window_us]
        assert sum(inside) <= rule.limit


@given(rules_and_courses(rules_of(Algorithm.FIXED_WINDOW)))
def test_a_fixed_window_admits_its_limit_per_window_and_twice_that_per_interval(case):
    """I2: ≤ limit in every aligned window, ≤ 2 × limit in every (t − window, t]."""
    rule, course = case
    admitted = admits(rule, course)
    for to_us, _ in admitted:
        aligned = [c for at_us, c in admitted if at_us // rule.window_us == to_us // rule.window_us]
        inside = [c for at_us, c in admitted if to_us - rule.window_us < at_us <= to_us]
        assert sum(aligned) <= rule.limit
        assert sum(inside) <= 2 * rule.limit


states = st.builds(StoredState, *[st.integers(0, 2)] * 4)


@given(st.lists(states, min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_nodes_that_receive_the_same_states_agree_in_any_order_and_with_repeats(heard, rng):
    """I5; a later generation wins first, then a later revision."""
    again = heard + rng.choices(heard, k=3)
    rng.shuffle(again)
    results = []
    for order in (heard, again):
        result = order[0]
        for state in order[1:]:
            result = merge(result, state)
        results.append(result)
    assert results[0] == results[1]
    assert results[0][:2] == max(state[:2] for state in heard)


@given(rules_and_courses())
def test_answers_stay_within_the_limit_and_a_denial_changes_nothing(case):
    """I6: 0 ≤ remaining ≤ capacity, 0 ≤ spent ≤ capacity, and a denied check leaves the state as it was."""
    rule, course = case
    node = Node(rule)
    for at_us, cost in course:
        before = node.value()
        answer = node.check(at_us, cost)
        assert 0 <= answer.remaining <= rule.capacity
        assert answer.retry_after >= (not answer.allowed)
        assert answer.reset_time * SECOND >= at_us
        value = node.value()
        if not answer.allowed:
            assert value == before
        elif isinstance(value, int):
            spent, _ = unpack(value)
            token = rule.window_us if rule.algorithm is Algorithm.TOKEN_BUCKET else 1
            assert 0 <= spent <= rule.capacity * token


@given(rules_and_courses(), st.data())
def test_a_denied_check_passes_at_its_retry_time_and_not_a_second_earlier(case, data):
    """I7, in the style of governor: denied at any time before, allowed exactly at it."""
    rule, course = case
    node = Node(rule)
    for at_us, cost in course:
        answer = node.check(at_us, cost)
        if answer.reason is Reason.LIMIT_EXCEEDED:
            wait_us = answer.retry_after * SECOND
            assert node.peek(at_us + wait_us, cost).allowed
            early_us = wait_us - SECOND
            for too_early_us in {0, early_us, data.draw(st.integers(0, early_us))}:
                assert not node.peek(at_us + too_early_us, cost).allowed


@given(rules_and_courses())
def test_an_emptied_bucket_reports_the_time_of_its_next_token_and_of_its_last(case):
    """I7 for allowed checks: retry_after is that of a check of one token, reset_time that of the whole limit."""
    rule, course = case
    node = Node(rule)
    for at_us, cost in course:
        answer = node.check(at_us, cost)
        full_us = answer.reset_time * SECOND
        assert node.peek(full_us, rule.capacity).allowed
        if answer.allowed:
            assert not node.peek(full_us - SECOND, rule.capacity).allowed
            assert (answer.retry_after > 0) == (answer.remaining == 0)
        if answer.allowed and not answer.remaining:
            wait_us = answer.retry_after * SECOND
            assert node.peek(at_us + wait_us, 1).allowed
            assert not node.peek(at_us + wait_us - SECOND, 1).allowed


@given(rules_and_courses())
def test_a_clock_that_steps_back_mints_nothing_and_delays_by_the_step_at_most(case):
    """I8: every answer is as if the clock had stood still instead."""
    rule, course = case
    stepping, standing, latest_accepted_us = Node(rule), Node(rule), 0
    for at_us, cost in course:
        effective_us = max(at_us, latest_accepted_us)
        answer, expected = stepping.check(at_us, cost), standing.check(effective_us, cost)
        assert answer[:3] == expected[:3]
        if answer.reason is not Reason.COST_EXCEEDS_LIMIT:
            step_s = -(-(effective_us - at_us) // SECOND)
            assert 0 <= answer.retry_after - expected.retry_after <= step_s
        if answer.allowed:
            latest_accepted_us = effective_us
            assert latest_us(stepping.value()) == effective_us


names = st.one_of(st.text("a:{}*\0é/", min_size=1, max_size=4), st.text(min_size=1, max_size=8))
questions = st.tuples(
    names.map(str.encode), st.sampled_from(IdentifierType), names.filter(lambda name: name != "*")
)


@given(questions, questions, algorithms)
@example((b"a", USER, "/a"), (b"a/", USER, "a"), Algorithm.TOKEN_BUCKET)
@example((b"a:b", USER, "c"), (b"a", USER, "b:c"), Algorithm.TOKEN_BUCKET)
def test_different_checks_never_share_a_bucket(one, other, algorithm):
    """I11."""
    assume(one != other)
    node = Node(
        *(
            Rule(kind, "*", kind, limit=5, window_seconds=60, algorithm=algorithm)
            for kind in IdentifierType
        )
    )
    assert node.limiter.check(Check(*one, cost=5)).remaining == 0
    assert node.limiter.check(Check(*other, cost=2)).remaining == 3
    assert not node.limiter.check(Check(*one)).allowed


@given(rules_and_courses(back=False), st.data())
def test_sweeping_expired_buckets_changes_no_answer(case, data):
    """I12: a bucket is dropped only once it equals a fresh one, even for callers as late as tolerated."""
    rule, course = case
    swept, kept = Node(rule, timestamps="bounded"), Node(rule, timestamps="bounded")
    for at_us, cost in course:
        timestamp = data.draw(st.one_of(st.just(0), st.integers(at_us - 6 * SECOND, at_us)))
        answers = [node.check(at_us, cost, timestamp=timestamp) for node in (swept, kept)]
        assert answers[0] == answers[1]
        swept.table.sweep(at_us, 1_000)
    assert len(swept.table) <= len(kept.table)


@given(rules_and_courses(max_size=15), algorithms, windows, st.data())
def test_an_algorithm_never_gets_the_state_of_another(case, algorithm, window_seconds, data):
    """I14: another algorithm or window starts afresh; after a change back, the old state is unchanged."""
    rule, course = case
    burst = rule.burst if algorithm is Algorithm.TOKEN_BUCKET else 0
    other = replace(rule, algorithm=algorithm, window_seconds=window_seconds, burst=burst)
    node = Node(rule)
    for at_us, cost in course:
        node.check(at_us, cost)
    at_us, cost = data.draw(courses(other))[0]
    before = node.peek(at_us, cost)
    node.put(other)
    if (other.algorithm, other.window_seconds) == (rule.algorithm, rule.window_seconds):
        assert node.check(at_us, cost) == before
        return
    assert node.check(at_us, cost)[:5] == Node(other).check(at_us, cost)[:5]
    node.put(rule)
    assert node.peek(at_us, cost) == before


@given(rules_and_courses(), limits)
def test_an_edited_limit_applies_at_once_and_denies_no_longer_than_its_time_to_full(case, limit):
    """I14: an old limit has no effect after its change; spends are kept."""
    rule, course = case
    node, edited = Node(rule), replace(rule, limit=limit)
    for at_us, cost in course:
        left = node.check(at_us, cost).remaining
    node.put(edited)
    answer = node.peek(at_us, 1)
    assert answer.rule is edited
    if (
        rule.algorithm is not Algorithm.TOKEN_BUCKET
    ):  # its new rate applies from its latest check on
        assert answer.remaining == max(0, limit - (rule.limit - left) - answer.allowed)
    # The latest accepted check may be ahead of a clock that was set back; its window counts.
    value = node.value()
    latest = at_us if value is None else max(at_us, latest_us(value))
    assert node.peek(latest + edited.full_after_s * SECOND, edited.capacity).allowed


@given(
    any_rule,
    st.integers(1, 8),
    st.lists(st.tuples(st.integers(0, 11), st.integers(1, 3), st.integers(0, 2)), max_size=80),
)
def test_only_a_counted_eviction_refills_a_bucket(rule, max_entries, uses):
    """I18 for a node without a shared store: a counted eviction precedes any answer that allows too much."""
    bounded, unbounded = Node(rule, max_entries=max_entries), Node(rule)
    names_seen, at_us = set(), START_US
    for name, cost, seconds in uses:
        at_us += seconds * SECOND
        bounded.table.tick += seconds
        names_seen.add(name)
        answers = [node.check(at_us, cost, b"%d" % name) for node in (bounded, unbounded)]
        assert len(bounded.table) <= max_entries
        if len(names_seen) <= max_entries:
            assert bounded.table.evicted_total == 0
        if not bounded.table.evicted_total:
            assert answers[0] == answers[1]
    assert bounded.table.evicted_total >= len(unbounded.table) - max_entries


items = st.builds(
    Check,
    st.sampled_from([b"ada", b"bob", b"eve"]),
    st.sampled_from([USER, IdentifierType.IP]),
    st.sampled_from(["/e", "/f"]),
    st.integers(1, 6),
    st.sampled_from([0, START_US // SECOND, START_US + SECOND, 1]),
    st.booleans(),
)


@given(any_rule, any_rule, st.lists(st.lists(items, max_size=20), max_size=4))
def test_a_batch_equals_the_same_checks_in_order(own, everywhere, batches):
    """I20: answer i belongs to check i, and the remaining tokens are the same."""
    rules = (own, replace(everywhere, id="2", endpoint="*"))
    batched, single = (Node(*rules, timestamps="bounded") for _ in range(2))
    for batch in batches:
        assert batched.limiter.check_batch(batch) == [*map(single.limiter.check, batch)]
    shards = range(batched.table.shard_count)
    left = [
        {key: node.table.value(key) for index in shards for key in node.table.keys(index)}
        for node in (batched, single)
    ]
    assert left[0] == left[1]
