"""A cluster in which one seed decides everything: time, order, loss, duplication, crashes. No I/O and no real clock."""

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ratelimitd.ledger.batches import MAX_UPDATES, Batch, Ledger, Reply, Sender
from ratelimitd.ledger.shared_state import Ask, SharedState, reset
from ratelimitd.ledger.view import STALE_US, View
from ratelimitd.model import Rule

MS = 1_000
SECOND = 1_000_000
START_US = 1_700_000_000 * SECOND
SYNC_US = 100 * MS
ANSWER_US = 20 * MS
"""How long a check waits for the store before the view decides."""
RESEND_US = 60 * MS
REREAD_US = (100 * MS, 300 * MS, 700 * MS, 1_000 * MS)


@dataclass
class Network:
    """What happens to messages between a node and the store; one way each."""

    least_us: int = 500
    most_us: int = 2_500
    loss: float = 0.0
    duplicates: float = 0.0


@dataclass(frozen=True)
class Admission:
    """One check that was allowed, and when in truth."""

    at_us: int
    cost: int
    key: bytes
    node: str
    """Which node allowed it, and in which of its lives."""
    alone: bool
    """By the view of a node that had no answer from the store in time."""


@dataclass(eq=False)
class Waiting:
    """A check that waits for the store, or did."""

    key: bytes
    cost: int
    ask: Ask | None = None
    answered: bool = False
    charged: bool = False


class Simulation:
    """Time, the store, and the messages on their way."""

    def __init__(self, seed: int, network: Network, ledger: Ledger) -> None:
        self.random = random.Random(seed)
        self.network = network
        self.ledger = ledger
        self.now_us = START_US
        self.admissions: list[Admission] = []
        self.settled_tokens = 0
        self.wasted_tokens = 0
        """Granted by the store to checks that were answered before."""
        self.longest_batch_us = 0
        self.store_calls = 0
        self.store_up = True
        self.nodes: list[Node] = []
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._applied: set[tuple[str, int]] = set()

    def at(self, when_us: int, act: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (when_us, next(self._order), act))

    def after(self, delay_us: int, act: Callable[[], None]) -> None:
        self.at(self.now_us + delay_us, act)

    def run_until(self, when_us: int) -> None:
        while self._agenda and self._agenda[0][0] <= when_us:
            self.now_us, _, act = heapq.heappop(self._agenda)
            act()
        self.now_us = when_us

    def deliver(self, act: Callable[[], None]) -> None:
        """Bring a message one way: late, never, or twice."""
        network, chance = self.network, self.random.random
        times = (chance() >= network.loss) + (chance() < network.duplicates)
        for _ in range(times):
            self.after(self.random.randint(network.least_us, network.most_us), act)

    # The store

    def send(self, batch: Batch, back: Callable[[Reply], None]) -> None:
        self.deliver(lambda: self._apply(batch, back))

    def _apply(self, batch: Batch, back: Callable[[Reply], None]) -> None:
        if not self.store_up:
            return
        self.store_calls += 1
        reply = self.ledger.apply(batch)
        if reply is None:
            return
        name = (batch.sender, batch.number)
        if name not in self._applied:
            self._applied.add(name)
            for key, settled in reply.settled.items():
                update = batch.updates[key]
                if update.generation in {None, settled.shared.generation}:
                    self.settled_tokens += sum(tokens for _, tokens in update.runs)
                granted = zip(update.asks, settled.grants, strict=True)
                self.settled_tokens += sum(ask.cost for ask, grant in granted if grant)
        self.deliver(lambda: back(reply))

    def read(self, key: bytes, back: Callable[[SharedState | None], None]) -> None:
        def answer() -> None:
            if self.store_up:
                self.store_calls += 1
                found = self.ledger.buckets.get(key)
                self.deliver(lambda: back(found))

        self.deliver(answer)

    def publish(self, key: bytes, shared: SharedState) -> None:
        for node in self.nodes:
            self.deliver(partial(node.heard, key, shared))

    def reset(self, key: bytes, rule: Rule) -> None:
        """An administrator resets a bucket."""
        shared = self.ledger.buckets[key] = reset(self.ledger.buckets.get(key), rule)
        self.publish(key, shared)


@dataclass
class Node:
    """One node: views of buckets, and one sender."""

    simulation: Simulation
    name: str
    rules: dict[bytes, Rule]
    skew_us: int = 0
    members: int = 1
    make_view: Callable[[Rule, SharedState | None], View] = View
    views: dict[bytes, View] = field(default_factory=dict)
    reading: dict[bytes, list[Waiting]] = field(default_factory=dict)
    asking: dict[bytes, list[Waiting]] = field(default_factory=dict)
    asked: dict[bytes, list[Waiting]] = field(default_factory=dict)
    denied: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    """Of a denied bucket: how often it was read again, and when that is due."""
    incarnation: int = 0
    alive: bool = True
    flush_due: bool = False
    forgiven_tokens: int = 0
    """By views that are gone."""
    crashed_tokens: int = 0

    def __post_init__(self) -> None:
        self.simulation.nodes.append(self)
        self.sender = Sender(self._sender_name())
        self._timer(self.incarnation, self.simulation.random.randint(0, SYNC_US))

    @property
    def now_us(self) -> int:
        return self.simulation.now_us + self.skew_us

    @property
    def forgiven(self) -> int:
        return self.forgiven_tokens + sum(view.forgiven for view in self.views.values())

    # Checks

    def check(self, key: bytes, cost: int = 1) -> None:
        if not self.alive:
            return
        waiting = Waiting(key, cost)
        if key in self.views:
            self._decide(waiting)
            return
        self._wait(waiting)
        if key in self.reading:
            self.reading[key].append(waiting)
            return
        self.reading[key] = [waiting]
        self._read(key, self.incarnation)

    def _read(self, key: bytes, incarnation: int) -> None:
        simulation = self.simulation

        def found(shared: SharedState | None) -> None:
            if self.incarnation != incarnation:
                return
            if key in self.views:
                if shared is not None:
                    self.heard(key, shared)
                return
            self._open(key, shared)

        def again() -> None:
            if self.incarnation == incarnation and key in self.reading:
                self._read(key, incarnation)

        simulation.read(key, found)
        simulation.after(RESEND_US, again)

    def _open(self, key: bytes, shared: SharedState | None) -> None:
        self.views[key] = self.make_view(self.rules[key], shared)
        for waiting in self.reading.pop(key, ()):
            if not waiting.answered:
                self._decide(waiting)

    def _wait(self, waiting: Waiting) -> None:
        incarnation = self.incarnation

        def too_late() -> None:
            if self.incarnation != incarnation:
                return
            if waiting.key not in self.views and not waiting.answered:
                self._open(waiting.key, None)  # which may answer it
            if waiting.answered:
                return
            view = self.views[waiting.key]
            if waiting.ask is not None and view.withdraw(waiting.ask):
                self.asking[waiting.key].remove(waiting)
            outcome = view.check_alone(self.now_us, waiting.cost)
            waiting.charged = outcome[0]
            self._answer(waiting, outcome[0], alone=True)

        self.simulation.after(ANSWER_US, too_late)

    def _decide(self, waiting: Waiting) -> None:
        view = self.views[waiting.key]
        outcome = view.check(self.now_us, self.members, waiting.cost)
        if outcome is not None:
            self._answer(waiting, outcome[0])
            if outcome[0] and view.is_due(self.now_us, self.members):
                self.flush()
            return
        waiting.ask = view.ask(self.now_us, waiting.cost)
        self.asking.setdefault(waiting.key, []).append(waiting)
        self._wait(waiting)
        self.flush()

    def _answer(self, waiting: Waiting, allowed: bool, *, alone: bool = False) -> None:
        waiting.answered = True
        simulation = self.simulation
        if allowed:
            simulation.admissions.append(
                Admission(
                    simulation.now_us,
                    waiting.cost,
                    waiting.key,
                    self._sender_name(),
                    alone,
                )
            )
        else:
            self.denied.setdefault(waiting.key, (0, self.now_us + REREAD_US[0]))

    # The sync job

    def _timer(self, incarnation: int, delay_us: int) -> None:
        def due() -> None:
            if self.alive and self.incarnation == incarnation:
                self.flush()
                self._reread()
                self._timer(incarnation, SYNC_US)

        self.simulation.after(delay_us, due)

    def _reread(self) -> None:
        for key, (before, due_us) in list(self.denied.items()):
            if key in self.views and self.now_us >= due_us:
                times = min(before + 1, len(REREAD_US) - 1)
                self.denied[key] = (times, self.now_us + REREAD_US[times])
                self._read(key, self.incarnation)

    def flush(self) -> None:
        wait_us = self.sender.wait_us(self.now_us)
        if wait_us is None:
            return
        if wait_us:
            self._flush_after(wait_us)
            return
        dirty = [key for key, view in self.views.items() if view.unsent.tokens or view.asks]
        if not dirty:
            return
        taken = dirty[:MAX_UPDATES]
        updates = [(key, self.views[key].freeze()) for key in taken]
        self.asked = {key: self.asking.pop(key, []) for key in taken}
        self._transmit(self.sender.freeze(updates, self.now_us), self.incarnation)

    def _flush_after(self, wait_us: int) -> None:
        incarnation = self.incarnation

        def due() -> None:
            if self.incarnation == incarnation:
                self.flush_due = False
                self.flush()

        if not self.flush_due:
            self.flush_due = True
            self.simulation.after(wait_us, due)

    def _transmit(self, batch: Batch, incarnation: int) -> None:
        def back(reply: Reply) -> None:
            if self.incarnation == incarnation:
                self._acknowledged(reply)

        def again() -> None:
            if self.incarnation == incarnation and self.sender.outstanding is batch:
                self._transmit(batch, incarnation)

        self.simulation.send(batch, back)
        self.simulation.after(RESEND_US, again)

    def _acknowledged(self, reply: Reply) -> None:
        self._first_word()
        batch = self.sender.acknowledged(reply)
        if batch is None:
            return
        simulation = self.simulation
        took_us = self.now_us - batch.frozen_at_us
        simulation.longest_batch_us = max(simulation.longest_batch_us, took_us)
        asked, self.asked = self.asked, {}
        for key, settled in reply.settled.items():
            view = self.views[key]
            view.acknowledge(settled.shared)
            for waiting, granted in zip(asked.get(key, ()), settled.grants, strict=True):
                if not waiting.answered:
                    self._answer(waiting, granted)
                elif granted and waiting.charged:
                    view.pay(waiting.cost)
                elif granted:
                    simulation.wasted_tokens += waiting.cost
        if any(view.is_due(self.now_us, self.members) for view in self.views.values()):
            self.flush()

    def _first_word(self) -> None:
        batch = self.sender.outstanding
        if batch is not None and self.now_us - batch.frozen_at_us > STALE_US:
            for view in self.views.values():
                view.forgive_outage(self.now_us)

    def heard(self, key: bytes, shared: SharedState) -> None:
        if not self.alive or key not in self.views:
            return
        self._first_word()
        self.views[key].hear(shared)

    def edited(self, key: bytes, rule: Rule) -> None:
        self.rules[key] = rule
        if key in self.views:
            self.views[key].edit(rule)

    # Life

    def crash(self) -> None:
        """What it has not settled is lost; some of what is in flight may arrive."""
        self.alive = False
        self.incarnation += 1
        for view in self.views.values():
            self.crashed_tokens += view.unsent.tokens + view.in_flight.tokens
            self.forgiven_tokens += view.forgiven
        self.views, self.reading, self.asking, self.asked, self.denied = {}, {}, {}, {}, {}
        self.flush_due = False

    def restart(self) -> None:
        """Under the same name."""
        self.alive = True
        self.sender = Sender(self._sender_name())
        self._timer(self.incarnation, self.simulation.random.randint(0, SYNC_US))

    def _sender_name(self) -> str:
        return f"{self.name}/{self.incarnation}"


def rest(simulation: Simulation, seconds: int = 10) -> None:
    """Let everything settle: the network is whole, and nobody asks."""
    simulation.network.loss = simulation.network.duplicates = 0.0
    simulation.store_up = True
    simulation.run_until(simulation.now_us + seconds * SECOND)


def settled(simulation: Simulation) -> bool:
    """Whether nothing is left to settle."""
    return not any(
        view.unsent.tokens or view.in_flight.tokens or view.asks
        for node in simulation.nodes
        for view in node.views.values()
    )
