"""A node of the simulated cluster: views of buckets, one sender, timeouts and retries."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, cast

from ratelimitd.algorithms import DECIDE
from ratelimitd.ledger import cold
from ratelimitd.ledger.accounts import ACCOUNTS
from ratelimitd.ledger.local_view import STALE_US, LocalView
from ratelimitd.ledger.protocol import MAX_UPDATES, Batch, ColdSpend, Reply, Sender
from ratelimitd.ledger.shared_state import FirstResult, Settled, SharedState, Update
from ratelimitd.model import Rule
from tests.simulation.first_checks import BURIED_US, FirstChecks, Waiting
from tests.simulation.giving_up import GivingUp
from tests.simulation.world import MS, SECOND, Admission, World

SYNC_US = 100 * MS
RESEND_US = 60 * MS
REREAD_US = (100 * MS, 300 * MS, 700 * MS, 1_000 * MS)
BEAT_US = SECOND
MAX_PENDING = 50
"""Evicted buckets with unsettled changes; beyond this number only clean buckets are evicted."""


@dataclass(eq=False)
class Node:
    """One node. Each later event names the incarnation that it is for."""

    world: World
    name: str
    rule: Rule
    skew_us: int = 0
    members: int = 1
    wrong_members: int = 0
    max_views: int = 1_000
    caller_times_us: int = 0
    """Largest difference of callers' times from the clock."""
    decides_alone: bool = False
    """Whether it has a circuit breaker; otherwise it always calls the store."""
    make_view: type[LocalView] = LocalView
    make_first_checks: ClassVar[type[FirstChecks]] = FirstChecks
    views: dict[bytes, LocalView] = field(default_factory=dict)
    """In order of last use while eviction is possible."""
    pending: dict[bytes, LocalView] = field(default_factory=dict)
    """Evicted with unsettled changes."""
    packed: dict[bytes, SharedState] = field(default_factory=dict)
    """Last bases of evicted buckets."""
    cold: dict[bytes, ColdSpend] = field(default_factory=dict)
    """Spends on packed buckets, which have no view."""
    sent_cold: dict[bytes, ColdSpend] = field(default_factory=dict)
    """Cold spends in the batch in flight."""
    dirty: dict[bytes, LocalView] = field(default_factory=dict)
    asking: dict[bytes, list[Waiting]] = field(default_factory=dict)
    asked: dict[bytes, list[Waiting]] = field(default_factory=dict)
    denied: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    """Denied bucket → (number of rereads, time of the next)."""
    incarnation: int = 0
    alive: bool = True
    is_mute: bool = False
    """Its messages do not arrive."""
    is_deaf: bool = False
    """It receives no messages."""
    stalled_until_us: int = 0
    """It runs no code until then."""
    asks: int = 0
    false_positives: int = 0
    gaps: int = 0
    """Missing numbers in the gossip of others."""
    evicted_unsettled: int = 0
    packs: bool = False
    """Whether idle buckets are packed at once, as happens soon with many buckets."""

    def __post_init__(self) -> None:
        self.world.nodes.append(self)
        self._begin()

    def _begin(self) -> None:
        self.sender_name = f"{self.name}/{self.incarnation}"
        self.sender = Sender(self.sender_name)
        self.flush_due = False
        self.resent: Batch | None = None
        self.is_full = self.max_views < 1_000
        self.forgave_us = self.published = 0
        self.published_us: dict[bytes, int] = {}
        self.news_numbers: dict[str, int] = {}
        world = self.world
        self.giving_up = GivingUp(world, self)
        self.first_checks = self.make_first_checks(self)
        self._after(int(world.chance() * SYNC_US), self._sync, self.incarnation)
        self._beat(self.incarnation)

    @property
    def now_us(self) -> int:
        return self.world.now_us + self.skew_us

    @property
    def is_cut_off(self) -> bool:
        return self.decides_alone and self.giving_up.is_cut_off

    def _after(self, delay_us: int, act: Callable[..., None], *arguments: object) -> None:
        self.world.after(delay_us, self.run, act, *arguments)

    def run(self, act: Callable[..., None], *arguments: object) -> None:
        """Act, once the node is not stalled."""
        if self.world.now_us < self.stalled_until_us:
            self.world.at(self.stalled_until_us, self.run, act, *arguments)
        else:
            act(*arguments)

    # Checks

    def check(self, key: bytes, cost: int) -> None:
        if not self.alive:
            return
        if self.world.now_us < self.stalled_until_us:
            self._after(0, self.check, key, cost)
            return
        if self.packs and key in self.views:
            self._pack(key)
        view, waiting = self.views.get(key), Waiting(key, cost, self._time_of_caller())
        if view is None:
            if self._spend_cold(waiting):
                self._note_cold(waiting)
                return
            view = self._known(key)
        if view is not None:
            self._decide(view, waiting)
        else:
            self.first_checks.wait(waiting)

    def _time_of_caller(self) -> int:
        if not self.caller_times_us:
            return self.now_us
        return self.now_us + self.world.random.randint(-self.caller_times_us, self.caller_times_us)

    def first_checked(self, waiting: list[Waiting], result: FirstResult) -> None:
        """Resolve waiting checks: the store has decided the first, and returned the bucket."""
        self.giving_up.answered()
        (first, *others), (outcome, shared) = waiting, result
        key = first.key
        if outcome[0]:
            self._charged(first, shared, 0)
        self._answer(first, outcome[0])
        left, half = outcome[1], self.rule.capacity // 2
        is_low = not outcome[0] or left <= half <= left + first.cost
        view = self.views.get(key)
        if view is None and key in self.pending:
            view = self._known(key)
        if view is not None:  # made while the breaker was open
            self.adopt(key, shared)
        elif is_low or others:
            view = self.make_view(self.rule, shared)
            self._use(key, view)
        else:
            self.packed[key] = shared
            return
        if is_low and outcome[0]:
            self._publish_if_low(key, view, None)
        for one in others:
            self._decide(view, one)

    def first_check_failed(self, waiting: list[Waiting]) -> None:
        """Let waiting checks through: the store has not answered, and the bucket is unknown."""
        self.giving_up.failed()
        for one in waiting:
            self._answer(one, allowed=True, alone=True, unchecked=True)

    def _spend_cold(self, waiting: Waiting) -> bool:
        """Charge a packed bucket without a view, or add to its cold spend, if possible."""
        key, rule, base = waiting.key, self.rule, self.packed.get(waiting.key)
        if key in self.cold and not self.is_cut_off:
            return self._add_cold(waiting)
        if base is None or key in self.pending or self.is_cut_off:
            return False
        if isinstance(base.state, bytes) or base.limit != rule.limit or base.burst or rule.burst:
            return False
        decide = DECIDE[rule.algorithm]
        outcome = cold.spend(
            base.state,
            rule,
            decide,
            waiting.at_us,
            self.members,
            waiting.cost,
            self.make_view.share_of,
        )
        if outcome is None:
            return False
        at_us = waiting.at_us if base.state is None else max(waiting.at_us, base.state[1])
        self.cold[key] = ColdSpend(rule, self.packed.pop(key), at_us, waiting.cost)
        self._answer(waiting, outcome[0])
        return True

    def _note_cold(self, waiting: Waiting) -> None:
        """Record whether a cold spend exceeds this node's share."""
        unsettled = [
            spends[waiting.key] for spends in (self.cold, self.sent_cold) if waiting.key in spends
        ]
        spent, account = unsettled[0], ACCOUNTS[self.rule.algorithm]
        used = account.used(spent.base.state, spent.rule, spent.at_us)
        share = self.make_view.share_of(spent.rule, spent.rule.capacity - used)
        if len(unsettled) > 1 or spent.cost * self.members >= share:
            self.world.books.cold_beyond_share = True

    def _add_cold(self, waiting: Waiting) -> bool:
        """Add a check to a cold spend that is not in a batch yet."""
        spent, rule = self.cold[waiting.key], self.rule
        if spent.rule is not rule:
            return False
        added = cold.add(
            spent,
            spent.base.state,
            DECIDE[rule.algorithm],
            waiting.at_us,
            self.members,
            waiting.cost,
            self.make_view.share_of,
        )
        if added is None:
            return False
        outcome, self.cold[waiting.key] = added
        self._answer(waiting, outcome[0])
        return True

    def _warm(self, key: bytes) -> LocalView | None:
        """Return the view of a bucket with a cold spend."""
        in_flight = key not in self.cold
        spent = self.sent_cold.pop(key, None) if in_flight else self.cold.pop(key)
        if spent is None:
            return None
        view = self._view_of(spent, in_flight=in_flight)
        if not in_flight:
            self.dirty[key] = view
        return view

    def _view_of(self, spent: ColdSpend, *, in_flight: bool) -> LocalView:
        view = self.make_view(cast("Rule", spent.rule), spent.base)
        view.resume(spent, in_flight=in_flight)
        return view

    def _known(self, key: bytes) -> LocalView | None:
        """Return the view of an evicted or packed bucket, or of a new one while the breaker is open."""
        view = self.pending.pop(key, None) or self._warm(key)
        if view is None:
            if key not in self.packed and not self.is_cut_off:
                return None
            base = self.packed.pop(key, None)
            view = self.make_view(self.rule, base)
            if base is None:
                view.start_alone(self.now_us, self.members)
        self._use(key, view)
        return view

    def _use(self, key: bytes, view: LocalView) -> None:
        self.views[key] = view
        if len(self.views) > self.max_views:
            self._evict()

    def _evict(self) -> None:
        for key in list(self.views)[:-1]:
            if self._is_idle(key) or len(self.pending) < MAX_PENDING:
                break
        else:
            return
        is_idle, view = self._is_idle(key), self.views.pop(key)
        self.denied.pop(key, None)
        if not is_idle:
            self.pending[key] = view
            self.evicted_unsettled += 1
            return
        self._take_counts(view)
        if view.base is not None and self.world.chance() < 0.5:
            self.packed[key] = view.base

    def _is_idle(self, key: bytes) -> bool:
        return self.views[key].is_clean and key not in self.dirty and key not in self.asked

    def _take_counts(self, view: LocalView) -> None:
        self.world.books.forgiven += view.forgiven
        self.false_positives += view.false_positives

    def _decide(self, view: LocalView, waiting: Waiting) -> None:
        key, now_us, rule = waiting.key, waiting.at_us, self.rule
        if self.is_full:
            self.views[key] = self.views.pop(key)
        if view.rule is not rule and rule.revision >= view.rule.revision:
            view.edit(rule)
        if self.is_cut_off:
            self._decide_alone(view, waiting)
            return
        outcome = view.check(now_us, self.members, waiting.cost)
        if outcome is None:
            self._ask(view, waiting)
            return
        self._answer(waiting, outcome[0])
        if outcome[0] or view.has_newer_limit:
            self.dirty[key] = view
        if outcome[0] and view.is_due(now_us, self.members):
            self.flush()

    def _ask(self, view: LocalView, waiting: Waiting) -> None:
        """Let the next batch ask the store."""
        key = waiting.key
        self.asks += 1
        waiting.ask = view.ask(waiting.at_us, waiting.cost)
        self.dirty[key] = view
        self.asking.setdefault(key, []).append(waiting)
        self._after(self.world.answer_us, self._too_late, waiting, self.incarnation)
        self.flush()

    def _too_late(self, waiting: Waiting, incarnation: int) -> None:
        if waiting.answered or self.incarnation != incarnation:
            return
        key = waiting.key
        view = self.views.get(key) or self.pending[key]
        if waiting.ask is not None and view.withdraw(waiting.ask):
            self.asking[key].remove(waiting)
        self._decide_alone(view, waiting)

    def _decide_alone(self, view: LocalView, waiting: Waiting) -> None:
        outcome = view.check_alone(waiting.at_us, waiting.cost)
        waiting.charged = outcome[0]
        if outcome[0]:
            self.dirty[waiting.key] = view
        self._answer(waiting, outcome[0], alone=True)

    def _answer(
        self, waiting: Waiting, allowed: bool, *, alone: bool = False, unchecked: bool = False
    ) -> None:
        waiting.answered = True
        key, world = waiting.key, self.world
        if allowed:
            name, cost = self.sender_name, waiting.cost
            admission = Admission(world.now_us, cost, name, alone, unchecked)
            world.books.admissions[key].append(admission)
        elif key not in self.denied:
            self.denied[key] = (0, self.now_us + REREAD_US[0])

    # What is read

    def _read(self, key: bytes, incarnation: int) -> None:
        def found(shared: SharedState | None) -> None:
            is_known = key in self.views or key in self.pending
            if self.incarnation == incarnation and is_known and shared is not None:
                self.adopt(key, shared)

        self.world.read(self, key, found)

    def _reread(self) -> None:
        for key, (before, due_us) in list(self.denied.items()):
            if self.now_us >= due_us:
                times = min(before + 1, len(REREAD_US) - 1)
                self.denied[key] = (times, self.now_us + REREAD_US[times])
                self._read(key, self.incarnation)

    # The sync job

    def _sync(self, incarnation: int) -> None:
        if self.incarnation == incarnation:
            self.flush()
            self._reread()
            self._after(SYNC_US, self._sync, incarnation)

    def _pack(self, key: bytes) -> None:
        """Pack an idle bucket, as if it had been unused for long."""
        view = self.views[key]
        if self._is_idle(key) and view.base is not None and self.world.chance() < 0.5:
            del self.views[key]
            self._take_counts(view)
            self.packed[key] = view.base

    def flush(self) -> None:
        if not self.dirty and not self.cold:
            return
        wait_us = self.sender.wait_us(self.now_us)
        if wait_us is None:
            return
        if wait_us:
            if not self.flush_due:
                self.flush_due = True
                self._after(wait_us, self._flush_now, self.incarnation)
            return
        taken = list(self.dirty.items())[:MAX_UPDATES]
        updates = []
        for key, view in taken:
            del self.dirty[key]
            updates.append((key, view.freeze()))
        self.asked = {key: self.asking.pop(key, []) for key, _ in taken}
        for key in list(self.cold)[: MAX_UPDATES - len(taken)]:
            self.sent_cold[key] = spent = self.cold.pop(key)
            updates.append((key, Update(spent.rule, spent.base.generation, spent.runs())))
        batch = self.sender.freeze(updates, self.now_us)
        self._transmit(batch, self.incarnation)
        if any(self.asked.values()):
            self._after(self.world.answer_us, self._is_answered, batch, self.incarnation)

    def _is_answered(self, batch: Batch, incarnation: int) -> None:
        """Report the result of a round trip of checks to the breaker."""
        if self.incarnation == incarnation:
            if self.sender.outstanding is batch:
                self.giving_up.failed()
            else:
                self.giving_up.answered()

    def _flush_now(self, incarnation: int) -> None:
        if self.incarnation == incarnation:
            self.flush_due = False
            self.flush()

    def _transmit(self, batch: Batch, incarnation: int) -> None:
        def back(reply: Reply) -> None:
            if self.incarnation == incarnation:
                self._acknowledged(reply)

        self.world.send(self, batch, back)
        self._after(RESEND_US, self._resend, batch, incarnation)

    def _charged(self, waiting: Waiting, shared: SharedState, later: int) -> None:
        """Receive a charge of the store; it charged ``later`` tokens between the check and ``shared``."""

    def _resend(self, batch: Batch, incarnation: int) -> None:
        if self.incarnation == incarnation and self.sender.outstanding is batch:
            self.resent = batch
            self._transmit(batch, incarnation)

    def _acknowledged(self, reply: Reply) -> None:
        self._forgive_outage()
        batch = self.sender.acknowledged(reply)
        if batch is None:
            return
        books = self.world.books
        books.longest_batch_us = max(books.longest_batch_us, self.now_us - batch.frozen_at_us)
        asked, self.asked = self.asked, {}
        for key, settled in reply.settled.items():
            spent = self.sent_cold.pop(key, None)
            if spent is not None:
                self._cold_settled(key, spent, settled.shared)
                continue
            view = self.views.get(key) or self.pending[key]
            before = view.base
            self._note_reset(view, settled.shared)
            view.acknowledge(settled.shared)
            if settled.grants:
                view.record_grants(settled.grants)
            self._resolve(asked.get(key, ()), settled, view, batch)
            if key in self.pending and view.is_clean and key not in self.dirty:
                self._take_counts(self.pending.pop(key))
            self._publish_if_low(key, view, before)
        full = len(batch.updates) == MAX_UPDATES
        now_us, members = self.now_us, self.members
        if full or any(view.is_due(now_us, members) for view in self.dirty.values()):
            self.flush()

    def _cold_settled(self, key: bytes, spent: ColdSpend, shared: SharedState) -> None:
        view = self._view_of(spent, in_flight=True)
        self._note_reset(view, shared)
        view.acknowledge(shared)
        self._take_counts(view)
        self._publish_if_low(key, view, spent.base)
        self.packed[key] = shared

    def _resolve(
        self, asked: Sequence[Waiting], settled: Settled, view: LocalView, batch: Batch
    ) -> None:
        """Answer the checks of one bucket in a batch."""
        verdicts = [*zip(asked, settled.grants, strict=True)]
        later = sum(waiting.cost for waiting, granted in verdicts if granted)
        for waiting, granted in verdicts:
            later -= waiting.cost if granted else 0
            if not waiting.answered:
                if granted and batch is not self.resent:
                    self._charged(waiting, settled.shared, later)
                self._answer(waiting, granted)
            elif granted and waiting.charged:
                view.pay(waiting.cost)
                # At most the tokens forgiven meanwhile may be charged after all.
                self.world.books.paid_twice |= view.forgiven < 0
            elif granted:
                self.world.books.wasted += waiting.cost

    def _forgive_outage(self) -> None:
        batch, now_us = self.sender.outstanding, self.now_us
        if batch is None or now_us - max(batch.frozen_at_us, self.forgave_us) <= STALE_US:
            return
        self.forgave_us = now_us
        for key in list(self.cold):
            view = self._warm(key)
            assert view is not None
            self.pending[key] = view
        for view in (*self.views.values(), *self.pending.values()):
            view.forgive_outage(self.now_us)

    def adopt(self, key: bytes, shared: SharedState) -> None:
        view = self.views.get(key) or self.pending.get(key)
        if view is None:
            view = self._warm(key)
            if view is None:
                self.packed.pop(key, None)
                return
            self.pending[key] = view
        self._forgive_outage()
        self._note_reset(view, shared)
        view.adopt(shared)

    def _note_reset(self, view: LocalView, shared: SharedState) -> None:
        """Correct the books: a view forgives spends in flight at a reset, but the store books them, too."""
        if view.generation is not None and shared.generation > view.generation:
            self.world.books.forgiven -= view.in_flight_tokens

    # Gossip

    def _publish_if_low(self, key: bytes, view: LocalView, before: SharedState | None) -> None:
        """Publish a state that has fallen below half of the capacity, at most once per interval."""
        shared, account, now_us = view.base, view._account, self.now_us
        if shared is None or shared is before:
            return
        half = shared.capacity / 2
        used = account.used(shared.state, view.rule, now_us)
        used_before = 0 if before is None else account.used(before.state, view.rule, now_us)
        if used > half >= used_before and now_us - self.published_us.get(key, 0) >= SYNC_US:
            self.news(key, shared)

    def news(self, key: bytes, shared: SharedState) -> None:
        """Publish a state, and adopt it."""
        self.adopt(key, shared)
        self.published_us[key] = self.now_us
        self.published += 1
        self.world.publish(self, self.published, key, shared)

    def receive(self, sender: str, number: int, key: bytes, shared: SharedState) -> None:
        """Adopt a state published by another node; after a gap in its numbers anything may have changed."""
        if not self.alive:
            return
        last = self.news_numbers.get(sender, number - 1)
        if number > last + 1:
            self.gaps += 1
            self.packed.clear()
            for known in self.views:
                self._read(known, self.incarnation)
        self.news_numbers[sender] = max(last, number)
        self.adopt(key, shared)

    # Members

    def _beat(self, incarnation: int) -> None:
        if self.incarnation == incarnation:
            self.world.beat(self, self._beaten)
            self._after(BEAT_US, self._beat, incarnation)

    def _beaten(self, count: int) -> None:
        members = max(1, count + self.wrong_members)
        if members != self.members:
            self.members = members
            self.world.members_changed()

    # Rules

    def edited(self, rule: Rule) -> None:
        """Apply a new rule book. Books are read completely, so an older one never follows a newer."""
        if rule.revision > self.rule.revision:
            self.rule = rule

    # Life

    def crash(self) -> None:
        """Lose all unsettled spends; some of those in flight may still arrive."""
        books = self.world.books
        views = (*self.views.values(), *self.pending.values())
        for view in views:
            books.lost += view.unsent.tokens
            self._take_counts(view)
        books.lost += sum(spent.cost for spent in self.cold.values())
        batch = self.sender.outstanding
        if batch is not None:
            # When nothing is in flight: book whether it has arrived, and its grants.
            self._after(BURIED_US, self._bury, batch)
        self.first_checks.end()
        self.alive = False
        self.incarnation += 1
        self.views, self.pending, self.packed, self.dirty = {}, {}, {}, {}
        self.asking, self.asked, self.denied = {}, {}, {}
        self.cold, self.sent_cold = {}, {}

    def _bury(self, batch: Batch) -> None:
        """Book the last batch of an incarnation, when it is neither resent nor in flight any more."""
        world = self.world
        reply = world.ledger.apply(batch) if (batch.sender, batch.number) in world.applied else None
        for key, update in batch.updates.items():
            if reply is None:
                world.books.lost += sum(tokens for _, tokens in update.runs)
                continue
            grants = zip(update.asks, reply.settled[key].grants, strict=True)
            world.books.wasted += sum(ask.cost for ask, grant in grants if grant)

    def restart(self) -> None:
        """Restart under the same name."""
        self.alive = True
        self._begin()
