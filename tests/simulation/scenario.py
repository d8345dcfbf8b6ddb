"""Scenarios of runs, each by its seed."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ratelimitd.ledger.accounts import ACCOUNTS
from ratelimitd.model import Algorithm, IdentifierType, Rule
from tests.simulation.world import MS, SECOND

FEW, MANY = 3, 250
"""Numbers of buckets. Many exceed one batch, and get five times as many checks."""
MOST_CHECKS = 800
LONGEST_S = 15.0
LATE_S = 60.0
CHECKS_PER_S = 400
"""Checks under a load of more tokens cost several each."""

BURST_SHARES = (0.0, 0.0, 0.5, 2.0, 4.0)

OF_TOKENS = [one for one in Algorithm if one in ACCOUNTS]
"""The algorithms with an account. A seed is an index into them, so their order must not change."""

Span = tuple[float, float]
"""(start, length), in seconds."""


@dataclass(frozen=True)
class Scenario:
    """The parameters of a run."""

    seed: int
    algorithm: Algorithm
    limit: int
    window_seconds: int
    nodes: int
    load: float
    """Demand, as a multiple of the limit."""
    seconds: float
    burst_share: float = 0.0
    """Burst of a token bucket, as a multiple of the current limit; 0 for none."""
    cost: int = 1
    """Mean cost of a check; costs are 1 to 2 × cost − 1."""
    bursts: bool = False
    skew_us: int = 0
    loss: float = 0.0
    duplicates: float = 0.0
    news_loss: float = 0.0
    outages: tuple[Span, ...] = ()
    mute: Span | None = None
    """When messages of the first node are lost."""
    deaf: Span | None = None
    """When messages to the first node are lost."""
    crash_s: float | None = None
    reset_s: float | None = None
    flush_s: float | None = None
    """When the store loses everything, and the bucket is reset again immediately."""
    edit_s: float | None = None
    edited_limit: int = 0
    first_node_misses_edits: bool = False
    """The first node does not get edits; it can learn of them only from states."""
    other_edits: tuple[float, ...] = ()
    """Times of edits of other rules in the same book."""
    wrong_members: int = 0
    buckets: int = FEW
    max_views: int = 1_000
    packs: bool = False
    """Whether nodes pack idle buckets at once."""
    decides_alone: bool = False
    """Whether nodes have a circuit breaker, and decide by their views while it is open."""
    rtt_us: int = 0
    """Round-trip time of the store; 0 for 1 to 5 ms."""
    caller_times_us: int = 0
    """Largest difference of callers' times from the node's, either way."""
    stalls: tuple[Span, ...] = ()
    """When one node after the other runs no code."""
    drains: bool = False
    """Whether the load is the one that exceeds a limit most: see :func:`tests.simulation.play.drain`."""

    @property
    def rule(self) -> Rule:
        return Rule(
            "r",
            "/a",
            IdentifierType.USER,
            limit=self.limit,
            window_seconds=self.window_seconds,
            algorithm=self.algorithm,
            burst=self.burst_of(self.limit),
        )

    def burst_of(self, limit: int) -> int:
        """Return the burst of the rule with this limit."""
        if self.algorithm is not Algorithm.TOKEN_BUCKET or not self.burst_share:
            return 0
        return max(1, int(limit * self.burst_share))

    def capacity_of(self, limit: int) -> int:
        """Return the capacity of the rule with this limit."""
        return self.burst_of(limit) or limit

    @property
    def rate_per_us(self) -> float:
        return self.limit / (self.window_seconds * SECOND)

    @property
    def checks_per_us(self) -> float:
        return self.rate_per_us * self.load / self.cost

    @property
    def may_begin_afresh(self) -> bool:
        """Whether a node may decide on a bucket that it has evicted while its breaker is open."""
        return self.decides_alone and self.max_views < self.buckets and not self.is_calm

    @property
    def is_late(self) -> bool:
        """Whether the only possible faults are delays."""
        return bool(self.rtt_us or self.stalls)

    @property
    def is_calm(self) -> bool:
        """Whether the run has no faults."""
        return not (
            self.is_late
            or self.drains
            or self.loss
            or self.duplicates
            or self.outages
            or self.mute
            or self.deaf
            or self.crash_s
            or self.reset_s
            or self.flush_s
            or self.edit_s
            or self.skew_us
            or self.caller_times_us
            or self.wrong_members
        )


def scenario(seed: int, *, calm: bool = False) -> Scenario:
    """Return the scenario of a seed."""
    source = random.Random(seed)
    pick, chance = source.choice, source.random
    limit, window = pick([1, 10, 100, 100, 1_000, 100_000]), pick([1, 1, 1, 5])
    load = pick([0.5, 0.8, 0.9, 1.5, 4, 20, 200])
    made = Scenario(
        seed=seed,
        algorithm=pick(OF_TOKENS),
        limit=limit,
        window_seconds=window,
        nodes=pick([1, 2, 3, 5, 8]),
        load=load,
        seconds=0,
        cost=_cost(limit, window, load, pick([1, 1, 1 if calm else limit // 8, limit // 50])),
        bursts=chance() < 0.2,
        buckets=pick([FEW] * 14 + [MANY]),
        max_views=pick([1_000, 1_000, 1_000, 2]),
    )
    made = replace(made, seconds=_seconds(made))
    if not calm:
        made, certain = PLOTS.get(seed % 5, _anything)(made, source)
        made = replace(_with_faults(made, source), **certain)
    if made.buckets == MANY:
        seconds, views = min(made.seconds, 4.0), pick([1_000, 200])
        made = replace(made, nodes=pick([1, 2]), max_views=views, seconds=seconds)
    # Other nodes must spend, so that a state informs the first.
    tells = made.nodes > 1 and 2 * made.cost <= made.edited_limit
    made = replace(made, first_node_misses_edits=made.first_node_misses_edits and tells)
    made = replace(made, decides_alone=chance() < 0.5)
    # Drawn last, so that they do not change scenarios without them.
    return replace(made, burst_share=pick(BURST_SHARES), packs=chance() < 0.4)


def calm_scenario(seed: int) -> Scenario:
    """One without any fault."""
    return scenario(seed, calm=True)


def late_scenario(seed: int) -> Scenario:
    """Return a long run without failures, in which the store is far away, or nodes stall repeatedly."""
    source = random.Random(seed)
    pick, chance = source.choice, source.random
    limit, load, stall_s = pick([10, 100, 100, 1_000]), pick([0.9, 1.5, 4, 4]), pick([0, 0.2, 1, 2])
    stalls, at_s = [], 1.0
    while stall_s and at_s < LATE_S:
        stalls.append((at_s, stall_s * (0.5 + chance())))
        at_s += 2 * stall_s
    return Scenario(
        seed=seed,
        algorithm=pick(OF_TOKENS),
        limit=limit,
        window_seconds=1,
        nodes=pick([2, 3, 5, 8]),
        load=load,
        seconds=LATE_S,
        cost=max(1, limit // 100),
        bursts=chance() < 0.2,
        rtt_us=pick([5, 60, 200]) * MS,
        stalls=tuple(stalls),
    )


def draining_scenario(seed: int) -> Scenario:
    """Return a run without failures, in which callers exceed a limit as far as possible."""
    source = random.Random(seed)
    pick = source.choice
    limit = pick([100, 1_000, 100_000])
    return Scenario(
        seed=seed,
        algorithm=pick(OF_TOKENS),
        limit=limit,
        window_seconds=pick([1, 5, 60]),
        nodes=pick([2, 3, 5, 8]),
        load=1,
        seconds=0,
        cost=max(1, limit // 200),
        rtt_us=pick([0, 0, 5, 20]) * MS,
        drains=True,
    )


def _cost(limit: int, window: int, load: float, least: int) -> int:
    needed = limit / window * load / CHECKS_PER_S
    return max(1, min(limit // 20, round(needed)), least)


def _seconds(made: Scenario) -> float:
    """Return the length of a run with this rate of checks."""
    return min(LONGEST_S, max(2.0, MOST_CHECKS / (made.checks_per_us * SECOND)))


def _with_faults(made: Scenario, source: random.Random) -> Scenario:
    pick, chance, at = source.choice, source.random, made.seconds / 3

    def maybe(*lengths: float) -> Span | None:
        return (at * (0.5 + chance()), pick(lengths)) if chance() < 0.1 else None

    outages: tuple[Span, ...] = ()
    if chance() < 0.2:
        outages = ((at, pick([0.2, 1.5, 6.0])),)
    elif chance() < 0.2:
        outages = tuple((at * (0.5 + number / 2), 0.3) for number in range(4))
    return replace(
        made,
        skew_us=pick([0, 0, 10 * MS, 50 * MS]),
        caller_times_us=pick([0, 0, 0, 20 * MS, 200 * MS]),
        loss=pick([0.0, 0.0, 0.02, 0.2]),
        duplicates=pick([0.0, 0.1]),
        news_loss=pick([0.0, 0.0, 0.3, 1.0]),
        outages=outages,
        mute=maybe(0.3, 3.0),
        deaf=maybe(0.3, 3.0),
        crash_s=at if chance() < 0.2 else None,
        reset_s=at * 1.2 if chance() < 0.2 else None,
        edit_s=at if chance() < 0.2 else None,
        edited_limit=pick([1, 10, 50, 2_000]),
        first_node_misses_edits=chance() < 0.3,
        other_edits=tuple(made.seconds * chance() for _ in range(pick([0, 0, 1, 5]))),
        wrong_members=pick([0, 0, 0, -1, 2]),
    )


# Plots: cases that are too rare by chance. Each plot is a fifth of the seeds, and returns its fixed parameters.

Plot = tuple[Scenario, dict[str, Any]]


def _anything(made: Scenario, _source: random.Random) -> Plot:
    return made, {}


def _long_outage(made: Scenario, source: random.Random) -> Plot:
    """The store is unreachable, and parallel spends of nodes add up; half of the runs have no other event."""
    pick = source.choice
    limit, nodes, length_s = pick([10, 100, 1_000, 100_000]), pick([2, 3, 5]), pick([0.2, 1.5, 6.0])
    load = pick([0.5, 0.8, 4, 20])
    certain: dict[str, Any] = {"edit_s": None}
    if made.seed % 10 == 0:
        certain |= {"crash_s": None, "reset_s": None, "mute": None, "deaf": None}
        made = replace(made, algorithm=pick([Algorithm.TOKEN_BUCKET, made.algorithm]))
        length_s = 6.0
    certain["outages"] = ((2.0, length_s),)
    made = replace(made, limit=limit, window_seconds=1, load=load, nodes=nodes, bursts=False)
    cost = max(1, round(limit * load / 100))
    return replace(made, cost=cost, buckets=FEW, seconds=length_s + nodes + 5.0), certain


def _much_lower_limit(made: Scenario, source: random.Random) -> Plot:
    """A limit is lowered so far that unsent spends, or past charges, would fill it many times."""
    if made.seed % 20 == 16:
        return _lower_limit_of_a_full_log(made, source)
    made = replace(made, limit=20_000, window_seconds=1, load=0.8, cost=50, seconds=5.0)
    made = replace(made, nodes=source.choice([1, 1, 2]), bursts=False)
    return made, {"edit_s": 1.5, "edited_limit": 200, "caller_times_us": 0}


def _higher_limit(made: Scenario, source: random.Random) -> Plot:
    """A limit is raised, which trims nothing, and earlier spends have not expired at the end."""
    algorithm = source.choice([Algorithm.TOKEN_BUCKET, Algorithm.SLIDING_WINDOW])
    made = replace(made, algorithm=algorithm, limit=100, window_seconds=5, load=2, cost=2)
    made = replace(made, nodes=source.choice([1, 3]), bursts=False, seconds=4.0)
    return made, {"edit_s": 3.0, "edited_limit": 400}


def _lower_limit_of_a_full_log(made: Scenario, source: random.Random) -> Plot:
    """Nodes that know the edit deny until the log has shrunk to the limit; one that does not know it allows."""
    made = replace(made, algorithm=Algorithm.SLIDING_WINDOW, limit=100, window_seconds=5, cost=1)
    load, nodes = source.choice([4, 8]), source.choice([2, 3])
    made = replace(made, load=load, nodes=nodes, bursts=False, buckets=FEW, seconds=10.0)
    edit = {"edit_s": 3.5, "edited_limit": 10, "first_node_misses_edits": True}
    return made, {**edit, "outages": (), "crash_s": None, "mute": None, "deaf": None}


def _reset_under_attack(made: Scenario, source: random.Random) -> Plot:
    """Every node denies until it knows of a reset."""
    made = replace(made, limit=50, window_seconds=5, load=20, cost=1, seconds=7.0, bursts=False)
    quiet = {"outages": (), "crash_s": None, "mute": None, "deaf": None, "edit_s": None}
    flush_s = source.choice([None, 3.0])
    return made, {
        "reset_s": 2.0,
        "flush_s": flush_s,
        "duplicates": 0.0,
        "loss": source.choice([0.0, 0.02]),
        **quiet,
    }


def _busy_rule_book(made: Scenario, source: random.Random) -> Plot:
    """Other rules are edited all the time, and nodes decide alone when messages are lost."""
    if made.seed % 20 == 8:
        return _higher_limit(made, source)
    other_edits = tuple(made.seconds * source.random() for _ in range(20))
    return made, {"other_edits": other_edits, "loss": 0.2, "edit_s": None}


PLOTS: Mapping[int, Callable[[Scenario, random.Random], Plot]] = MappingProxyType(
    {0: _long_outage, 1: _much_lower_limit, 2: _reset_under_attack, 3: _busy_rule_book}
)
