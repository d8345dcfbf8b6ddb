"""What real nodes allow together, measured by their callers: the bound of the ledger (ADR 0023), and hardly less than
one node alone would allow.

One machine cannot generate 100,000 checks a second beside its nodes: with that limit, each check costs 100.
"""

import itertools
from dataclasses import dataclass

import pytest

from ratelimitd.model import Algorithm, IdentifierType, Rule
from tests.cluster.admissions import entitled, excess, tokens
from tests.cluster.load import bursts, draining, offer, steady
from tests.cluster.nodes import Nodes
from tests.servers import Valkey
from tests.system.process import PATIENT

BUCKET, SLIDING, FIXED = Algorithm.TOKEN_BUCKET, Algorithm.SLIDING_WINDOW, Algorithm.FIXED_WINDOW

WINDOW_S = 1
ROUND_TRIP_S = 0.01
"""Time of a settlement without delays, and the largest difference of the nodes' clocks."""
MOST_CHECKS_IN_A_WINDOW = 1_000
SHORT_S, LONG_S = 4.0, 10.0

BURST_EVERY_S = WINDOW_S / 10.3
"""Ten bursts in a window, none at the moment when an earlier one leaves it, where a millisecond would decide."""

MOST_ABOVE = 0.02
"""Largest measured excess, as a fraction of the entitled tokens, for limits large enough for shares. The promise is
only half a limit.
"""


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    nodes: int
    algorithm: Algorithm
    limit: int
    load: float
    """As a multiple of the limit."""
    bursts: bool = False
    """Whether the load comes in ten bursts per window, to all nodes at once."""
    drains: bool = False
    """Whether callers exceed the limit as far as possible in every second window."""

    def __str__(self):
        how = "-bursts" if self.bursts else "-drains" if self.drains else ""
        return f"{self.nodes}-{self.algorithm}-{self.limit}-{self.load}{how}"

    @property
    def rule(self):
        return Rule(
            "r",
            f"/{self}",
            IdentifierType.USER,
            limit=self.limit,
            window_seconds=WINDOW_S,
            algorithm=self.algorithm,
        )

    @property
    def cost(self):
        return max(1, self.limit // MOST_CHECKS_IN_A_WINDOW)

    @property
    def checks_per_s(self):
        return self.limit * self.load / self.cost / WINDOW_S

    @property
    def burst(self):
        """Number of concurrent checks."""
        return max(1, int(self.checks_per_s * BURST_EVERY_S)) if self.bursts else 1

    def schedule(self, seconds):
        nodes, cost = self.nodes, self.cost
        if self.drains:
            return draining(self.limit, 2 * WINDOW_S, seconds, nodes=nodes)
        if self.bursts:
            return bursts(self.burst, BURST_EVERY_S, seconds, nodes=nodes, cost=cost)
        return steady(self.checks_per_s, seconds, nodes=nodes, cost=cost)


SETTINGS = {
    "eventual": [],
    # A long timeout: a machine that is busy with its own load must not look like an outage of the shared state.
    "patient": PATIENT,
    "tight": ["--accuracy", "tight", "--redis-timeout-ms", "200"],
    "strict": ["--consistency", "strict", *PATIENT],
}


@pytest.fixture(scope="module")
def nodes(request, tmp_path_factory):
    """Nodes by number and settings; pytest groups the tests with the same parameter."""
    count, settings = request.param
    directory = tmp_path_factory.mktemp("nodes")
    with (
        Valkey(directory / "valkey") as valkey,
        Nodes(directory, valkey.url, *SETTINGS[settings], count=count) as nodes,
    ):
        nodes.wait_for_members()
        yield nodes


SLICE = Cell(3, BUCKET, 100_000, 1.5)
"""Measured with the default settings by `make test`."""


def on(*cells, settings="eventual"):
    """Parametrize a test with each cell, and the nodes for its measurement."""
    return pytest.mark.parametrize(
        ("cell", "nodes"),
        [
            pytest.param(
                cell,
                (cell.nodes, settings),
                id=str(cell),
                marks=pytest.mark.slice if cell == SLICE and settings == "eventual" else (),
            )
            for cell in cells
        ],
        indirect=["nodes"],
        scope="module",
    )


class Measured:
    """The result of a cell. Its bounds are those of an idle machine, plus the measured delays of the nodes."""

    def __init__(self, cell, nodes, seconds):
        rule = cell.rule
        nodes.rule(
            endpoint=rule.endpoint,
            limit=rule.limit,
            window_seconds=rule.window_seconds,
            algorithm=str(rule.algorithm),
        )
        late_before = nodes.metric_sum("rate_limiter_shared_state_late_total")
        log = offer(nodes.addresses, cell.schedule(seconds), endpoint=rule.endpoint).log
        late = nodes.metric_sum("rate_limiter_shared_state_late_total") - late_before
        lag_s = max(nodes.metric("rate_limiter_loop_lag_seconds"))
        self.cell = cell
        self.rate = rule.limit / rule.window_seconds
        self.admitted = tokens(log.admitted)
        self.entitled = entitled(log, rule)
        self.excess = excess(log, rule, slack_s=ROUND_TRIP_S)
        self.strict_excess = excess(log, rule)
        self.late_s = ROUND_TRIP_S + lag_s
        self.late_tokens = late * cell.cost
        self.unanswered = len(log.unknown)
        self.reasons = log.reasons
        print(f"\n{cell}: {self}")  # noqa: T201 - shown with `pytest -s`

    def __str__(self):
        ratio, worst = self.admitted / self.entitled, self.excess / self.cell.limit
        return (
            f"{self.admitted} of {self.entitled} = {ratio:.3f}, worst interval {worst:+.3f} limits, "
            f"late {self.late_s:.3f} s and {self.late_tokens:.0f} tokens, {self.reasons}"
        )

    def holds(self, shares=1 / 2 + 1 / 100):
        cell = self.cell
        limit, one_each = cell.limit, cell.nodes * cell.cost
        drift = self.rate * self.late_s
        assert not self.unanswered
        assert self.excess <= shares * limit + cell.nodes * drift + one_each, self
        least = 0.99 * self.entitled - drift - self.late_tokens - one_each
        assert self.admitted >= least, self
        if limit >= 1_000:
            most = MOST_ABOVE * self.entitled + drift + self.late_tokens + one_each
            assert self.excess <= most, self

    def holds_within_two_per_cent(self):
        assert not self.unanswered
        assert self.late_tokens == 0, self
        assert self.excess <= MOST_ABOVE * self.entitled, self

    def holds_strictly(self):
        assert not self.unanswered
        assert self.reasons.keys() <= {"WITHIN_LIMIT", "LIMIT_EXCEEDED"}, self
        assert self.strict_excess <= 0, self
        # Checks at the edge of a window, one burst at most, may be decided in the next one, by the store's time.
        at_the_edge = self.rate * self.late_s + self.cell.burst * self.cell.cost
        assert self.admitted >= 0.99 * self.entitled - at_the_edge, self


DIAGONAL = (
    Cell(1, BUCKET, 1_000, 1.5),
    Cell(3, FIXED, 10, 4.0),
    Cell(3, BUCKET, 100_000, 1.5),
    Cell(3, SLIDING, 1_000, 4.0, bursts=True),
    Cell(5, SLIDING, 10, 0.9),
    Cell(5, FIXED, 1_000, 4.0),
)

ALL = [
    Cell(nodes, algorithm, limit, load, burst)
    for nodes, algorithm, limit, load, burst in itertools.product(
        (1, 3, 5), (BUCKET, SLIDING, FIXED), (10, 1_000, 100_000), (0.9, 1.5, 4.0), (False, True)
    )
]


@on(*DIAGONAL)
def test_nodes_together_allow_what_one_would(cell, nodes):
    Measured(cell, nodes, SHORT_S).holds()


@pytest.mark.long
@pytest.mark.timeout(120)
@on(*ALL)
def test_nodes_together_allow_what_one_would_in_all_cells(cell, nodes):
    Measured(cell, nodes, LONG_S).holds()


@pytest.mark.long
@pytest.mark.timeout(120)
@on(
    *(cell for cell in ALL if cell.limit > 10 and cell.load == 4 and cell.bursts),
    settings="patient",
)
def test_nodes_without_late_answers_allow_little_more_even_in_bursts(cell, nodes):
    Measured(cell, nodes, LONG_S).holds_within_two_per_cent()


@on(Cell(5, BUCKET, 1_000, 1, drains=True), Cell(5, SLIDING, 100, 1, drains=True), settings="tight")
def test_tight_nodes_allow_at_most_a_tenth_more(cell, nodes):
    Measured(cell, nodes, SHORT_S).holds(shares=1 / 10)


STRICT = [
    Cell(3, algorithm, 1_000, 4.0, burst)
    for algorithm, burst in zip((BUCKET, SLIDING, FIXED), (False, True, False), strict=True)
]


@on(*STRICT, settings="strict")
def test_strict_nodes_never_allow_more(cell, nodes):
    Measured(cell, nodes, 2.0).holds_strictly()


@pytest.mark.long
@pytest.mark.timeout(120)
@on(*(cell for cell in ALL if cell.limit != 100_000), settings="strict")
def test_strict_nodes_never_allow_more_in_all_cells(cell, nodes):
    Measured(cell, nodes, LONG_S).holds_strictly()
