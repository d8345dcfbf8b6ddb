"""A simulated world in which one seed decides time, order, loss, duplication and crashes. No I/O and no real clock.

Contains time, messages in flight and the store, and accounts for every token.
"""

import heapq
import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ratelimitd.ledger.protocol import Batch, Reply
from ratelimitd.ledger.shared_state import FirstResult, SharedState, StoreCheck, generation_at
from ratelimitd.model import MAX_TIME_US, Rule
from tests.ledger_model import Ledger, reset

MS = 1_000
SECOND = 1_000_000
START_US = 1_800_000_000 * SECOND
MEMBER_TTL_US = 5 * SECOND
RETRY_US = 100 * MS
ANSWER_US = 20 * MS
"""Least time that a check waits for the store; then the view decides, or the check is let through without one."""


@dataclass
class Network:
    """Delays and faults of messages, each way."""

    least_us: int = 500
    most_us: int = 2_500
    loss: float = 0.0
    duplicates: float = 0.0
    news_loss: float = 0.0
    """Additional loss of published states."""


class Admission(NamedTuple):
    """One allowed check, and its true time."""

    at_us: int
    cost: int
    node: str
    """The node that allowed it, with its incarnation."""
    alone: bool
    """Whether the node had no answer from the store in time."""
    unchecked: bool
    """Whether the node also did not know the bucket, and let the check through."""


class Charge(NamedTuple):
    """A charge that the store received, with its nominal time."""

    at_us: int
    tokens: int
    generation: int
    limit: int
    """The limit in force in the store then."""
    is_grant: bool = False
    """Whether the store decided it, at its latest time or later."""


@dataclass
class Books:
    """Accounts of all tokens."""

    arrived: int = 0
    """Spends that the store received, even if a reset had voided them, and grants."""
    wasted: int = 0
    """Granted to checks that were already answered, or whose node has crashed."""
    forgiven: int = 0
    """Forgiven by nodes, and never sent."""
    lost: int = 0
    """Lost with a crashed node."""
    unchecked: int = 0
    """Let through, and never charged."""
    charges: dict[bytes, list[Charge]] = field(default_factory=lambda: defaultdict(list))
    admissions: dict[bytes, list[Admission]] = field(default_factory=lambda: defaultdict(list))
    paid_twice: bool = False
    cold_beyond_share: bool = False
    """Whether a bucket without a view had more unsettled tokens than a view may have."""
    longest_batch_us: int = 0
    most_held: float = 0.0
    """Sum of 1/N over the nodes, by the N that each assumed; 1 if all were right."""


@dataclass(eq=False, slots=True)
class FirstCheck:
    """A first check, and whether the store has charged it."""

    check: StoreCheck
    is_charged: bool = False


class World:
    """Time, the store, and the messages on their way."""

    def __init__(self, seed: int, network: Network, ledger: Ledger) -> None:
        self.random = random.Random(seed)
        self.chance = self.random.random
        self.network = network
        self.ledger = ledger
        self.now_us = START_US
        self.answer_us = max(ANSWER_US, 4 * network.most_us)
        self.store_up = True
        self.books = Books()
        self.nodes: list[Any] = []
        self.applied: dict[tuple[str, int], int] = {}
        """Batches, and the grants in them."""
        self._beats: dict[str, int] = {}
        self._resets = 0
        self.is_flushed = False
        """Whether the store has lost its content."""
        self.most_events = math.inf
        self.is_endless = False
        """Whether the maximum of events is reached, which ends the run."""
        self._events = 0
        self._agenda: list[tuple[int, int, Callable[..., None], tuple]] = []
        self._order = 0

    # Time

    def at(self, when_us: int, act: Callable[..., None], *arguments: Any) -> None:
        self._order += 1
        heapq.heappush(self._agenda, (when_us, self._order, act, arguments))

    def after(self, delay_us: int, act: Callable[..., None], *arguments: Any) -> None:
        self._order += 1
        heapq.heappush(self._agenda, (self.now_us + delay_us, self._order, act, arguments))

    def run_until(self, when_us: int) -> None:
        agenda, pop = self._agenda, heapq.heappop
        while agenda and agenda[0][0] <= when_us:
            if self._events >= self.most_events:
                self.is_endless = True
                agenda.clear()
                break
            self._events += 1
            self.now_us, _, act, arguments = pop(agenda)
            act(*arguments)
        self.now_us = when_us

    # Messages

    def deliver(
        self, act: Callable[..., None], *arguments: Any, loss: float = 0.0, is_repeated: bool = True
    ) -> None:
        """Deliver a message late, never, or twice if duplicates are possible."""
        network, chance = self.network, self.chance
        span_us = network.most_us - network.least_us
        if not loss + network.loss or chance() >= loss + network.loss:
            self.after(network.least_us + int(chance() * span_us), act, *arguments)
        if is_repeated and network.duplicates and chance() < network.duplicates:
            self.after(network.least_us + int(chance() * span_us), act, *arguments)

    # The store

    def send(self, node: Any, batch: Batch, back: Callable[[Reply], None]) -> None:
        if not node.is_mute:
            self.deliver(self._apply, node, batch, back)

    def _apply(self, node: Any, batch: Batch, back: Callable[[Reply], None]) -> None:
        if not self.store_up:
            return
        reply = self.ledger.apply(batch)
        if reply is None:
            return
        name, granted = (batch.sender, batch.number), _granted(batch, reply)
        if name not in self.applied:
            self._book(batch, reply)
        else:  # a repeated answer, or by a store that has lost the batch
            self.books.arrived += granted - self.applied[name]
        self.applied[name] = granted
        if not node.is_deaf:
            self.deliver(node.run, back, reply)

    def _book(self, batch: Batch, reply: Reply) -> None:
        books = self.books
        for key, settled in reply.settled.items():
            update, shared = batch.updates[key], settled.shared
            charges, generation = books.charges[key], shared.generation
            for at_us, tokens in update.runs:
                books.arrived += tokens
                if update.generation in {None, generation}:
                    charges.append(Charge(at_us, tokens, generation, shared.limit))
            for ask, grant in zip(update.asks, settled.grants, strict=True):
                if grant:
                    books.arrived += ask.cost
                    charge = Charge(ask.at_us, ask.cost, generation, shared.limit, is_grant=True)
                    charges.append(charge)

    def send_first_check(
        self, node: Any, first_check: FirstCheck, back: Callable[[FirstResult], None]
    ) -> None:
        """Deliver a first check to the store, never twice, because it has no number."""
        if not node.is_mute:
            self.deliver(self._apply_first_check, node, first_check, back, is_repeated=False)

    def _apply_first_check(
        self, node: Any, first_check: FirstCheck, back: Callable[[FirstResult], None]
    ) -> None:
        if not self.store_up:
            return
        check, books = first_check.check, self.books
        outcome, shared = self.ledger.first_check(check)
        if outcome[0]:
            first_check.is_charged = True
            books.arrived += check.cost
            its, limit = shared.generation, shared.limit
            charge = Charge(check.now_us, check.cost, its, limit, is_grant=True)
            books.charges[check.name].append(charge)
        if not node.is_deaf:
            self.deliver(node.run, back, (outcome, shared), is_repeated=False)

    def read(self, node: Any, key: bytes, back: Callable[..., None]) -> None:
        if not node.is_mute:
            self.deliver(self._answer, node, key, back)

    def _answer(self, node: Any, key: bytes, back: Callable[..., None]) -> None:
        if self.store_up and not node.is_deaf:
            self.deliver(node.run, back, self.ledger.buckets.get(key))

    def start(self, name: str) -> None:
        """Register a live sender."""
        self._beats[name] = self.now_us

    def beat(self, node: Any, back: Callable[[int], None]) -> None:
        """Send a heartbeat of a node; ``back`` receives the number of live nodes."""
        if not node.is_mute:
            self.deliver(self._beaten, node, node.sender_name, back)

    def _beaten(self, node: Any, name: str, back: Callable[[int], None]) -> None:
        if not self.store_up:
            return
        self._beats[name] = self.now_us
        alive = sum(self.now_us - at_us < MEMBER_TTL_US for at_us in self._beats.values())
        if not node.is_deaf:
            self.deliver(node.run, back, alive)

    def publish(self, sender: Any, number: int, key: bytes, shared: SharedState) -> None:
        """Deliver a published state to the other nodes."""
        if not (self.store_up and not sender.is_mute):
            return
        for node in self.nodes:
            if node is not sender:
                self._bring_news(node, sender.sender_name, number, key, shared)

    def _bring_news(self, node: Any, *news: Any) -> None:
        if not node.is_deaf:
            self.deliver(node.run, node.receive, *news, loss=self.network.news_loss)

    def reset(self, key: bytes, rule: Rule) -> None:
        """Reset a bucket through a node without checks, and retry until it is done."""
        if not self.store_up:
            self.after(RETRY_US, self.reset, key, rule)
            return
        before = self.ledger.buckets.get(key)
        shared = self.ledger.buckets[key] = self.made_full(before, rule, self.now_us)
        self._resets += 1
        for node in self.nodes:
            self._bring_news(node, "admin", self._resets, key, shared)

    @staticmethod
    def made_full(shared: SharedState | None, rule: Rule, now_us: int) -> SharedState:
        return reset(shared, rule, generation_at(now_us))

    def flush(self) -> None:
        """Lose the whole content of the store."""
        self.ledger = type(self.ledger)()
        self.books.charges.clear()
        self.is_flushed = True

    def members_changed(self) -> None:
        """Account for a node that assumes another number of members."""
        held = sum(1 / node.members for node in self.nodes if node.alive)
        self.books.most_held = max(self.books.most_held, held)


def _granted(batch: Batch, reply: Reply) -> int:
    return sum(
        ask.cost
        for key, settled in reply.settled.items()
        for ask, grant in zip(batch.updates[key].asks, settled.grants, strict=True)
        if grant
    )


def level(
    charges: Sequence[Charge], rule: Rule, until_us: int = MAX_TIME_US
) -> tuple[int, int] | None:
    """Return the expected content of a bucket after charges, independently of the ledger: (latest time, amount).

    The amount is the missing units of a token bucket, the count of a window, or the tokens in the last window of a log.
    Charges after ``until_us`` count as made at that time.
    """
    generation = max((one.generation for one in charges), default=0)
    spends, latest_us, missing = [], 0, 0
    for charged_us, tokens, its, limit, is_grant in charges:
        at_us = min(charged_us, until_us)
        if its == generation:
            spends.append((max(at_us, latest_us) if is_grant else at_us, tokens))
            missing -= min(missing, max(0, at_us - latest_us) * limit)
            missing += tokens * rule.window_us
            latest_us = max(latest_us, at_us)
    if not spends:
        return None
    if rule.algorithm == "token_bucket":
        return latest_us, missing
    if rule.algorithm == "fixed_window":
        return latest_us, _count(spends, rule)
    begin_us = latest_us - rule.window_us + 1
    return latest_us, sum(tokens for at_us, tokens in spends if at_us >= begin_us)


def _count(spends: Sequence[tuple[int, int]], rule: Rule) -> int:
    """Return the count of the last window of these spends, with the overdraft of earlier ones."""
    of_windows: defaultdict[int, int] = defaultdict(int)
    last = 0
    for at_us, tokens in spends:
        last = max(last, at_us // rule.window_us)
        # Spends that are more than one window late count in the window before the last.
        of_windows[max(at_us // rule.window_us, last - 1)] += tokens
    count, before = 0, min(of_windows)
    for window, tokens in sorted(of_windows.items()):
        count = max(0, count - (window - before) * rule.limit) + tokens
        before = window
    return count
