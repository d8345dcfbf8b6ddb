"""Runs of checks on several buckets: their scenarios and invariants."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ratelimitd.algorithms import DECIDE
from ratelimitd.algorithms.several import decide_all
from ratelimitd.ledger.accounts import ACCOUNTS
from ratelimitd.ledger.local_view import LocalView
from ratelimitd.ledger.shared_state import SharedState, StoreCheck, Update, standing
from ratelimitd.model import Enforcement, Rule
from tests.ledger_model import settle
from tests.simulation import demands
from tests.simulation.play import KEY, OTHERS, Played, let_things_happen, rest
from tests.simulation.scenario import OF_TOKENS, Scenario, scenario
from tests.simulation.several import USERS, Journal, Machine, PartNode, Shard
from tests.simulation.world import MS, SECOND, START_US, Network

MOST_CHECKS = 600
MOST_EVENTS = 300_000


# Scenarios


@dataclass(frozen=True)
class Several:
    """The parameters of a run: a scenario for each shard, and the buckets of checks."""

    shards: tuple[Scenario, ...]
    observed: int | None = None
    """The shard with an observing limit."""
    resets: tuple[float, ...] = ()
    """Times of resets on every shard; then the only invariant is that no refund reaches another generation."""

    @property
    def first(self) -> Scenario:
        return self.shards[USERS]

    @property
    def is_calm(self) -> bool:
        return all(shard.is_calm for shard in self.shards)


def several(seed: int, *, calm: bool = False) -> Several:
    """Return the scenario of a seed: that for a single bucket, with each fault on one shard or on all."""
    source = random.Random(seed)
    pick, chance = source.choice, source.random
    base = scenario(seed, calm=calm)
    base = replace(base, flush_s=None, buckets=3, bursts=False, decides_alone=chance() < 0.5)
    base = replace(base, first_node_misses_edits=False, other_edits=())
    if not calm and seed % 4 == 1:  # refunds come late
        base = replace(base, rtt_us=60 * MS)
    shards = []
    of_edit, of_reset = pick(range(3)), pick(range(3))
    for number in range(pick([2, 2, 3])):
        limit = max(1, round(base.limit * pick([0.5, 1, 1, 3])))
        shard = replace(
            base,
            algorithm=pick(OF_TOKENS),
            limit=limit,
            window_seconds=pick([1, base.window_seconds]),
        )
        if number:
            shard = replace(shard, caller_times_us=base.caller_times_us)
        if number != of_edit:
            shard = replace(shard, edit_s=None)
        if number != of_reset:
            shard = replace(shard, reset_s=None)
        if chance() < 0.5:
            shard = replace(shard, outages=(), mute=None)
        if chance() < 0.5:
            shard = replace(shard, deaf=None)
        shards.append(shard)
    resets: tuple[float, ...] = ()
    if not calm and seed % 5 == 2:
        resets = tuple(0.2 + base.seconds * chance() for _ in range(40))
    return Several(tuple(shards), pick([None, None, None, len(shards) - 1]), resets)


@dataclass
class PlayedSeveral:
    """The results of each shard and of the whole run."""

    parameters: Several
    shards: list[Played]
    machines: list[Machine]
    ideal: int
    """Tokens that a single node would have allowed."""
    is_endless: bool

    @property
    def allowed(self) -> int:
        return sum(machine.allowed for machine in self.machines)


def play_several(
    parameters: Several,
    *,
    ledger: type[Journal] = Journal,
    view: type[LocalView] = LocalView,
    node: type[PartNode] = PartNode,
    machine: type[Machine] = Machine,
) -> PlayedSeveral:
    """Run a scenario until everything is settled."""
    first = parameters.first
    network = Network(loss=first.loss, duplicates=first.duplicates, news_loss=first.news_loss)
    if first.rtt_us:
        network.least_us, network.most_us = first.rtt_us * 2 // 5, first.rtt_us * 3 // 5
    worlds: list[Shard] = []
    for _ in parameters.shards:
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
                    _node(parameters, shard, worlds[shard], number, skew_us, node, view)
                    for shard in range(len(worlds))
                ]
            )
        )
    for world in worlds:
        world.members_changed()
    for one, world in zip(parameters.shards, worlds, strict=True):
        let_things_happen(one, world)
        for reset_s in parameters.resets:
            main.at(START_US + int(reset_s * SECOND), world.reset, KEY, one.rule)
    end_us = START_US + int(first.seconds * SECOND)
    offered, ideal = _offer(parameters, main, machines, end_us)
    main.run_until(end_us)
    rest(main)
    shards = [
        Played(one, world, offered[number], end_us)
        for number, (one, world) in enumerate(zip(parameters.shards, worlds, strict=True))
    ]
    for world in worlds:
        for admissions in world.books.admissions.values():
            admissions.sort()
    return PlayedSeveral(parameters, shards, machines, ideal, main.is_endless)


def _node(  # noqa: PLR0917 - what a node is made of
    parameters: Several,
    shard: int,
    world: Shard,
    number: int,
    skew_us: int,
    node: type[PartNode],
    view: type[LocalView],
) -> PartNode:
    of_shard = parameters.shards[shard]
    world.start(f"n{number}/0")
    return node(
        world,
        f"n{number}",
        _rule(parameters, shard),
        skew_us=skew_us,
        members=max(1, of_shard.nodes + of_shard.wrong_members),
        wrong_members=of_shard.wrong_members,
        max_views=of_shard.max_views,
        decides_alone=of_shard.decides_alone,
        caller_times_us=of_shard.caller_times_us,
        make_view=view,
    )


def _rule(parameters: Several, shard: int) -> Rule:
    is_observed = shard == parameters.observed
    enforcement = Enforcement.OBSERVE if is_observed else Enforcement.ENFORCE
    return replace(parameters.shards[shard].rule, enforcement=enforcement)


def _offer(parameters, main, machines, end_us):
    """Generate the checks; also compute the tokens that a single node would allow."""
    first, source, chance = parameters.first, main.random, main.chance
    at_us, many = float(START_US), 2 * first.cost - 1
    per_us = min(
        max(one.checks_per_us for one in parameters.shards), 2 * MOST_CHECKS / (end_us - START_US)
    )
    offered: list[list[tuple[int, int]]] = [[] for _ in parameters.shards]
    rules = [_rule(parameters, shard) for shard in range(len(parameters.shards))]
    states: dict = {}
    ideal = 0
    while True:
        at_us += source.expovariate(per_us)
        if at_us >= end_us:
            return offered, ideal
        now_us = int(at_us)
        main.run_until(now_us)
        user = KEY if chance() < 0.6 else OTHERS[int(chance() * 2)]
        shards = [*range(len(parameters.shards))]
        if chance() < 0.1:
            shards = [*shards[:1], *shards[2:]]
        keys = [(shard, user if shard == USERS else KEY) for shard in shards]
        costs = [1 + int(chance() * many) for _ in keys]
        machines[int(chance() * len(machines))].check(keys, costs)
        buckets = [
            (states.get(key), rules[key[0]], DECIDE[rules[key[0]].algorithm]) for key in keys
        ]
        outcomes = decide_all(buckets, now_us, costs)
        for key, cost, outcome in zip(keys, costs, outcomes, strict=True):
            states[key] = outcome[5]
            if key[1] == KEY:
                offered[key[0]].append((now_us, cost))
        denied = any(
            not outcome[0] and rules[key[0]].enforcement is Enforcement.ENFORCE
            for key, outcome in zip(keys, outcomes, strict=True)
        )
        ideal += 0 if denied else sum(costs)


# Invariants


def shard_of(played: Played) -> Shard:
    """Return the world of a shard, with its counts of checks on several buckets."""
    assert isinstance(played.world, Shard)
    return played.world


def several_violations(played: PlayedSeveral) -> list[str]:
    """Return the violated invariants."""
    if played.is_endless:
        return ["does not come to an end"]
    found = []
    for number, shard in enumerate(played.shards):
        for name, demand in OF_EACH_SHARD.items():
            if played.parameters.resets and name in WITHOUT_RESETS:
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
    """At any time at least as much is missing from a bucket as without the refunded charges."""
    parameters, world = played.scenario, shard_of(played)
    if parameters.edit_s or world.is_flushed:
        return ""
    account, rule = ACCOUNTS[parameters.algorithm], parameters.rule
    given_back = {id(one) for one in world.given_back}
    for key, events in world.journal.events.items():
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


def _without(  # noqa: PLR0917 - what is replayed
    without: SharedState | None,
    event: Update | StoreCheck,
    made: tuple[SharedState, Sequence[bool]],
    given_back: set[int],
    rule: Rule,
) -> SharedState:
    """Return the bucket after an event, without charges that are given back at any time."""
    shared, grants = made
    if without is not None and without.generation < shared.generation:  # the bucket was reset
        without = SharedState(*shared[:3])
    if isinstance(event, StoreCheck):
        asks: list[tuple[Any, int, int]] = [(event, event.now_us, event.cost)]
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
    """At the end no node has an older state as its latest."""
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
    """A denied check changes nothing beyond a round trip."""
    stay = shard_of(played).stay
    return f"{stay} of denied checks stay charged" if stay and played.scenario.is_calm else ""


def no_node_spends_beyond_its_share(played: Played) -> str:
    """Even with checks waiting for other buckets, no node exceeds its share, unless the store was late."""
    return shard_of(played).over_share


def what_is_given_back_was_charged(played: Played) -> str:
    """Each refund is for one charge of a denied check."""
    world = shard_of(played)
    refunds = sum(
        len(event.refunds)
        for events in world.journal.events.values()
        for event, _, _ in events
        if isinstance(event, Update)
    )
    return "" if refunds <= world.refunds else f"{refunds} were given back of {world.refunds}"


def no_less_than_one_node_alone(played: PlayedSeveral) -> str:
    """Without faults all machines together allow nearly as much as a single one."""
    parameters = played.parameters
    window_us = max(one.window_seconds for one in parameters.shards) * SECOND
    if not parameters.is_calm or parameters.first.seconds * SECOND < 5 * window_us:
        return ""
    edges = sum(2 * one.nodes * one.cost + 0.05 * one.limit for one in parameters.shards)
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
    "no node spends beyond its share": no_node_spends_beyond_its_share,
    "nothing stays charged": where_nothing_fails_nothing_stays_charged,
    "what is given back was charged": what_is_given_back_was_charged,
}
WITHOUT_RESETS = (
    "never more than the bound",
    "no node allows more than one may",
    "what was spent beside each other is paid back",
)
OF_ALL = {"no less than one node alone": no_less_than_one_node_alone}
