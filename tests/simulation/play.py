"""Runs a scenario: checks, events, and the settling at the end."""

from dataclasses import dataclass, replace
from functools import cached_property

from ratelimitd.ledger.local_view import LocalView
from tests.ledger_model import Ledger
from tests.simulation.node import Node
from tests.simulation.scenario import FEW, MOST_CHECKS, Scenario, Span
from tests.simulation.world import MS, SECOND, START_US, Admission, Network, World

KEY = b"one"
"""The bucket under load, to which most invariants apply."""
OTHERS = (b"two", b"three")
LATEST_EDIT_S = 0.5
"""Longest time until every node has an edit."""
REST_S = 10
DRAINS, DRAIN_US = 3, 20 * MS
MOST_EVENTS = 100_000
"""A run that ends has less than a tenth of these events."""


@dataclass
class Played:
    """The result of a scenario."""

    scenario: Scenario
    world: World
    offered: list[tuple[int, int]]
    """(time, cost) of all checks of :data:`KEY`."""
    end_us: int

    @cached_property
    def admissions(self) -> list[Admission]:
        """Allowed checks of :data:`KEY`."""
        return self.world.books.admissions[KEY]

    @property
    def checked(self) -> list[Admission]:
        """Allowed checks without those that were let through undecided."""
        return [one for one in self.admissions if not one.unchecked]

    @cached_property
    def forgiven(self) -> int:
        """Allowed tokens that are never charged."""
        kept: int = sum(
            view.forgiven
            for node in self.world.nodes
            for view in (*node.views.values(), *node.pending.values())
        )
        return self.world.books.forgiven + kept


def play(
    scenario: Scenario,
    *,
    ledger: type[Ledger] = Ledger,
    view: type[LocalView] = LocalView,
    node: type[Node] = Node,
    world: type[World] = World,
) -> Played:
    """Run a scenario until everything is settled."""
    network = Network(
        loss=scenario.loss, duplicates=scenario.duplicates, news_loss=scenario.news_loss
    )
    if scenario.rtt_us:
        network.least_us, network.most_us = scenario.rtt_us * 2 // 5, scenario.rtt_us * 3 // 5
    made = world(scenario.seed, network, ledger())
    made.most_events = 10 * MOST_EVENTS if scenario.is_late else MOST_EVENTS
    source = made.random

    for number in range(scenario.nodes):
        made.start(f"n{number}/0")
        node(
            made,
            f"n{number}",
            scenario.rule,
            skew_us=source.randint(-scenario.skew_us, scenario.skew_us),
            members=max(1, scenario.nodes + scenario.wrong_members),
            wrong_members=scenario.wrong_members,
            max_views=scenario.max_views,
            packs=scenario.packs,
            decides_alone=scenario.decides_alone,
            caller_times_us=scenario.caller_times_us,
            make_view=view,
        )
    made.members_changed()
    end_us = START_US + int(scenario.seconds * SECOND)
    let_things_happen(scenario, made)
    offered = drain(scenario, made) if scenario.drains else _offer(scenario, made, end_us)
    made.run_until(end_us)
    rest(made)
    last_us = offered[-1][0] if offered else end_us
    return Played(scenario, made, offered, min(end_us, last_us))


def _offer(scenario: Scenario, world: World, end_us: int) -> list[tuple[int, int]]:
    """Generate the checks of a scenario."""
    source, chance, nodes = world.random, world.chance, world.nodes
    at_us, per_us = float(START_US), scenario.checks_per_us
    offered: list[tuple[int, int]] = []
    others = (
        OTHERS
        if scenario.buckets == FEW
        else [b"%d" % number for number in range(scenario.buckets)]
    )
    beside = 0.1 if scenario.buckets == FEW else 5.0
    many = 2 * scenario.cost - 1
    most_checks = 20 * MOST_CHECKS if scenario.is_late else 2 * MOST_CHECKS
    in_burst = max(1, int(per_us * scenario.window_seconds * SECOND / 10))
    while len(offered) < most_checks:
        if scenario.bursts:  # the checks of a tenth of a window at once, to all nodes
            at_us += scenario.window_seconds * SECOND / 10
        else:
            at_us += source.expovariate(per_us)
        if at_us >= end_us:
            break
        now_us = int(at_us)
        world.run_until(now_us)
        for number in range(in_burst if scenario.bursts else 1):
            node = (
                nodes[number % len(nodes)] if scenario.bursts else nodes[int(chance() * len(nodes))]
            )
            cost = 1 + int(chance() * many)
            offered.append((now_us, cost))
            node.check(KEY, cost)
        for _ in range(int(beside + chance())):
            node = nodes[int(chance() * len(nodes))]
            cost = (
                1 + int(chance() * many) if scenario.buckets == FEW and not scenario.is_calm else 1
            )
            node.check(others[int(chance() * len(others))], cost)
    return offered


def drain(scenario: Scenario, world: World) -> list[tuple[int, int]]:
    """Spend the shares of all nodes but one, and request all remaining tokens from that one before they settle."""
    one, *others = world.nodes
    offered: list[tuple[int, int]] = []

    def check(node: Node) -> None:
        offered.append((world.now_us, scenario.cost))
        node.check(KEY, scenario.cost)

    share, all_at_once = (
        scenario.limit // (2 * scenario.nodes * scenario.cost),
        2 * scenario.limit // scenario.cost,
    )
    for _ in range(DRAINS):
        for node in others * (share - 1):
            check(node)
        for _ in range(all_at_once):
            world.run_until(world.now_us + DRAIN_US // all_at_once)
            check(one)
        world.run_until(world.now_us + 3 * scenario.window_seconds * SECOND)
    return offered


def let_things_happen(scenario: Scenario, world: World) -> None:
    nodes = world.nodes

    def at(seconds: float, act, *arguments) -> None:
        world.at(START_US + int(seconds * SECOND), act, *arguments)

    def during(span: Span | None, thing: object, name: str, value: bool) -> None:
        if span:
            began, length = span
            at(began, setattr, thing, name, value)
            at(began + length, setattr, thing, name, not value)

    _stall(scenario, world)
    for outage in scenario.outages:
        during(outage, world, "store_up", False)
    during(scenario.mute, nodes[0], "is_mute", True)
    during(scenario.deaf, nodes[0], "is_deaf", True)
    _crash(scenario, world)
    if scenario.flush_s:
        at(scenario.flush_s, world.flush)
    for reset_s in filter(None, (scenario.reset_s, scenario.flush_s)):
        at(reset_s, lambda: world.reset(KEY, nodes[-1].rule))
    edits = sorted((seconds, False) for seconds in scenario.other_edits)
    if scenario.edit_s:
        edits = sorted([*edits, (scenario.edit_s, True)])
    limit = scenario.limit
    for revision, (seconds, is_ours) in enumerate(edits, 1):
        limit = scenario.edited_limit if is_ours else limit
        burst = scenario.burst_of(limit)
        rule = replace(scenario.rule, limit=limit, burst=burst, revision=revision)
        for node in nodes[1 if scenario.first_node_misses_edits else 0 :]:
            at(seconds + world.chance() * LATEST_EDIT_S, node.edited, rule)


def _crash(scenario: Scenario, world: World) -> None:
    if scenario.crash_s:
        from_us = START_US + int(scenario.crash_s * SECOND)
        world.at(from_us, world.nodes[0].crash)
        world.at(from_us + SECOND // 2, world.nodes[0].restart)


def _stall(scenario: Scenario, world: World) -> None:
    for number, (began, length) in enumerate(scenario.stalls):
        node, from_us = world.nodes[number % len(world.nodes)], START_US + int(began * SECOND)
        world.at(from_us, setattr, node, "stalled_until_us", from_us + int(length * SECOND))


def rest(world: World) -> None:
    """Let everything settle, without network faults and checks."""
    network = world.network
    network.loss = network.duplicates = network.news_loss = 0.0
    world.store_up = True
    for node in world.nodes:
        node.is_mute = node.is_deaf = False
    world.run_until(world.now_us + REST_S * SECOND)


def settled(world: World) -> bool:
    """Whether everything is settled."""
    return not any(
        node.pending
        or node.cold
        or node.sent_cold
        or not all(view.is_clean for view in node.views.values())
        for node in world.nodes
    )
