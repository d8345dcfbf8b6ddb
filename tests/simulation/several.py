"""Checks on several buckets, each on a shard of its own: a user within a tenant within everybody.

A shard is a world beside the others: it has a store, and of every machine a node, but no time of its own.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ratelimitd.algorithms import DECIDE
from ratelimitd.algorithms.several import decide_all
from ratelimitd.errors import StoreUnavailableError
from ratelimitd.ledger.accounts import ACCOUNTS, Refund
from ratelimitd.ledger.local_view import LocalView
from ratelimitd.ledger.protocol import Batch, Reply
from ratelimitd.ledger.several import Part, conclude, denies
from ratelimitd.ledger.shared_state import (
    Ask,
    Met,
    SharedState,
    StoreCheck,
    Update,
    refund_of,
    standing,
)
from ratelimitd.model import (
    LIMIT_EXCEEDED,
    WITHIN_LIMIT,
    Algorithm,
    Enforcement,
    Rule,
)
from tests.ledger_model import Ledger, settle
from tests.simulation import demands
from tests.simulation.meetings import FirstChecks, Waiting
from tests.simulation.node import Node
from tests.simulation.play import KEY, OTHERS, Played, let_things_happen, rest
from tests.simulation.scenario import Scenario, scenario
from tests.simulation.world import MS, SECOND, START_US, Admission, Network, World

USERS, TENANT, EVERYBODY = range(3)
MOST_CHECKS = 600
MOST_EVENTS = 300_000


# The shards


class Journal(Ledger):
    """A store's side that writes down what it did to each bucket.

    Attributes:
        events: of each bucket, in order: an update with what came of it, or a first check and whether it was charged.
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

    def first_check(self, check: StoreCheck) -> Met:
        outcome, shared = super().first_check(check)
        self.events.setdefault(check.name, []).append((check, shared, (outcome[0],)))
        return outcome, shared


class Shard(World):
    """A shard; its time, chance and messages are those of the first."""

    def __init__(self, first: World | None, seed: int, network: Network, ledger: Ledger) -> None:
        self.first = first
        super().__init__(seed, network, ledger)
        self.given_back: list[Ask | StoreCheck] = []
        """Charges of the store for which a refund was sent."""
        self.stay = 0
        """Tokens that stay charged for denied checks, because the store's charge is not known well enough."""
        self.refunds = 0
        self.over_share = ""
        if first is not None:
            self.random, self.chance = first.random, first.chance

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


@dataclass(eq=False, slots=True)
class PartWaiting(Waiting):
    """One bucket of a check that waits for others, too."""

    part: Part | None = None
    joint: "Joint | None" = None
    node: "PartNode | None" = None
    charge: Ask | StoreCheck | None = None
    """What the store has charged."""
    is_alone: bool = False
    decided_us: int = 0


class NotedChecks(FirstChecks):
    """First checks that are noted, so that what they have charged can be found."""

    def bring(self, meeting) -> None:
        _, (first, *_) = self._waiting[meeting.check.name]
        first.charge = meeting.check
        super().bring(meeting)


class PartNode(Node):
    """What one machine does about one shard."""

    machine: "Machine"
    make_meetings = NotedChecks

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
            part.reserve_alone(view, waiting.at_us, waiting.cost)
            waiting.is_alone = self.was_alone = True
        else:
            part.reserve(view, waiting.at_us, self.members, waiting.cost)
            share = view._share_of(view._remaining(waiting.at_us)) / self.members
            self.most_share[key] = max(share, self.most_share.get(key, 0.0))
        if part.outcome is None:
            return False
        waiting.answered, waiting.decided_us = True, self.world.now_us
        if not part.outcome[0]:
            self._note_denial(waiting)
            if view.knows_better:
                self.dirty[key] = view
        return True

    def view_of(self, key: bytes) -> LocalView | None:
        return self.views.get(key) or self._known(key)

    def ask(self, waiting: PartWaiting) -> None:
        if waiting.part.view is not None:
            self._ask(waiting.part.view, waiting)
        else:
            self.meetings.wait(waiting)

    def _note_denial(self, waiting: Waiting) -> None:
        if waiting.key not in self.denied:
            self.denied[waiting.key] = (0, self.now_us + 100_000)

    def _charged(self, waiting: Waiting, shared: SharedState, later: int) -> None:
        ask = waiting.ask
        at_us = ask.at_us if ask is not None and later else None
        waiting.part.refund = refund_of(shared, self.rule, waiting.cost, at_us=at_us, later=later)
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

    def give_back(self, key: bytes, refund: Refund, charge: Ask | StoreCheck) -> bool:
        """Let the next batch give a charge back, if the bucket is still known."""
        view = self.views.get(key) or self.pending.get(key)
        if view is None and key in self.packed:
            view = self._known(key)
        if view is None:
            return False
        view.give_back(refund)
        self.world.given_back.append(charge)
        self.dirty[key] = view
        self.flush()
        return True

    def let_go(self, key: bytes) -> None:
        view = self.pending.get(key)
        is_idle = key not in self.dirty and key not in self.asked
        if view is not None and view.is_clean and is_idle:
            self._let_go(self.pending.pop(key))

    def crash(self) -> None:
        self.machine.crash()
        super().crash()


class Joint:
    """One check on several buckets, on its way."""

    def __init__(self, machine: "Machine", waitings: Sequence[PartWaiting], cost: int) -> None:
        self.machine = machine
        self.waitings = waitings
        self.parts = [one.part for one in waitings]
        self.cost = cost
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
    """One node as a machine has it: a part of it for each shard."""

    make_joint = Joint

    def __init__(self, nodes: Sequence[PartNode]) -> None:
        self.nodes = nodes
        self.open: list[Joint] = []
        self.allowed = 0
        for node in nodes:
            node.machine = self

    def check(self, keys: Sequence[tuple[int, bytes]], cost: int) -> None:
        first = self.nodes[0]
        if not first.alive:
            return
        if first.world.now_us < first.stalled_until_us:
            first.world.at(first.stalled_until_us, self.check, keys, cost)
            return
        at_us = first._time_of_caller()
        waitings = []
        for shard, key in keys:
            node = self.nodes[shard]
            waiting = PartWaiting(key, cost, at_us, part=Part(node.rule), node=node)
            waitings.append(waiting)
        joint = self.make_joint(self, waitings, cost)
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
        at_us, cost = joint.waitings[0].at_us, joint.cost
        is_allowed = self.verdict(joint, at_us, cost)
        self.allowed += cost if is_allowed else 0
        for waiting in joint.waitings:
            if is_allowed:
                self._admit(waiting)
            else:
                self._deny(waiting)

    @staticmethod
    def verdict(joint: Joint, at_us: int, cost: int) -> bool:
        return conclude(joint.parts, at_us, cost)

    def _admit(self, waiting: PartWaiting) -> None:
        node, part, key = waiting.node, waiting.part, waiting.key
        is_unchecked = isinstance(part.outcome, Exception)
        if not (is_unchecked or part.is_charged):
            return  # one that only observes
        admission = Admission(
            waiting.decided_us, waiting.cost, node.sender_name, waiting.is_alone, is_unchecked
        )
        node.world.books.admissions[key].append(admission)
        if part.is_reserved:
            self._compare_with_share(waiting)
            node.dirty[key] = part.view
            if part.view.is_due(node.now_us, node.members):
                node.flush()

    @staticmethod
    def _compare_with_share(waiting: PartWaiting) -> None:
        node, view = waiting.node, waiting.part.view
        unsettled, share = (
            view.unsent.tokens + view.in_flight.tokens,
            node.most_share.get(waiting.key, 0),
        )
        if unsettled > share and not node.was_alone:
            node.world.over_share = f"{unsettled} are unsettled, {share} is the largest share"

    def _deny(self, waiting: PartWaiting) -> None:
        node, part, key = waiting.node, waiting.part, waiting.key
        books, cost = node.world.books, waiting.cost
        if part.is_reserved:
            node.let_go(key)
        if isinstance(part.outcome, Exception):
            books.unchecked -= cost
        elif part.is_charged:
            books.wasted += cost
            is_sent = part.refund is not None and self.give_back(waiting)
            node.world.refunds += is_sent
            node.world.stay += 0 if is_sent else cost

    @staticmethod
    def give_back(waiting: PartWaiting) -> bool:
        return waiting.node.give_back(waiting.key, waiting.part.refund, waiting.charge)

    def crash(self) -> None:
        """What was charged for checks that nobody answers now stays charged."""
        for joint in self.open:
            for waiting in joint.waitings:
                if waiting.part.is_charged:
                    waiting.node.world.books.wasted += waiting.cost
                elif isinstance(waiting.part.outcome, Exception):
                    waiting.node.world.books.unchecked -= waiting.cost
        self.open = []


# What happens


@dataclass(frozen=True)
class Several:
    """What happens in a run: a scenario for each shard, and which buckets checks are for."""

    shards: tuple[Scenario, ...]
    observed: int | None = None
    """The shard whose limit only observes."""
    resets: tuple[float, ...] = ()
    """Of every shard, when nothing else is demanded than that no refund reaches another generation."""

    @property
    def first(self) -> Scenario:
        return self.shards[USERS]

    @property
    def is_calm(self) -> bool:
        return all(told.is_calm for told in self.shards)


def several(seed: int, *, calm: bool = False) -> Several:
    """The scenario of a seed: the faults of one for a single bucket, each at one shard or at all of them."""
    source = random.Random(seed)
    pick, chance = source.choice, source.random
    base = scenario(seed, calm=calm)
    base = replace(base, flush_s=None, buckets=3, bursts=False, decides_alone=chance() < 0.5)
    base = replace(base, first_is_not_told=False, other_edits=())
    if not calm and seed % 4 == 1:  # refunds come late
        base = replace(base, rtt_us=60 * MS)
    shards = []
    of_edit, of_reset = pick(range(3)), pick(range(3))
    for number in range(pick([2, 2, 3])):
        limit = max(1, round(base.limit * pick([0.5, 1, 1, 3])))
        told = replace(
            base,
            algorithm=pick([*Algorithm]),
            limit=limit,
            window_seconds=pick([1, base.window_seconds]),
        )
        if number:
            told = replace(told, caller_times_us=base.caller_times_us)
        if number != of_edit:
            told = replace(told, edit_s=None)
        if number != of_reset:
            told = replace(told, reset_s=None)
        if chance() < 0.5:
            told = replace(told, outages=(), mute=None)
        if chance() < 0.5:
            told = replace(told, deaf=None)
        shards.append(told)
    resets: tuple[float, ...] = ()
    if not calm and seed % 5 == 2:
        resets = tuple(0.2 + base.seconds * chance() for _ in range(40))
    return Several(tuple(shards), pick([None, None, None, len(shards) - 1]), resets)


@dataclass
class PlayedSeveral:
    """What came of it: of each shard, and of all."""

    told: Several
    shards: list[Played]
    machines: list[Machine]
    ideal: int
    """Tokens that one node alone would have allowed."""
    is_endless: bool

    @property
    def allowed(self) -> int:
        return sum(machine.allowed for machine in self.machines)


def play_several(
    told: Several,
    *,
    ledger: type[Journal] = Journal,
    view: type[LocalView] = LocalView,
    node: type[PartNode] = PartNode,
    machine: type[Machine] = Machine,
) -> PlayedSeveral:
    """Run a scenario, then let everything settle."""
    first = told.first
    network = Network(loss=first.loss, duplicates=first.duplicates, news_loss=first.news_loss)
    if first.rtt_us:
        network.least_us, network.most_us = first.rtt_us * 2 // 5, first.rtt_us * 3 // 5
    worlds: list[Shard] = []
    for _ in told.shards:
        worlds.append(Shard(worlds[0] if worlds else None, first.seed, network, ledger()))
    main = worlds[0]
    main.most_events = MOST_EVENTS
    source = main.random
    machines = []
    for number in range(first.nodes):
        skew_us = source.randint(-first.skew_us, first.skew_us)
        machines.append(
            machine(
                [
                    _node(told, shard, worlds[shard], number, skew_us, node, view)
                    for shard in range(len(worlds))
                ]
            )
        )
    for world in worlds:
        world.members_changed()
    for one, world in zip(told.shards, worlds, strict=True):
        let_things_happen(one, world)
        for reset_s in told.resets:
            main.at(START_US + int(reset_s * SECOND), world.reset, KEY, one.rule)
    end_us = START_US + int(first.seconds * SECOND)
    offered, ideal = _offer(told, main, machines, end_us)
    main.run_until(end_us)
    rest(main)
    shards = [
        Played(one, world, offered[number], end_us)
        for number, (one, world) in enumerate(zip(told.shards, worlds, strict=True))
    ]
    for world in worlds:
        for admissions in world.books.admissions.values():
            admissions.sort()
    return PlayedSeveral(told, shards, machines, ideal, main.is_endless)


def _node(told, shard, world, number, skew_us, node, view) -> PartNode:
    of_shard = told.shards[shard]
    world.start(f"n{number}/0")
    return node(
        world,
        f"n{number}",
        _rule(told, shard),
        skew_us=skew_us,
        members=max(1, of_shard.nodes + of_shard.wrong_members),
        wrong_members=of_shard.wrong_members,
        max_views=of_shard.max_views,
        decides_alone=of_shard.decides_alone,
        caller_times_us=of_shard.caller_times_us,
        make_view=view,
    )


def _rule(told: Several, shard: int) -> Rule:
    is_observed = shard == told.observed
    enforcement = Enforcement.OBSERVE if is_observed else Enforcement.ENFORCE
    return replace(told.shards[shard].rule, enforcement=enforcement)


def _offer(told, main, machines, end_us):
    """Let checks come; also the single node's view of what they may."""
    first, source, chance = told.first, main.random, main.chance
    at_us, many = float(START_US), 2 * first.cost - 1
    per_us = min(
        max(one.checks_per_us for one in told.shards), 2 * MOST_CHECKS / (end_us - START_US)
    )
    offered: list[list[tuple[int, int]]] = [[] for _ in told.shards]
    rules = [_rule(told, shard) for shard in range(len(told.shards))]
    states: dict = {}
    ideal = 0
    while True:
        at_us += source.expovariate(per_us)
        if at_us >= end_us:
            return offered, ideal
        now_us = int(at_us)
        main.run_until(now_us)
        user = KEY if chance() < 0.6 else OTHERS[int(chance() * 2)]
        shards = [*range(len(told.shards))]
        if chance() < 0.1:
            shards = [*shards[:1], *shards[2:]]
        keys = [(shard, user if shard == USERS else KEY) for shard in shards]
        cost = 1 + int(chance() * many)
        machines[int(chance() * len(machines))].check(keys, cost)
        buckets = [
            (states.get(key), rules[key[0]], DECIDE[rules[key[0]].algorithm]) for key in keys
        ]
        outcomes = decide_all(buckets, now_us, cost)
        for key, outcome in zip(keys, outcomes, strict=True):
            states[key] = outcome[5]
            if key[1] == KEY:
                offered[key[0]].append((now_us, cost))
        denied = any(
            not outcome[0] and rules[key[0]].enforcement is Enforcement.ENFORCE
            for key, outcome in zip(keys, outcomes, strict=True)
        )
        ideal += 0 if denied else cost


# What must hold


def several_violations(played: PlayedSeveral) -> list[str]:
    """What does not hold, if anything."""
    if played.is_endless:
        return ["does not come to an end"]
    found = []
    for number, shard in enumerate(played.shards):
        for name, demand in OF_EACH_SHARD.items():
            if played.told.resets and name in WITHOUT_RESETS:
                continue
            problem = demand(shard)
            if problem:
                found.append(f"{name}, shard {number}: {problem}")
    for name, of_all in OF_ALL.items():
        problem = of_all(played)
        if problem:
            found.append(f"{name}: {problem}")
    return found


def a_refund_never_mints(played: Played) -> str:
    """At no time a bucket lacks less than if what is given back had not been charged."""
    told, world = played.scenario, played.world
    if told.edit_s or world.is_flushed:
        return ""
    account, rule = ACCOUNTS[told.algorithm], told.rule
    given_back = {id(one) for one in world.given_back}
    for key, events in world.ledger.events.items():
        without: SharedState | None = None
        for event, shared, grants in events:
            without = _without(without, event, (shared, grants), given_back, rule)
            latest_us, _ = account.standing(shared.state)
            for part in range(5):
                at_us = latest_us + part * rule.window_us // 4
                lacks = account.used(shared.state, rule, at_us)
                least = account.used(without.state, rule, at_us)
                if lacks < least:
                    return f"{key!r} lacks {lacks} and not {least}"
    return ""


def _without(without, event, made, given_back, rule) -> SharedState:
    """The bucket after an event, but for charges that are given back at some time."""
    shared, grants = made
    if without is not None and without.generation < shared.generation:  # it was reset
        without = SharedState(*shared[:3])
    if isinstance(event, StoreCheck):
        asks = [(event, event.now_us, event.cost)]
        update = Update(event.rule, None)
    else:
        asks = [(ask, ask.at_us, ask.cost) for ask in event.asks]
        update = event._replace(asks=(), refunds=())
    shared = settle(without, update).shared
    account = ACCOUNTS[rule.algorithm]
    for (ask, at_us, cost), is_granted in zip(asks, grants, strict=True):
        if is_granted and id(ask) not in given_back:
            latest_us = account.standing(shared.state)[0]
            run = [(max(at_us, latest_us), cost)]
            shared = shared._replace(state=account.charged(shared.state, rule, run))
    return shared


def nodes_learn_of_refunds(played: Played) -> str:
    """When all is quiet, no node takes an older state for the latest."""
    world = played.world
    for node in world.nodes:
        for key, view in node.views.items():
            shared = world.ledger.buckets.get(key)
            if shared is None or view.base is None or key not in node.denied:
                continue
            known, latest = standing(view.base, view.rule), standing(shared, view.rule)
            if known < latest and known[:3] == latest[:3]:
                return f"{key!r}: {view.base} is not {shared}"
    return ""


def where_nothing_fails_nothing_stays_charged(played: Played) -> str:
    """A denied check changes nothing but for a round trip."""
    stay = played.world.stay
    return f"{stay} of denied checks stay charged" if stay and played.scenario.is_calm else ""


def nobody_spends_beyond_its_share(played: Played) -> str:
    """Whatever waits for other buckets, no node has more unsettled than its share, unless the store was late."""
    return played.world.over_share


def what_is_given_back_was_charged(played: Played) -> str:
    """Each refund is for one charge for a denied check."""
    world = played.world
    refunds = sum(
        len(event.refunds)
        for events in world.ledger.events.values()
        for event, _, _ in events
        if isinstance(event, Update)
    )
    return "" if refunds <= world.refunds else f"{refunds} were given back of {world.refunds}"


def no_less_than_one_node_alone(played: PlayedSeveral) -> str:
    """Where nothing went wrong all machines allow nearly what one would."""
    told = played.told
    window_us = max(one.window_seconds for one in told.shards) * SECOND
    if not told.is_calm or told.first.seconds * SECOND < 5 * window_us:
        return ""
    edges = sum(2 * one.nodes * one.cost + 0.05 * one.limit for one in told.shards)
    least = 0.97 * played.ideal - edges
    return (
        "" if played.allowed >= least else f"{played.allowed} allowed, {played.ideal} by one node"
    )


OF_EACH_SHARD = {
    "nothing is left": demands.nothing_is_left,
    "no spend is lost or doubled": demands.no_spend_is_lost_or_doubled,
    "never more than the bound": demands.never_more_than_the_bound,
    "no node allows more than one may": demands.no_node_allows_more_than_one_may,
    "what was spent beside each other is paid back": demands.what_was_spent_beside_each_other_is_paid_back,
    "a refund never mints": a_refund_never_mints,
    "nodes learn of refunds": nodes_learn_of_refunds,
    "nobody spends beyond its share": nobody_spends_beyond_its_share,
    "nothing stays charged": where_nothing_fails_nothing_stays_charged,
    "what is given back was charged": what_is_given_back_was_charged,
}
WITHOUT_RESETS = (
    "never more than the bound",
    "no node allows more than one may",
    "what was spent beside each other is paid back",
)
OF_ALL = {"no less than one node alone": no_less_than_one_node_alone}
