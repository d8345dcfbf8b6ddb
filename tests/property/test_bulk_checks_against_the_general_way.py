"""Bulk checks get the same octets, and leave the same buckets and counters, as checks one by one."""

import asyncio
from collections import Counter
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.buckets.table import BucketTable
from ratelimitd.counters import CheckStats
from ratelimitd.errors import InvalidInputError
from ratelimitd.fair_queue import FairQueue
from ratelimitd.ledger.accounts import ACCOUNTS
from ratelimitd.limiter.limiter import Limiter
from ratelimitd.model import (
    Algorithm,
    Calendar,
    Enforcement,
    IdentifierType,
    Limit,
    Period,
    Plan,
    Rule,
)
from ratelimitd.rules.assignments import Assignments
from ratelimitd.rules.book import RuleBook
from ratelimitd.services.rate_limiter import RateLimiterService
from ratelimitd.testing import ManualClock
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.one_by_one import OneByOne
from tests.property.spelled_checks import (
    ADDRESSES,
    ENDPOINTS,
    NAMES,
    TYPES,
    canonical,
    common,
    long_varint,
    messages,
)
from tests.rpc.wire import field
from tests.unit.services.fake_call import FakeCall

CALL = FakeCall()
USER, IP = IdentifierType.USER, IdentifierType.IP
DAYS = Calendar(Period.DAY, "Europe/Berlin")
OTHERS = (
    Limit(limit=30, window_seconds=60, algorithm=Algorithm.FIXED_WINDOW, name="minute"),
    Limit(
        limit=40,
        window_seconds=86_400,
        algorithm=Algorithm.FIXED_WINDOW,
        name="day",
        calendar=DAYS,
    ),
    Limit(
        limit=3,
        window_seconds=60,
        algorithm=Algorithm.SLIDING_WINDOW,
        name="candidate",
        enforcement=Enforcement.OBSERVE,
    ),
)

# One with one limit, one with several, and one whose answers are too long for the fast encoding.
PLANS = (
    Plan("few", OTHERS[:1]),
    Plan("long", tuple(replace(OTHERS[0], name=f"{n}".zfill(32)) for n in range(8))),
    Plan("several", OTHERS),
)

MET: Counter[str] = Counter()


class Node:
    """The check path of a node, with everything in memory."""

    def __init__(self, limiter_class, timestamps):
        self.clock, self.stats = ManualClock(), CheckStats()
        self.table = BucketTable(10_000, callers_time=timestamps == "caller")
        self.limiter = limiter_class(
            buckets=self.table,
            clock=self.clock,
            stats=self.stats,
            timestamps=timestamps,
            keys=BucketKeys(b"k" * 32),
            assignments=(assignments := Assignments()),
        )
        self.assignments = assignments
        self.service = RateLimiterService(
            self.limiter, self.stats, lambda: 0.0, FairQueue(map(float, count()).__next__)
        )
        [self.bulk] = self.service.methods().bulk.values()

    def put(self, rules):
        """Change the rules like a node does."""
        book = RuleBook.of(rules, 1)
        self.limiter.replace_book(book)
        self.stats.forget_rules(lambda rule_id: book.get(rule_id) is not None)

    def check(self, message):
        """Return the octets of the answer, or the error of the message."""
        try:
            return self.service.check_rate_limit(message, CALL)
        except InvalidInputError as error:
            return error.violations

    def batch(self, message):
        try:
            return self.service.check_rate_limit_batch(message, CALL)
        except InvalidInputError as error:
            return error.violations

    @property
    def answered(self):
        return self.stats.allowed_total + self.stats.blocked_total + self.stats.invalid_total

    @property
    def state(self):
        """Return all state that checks leave."""
        table, stats = self.table, self.stats
        counted = {name: getattr(stats, name) for name in CheckStats.__slots__}
        # A rule that was looked up but never charged may already have counters, and count as used.
        del counted["used_rules"]
        for name in ("by_rule", "further_rules", "would_deny"):
            counted[name] = {key: some for key, some in counted[name].items() if any(some)}
        keys = [key for index in range(table.shard_count) for key in table.keys(index)]
        return counted, {key: table.value(key) for key in keys}


class Pair:
    """A node with bulk checks beside one without."""

    def __init__(self, timestamps, algorithms):
        self.node, self.plain = Node(Limiter, timestamps), Node(OneByOne, timestamps)
        own, other, everywhere = algorithms
        burst = 12 if own is Algorithm.TOKEN_BUCKET else 0
        self.rules = {
            rule.id: rule
            for rule in (
                Rule(
                    "a",
                    "/a",
                    USER,
                    limit=5,
                    window_seconds=60,
                    algorithm=own,
                    burst=burst,
                    plans=PLANS,
                ),
                Rule("a-ip", "/a", IP, limit=3, window_seconds=3, algorithm=other),
                Rule("long", ENDPOINTS[-1], USER, limit=20_000, window_seconds=1, algorithm=other),
                Rule("off", "/off", USER, limit=2, window_seconds=60, algorithm=own, enabled=False),
                Rule("default", "*", USER, limit=2**31 - 1, window_seconds=7, algorithm=everywhere),
                Rule(
                    "default-ip", "*", IP, limit=300, window_seconds=2**31 - 1, algorithm=everywhere
                ),
                Rule(
                    "b-ip",
                    "/b",
                    IP,
                    limit=7,
                    window_seconds=86_400,
                    algorithm=Algorithm.FIXED_WINDOW,
                    calendar=DAYS,
                ),
                Rule("b", "/b", USER, limit=9, window_seconds=9, algorithm=own, more=OTHERS),
            )
        }
        # A rule for all callers adds a limit to each check, so it is not always present.
        self.everybody = Rule("all", "**", "all", limit=20, window_seconds=9, algorithm=other)

    def put(self):
        for node in (self.node, self.plain):
            node.put(self.rules.values())

    def calls(self, asked):
        """Send all at once like a transport: checks left by the bulk path are decided after it."""
        answers = list(self.node.bulk(asked))
        assert len(answers) == len(asked)
        MET["in bulk"] += len(answers) - answers.count(None)
        MET["of a plan"] += sum(
            bool(pb.RateLimitResponse.FromString(answer).plan) for answer in answers if answer
        )
        MET["several"] += sum(b"\x52" in answer for answer in answers if answer)
        left = [index for index, answer in enumerate(answers) if answer is None]
        order = [index for index, answer in enumerate(answers) if answer is not None] + left
        for index in left:
            answers[index] = self.node.check(asked[index])
        expected = {index: self.plain.check(asked[index]) for index in order}
        for index in order:
            assert answers[index] == expected[index]
            MET["an error"] += not isinstance(answers[index], bytes)

    def singly(self, asked):
        for message in asked:
            self.calls([message])

    def batch(self, asked):
        message = b"".join(field(1, item) for item in asked)
        assert self.node.batch(message) == self.plain.batch(message)

    def long_batch(self, asked, rule_id, changes):
        """Send more than one slice; the rules change between the first and the second."""
        message = b"".join(field(1, item) for item in asked * (250 // len(asked)))
        running = [node.batch(message) for node in (self.node, self.plain)]
        if not all(map(asyncio.iscoroutine, running)):
            assert running[0] == running[1]
            return
        # Each in its own event loop, iteration by iteration, because the general path takes another number of them.
        loops = [asyncio.new_event_loop() for _ in running]
        tasks = [loop.create_task(each) for loop, each in zip(loops, running, strict=True)]
        for node, loop, task in zip((self.node, self.plain), loops, tasks, strict=True):
            _step_until(loop, lambda node=node, was=node.answered: node.answered > was, task)
        self.edit(rule_id, changes)
        done = [
            _step_until(loop, lambda: False, task) for loop, task in zip(loops, tasks, strict=True)
        ]
        for loop in loops:
            loop.close()
        assert done[0] == done[1]
        MET["a long batch"] += isinstance(done[0], bytes)

    def padded_batch(self, asked, length):
        item = asked[0]
        message = b"\x0a" + length + item
        assert self.node.batch(message) == self.plain.batch(message)

    def passes(self, us):
        for node in (self.node, self.plain):
            node.clock.step(us)

    def edit(self, rule_id, changes):
        if changes is None:
            self.rules.pop(rule_id, None)
            MET["a rule is gone"] += 1
        elif rule_id == "all":
            self.rules["all"] = replace(self.everybody, **changes)
        elif rule_id in self.rules:
            self.rules[rule_id] = replace(self.rules[rule_id], **changes)
        self.put()

    def assign(self, kind, name, plan, ends_in_s):
        for node in (self.node, self.plain):
            end_s = node.clock.now_us() // 1_000_000 + ends_in_s
            node.assignments.put(kind, name.encode(), plan, end_s if ends_in_s else 0)
        MET["assigned"] += 1

    def unassign(self, kind, name):
        for node in (self.node, self.plain):
            node.assignments.remove(kind, name.encode())

    def reset(self, identifier, endpoint):
        for node in (self.node, self.plain):
            asyncio.run(node.limiter.reset(identifier.encode(), USER, endpoint))

    def agree(self):
        """Assert that both have the same state and report the same."""
        assert self.node.state == self.plain.state
        for identifier_type in TYPES:
            for name in ADDRESSES if identifier_type == "ip" else NAMES:
                for endpoint in ENDPOINTS:
                    peek = canonical(name, identifier_type, endpoint, peek=True)
                    assert self.node.check(peek) == self.plain.check(peek)


def _step_until(loop, is_enough, task):
    """Run iterations until ``is_enough``; return the answer, or the error, if the task has ended."""
    while not task.done() and not is_enough():
        loop.call_soon(loop.stop)
        loop.run_forever()
    if not task.done():
        return None
    try:
        return task.result()
    except InvalidInputError as error:
        return error.violations


def times(name, *arguments):
    return st.tuples(st.just(name), *arguments)


several = st.lists(messages, min_size=1, max_size=12)
usual = st.lists(common.map(lambda question: canonical(*question)), min_size=1, max_size=12)
again = st.builds(lambda some, times: some * times, several, st.integers(2, 4))
rule_ids = st.sampled_from(["a", "a", "a-ip", "long", "off", "default", "default-ip", "b", "all"])
changes = st.one_of(
    st.none(),
    st.fixed_dictionaries({"limit": st.sampled_from([1, 2, 6, 127, 128, 16_384, 2**31 - 1])}),
    st.fixed_dictionaries({"window_seconds": st.sampled_from([1, 7, 60, 16_384])}),
    st.fixed_dictionaries({"algorithm": st.sampled_from(list(ACCOUNTS))}),
    st.fixed_dictionaries({"enabled": st.booleans()}),
)
plans = st.sampled_from(["few", "long", "several", "unnamed", "unlimited", "blocked"])
steps = st.one_of(
    times("calls", several),
    times("calls", again),
    times("singly", again),
    times("batch", again),
    times("long_batch", several, rule_ids, changes),
    times("long_batch", usual, rule_ids, changes),
    times("batch", usual),
    times("padded_batch", several, long_varint(20)),
    times("passes", st.sampled_from([1, 100_000, 1_000_000, 61_000_000, -3_000_000])),
    times("edit", rule_ids, changes),
    times(
        "assign",
        st.sampled_from(TYPES),
        st.sampled_from(NAMES + ADDRESSES),
        plans,
        st.sampled_from([0, 0, 1, 61]),
    ),
    times("unassign", st.sampled_from(TYPES), st.sampled_from(NAMES + ADDRESSES)),
    times("reset", st.sampled_from(NAMES), st.sampled_from(ENDPOINTS)),
)


def run(examples, *, derandomize):
    MET.clear()

    @settings(
        max_examples=examples,
        derandomize=derandomize,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        timestamps=st.sampled_from(["server", "bounded", "caller"]),
        algorithms=st.tuples(*[st.sampled_from(list(ACCOUNTS))] * 3),
        early=several,
        assigned=st.dictionaries(st.sampled_from(NAMES), plans),
        course=st.lists(steps, max_size=12),
    )
    def agree(timestamps, algorithms, early, *, assigned, course):
        pair = Pair(timestamps, algorithms)
        pair.calls(early)  # before any rules exist
        pair.put()
        for name, plan in assigned.items():
            pair.assign("user", name, plan, 0)
        for name, *arguments in course:
            getattr(pair, name)(*arguments)
        pair.agree()

    agree()


@pytest.mark.timeout(300)
def test_bulk_checks_are_answered_and_charged_like_single_checks():
    run(400, derandomize=True)
    # Without the intended cases the agreement would mean little.
    assert MET["in bulk"] > 500
    assert MET["several"] > 50
    assert MET["of a plan"] > 50
    assert min(MET["an error"], MET["a long batch"], MET["a rule is gone"]) > 20


@pytest.mark.long
@pytest.mark.timeout(1_800)
def test_very_many_bulk_checks_are_answered_and_charged_like_single_checks():
    run(10_000, derandomize=False)
