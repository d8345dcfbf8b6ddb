"""A node's part in a cluster, without a server: tests set the clock and decide the result of each request."""

import heapq
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

from ratelimitd.algorithms import DECIDE
from ratelimitd.cluster.accuracy import Accuracy
from ratelimitd.cluster.cache import IDLE_US, BucketCache
from ratelimitd.cluster.gossip import Gossip
from ratelimitd.cluster.pending import HASH_TAGS
from ratelimitd.cluster.refresh import DISTRUSTED_PER_STEP, Refresh
from ratelimitd.cluster.shared_buckets import SharedBuckets
from ratelimitd.cluster.store_servers import StoreServer
from ratelimitd.cluster.sync import Partition
from ratelimitd.counters import CheckStats
from ratelimitd.errors import StoreUnavailableError
from ratelimitd.ledger.local_view import LocalView
from ratelimitd.ledger.shared_state import Ask, SharedState, Update
from ratelimitd.model import Algorithm, IdentifierType, Rule
from ratelimitd.testing import ManualClock
from ratelimitd_wire.breaker import Breaker
from tests.ledger_model import Ledger, reset, settle
from tests.shared_hold_model import HoldStore

MS = 1_000
SECOND = 1_000_000
ROUND_TRIP_US = MS
STEP_US = 6_250
TIMEOUT_US = 20 * MS

RULE = Rule(
    "1",
    "/a",
    IdentifierType.USER,
    limit=1_000,
    window_seconds=3_600,
    algorithm=Algorithm.FIXED_WINDOW,
    revision=1,
)


def limited(limit, **changes):
    """:data:`RULE` with another limit."""
    return replace(RULE, limit=limit, **changes)


NO_TAG = SimpleNamespace(make_view=LocalView)


def name_of(key):
    """Return the stored name of a bucket; its first octet, and so its hash tag, is that of the key."""
    return key.ljust(16, b"\0")


def unwatch(queue):
    """Forget denials and peeks, so that they cause no reads."""
    for bucket, _ in queue.due(1 << 63, 1_000):
        bucket.is_queued = False


class ManualTimers:
    """Timers of a manual clock."""

    def __init__(self, clock):
        self.clock, self._agenda, self.set_total = clock, [], 0

    def call_soon(self, callback, *arguments):
        self.call_later(0, callback, *arguments)

    def call_later(self, delay, callback, *arguments):
        self.set_total += 1
        due_us = self.clock.monotonic_us() + round(delay * SECOND)
        timer = (due_us, self.set_total, partial(callback, *arguments))
        heapq.heappush(self._agenda, timer)
        return SimpleNamespace(cancel=partial(self._cancel, timer))

    def _cancel(self, timer):
        if timer in self._agenda:
            self._agenda.remove(timer)
            heapq.heapify(self._agenda)

    def run(self, us=0):
        """Advance the clock, and run the timers due."""
        until_us = self.clock.monotonic_us() + us
        while self._agenda and self._agenda[0][0] <= until_us:
            due_us, _, act = heapq.heappop(self._agenda)
            self.clock.advance(us=due_us - self.clock.monotonic_us())
            act()
        self.clock.advance(us=until_us - self.clock.monotonic_us())


@dataclass
class Request:
    """A request of a node to the store, answered by the store or a test."""

    kind: str
    subject: object
    run: object
    done: object

    def answer(self):
        self.done(self.run())

    def lose(self):
        """Apply the request, and lose the reply."""
        self.run()
        self.fail()

    def fail(self, error=None):
        self.done(error or StoreUnavailableError("no answer"))


class FakeStore:
    """A store that is a :class:`tests.ledger_model.Ledger`.

    Attributes:
        mode: ``up`` answers after a millisecond; ``deaf`` applies requests and does not answer within 20 ms; ``down``
        does nothing; ``held`` leaves requests to the test.
        requests: all requests so far.
        held: requests that wait for the test.
    """

    tags_per_batch = 1
    decides_together = False
    connected = True
    corrupt_total = 0

    def __init__(self, timers):
        self.ledger, self.mode, self.requests, self.held = Ledger(), "up", [], []
        self.server_of_tag = ["server"] * HASH_TAGS
        self.time_us, self.fingerprint, self.members = 1_700_006_400 * SECOND, "", ()
        self._timers = timers
        self._ledgers = {}
        self.holds = defaultdict(HoldStore)
        """Stores of holds by hash tag; a single one if one server decides together."""
        self.disconnected = set()

    def server_of(self, tag):
        return self.server_of_tag[tag]

    def is_connected(self, tag):
        return self.server_of_tag[tag] not in self.disconnected

    def read(self, name, rule, done):
        self._take("read", name, lambda: self.ledger.buckets.get(name), done)

    def first_check(self, check, done):
        self._take("first_check", check.name, partial(self.ledger.first_check, check), done)

    def settle(self, tag, batch, done):
        # The answers of a sender are stored per hash tag.
        ledger = self._ledgers.setdefault(tag, Ledger())
        ledger.buckets = self.ledger.buckets
        self._take("settle", batch, partial(ledger.apply, batch), done)

    def keeper(self, tag):
        """Return the store of the holds whose record is under a hash tag."""
        keeper = self.holds[0 if self.decides_together else tag]
        keeper.now_us = self.time_us + self._timers.clock.monotonic_us()
        return keeper

    def hold(self, tag, call, done):
        self._take("hold", call, lambda: self.keeper(tag).hold(call), done)

    def step_hold(self, tag, call, done):
        self._take("step", call, lambda: self.keeper(tag).step(call), done)

    def decide(self, check, done):
        name, rule, now_us, cost, peek = check
        if rule.algorithm is Algorithm.CONCURRENCY:
            self._take("decide", check, lambda: self.keeper(name[0]).decide(check), done)
            return

        def decided():
            shared = self.ledger.buckets.get(name)
            outcome = DECIDE[rule.algorithm](shared and shared.state, rule, now_us, cost)
            if not peek:
                update = Update(rule, None, (), [Ask(now_us, cost)])
                self.ledger.buckets[name] = settle(shared, update).shared
            return outcome

        self._take("decide", check, decided, done)

    def reset(self, name, rule, least, done):
        def was_reset():
            shared = self.ledger.buckets[name] = reset(self.ledger.buckets.get(name), rule, least)
            return shared

        self._take("reset", name, was_reset, done)

    def probe(self, tag, done):
        self._take("probe", tag, lambda: None, done)

    def beat(self, incarnation, ttl_us, fingerprint, done):
        def beaten():
            self.fingerprint = self.fingerprint or fingerprint
            self.members = (*{*self.members, incarnation},) if ttl_us else ()
            return self.time_us, self.fingerprint, self.members

        self._take("beat", (incarnation, ttl_us), beaten, done)

    def asked(self, kind):
        """Return the subjects of the requests of one kind so far."""
        return [request.subject for request in self.requests if request.kind == kind]

    def held_one(self):
        """Return and remove the only held request."""
        (request,) = self.held
        self.held = []
        return request

    def spend(self, key, rule, tokens, at_us):
        """Spend on another node."""
        name = name_of(key)
        update = Update(rule, None, [(at_us, tokens)])
        self.ledger.buckets[name] = settle(self.ledger.buckets.get(name), update).shared

    def spent(self, key):
        """Return the count of a fixed window."""
        shared = self.ledger.buckets.get(name_of(key))
        return shared.state[0] if shared is not None and shared.state else 0

    def _take(self, kind, subject, run, done):
        request = Request(kind, subject, run, done)
        self.requests.append(request)
        if self.mode == "up":
            self._timers.call_later(ROUND_TRIP_US / SECOND, request.answer)
        elif self.mode == "deaf":
            self._timers.call_later(TIMEOUT_US / SECOND, request.lose)
        elif self.mode == "down":
            self._timers.call_later(TIMEOUT_US / SECOND, request.fail)
        else:
            self.held.append(request)


class FakeBus:
    def __init__(self):
        self.published = []

    def publish(self, tag, payload):
        self.published.append((tag, payload))

    async def start(self, on_message, on_gap):
        self.on_message, self.on_gap = on_message, on_gap


class World:
    """The shared buckets of one node, and all their collaborators. Needs a running event loop, for its futures."""

    def __init__(self, rule=RULE, *, members=1, max_entries=1_000, ttl_s=300, **options):
        self.rule, self.clock, self.stats = rule, ManualClock(), CheckStats()
        self.timers = ManualTimers(self.clock)
        self.store, self.bus = FakeStore(self.timers), FakeBus()
        self.gossip, self.accuracy = Gossip(self.bus, self.clock), Accuracy(self.stats)
        self.members = SimpleNamespace(count=members)
        breaker = Breaker(self.clock.monotonic_us)
        self.server = StoreServer("server", 0, breaker, self.clock, self.stats, self.timers)
        self.make_view = LocalView
        self.tags = [Partition(number, self.server, "node/1", self) for number in range(HASH_TAGS)]
        self.cache = BucketCache(
            max_entries=max_entries, ttl_us=ttl_s * SECOND, now_us=self.clock.monotonic_us()
        )
        self.refresh = Refresh(
            store=self.store,
            tags=self.tags,
            cache=self.cache,
            clock=self.clock,
            gossip=self.gossip,
            accuracy=self.accuracy,
        )
        self.buckets = SharedBuckets(
            store=self.store,
            tags=self.tags,
            cache=self.cache,
            stored_name=name_of,
            clock=self.clock,
            timers=self.timers,
            stats=self.stats,
            membership=self.members,
            gossip=self.gossip,
            refresh=self.refresh,
            answer_s=0.02,
            **options,
        )

    # Called by the partitions, as for a Cluster

    def settled(self, bucket, tokens, before):
        self.accuracy.settled(bucket, tokens, before, self.clock.now_us())
        self.gossip.settled(bucket, before)

    def lost(self, tokens):
        self.accuracy.forgiven_total += tokens

    def defect(self, error):
        raise error

    # Called by tests

    def at_once(self, key=b"a", cost=1, rule=None):
        """Return the answer to a check, ``None`` if it has to wait; raises its error."""
        rule = rule or self.rule
        decide = DECIDE[rule.algorithm]
        return self.buckets.apply(key, rule, decide, self.clock.now_us(), cost)

    def peek(self, key=b"a", cost=1, rule=None):
        rule = rule or self.rule
        decide = DECIDE[rule.algorithm]
        return self.buckets.peek(key, rule, decide, self.clock.now_us(), cost)

    def wait(self, key=b"a", cost=1, rule=None, *, peek=False, remaining_s=None):
        """Start a check that has to wait, and return its future answer."""
        rule, now_us = rule or self.rule, self.clock.now_us()
        return self.buckets.wait(key, rule, now_us, cost, remaining_s, peek=peek)

    def check(self, key=b"a", cost=1, rule=None):
        """Return the answer to a check, advancing the clock if it has to wait."""
        outcome = self.at_once(key, cost, rule)
        if outcome is not None:
            return outcome
        answer = self.wait(key, cost, rule)
        while not answer.done():
            self.run(MS)
        return answer.result()

    def know(self, *keys):
        """Bring buckets into use on the node."""
        for key in keys or (b"a",):
            self.wait(key, 1, peek=True)
        self.run(2 * MS)
        for key in keys or (b"a",):
            self.peek(key)
        unwatch(self.refresh.queue)

    def run(self, us=0):
        self.timers.run(us)

    def sync(self):
        for tag in self.tags:
            tag.sync()

    def pack(self, but=None):
        """Advance the clock until all idle buckets are packed; keep one in use."""
        for _ in range(round(2 * IDLE_US / STEP_US) + 10):
            self.run(STEP_US)
            if but is not None:
                self.at_once(but)
            self.refresh.step()

    def lose_messages(self):
        """Handle a gap, until all packed buckets are stale."""
        self.refresh.resync()
        for _ in self.tags[::DISTRUSTED_PER_STEP]:
            self.refresh.step()

    def settle(self):
        """Sync until everything is settled."""
        for _ in range(100):
            if all(tag.is_settled for tag in self.tags):
                return
            self.sync()
            self.run(10 * MS)
        raise AssertionError([tag.number for tag in self.tags if not tag.is_settled])

    def open_breaker(self):
        for _ in range(5):
            self.server.failed(StoreUnavailableError("no answer"))
            self.run()

    def view(self, key=b"a"):
        """Return the node's view of a bucket."""
        return self.tags[key[0]].buckets[name_of(key)].view


def state(spent, at_us, *, generation=0, revision=1, limit=RULE.limit):
    """Return a shared state of a fixed window or token bucket."""
    return SharedState(generation, revision, limit, (spent, at_us))
