"""Scenarios by seed, and what must hold of any of them."""

import random
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from ratelimitd.algorithms import DECIDE
from ratelimitd.ledger.batches import Ledger
from ratelimitd.ledger.view import View
from ratelimitd.model import Algorithm, IdentifierType, Rule
from tests.simulation.cluster import (
    MS,
    SECOND,
    START_US,
    Network,
    Node,
    Simulation,
    rest,
    settled,
)

KEYS = (b"one", b"two", b"three")
MOST_CHECKS = 2_000


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
    bursts: bool = False
    skew_us: int = 0
    loss: float = 0.0
    duplicates: float = 0.0
    outage_s: tuple[float, float] | None = None
    """Beginning and length."""
    crash_s: float | None = None
    reset_s: float | None = None
    edit_s: float | None = None
    edited_limit: int = 0
    wrong_members: int = 0

    @property
    def rule(self) -> Rule:
        return Rule("r", "/a", IdentifierType.USER, self.limit, self.window_seconds, self.algorithm)

    @property
    def rate_per_us(self) -> float:
        return self.limit / (self.window_seconds * SECOND)

    @property
    def is_calm(self) -> bool:
        """Without any fault."""
        return not (
            self.loss
            or self.duplicates
            or self.outage_s
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
    limit, window = pick([1, 10, 100, 100, 1_000]), pick([1, 1, 1, 5])
    load = pick([0.5, 0.8, 0.9, 1.5, 4, 20, 200])
    made = Scenario(
        seed=seed,
        algorithm=pick(list(Algorithm)),
        limit=limit,
        window_seconds=window,
        nodes=pick([1, 2, 3, 5, 8]),
        load=load,
        seconds=_seconds(limit / window * load),
        bursts=chance() < 0.2,
    )
    if calm:
        return made
    if seed % 5 == 0:  # long outages of callers who stay below the limit
        low = pick([0.5, 0.8])
        seconds = _seconds(limit / window * low)
        made = replace(made, load=low, seconds=seconds, window_seconds=1, bursts=False)
    at = made.seconds / 3
    return replace(
        made,
        skew_us=pick([0, 0, 10 * MS, 50 * MS]),
        loss=pick([0.0, 0.0, 0.02, 0.2]),
        duplicates=pick([0.0, 0.1]),
        outage_s=(at, pick([0.2, 1.5, 6.0])) if seed % 5 == 0 or chance() < 0.2 else None,
        crash_s=at if chance() < 0.2 else None,
        reset_s=at if chance() < 0.2 else None,
        edit_s=at if chance() < 0.2 else None,
        edited_limit=pick([1, 10, 50, 2_000]),
        wrong_members=pick([0, 0, -1, 2]),
    )


def _seconds(rate: float) -> float:
    """How long a run takes that asks so often in a second."""
    return min(20.0, max(2.0, MOST_CHECKS / rate))


@dataclass
class Played:
    """What came of a scenario."""

    scenario: Scenario
    simulation: Simulation
    offered_us: list[int]
    """When checks of the first key came."""
    end_us: int

    @property
    def allowed_us(self) -> list[int]:
        """When checks of the first key were allowed."""
        return [one.at_us for one in self.simulation.admissions if one.key == KEYS[0]]


def play(
    told: Scenario,
    *,
    ledger: type[Ledger] = Ledger,
    view: type[View] = View,
    node: type[Node] = Node,
) -> Played:
    """Run a scenario, then let everything settle."""
    network = Network(loss=told.loss, duplicates=told.duplicates)
    simulation = Simulation(told.seed, network, ledger())
    source, rule = simulation.random, told.rule
    members = max(1, told.nodes + told.wrong_members)
    nodes = [
        node(
            simulation,
            f"n{number}",
            dict.fromkeys(KEYS, rule),
            skew_us=source.randint(-told.skew_us, told.skew_us),
            members=members,
            make_view=view,
        )
        for number in range(told.nodes)
    ]
    end_us = START_US + int(told.seconds * SECOND)
    offered = _offer(told, simulation, nodes, end_us)
    _let_things_happen(told, simulation, nodes)
    simulation.run_until(end_us)
    rest(simulation)
    return Played(told, simulation, offered, min(end_us, *(offered[-1:] or [end_us])))


def _offer(told: Scenario, simulation: Simulation, nodes: list[Node], end_us: int) -> list[int]:
    source, at_us = simulation.random, float(START_US)
    offered: list[int] = []
    per_us = told.rate_per_us * told.load
    while True:
        if told.bursts:  # what comes in a tenth of a window, at once and to all nodes
            at_us += told.window_seconds * SECOND / 10
            count = max(1, int(per_us * told.window_seconds * SECOND / 10))
        else:
            at_us += source.expovariate(per_us)
            count = 1
        if at_us >= end_us or len(offered) > 2 * MOST_CHECKS:
            return offered
        for number in range(count):
            node = nodes[number % len(nodes)] if told.bursts else source.choice(nodes)
            simulation.at(int(at_us), partial(node.check, KEYS[0]))
            offered.append(int(at_us))
        if source.random() < 0.1:
            node, key = source.choice(nodes), source.choice(KEYS[1:])
            simulation.at(int(at_us), partial(node.check, key))


def _let_things_happen(told: Scenario, simulation: Simulation, nodes: list[Node]) -> None:
    def at(seconds: float, act) -> None:
        simulation.at(START_US + int(seconds * SECOND), act)

    def store(*, up: bool) -> None:
        simulation.store_up = up

    if told.outage_s:
        began, length = told.outage_s
        at(began, lambda: store(up=False))
        at(began + length, lambda: store(up=True))
    if told.crash_s:
        at(told.crash_s, nodes[0].crash)
        at(told.crash_s + 0.5, nodes[0].restart)
    if told.reset_s:
        at(told.reset_s, lambda: simulation.reset(KEYS[0], told.rule))
    if told.edit_s:
        edited = replace(told.rule, limit=told.edited_limit, revision=1)
        for node in nodes:
            late_s = simulation.random.uniform(0.0, 0.5)
            at(told.edit_s + late_s, partial(node.edited, KEYS[0], edited))


# What must hold


def violations(played: Played) -> list[str]:
    """What does not hold, if anything."""
    found = []
    for name, demand in DEMANDS.items():
        problem = demand(played)
        if problem:
            found.append(f"{name}: {problem}")
    return found


def nothing_is_left(played: Played) -> str:
    """Once all is quiet, everything is settled."""
    return "" if settled(played.simulation) else "spends or checks wait for ever"


def no_spend_is_lost_or_doubled(played: Played) -> str:
    """What was allowed was charged once, or is accounted for."""
    told, simulation = played.scenario, played.simulation
    if told.crash_s or told.reset_s:
        return ""  # what was in flight may have arrived or not
    allowed = sum(one.cost for one in simulation.admissions)
    forgiven = sum(node.forgiven for node in simulation.nodes)
    charged = simulation.settled_tokens - simulation.wasted_tokens + forgiven
    if any(view.forgiven < 0 for node in simulation.nodes for view in node.views.values()):
        return "a grant was paid for twice"
    return "" if allowed == charged else f"{allowed} allowed, {charged} accounted for"


def slack(played: Played) -> float:
    """What the nodes may allow together beyond the limit, in any interval."""
    told, simulation = played.scenario, played.simulation
    limit = max(told.limit, told.edited_limit if told.edit_s else 0)
    rate = limit / (told.window_seconds * SECOND)
    forgiven = sum(node.forgiven for node in simulation.nodes)
    crashed = sum(node.crashed_tokens for node in simulation.nodes)
    late_us = min(simulation.longest_batch_us, SECOND) + 2 * told.skew_us + 10 * MS
    over = limit / 2 + limit / 100 + told.nodes * rate * late_us + forgiven + crashed + told.nodes
    if told.is_calm:
        over -= 0.41 * limit  # a tenth of the limit is left: what was measured where nothing fails
    if told.edit_s:
        over += told.limit + told.edited_limit
    if told.reset_s:
        over += limit * 2
    if told.wrong_members < 0:
        over += limit / 2
    return over


def never_more_than_the_bound(played: Played) -> str:
    """In no interval is more allowed than the limit and the bound, but by nodes that were cut off from the store."""
    told = played.scenario
    limit = max(told.limit, told.edited_limit if told.edit_s else 0)
    times = [
        one.at_us for one in played.simulation.admissions if one.key == KEYS[0] and not one.alone
    ]
    excess, most = _excess(told, times, limit), slack(played)
    return "" if excess <= most else f"{excess:.1f} over the limit, {most:.1f} is the bound"


def no_node_allows_more_than_one_may(played: Played) -> str:
    """Whatever became of the store: what one node allows by itself is within the limit."""
    told = played.scenario
    if told.edit_s or told.reset_s:
        return ""
    times: dict[str, list[int]] = {}
    for one in played.simulation.admissions:
        if one.key == KEYS[0]:
            times.setdefault(one.node, []).append(one.at_us)
    # What the store grants it beside, when the node had not heard yet that others have spent less.
    most = told.nodes + told.rate_per_us * (played.simulation.longest_batch_us + 20 * MS)
    worst = max((_excess(told, some, told.limit) for some in times.values()), default=0.0)
    return "" if worst <= most else f"{worst:.1f} over the limit by itself, {most:.1f} is the bound"


def _excess(told: Scenario, times: list[int], limit: int) -> float:
    """What the worst interval has over a limit; an answer may come 10 ms after the time that was charged."""
    length_us = told.window_seconds * SECOND
    if told.algorithm is Algorithm.TOKEN_BUCKET:
        return _worst_excess(times, limit / length_us) - limit
    # A fixed window may be used up at its end and again at the beginning of the next.
    windows = 2 if told.algorithm is Algorithm.FIXED_WINDOW else 1
    return _most_in(times, length_us - 2 * told.skew_us - 10 * MS) - windows * limit


def _worst_excess(times: list[int], rate: float) -> float:
    worst = level = 0.0
    before = None
    for at_us in times:
        if before is not None:
            level = max(0.0, level - (at_us - before) * rate)
        level += 1
        before = at_us
        worst = max(worst, level)
    return worst


def _most_in(times: list[int], length_us: int) -> int:
    most = first = 0
    for last, at_us in enumerate(times):
        while times[first] <= at_us - length_us:
            first += 1
        most = max(most, last - first + 1)
    return most


def no_less_than_one_node_alone(played: Played) -> str:
    """Where nothing went wrong the nodes together allow 99 % of what one would, once the limit is worth a share."""
    told = played.scenario
    if not told.is_calm or played.end_us - START_US < 5 * told.window_seconds * SECOND:
        return ""
    state, ideal = None, 0
    decide = DECIDE[told.algorithm]
    for at_us in played.offered_us:
        outcome = decide(state, told.rule, at_us, 1)
        state = outcome[5]
        ideal += outcome[0]
    allowed = len(played.allowed_us)
    # What waits for the store at the ends of the run; and a burst in which the last one has not quite left its window.
    edges = 2 * told.nodes + 0.05 * told.limit
    if told.bursts and told.algorithm is Algorithm.SLIDING_WINDOW:
        edges += ideal / 10
    least = 0.99 * ideal - edges
    return "" if allowed >= least else f"{allowed} allowed, one node would have allowed {ideal}"


def nobody_is_locked_out(played: Played) -> str:
    """After an outage, callers below the limit are denied for no more than a window for each node."""
    told = played.scenario
    if told.load > 0.8 or told.edit_s or told.bursts or told.limit < 10 or not told.outage_s:
        return ""
    from_us = START_US + int(sum(told.outage_s) * SECOND)
    edges = [from_us, *(at_us for at_us in played.allowed_us if at_us > from_us), played.end_us]
    longest_us = max((after - before for before, after in pairwise(edges)), default=0)
    most_us = told.nodes * told.window_seconds * SECOND + SECOND // 2
    longest_s = longest_us / SECOND
    return "" if longest_us <= most_us else f"nothing was allowed for {longest_s:.1f} s"


def a_reset_frees(played: Played) -> str:
    """Half a second after a reset, half the limit has passed, if so much was asked for."""
    told = played.scenario
    if not told.reset_s or told.loss or told.outage_s or told.edit_s or told.crash_s:
        return ""
    from_us = START_US + int(told.reset_s * SECOND)
    until_us = from_us + SECOND // 2
    offered = sum(from_us <= at_us < until_us for at_us in played.offered_us)
    allowed = sum(from_us <= at_us < until_us for at_us in played.allowed_us)
    if offered < 2 * told.limit or until_us > played.end_us:
        return ""
    return "" if allowed >= told.limit / 2 else f"{allowed} of {told.limit} after a reset"


DEMANDS = {
    "nothing is left": nothing_is_left,
    "no spend is lost or doubled": no_spend_is_lost_or_doubled,
    "never more than the bound": never_more_than_the_bound,
    "no node allows more than one may": no_node_allows_more_than_one_may,
    "no less than one node alone": no_less_than_one_node_alone,
    "nobody is locked out": nobody_is_locked_out,
    "a reset frees": a_reset_frees,
}
