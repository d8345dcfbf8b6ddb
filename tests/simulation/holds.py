"""A simulation of holds: servers, nodes and callers; a seed decides everything.

The store is :class:`tests.shared_hold_model.HoldStore`, nodes use the product's conclusions; time, network and faults
are simulated.
"""

import copy
import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from ratelimitd.algorithms import DECIDE
from ratelimitd.algorithms.several import Charge
from ratelimitd.errors import (
    CheckInvalidError,
    HoldEndedError,
    HoldSettledError,
    HoldsFullError,
    RateLimitdError,
    StoreUnavailableError,
)
from ratelimitd.ledger.holds import Held, Hold
from ratelimitd.ledger.shared_holds import (
    HoldCall,
    HoldReply,
    Step,
    StepCall,
    Stepped,
    StepReply,
    conclude,
    conclude_step,
    has_part,
    longest_of_parts_us,
)
from ratelimitd.ledger.shared_state import OBSERVES, STORE_TIME, StoreCheck
from ratelimitd.model import Algorithm, Enforcement, Limit
from tests.shared_hold_model import HoldStore
from tests.simulation.world import MS, SECOND, START_US

ANSWER_US = 20 * MS
LATE_US = 400 * MS
LONGEST_TTL_US = 6 * SECOND
OF_RAISED_LIMITS = 5
"""Seeds, modulo 8, of runs in which limits are raised during large debts."""
OF_IDLE_BUCKETS = 6
"""Seeds, modulo 8, of runs in which only holds are charged, so that buckets are full in between."""


class Event(NamedTuple):
    """An operation of a server on a bucket, and the bucket after it."""

    kind: str
    now_us: int
    what: tuple[Any, ...]
    shared: Any


class Server(HoldStore):
    """A server that records its operations."""

    world: "World"
    offset_us = 0
    journal: dict[bytes, list[Event]]
    losses: list[int]
    """Times at which it lost something, by the world's clock."""

    @property
    def now_us(self) -> int:
        return self.world.now_us + self.offset_us

    @now_us.setter
    def now_us(self, now_us: int) -> None:
        """Set by the world."""

    def log(self, kind: str, name: bytes, *what: Any) -> None:
        kept = self.buckets.get(name)
        event = Event(kind, self.now_us, what, kept and kept.shared)
        self.journal.setdefault(name, []).append(event)

    def lose(self, what: str, key: bytes) -> None:
        """Evict a bucket, its slots, or the record of a hold."""
        lost = getattr(self, what).pop(key, None)
        if lost is not None:
            self.losses.append(self.world.now_us)
            if what != "records":
                self.log(f"lost {what}", key)

    def state(self) -> Any:
        """Return a copy of the whole state, for :meth:`fail_over`."""
        slots = {name: dict(slots) for name, slots in self.slots.items()}
        journal = {name: [*events] for name, events in self.journal.items()}
        return dict(self.buckets), slots, dict(self.records), journal

    def fail_over(self, state: Any) -> None:
        """Fail over to a replica without the last writes, and with another clock."""
        self.buckets, self.slots, self.records, self.journal = copy.deepcopy(state)
        self.losses.append(self.world.now_us)


@dataclass
class Scenario:
    """The parameters of a run."""

    seed: int
    servers: int
    nodes: int
    limits: Sequence[Limit]
    seconds: float
    holds: int
    checks: int
    loss: float = 0.0
    lateness: float = 0.0
    crashes: int = 0
    resets: int = 0
    edits: int = 0
    evictions: int = 0
    failovers: int = 0
    changes: Sequence[float] = (0.3, 0.7, 2, 5)
    """Factors of edits of a limit."""
    late_spends: int = 0
    skew_us: int = 0
    most: int = 1_000
    abandons: float = 0.0
    """Share of holds that are never settled."""
    hedges: float = 0.0
    """Share of holds that are requested from two nodes at once."""
    quarrels: float = 0.0
    """Share of holds that are settled with two different amounts."""

    @property
    def is_calm(self) -> bool:
        """Whether the run has no faults."""
        return not (self.loss or self.lateness or self.crashes or self.evictions or self.failovers)


def scenario(seed: int, *, calm: bool = False) -> Scenario:
    """Return the scenario of a seed."""
    source = random.Random(seed)
    pick, chance = source.choice, source.random
    limits = [
        Limit(
            limit=pick([1, 3, 10, 40]),
            window_seconds=pick([1, 1, 2, 5]),
            algorithm=pick([*Algorithm]),
            burst=0,
            enforcement=pick([Enforcement.ENFORCE] * 4 + [Enforcement.OBSERVE]),
            revision=1,
        )
        for _ in range(pick([1, 2, 3, 4]))
    ]
    limits = [
        replace(one, burst=pick([0, 2, 60])) if one.algorithm is Algorithm.TOKEN_BUCKET else one
        for one in limits
    ]
    made = Scenario(
        seed,
        servers=pick([1, 2, 3]),
        nodes=pick([1, 2, 3]),
        limits=limits,
        seconds=pick([2.0, 4.0, 8.0]),
        holds=pick([5, 20, 40]),
        checks=pick([0, 20, 60]),
        abandons=pick([0.0, 0.2]),
        quarrels=pick([0.0, 0.3]),
        most=pick([1_000, 1_000, 3]),
    )
    if calm:
        return replace(made, abandons=0.0, most=1_000)
    if seed % 8 == OF_RAISED_LIMITS:
        raised = [
            replace(one, algorithm=Algorithm.FIXED_WINDOW, burst=0, limit=5) for one in limits
        ]
        made = replace(made, limits=raised, holds=40, checks=60, seconds=4.0)
        return replace(made, edits=6, changes=(2, 5))
    if seed % 8 == OF_IDLE_BUCKETS:
        idle = [replace(one, algorithm=Algorithm.TOKEN_BUCKET, burst=0, limit=10) for one in limits]
        return replace(made, limits=idle, holds=40, checks=0, abandons=0.0)
    return replace(
        made,
        loss=pick([0.0, 0.05, 0.3]),
        lateness=pick([0.0, 0.0, 0.2]),
        crashes=pick([0, 0, 2]),
        resets=pick([0, 0, 0, 3]),
        edits=pick([0, 0, 0, 3]),
        evictions=pick([0, 0, 0, 4]),
        failovers=pick([0, 0, 0, 2]) if chance() < 0.7 else 0,
        late_spends=pick([0, 0, 15]),
        skew_us=pick([0, 50 * MS, 2 * SECOND]),
        hedges=pick([0.0, 0.3]),
    )


@dataclass
class CallerHold:
    """A hold as its caller knows it."""

    number: bytes
    charges: Sequence[tuple[int, Limit]]
    cost: int
    ttl_us: int
    actual: int
    begun_us: int
    allowed_us: int = 0
    """When the caller first learned that the hold was made; 0: never."""
    denied: bool = False
    names: Sequence[bytes] = ()
    settled: dict[int, int] = field(default_factory=dict)
    """Settled amount → when the caller learned of it."""
    unknown: bool = False
    """Whether the hold was reported as unknown after it was reported as made."""
    tries: int = 0


class World:
    """Time, messages, servers, nodes and callers."""

    def __init__(self, scenario: Scenario, *, server: type[Server], node: "type[Node]") -> None:
        self.scenario = scenario
        self.random = random.Random(scenario.seed + 1)
        self.chance = self.random.random
        self.now_us = START_US
        self._agenda: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self._attempts = 0
        self.limits = [*scenario.limits]
        self.names = [self.name_of(place) for place in range(len(scenario.limits))]
        self.servers = [server() for _ in range(scenario.servers)]
        for one in self.servers:
            one.world, one.journal, one.losses = self, {}, []
            one.offset_us = self.random.randint(-scenario.skew_us, scenario.skew_us)
        self.edited: set[int] = set()
        """Limits that were edited."""
        self.nodes = [node(self) for _ in range(scenario.nodes)]
        self.caller_holds: list[CallerHold] = []

    def name_of(self, place: int) -> bytes:
        """Return the name of a bucket; its first byte is its hash tag."""
        return bytes([place % self.scenario.servers, place]) + bytes(14)

    def server_of(self, name: bytes) -> Server:
        return self.servers[name[0]]

    def attempt(self) -> bytes:
        self._attempts += 1
        return self._attempts.to_bytes(8, "big")

    # Time

    def after(self, delay_us: int, act: Callable[..., None], *arguments: Any) -> None:
        self._order += 1
        heapq.heappush(self._agenda, (self.now_us + delay_us, self._order, act, arguments))

    def run(self, until_us: int | None = None) -> None:
        """Run all events, or those until ``until_us``."""
        agenda = self._agenda
        while agenda and (until_us is None or agenda[0][0] <= until_us):
            self.now_us, _, act, arguments = heapq.heappop(agenda)
            act(*arguments)
        self.now_us = max(self.now_us, until_us or 0)

    # Messages

    def ask(self, server: Server, do: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Call a server; ``done`` receives its answer, or an error on a timeout."""
        is_done = [False]

        def answer(reply: Any) -> None:
            if not is_done[0]:
                is_done[0] = True
                done(reply)

        def arrive() -> None:
            reply = do()
            self._deliver(answer, reply)

        self._deliver(arrive)
        self.after(ANSWER_US, answer, StoreUnavailableError("no answer"))

    def _deliver(self, act: Callable[..., None], *arguments: Any) -> None:
        scenario, chance = self.scenario, self.chance
        if chance() < scenario.loss:
            return
        delay_us = MS // 2 + int(chance() * 3 * MS)
        if chance() < scenario.lateness:
            delay_us += int(chance() * LATE_US)
        self.after(delay_us, act, *arguments)


Parts = list[tuple[Sequence[int], Any]]
"""(indices of the buckets of a call, the server's answer)."""


class Node:
    """The holds of one node, like ``SharedHolds`` without an event loop."""

    retries = 1

    def __init__(self, world: World) -> None:
        self.world = world
        self.lives = 0

    def crash(self) -> None:
        """Drop all calls in flight."""
        self.lives += 1

    def hold(self, hold: Hold, names: Sequence[bytes], done: Callable[[Any], None]) -> None:
        """Make a hold; ``done`` receives it, or the error."""
        attempt = self.world.attempt()
        calls = {}
        parts = self.by_server(names)
        longest_us = longest_of_parts_us([limit for _, limit, _ in hold.charges], len(parts))
        for server, places in parts.items():
            checks = [
                StoreCheck(
                    names[place],
                    hold.charges[place][1],
                    STORE_TIME,
                    hold.cost,
                    0 if hold.charges[place][1].enforcement is Enforcement.ENFORCE else OBSERVES,
                )
                for place in places
            ]
            calls[server] = HoldCall(
                hold.number,
                hold.check_digest,
                attempt,
                checks,
                hold.ttl_us,
                self.world.scenario.most,
                longest_us,
            )
        self._ask_all(
            {server: partial(server.hold, call) for server, call in calls.items()},
            self.by_server(names),
            lambda parts: done(self._concluded(hold, names, attempt, parts)),
        )

    def _ask_all(
        self,
        asks: "Mapping[Server, Callable[[], Any]]",
        places: "dict[Server, list[int]]",
        done: Callable[[Parts], None],
    ) -> None:
        """Call several servers at once; ``done`` receives all answers."""
        parts: Parts = []

        def part_done(server: Server, reply: Any) -> None:
            parts.append((places[server], reply))
            if len(parts) == len(asks):
                done(parts)

        for server, do in asks.items():
            self._ask(server, do, partial(part_done, server), self.retries)

    def _concluded(self, hold: Hold, names: Sequence[bytes], attempt: bytes, parts: Parts) -> Any:
        limits = [limit for _, limit, _ in hold.charges]
        result: Any
        try:
            result = conclude(names, limits, hold.cost, self.answers(parts))
        except RateLimitdError as error:
            result = error
        if not isinstance(result, Held) or not result.expire_us:
            for places, reply in parts:
                if self.is_to_be_withdrawn(reply):
                    of_part = [names[place] for place in places]
                    call = StepCall(Step.WITHDRAW, hold.number, of_part, attempt=attempt)
                    self._withdraw(self.world.server_of(of_part[0]), call, 3)
        return result

    @staticmethod
    def answers(parts: Parts) -> Parts:
        """Return the answers that the conclusion uses."""
        return parts

    @staticmethod
    def is_to_be_withdrawn(reply: HoldReply | RateLimitdError) -> bool:
        return has_part(reply)

    def _withdraw(self, server: Server, call: StepCall, tries: int) -> None:
        self._ask(server, lambda: server.step(call), lambda _reply: None, tries - 1)

    def settle(
        self, number: bytes, names: Sequence[bytes], actual: int, done: Callable[[Any], None]
    ) -> None:
        """Settle a hold; ``done`` receives the result, or the error."""
        self._step(StepCall(Step.SETTLE, number, names, actual, STORE_TIME), done)

    def extend(
        self, number: bytes, names: Sequence[bytes], ttl_us: int, done: Callable[[Any], None]
    ) -> None:
        """Extend a hold."""
        self._step(StepCall(Step.EXTEND, number, names, ttl_us), done)

    def _step(self, step: StepCall, done: Callable[[Any], None]) -> None:
        by_server = self.by_server(step.names)
        asks = {
            server: partial(server.step, step._replace(names=[step.names[one] for one in places]))
            for server, places in by_server.items()
        }

        def all_done(parts: Parts) -> None:
            try:
                done(conclude_step(len(step.names), parts, field="hold"))
            except RateLimitdError as error:
                done(error)

        self._ask_all(asks, by_server, all_done)

    def by_server(self, names: Sequence[bytes]) -> "dict[Server, list[int]]":
        """Return the indices of each server's buckets."""
        found: dict[Server, list[int]] = {}
        for place, name in enumerate(names):
            found.setdefault(self.world.server_of(name), []).append(place)
        return found

    def _ask(
        self, server: Server, do: Callable[[], Any], done: Callable[[Any], None], retries: int
    ) -> None:
        lives = self.lives

        def answered(reply: Any) -> None:
            if self.lives != lives:
                return
            if isinstance(reply, StoreUnavailableError) and retries:
                self._ask(server, do, done, retries - 1)
            else:
                done(reply)

        self.world.ask(server, do, answered)


# Callers, traffic and faults


class Callers:
    """Callers that make, settle and abandon holds."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.random, self.chance = world.random, world.chance

    def begin(self) -> None:
        """Start a new hold."""
        world, scenario = self.world, self.world.scenario
        places = [place for place in range(len(world.limits)) if self.chance() < 0.8] or [0]
        least = min(world.limits[place].limit for place in places)
        cost = 1 + int(self.chance() * min(least, 6))
        ttl_us = int(SECOND * self.random.choice([0.3, 1, 3, LONGEST_TTL_US / SECOND]))
        kind = self.chance()
        actual = 0 if kind < 0.25 else int(self.chance() * cost) if kind < 0.6 else cost
        if kind > 0.75:
            actual = cost + int(self.chance() * 8)
        hold = CallerHold(
            self.random.randbytes(16),
            [(place, world.limits[place]) for place in places],
            cost,
            ttl_us,
            actual,
            world.now_us,
        )
        world.caller_holds.append(hold)
        self._ask(hold)
        if self.chance() < scenario.hedges:
            world.after(int(self.chance() * 10 * MS), self._ask, hold)

    def _ask(self, hold: CallerHold) -> None:
        """Request the hold from a node, again if it does not answer."""
        world = self.world
        charges: list[Charge] = [
            (bytes([place]), limit, DECIDE[limit.algorithm]) for place, limit in hold.charges
        ]
        names = [world.names[place] for place, _ in hold.charges]
        hold.tries += 1
        is_answered = [False]

        def answered(result: Any) -> None:
            if is_answered[0]:
                return
            is_answered[0] = True
            self._answered(hold, names, result)

        made = Hold(hold.number, b"digest01", charges, world.now_us, hold.cost, hold.ttl_us)
        self._a_node().hold(made, names, answered)
        world.after(4 * ANSWER_US, answered, StoreUnavailableError("no answer"))

    def _a_node(self) -> Node:
        return self.random.choice(self.world.nodes)

    def _answered(self, hold: CallerHold, names: Sequence[bytes], result: Any) -> None:
        world = self.world
        if isinstance(result, HoldsFullError | CheckInvalidError):  # it may have ended by now
            return
        if isinstance(result, RateLimitdError):
            assert isinstance(result, StoreUnavailableError)
            self._perhaps_again(hold, 4, 0.7)
        elif not result.expire_us:
            hold.denied = True
            self._perhaps_again(hold, 3, 0.3)
        elif not hold.allowed_us:
            hold.allowed_us = world.now_us
            hold.names = [
                name
                for name, outcome in zip(result.names, result.outcomes, strict=True)
                if outcome is not None and outcome[0]
            ]
            self._use(hold)

    def _perhaps_again(self, hold: CallerHold, tries: int, chance: float) -> None:
        if hold.tries < tries and self.chance() < chance:
            self.world.after(int(self.chance() * 30 * MS), self._ask, hold)

    def _use(self, hold: CallerHold) -> None:
        """Extend, repeat, settle (perhaps with another amount) or abandon the hold."""
        world = self.world
        if self.chance() < world.scenario.abandons:
            return
        lasts_us = int(hold.ttl_us * self.chance() * 1.1)
        if self.chance() < 0.2:
            world.after(lasts_us // 2, self._extend, hold)
        if self.chance() < 0.15:
            world.after(int(self.chance() * 100 * MS), self._ask, hold)
        world.after(lasts_us, self._settle, hold, hold.actual, 4)
        if self.chance() < world.scenario.quarrels:
            other = max(0, hold.actual + self.random.choice([-1, 1, 5]))
            late_us = int(self.chance() * self.random.choice([5 * MS, SECOND]))
            world.after(lasts_us + late_us, self._settle, hold, other, 1)

    def _extend(self, hold: CallerHold) -> None:
        if hold.names:
            self._a_node().extend(hold.number, hold.names, hold.ttl_us, lambda _reply: None)

    def _settle(self, hold: CallerHold, actual: int, tries: int) -> None:
        world = self.world
        if not hold.names:
            return

        def settled(result: Any) -> None:
            if isinstance(result, StepReply):
                if result.stepped is Stepped.UNKNOWN:
                    hold.unknown = True
                else:
                    hold.settled.setdefault(actual, world.now_us)
                    if self.chance() < 0.3:
                        world.after(int(self.chance() * 50 * MS), again, hold, actual)
            elif not isinstance(result, HoldEndedError | HoldSettledError) and tries:
                world.after(20 * MS, self._settle, hold, actual, tries - 1)

        def again(hold: CallerHold, actual: int) -> None:
            self._a_node().settle(hold.number, hold.names, actual, lambda _reply: None)

        self._a_node().settle(hold.number, hold.names, actual, settled)


class Happenings:
    """Checks and faults, each at a time of its own."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.random, self.chance = world.random, world.chance
        self.span_us = int(world.scenario.seconds * SECOND)
        self._states: dict[Server, Any] = {}

    def plan(self) -> None:
        """Schedule all events of the scenario."""
        world, scenario = self.world, self.world.scenario
        callers = Callers(world)
        for count, act in (
            (scenario.holds, callers.begin),
            (scenario.checks, self.check),
            (scenario.late_spends, self.spend_late),
            (scenario.resets, self.reset),
            (scenario.edits, self.edit),
            (scenario.evictions, self.evict),
            (scenario.crashes, self.crash),
            (scenario.failovers, self.fail_over),
        ):
            for _ in range(count):
                world.after(int(self.chance() * self.span_us), act)
        if scenario.failovers:
            self.remember()

    def _bucket(self) -> tuple[int, Limit, bytes, Server]:
        place = self.random.randrange(len(self.world.limits))
        name = self.world.names[place]
        return place, self.world.limits[place], name, self.world.server_of(name)

    def check(self) -> None:
        _, limit, name, server = self._bucket()
        cost = 1 + int(self.chance() * min(limit.limit, 4))
        server.decide(StoreCheck(name, limit, STORE_TIME, cost, peek=False))

    def spend_late(self) -> None:
        _, limit, name, server = self._bucket()
        if limit.algorithm is not Algorithm.CONCURRENCY:
            at_us = self.world.now_us - int(self.chance() * 500 * MS)
            server.charge_late(name, limit, [(at_us, 1 + int(self.chance() * 3))])

    def reset(self) -> None:
        _, limit, name, server = self._bucket()
        server.reset(name, limit)

    def edit(self) -> None:
        place, limit, _, _ = self._bucket()
        changed = max(1, int(limit.limit * self.random.choice(self.world.scenario.changes)))
        self.world.limits[place] = replace(limit, limit=changed, revision=limit.revision + 1)
        self.world.edited.add(place)

    def evict(self) -> None:
        server = self.random.choice(self.world.servers)
        what = self.random.choice(["buckets", "slots", "records"])
        keys = [*getattr(server, what)]
        if keys:
            server.lose(what, self.random.choice(keys))

    def crash(self) -> None:
        self.random.choice(self.world.nodes).crash()

    def remember(self) -> None:
        """Copy the state to replicas."""
        for server in self.world.servers:
            self._states[server] = server.state()
        if self.world.now_us < START_US + self.span_us:
            self.world.after(int(self.chance() * 100 * MS), self.remember)

    def fail_over(self) -> None:
        server, skew_us = self.random.choice(self.world.servers), self.world.scenario.skew_us
        server.fail_over(self._states[server])
        server.offset_us = self.random.randint(-skew_us, skew_us)


def play(
    scenario: Scenario, *, server: type[Server] = Server, node: type[Node] | None = None
) -> World:
    """Run a scenario until all holds have ended."""
    world = World(scenario, server=server, node=node or Node)
    Happenings(world).plan()
    world.run()
    world.run(world.now_us + 2 * LONGEST_TTL_US + 2 * scenario.skew_us + 61 * SECOND)
    return world
