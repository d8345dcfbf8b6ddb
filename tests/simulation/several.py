"""Checks on several buckets, each on its own shard: a user within a tenant within all callers.

A shard is a world with its own store and one node of every machine; all shards share one clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ratelimitd.errors import StoreUnavailableError
from ratelimitd.ledger.accounts import Refund
from ratelimitd.ledger.local_view import LocalView
from ratelimitd.ledger.protocol import Batch, Reply
from ratelimitd.ledger.several import Part, conclude, denies
from ratelimitd.ledger.shared_state import (
    Ask,
    FirstResult,
    SharedState,
    StoreCheck,
    Update,
    refund_of,
)
from ratelimitd.model import (
    LIMIT_EXCEEDED,
    WITHIN_LIMIT,
)
from tests.ledger_model import Ledger
from tests.simulation.first_checks import FirstChecks, Waiting
from tests.simulation.node import Node
from tests.simulation.world import ANSWER_US, Admission, Network, World

USERS, TENANT, EVERYBODY = range(3)


# The shards


class Journal(Ledger):
    """A store that records its operations on each bucket.

    Attributes:
        events: of each bucket, in order: an update with its result, or a first check and whether it was charged.
    """

    __slots__ = ("events",)

    def __init__(self) -> None:
        super().__init__()
        self.events: dict[bytes, list[tuple[Update | StoreCheck, SharedState, Sequence[bool]]]] = {}

    def apply(self, batch: Batch) -> Reply | None:
        before = self._replies.get(batch.sender)
        reply = super().apply(batch)
        if reply is not None and reply is not before:
            for key, update in batch.updates.items():
                shared, grants = reply.settled[key]
                self.events.setdefault(key, []).append((update, shared, grants))
        return reply

    def first_check(self, check: StoreCheck) -> FirstResult:
        outcome, shared = super().first_check(check)
        self.events.setdefault(check.name, []).append((check, shared, (outcome[0],)))
        return outcome, shared


class Shard(World):
    """A shard; it shares time, randomness and messages with the first one."""

    def __init__(self, first: World | None, seed: int, network: Network, ledger: Ledger) -> None:
        self.first = first
        super().__init__(seed, network, ledger)
        self.given_back: list[Ask | StoreCheck] = []
        """Charges of the store for which a refund was sent."""
        self.stay = 0
        """Tokens that stay charged for denied checks, because the store's charge is not known exactly enough."""
        self.refunds = 0
        self.over_share = ""
        self.is_far = network.most_us > ANSWER_US
        if first is not None:
            self.random, self.chance = first.random, first.chance

    @property
    def journal(self) -> Journal:
        assert isinstance(self.ledger, Journal)
        return self.ledger

    @property
    def now_us(self) -> int:
        return self._now_us if self.first is None else self.first.now_us

    @now_us.setter
    def now_us(self, now_us: int) -> None:
        self._now_us = now_us

    def at(self, when_us, act, *arguments) -> None:
        if self.first is None:
            super().at(when_us, act, *arguments)
        else:
            self.first.at(when_us, act, *arguments)

    def after(self, delay_us, act, *arguments) -> None:
        if self.first is None:
            super().after(delay_us, act, *arguments)
        else:
            self.first.after(delay_us, act, *arguments)


# The nodes


@dataclass(eq=False, slots=True, kw_only=True)
class PartWaiting(Waiting):
    """One bucket of a check that also waits for others."""

    part: Part
    node: "PartNode"
    joint: "Joint" = field(init=False)
    charge: Ask | StoreCheck | None = None
    """The charge by the store."""
    is_alone: bool = False
    came_us: int = 0
    decided_us: int = 0

    @property
    def allowed_us(self) -> int:
        """Time of the allowance; with a distant store that of the charge, because the answer comes much later."""
        return self.came_us if self.node.world.is_far else self.decided_us


class NotedChecks(FirstChecks):
    """First checks that are recorded, so that their charges can be found."""

    def send(self, first_check) -> None:
        _, (first, *_) = self._waiting[first_check.check.name]
        assert isinstance(first, PartWaiting)
        first.charge = first_check.check
        super().send(first_check)


class PartNode(Node):
    """The part of one machine on one shard."""

    world: Shard
    machine: "Machine"
    make_first_checks = NotedChecks

    def __post_init__(self) -> None:
        self.most_share: dict[bytes, float] = {}
        """The largest share of each bucket so far."""
        self.was_alone = False
        super().__post_init__()

    def _decide(self, view: LocalView, waiting: Waiting) -> None:
        assert isinstance(waiting, PartWaiting)
        if not self.judge(view, waiting):
            self._ask(view, waiting)
        else:
            waiting.joint.decided()

    def judge(self, view: LocalView, waiting: PartWaiting) -> bool:
        """Decide by the view, without charging; false if the store has to decide."""
        key, rule, part = waiting.key, self.rule, waiting.part
        if self.is_full and key in self.views:
            self.views[key] = self.views.pop(key)
        if view.rule is not rule and rule.revision >= view.rule.revision:
            view.edit(rule)
        if self.is_cut_off:
            part.reserve_alone(view, waiting.at_us)
            waiting.is_alone = self.was_alone = True
        else:
            part.reserve(view, waiting.at_us, self.members)
            share = view.share_of(rule, view._remaining(waiting.at_us)) / self.members
            self.most_share[key] = max(share, self.most_share.get(key, 0.0))
        if not isinstance(part.outcome, tuple):
            return False
        waiting.answered, waiting.decided_us = True, self.world.now_us
        if not part.outcome[0]:
            self._note_denial(waiting)
            if view.has_newer_limit:
                self.dirty[key] = view
        return True

    def view_of(self, key: bytes) -> LocalView | None:
        return self.views.get(key) or self._known(key)

    def ask(self, waiting: PartWaiting) -> None:
        if waiting.part.view is not None:
            self._ask(waiting.part.view, waiting)
        else:
            self.first_checks.wait(waiting)

    def _note_denial(self, waiting: Waiting) -> None:
        if waiting.key not in self.denied:
            self.denied[waiting.key] = (0, self.now_us + 100_000)

    def _charged(self, waiting: Waiting, shared: SharedState, later: int) -> None:
        assert isinstance(waiting, PartWaiting)
        ask = waiting.ask
        at_us = ask.at_us if ask is not None and later else None
        waiting.part.refund = refund_of(shared, self.rule, waiting.cost, at_us=at_us, later=later)
        waiting.part.shared = shared
        waiting.charge = ask or waiting.charge

    def _answer(self, waiting, allowed, *, alone=False, unchecked=False) -> None:
        waiting.answered, waiting.decided_us = True, self.world.now_us
        part = waiting.part
        part.view = None
        reason = WITHIN_LIMIT if allowed else LIMIT_EXCEEDED
        part.outcome = (allowed, 0, 0, 0, reason, None)
        part.is_charged = allowed
        waiting.is_alone = alone
        self.was_alone |= alone
        if unchecked:
            part.outcome, part.is_charged = StoreUnavailableError("no answer"), False
        if not allowed:
            self._note_denial(waiting)
        waiting.joint.decided()

    def give_back(self, waiting: PartWaiting, refund: Refund, charge: Ask | StoreCheck) -> bool:
        """Give a charge back with the next batch, unless the breaker is open."""
        key = waiting.key
        view = self.views.get(key) or self.pending.get(key)
        if view is None and self.is_cut_off and key not in self.packed:
            return False
        if view is None and (view := self._known(key)) is None:  # evicted since it was charged
            view = self.make_view(self.rule, waiting.part.shared)
            self._use(key, view)
        view.give_back(refund)
        self.world.given_back.append(charge)
        self.dirty[key] = view
        self.flush()
        return True

    def drop_if_settled(self, key: bytes) -> None:
        view = self.pending.get(key)
        is_idle = key not in self.dirty and key not in self.asked
        if view is not None and view.is_clean and is_idle:
            self._take_counts(self.pending.pop(key))

    def crash(self) -> None:
        self.machine.crash()
        super().crash()


class Joint:
    """One check on several buckets, in flight."""

    def __init__(self, machine: "Machine", waitings: Sequence[PartWaiting]) -> None:
        self.machine = machine
        self.waitings = waitings
        self.parts = [one.part for one in waitings]
        self.missing = 0

    def decided(self) -> None:
        self.missing -= 1
        if self.is_over:
            world = self.waitings[0].node.world
            world.after(0, self.machine.conclude, self)

    @property
    def is_over(self) -> bool:
        return self.missing == 0


class Machine:
    """One machine, with a node for each shard."""

    make_joint = Joint

    def __init__(self, nodes: Sequence[PartNode]) -> None:
        self.nodes = nodes
        self.open: list[Joint] = []
        self.allowed = 0
        for node in nodes:
            node.machine = self

    def check(self, keys: Sequence[tuple[int, bytes]], costs: Sequence[int]) -> None:
        first = self.nodes[0]
        if not first.alive:
            return
        if first.world.now_us < first.stalled_until_us:
            first.world.at(first.stalled_until_us, self.check, keys, costs)
            return
        at_us = first._time_of_caller()
        waitings = []
        for (shard, key), cost in zip(keys, costs, strict=True):
            node = self.nodes[shard]
            waiting = PartWaiting(key, cost, at_us, part=Part(node.rule, cost), node=node)
            waiting.came_us = node.world.now_us
            waitings.append(waiting)
        joint = self.make_joint(self, waitings)
        for waiting in waitings:
            waiting.joint = joint
        self.open.append(joint)
        undecided = []
        for waiting in waitings:
            view = waiting.node.view_of(waiting.key)
            if view is None or not waiting.node.judge(view, waiting):
                undecided.append(waiting)
        if denies(joint.parts) or not undecided:
            self.conclude(joint)
            return
        joint.missing = len(undecided)
        for waiting in undecided:
            waiting.node.ask(waiting)

    def conclude(self, joint: Joint) -> None:
        if joint not in self.open:  # crashed meanwhile
            return
        self.open.remove(joint)
        is_allowed = self.verdict(joint, joint.waitings[0].at_us)
        self.allowed += sum(one.cost for one in joint.waitings) if is_allowed else 0
        for waiting in joint.waitings:
            if is_allowed:
                self._admit(waiting)
            else:
                self._deny(waiting)

    @staticmethod
    def verdict(joint: Joint, at_us: int) -> bool:
        return conclude(joint.parts, at_us)

    def _admit(self, waiting: PartWaiting) -> None:
        node, part, key = waiting.node, waiting.part, waiting.key
        is_unchecked = isinstance(part.outcome, Exception)
        if not (is_unchecked or part.is_charged):
            return  # of an observing limit
        admission = Admission(
            waiting.allowed_us, waiting.cost, node.sender_name, waiting.is_alone, is_unchecked
        )
        node.world.books.admissions[key].append(admission)
        if part.is_reserved and part.view is not None:
            self._compare_with_share(waiting, part.view)
            node.dirty[key] = part.view
            if part.view.is_due(node.now_us, node.members):
                node.flush()

    @staticmethod
    def _compare_with_share(waiting: PartWaiting, view: LocalView) -> None:
        node = waiting.node
        unsettled, share = (
            view.unsent.tokens + view.in_flight_tokens,
            node.most_share.get(waiting.key, 0),
        )
        if unsettled > share and not node.was_alone:
            node.world.over_share = f"{unsettled} are unsettled, {share} is the largest share"

    def _deny(self, waiting: PartWaiting) -> None:
        node, part, key = waiting.node, waiting.part, waiting.key
        books, cost = node.world.books, waiting.cost
        if part.is_reserved:
            node.drop_if_settled(key)
        if isinstance(part.outcome, Exception):
            books.unchecked -= cost
        elif part.is_charged:
            books.wasted += cost
            is_sent = self.give_back(waiting)
            node.world.refunds += is_sent
            node.world.stay += 0 if is_sent else cost

    @staticmethod
    def give_back(waiting: PartWaiting) -> bool:
        refund, charge = waiting.part.refund, waiting.charge
        if refund is None or charge is None:
            return False
        return waiting.node.give_back(waiting, refund, charge)

    def crash(self) -> None:
        """Lose all checks in flight; their charges remain."""
        for joint in self.open:
            for waiting in joint.waitings:
                if waiting.part.is_charged:
                    waiting.node.world.books.wasted += waiting.cost
                elif isinstance(waiting.part.outcome, Exception):
                    waiting.node.world.books.unchecked -= waiting.cost
        self.open = []
