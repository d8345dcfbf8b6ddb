"""Scenarios by seed, and how they are played."""

import random
from dataclasses import dataclass, field, replace
from functools import cached_property

from ratelimitd.ledger.batches import Ledger
from ratelimitd.ledger.shared_state import SharedState
from ratelimitd.ledger.view import View
from ratelimitd.model import Algorithm, IdentifierType, Rule
from tests.simulation.node import Node
from tests.simulation.world import MS, SECOND, START_US, Admission, Network, World

KEY = b"one"
"""The bucket that the load is on, and most demands."""
OTHERS = (b"two", b"three")
FEW, MANY = 3, 250
"""Buckets; many are more than one batch may have, and five times as many checks are for them."""
MOST_CHECKS = 1_000
LONGEST_S = 15.0
CHECKS_PER_S = 400
"""A load of more tokens asks for several at once."""
LATEST_EDIT_S = 0.5
"""By then every node has heard of an edit."""
REST_S = 10

Span = tuple[float, float]
"""Beginning and length, in seconds."""


@dataclass(frozen=True)
class Scenario:
    """What happens in a run."""

    seed: int
    algorithm: Algorithm
    limit: int
    window_seconds: int
    nodes: int
    load: float
    """Of the limit."""
    seconds: float
    cost: int = 1
    """Checks ask for 1 to twice as much less one."""
    bursts: bool = False
    skew_us: int = 0
    loss: float = 0.0
    duplicates: float = 0.0
    news_loss: float = 0.0
    outages: tuple[Span, ...] = ()
    mute: Span | None = None
    """The first node is not heard."""
    deaf: Span | None = None
    """It does not hear."""
    crash_s: float | None = None
    reset_s: float | None = None
    edit_s: float | None = None
    edited_limit: int = 0
    first_is_not_told: bool = False
    """Of edits; it can learn of them from states alone."""
    other_edits: tuple[float, ...] = ()
    """Of other rules in the same book."""
    wrong_members: int = 0
    buckets: int = FEW
    max_views: int = 1_000

    @property
    def rule(self) -> Rule:
        return Rule("r", "/a", IdentifierType.USER, self.limit, self.window_seconds, self.algorithm)

    @property
    def rate_per_us(self) -> float:
        return self.limit / (self.window_seconds * SECOND)

    @property
    def checks_per_us(self) -> float:
        return self.rate_per_us * self.load / self.cost

    @property
    def is_calm(self) -> bool:
        """Without any fault."""
        return not (
            self.loss
            or self.duplicates
            or self.outages
            or self.mute
            or self.deaf
            or self.crash_s
            or self.reset_s
            or self.edit_s
            or self.skew_us
            or self.wrong_members
        )


def scenario(seed: int, *, calm: bool = False) -> Scenario:
    """The scenario of a seed."""
    source = random.Random(seed)
    pick, chance = source.choice, source.random
    limit, window = pick([1, 10, 100, 100, 1_000, 100_000]), pick([1, 1, 1, 5])
    load = pick([0.5, 0.8, 0.9, 1.5, 4, 20, 200])
    made = Scenario(
        seed=seed,
        algorithm=pick(list(Algorithm)),
        limit=limit,
        window_seconds=window,
        nodes=pick([1, 2, 3, 5, 8]),
        load=load,
        seconds=0,
        cost=_cost(limit, window, load, source),
        bursts=chance() < 0.2,
        buckets=pick([FEW] * 14 + [MANY]),
        max_views=pick([1_000, 1_000, 1_000, 2]),
    )
    made = replace(made, seconds=_seconds(made))
    if not calm:
        made = _with_faults(made, source)
    if made.buckets == MANY:
        seconds, views = min(made.seconds, 4.0), pick([1_000, 200])
        made = replace(made, nodes=pick([1, 2]), max_views=views, seconds=seconds)
    return made


def _cost(limit: int, window: int, load: float, source: random.Random) -> int:
    needed = limit / window * load / CHECKS_PER_S
    return max(1, min(limit // 20, round(needed)), source.choice([1, 1, 1, limit // 50]))


def _seconds(made: Scenario) -> float:
    """How long a run takes that asks so often in a second."""
    return min(LONGEST_S, max(2.0, MOST_CHECKS / (made.checks_per_us * SECOND)))


def _with_faults(made: Scenario, source: random.Random) -> Scenario:
    pick, chance, at = source.choice, source.random, made.seconds / 3

    def maybe(*lengths: float) -> Span | None:
        return (at * (0.5 + chance()), pick(lengths)) if chance() < 0.1 else None

    outages: tuple[Span, ...] = ()
    if made.seed % 5 == 0:  # a long outage for callers who stay below the limit
        outages = ((2.0, pick([0.2, 1.5, 6.0, 6.0])),)
        limit, nodes = pick([10, 100, 1_000, 100_000]), pick([1, 2, 2, 3, 5])
        made = replace(made, limit=limit, window_seconds=1, nodes=nodes, load=pick([0.5, 0.8, 0.8]))
        made = replace(made, buckets=FEW)
        seconds = sum(outages[0]) + nodes + 2.5
        made = replace(made, cost=max(1, limit // 100), seconds=seconds, bursts=False)
    elif chance() < 0.2:
        outages = ((at, pick([0.2, 1.5, 6.0])),)
    elif chance() < 0.2:
        outages = tuple((at * (0.5 + number / 2), 0.3) for number in range(4))
    if made.seed % 5 == 1:  # a limit becomes very much lower
        made = replace(made, limit=20_000, window_seconds=1, load=0.8, cost=40, seconds=5.0)
        at = made.seconds / 3
        made = replace(made, nodes=pick([1, 2]), bursts=False, edit_s=at, edited_limit=200)
    elif chance() < 0.2:
        made = replace(made, edit_s=at, edited_limit=pick([1, 10, 50, 2_000]))
    made = replace(
        made,
        skew_us=pick([0, 0, 10 * MS, 50 * MS]),
        loss=pick([0.0, 0.0, 0.02, 0.2]),
        duplicates=pick([0.0, 0.1]),
        news_loss=pick([0.0, 0.0, 0.3, 1.0]),
        outages=outages,
        mute=maybe(0.3, 3.0),
        deaf=maybe(0.3, 3.0),
        crash_s=at if chance() < 0.2 else None,
        reset_s=at * 1.2 if chance() < 0.2 else None,
        # Others have to be able to spend, that a state tells it.
        first_is_not_told=made.nodes > 1 and 2 * made.cost <= made.edited_limit and chance() < 0.3,
        other_edits=tuple(made.seconds * chance() for _ in range(pick([0, 0, 1, 5, 20]))),
        wrong_members=pick([0, 0, 0, -1, 2]),
    )
    if made.seed % 10 == 0:  # that outage, and nothing that would free anybody beside
        made = replace(made, crash_s=None, reset_s=None, edit_s=None, mute=None, deaf=None)
        if chance() < 0.5:
            made = replace(made, algorithm=Algorithm.TOKEN_BUCKET, load=0.8, outages=((2.0, 6.0),))
            made = replace(made, nodes=pick([1, 2, 3]), seconds=14.0)
    if made.seed % 5 == 2 and not (outages or made.edit_s):  # a reset in the middle of an attack
        made = replace(
            made, limit=100, window_seconds=5, load=20, cost=1, seconds=5.0, bursts=False
        )
        made = replace(made, reset_s=2.0, crash_s=None, mute=None, deaf=None, loss=0.0)
    return made


@dataclass
class Played:
    """What came of a scenario."""

    scenario: Scenario
    world: World
    offered: list[tuple[int, int]]
    """When checks of :data:`KEY` came, and what they asked for."""
    end_us: int
    edits: list[tuple[float, int, int]] = field(default_factory=list)

    @cached_property
    def admissions(self) -> list[Admission]:
        """Checks of :data:`KEY` that were allowed."""
        return self.world.books.admissions[KEY]

    @cached_property
    def forgiven(self) -> int:
        """Tokens that are charged nowhere."""
        kept: int = sum(
            view.forgiven
            for node in self.world.nodes
            for view in (*node.views.values(), *node.pending.values())
        )
        return self.world.books.forgiven + kept


def play(
    told: Scenario,
    *,
    ledger: type[Ledger] = Ledger,
    view: type[View] = View,
    node: type[Node] = Node,
    world: type[World] = World,
) -> Played:
    """Run a scenario, then let everything settle."""
    network = Network(loss=told.loss, duplicates=told.duplicates, news_loss=told.news_loss)
    made = world(told.seed, network, ledger())
    source = made.random

    def make_view(rule: Rule, base: SharedState | None) -> View:
        return view(rule, base)

    for number in range(told.nodes):
        made.start(f"n{number}/0")
        node(
            made,
            f"n{number}",
            told.rule,
            skew_us=source.randint(-told.skew_us, told.skew_us),
            members=max(1, told.nodes + told.wrong_members),
            wrong_members=told.wrong_members,
            max_views=told.max_views,
            make_view=make_view,
        )
    made.members_changed()
    end_us = START_US + int(told.seconds * SECOND)
    _let_things_happen(told, made)
    offered = _offer(told, made, end_us)
    made.run_until(end_us)
    rest(made)
    last_us = offered[-1][0] if offered else end_us
    return Played(told, made, offered, min(end_us, last_us))


def _offer(told: Scenario, world: World, end_us: int) -> list[tuple[int, int]]:
    """Let checks come, as they come."""
    source, chance, nodes = world.random, world.chance, world.nodes
    at_us, per_us = float(START_US), told.checks_per_us
    offered: list[tuple[int, int]] = []
    others = OTHERS if told.buckets == FEW else [b"%d" % number for number in range(told.buckets)]
    beside = 0.1 if told.buckets == FEW else 5.0
    many = 2 * told.cost - 1
    in_burst = max(1, int(per_us * told.window_seconds * SECOND / 10))
    while len(offered) < 2 * MOST_CHECKS:
        if told.bursts:  # what comes in a tenth of a window, at once and to all nodes
            at_us += told.window_seconds * SECOND / 10
        else:
            at_us += source.expovariate(per_us)
        if at_us >= end_us:
            break
        now_us = int(at_us)
        world.run_until(now_us)
        for number in range(in_burst if told.bursts else 1):
            node = nodes[number % len(nodes)] if told.bursts else nodes[int(chance() * len(nodes))]
            cost = 1 + int(chance() * many)
            offered.append((now_us, cost))
            node.check(KEY, cost)
        for _ in range(int(beside + chance())):
            node = nodes[int(chance() * len(nodes))]
            node.check(others[int(chance() * len(others))], 1)
    return offered


def _let_things_happen(told: Scenario, world: World) -> None:
    nodes = world.nodes

    def at(seconds: float, act, *arguments) -> None:
        world.at(START_US + int(seconds * SECOND), act, *arguments)

    def during(span: Span | None, thing: object, name: str, value: bool) -> None:
        if span:
            began, length = span
            at(began, setattr, thing, name, value)
            at(began + length, setattr, thing, name, not value)

    for outage in told.outages:
        during(outage, world, "store_up", False)
    during(told.mute, nodes[0], "is_mute", True)
    during(told.deaf, nodes[0], "is_deaf", True)
    if told.crash_s:
        at(told.crash_s, nodes[0].crash)
        at(told.crash_s + 0.5, nodes[0].restart)
    if told.reset_s:
        at(told.reset_s, lambda: world.reset(KEY, nodes[-1].rule))
    edits = sorted((seconds, False) for seconds in told.other_edits)
    if told.edit_s:
        edits = sorted([*edits, (told.edit_s, True)])
    limit = told.limit
    for revision, (seconds, is_ours) in enumerate(edits, 1):
        limit = told.edited_limit if is_ours else limit
        rule = replace(told.rule, limit=limit, revision=revision)
        for node in nodes[1 if told.first_is_not_told else 0 :]:
            at(seconds + world.chance() * LATEST_EDIT_S, node.edited, rule)


def rest(world: World) -> None:
    """Let everything settle: the network is whole, and nobody asks."""
    network = world.network
    network.loss = network.duplicates = network.news_loss = 0.0
    world.store_up = True
    for node in world.nodes:
        node.is_mute = node.is_deaf = False
    world.run_until(world.now_us + REST_S * SECOND)


def settled(world: World) -> bool:
    """Whether nothing is left to settle."""
    return not any(
        node.pending or not all(view.is_clean for view in node.views.values())
        for node in world.nodes
    )
