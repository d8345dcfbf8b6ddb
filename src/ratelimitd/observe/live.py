"""The state of the node and its cluster, now and over the last 24 hours, for the page.

Takes one step every two seconds, independent of the number of viewers: takes a sample of the node, publishes its
status, and, while a page is open, reads the other nodes' statuses. Without an open page it reads them every ten
seconds, so that a newly opened page has a history. See ADR 0029.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import Final, NamedTuple

from ratelimitd import __version__
from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.clock import Clock
from ratelimitd.cluster.membership import StatusBoard
from ratelimitd.errors import RateLimitdError, StoreCorruptError
from ratelimitd.model import US_PER_S, InFlight
from ratelimitd.observe.denials import (
    TOP,
    TOP_UNMATCHED,
    Denials,
    DeniedEndpoint,
    DeniedIdentifier,
)
from ratelimitd.observe.history import SAMPLE_S, History, Sample, Sampler, Span, summed
from ratelimitd.observe.metrics import NodeParts, resident_bytes
from ratelimitd.observe.node_status import (
    MAX_ENDPOINT,
    BusyRule,
    HeldLimit,
    NodeStatus,
    decode,
    encode,
    names_within,
    sealed_names,
)

SILENT_S: Final = 6.0
"""Age of a status that missed two updates: its node is excluded from totals and shown as gone for a minute."""

WATCH_S: Final = 1.0

STEPS_UNSEEN: Final = 2
"""Steps between two reads of the other nodes' statuses while no page is open; between them their last samples count."""

FRESH_US: Final = 3_000_000
"""Maximum age of the statuses for a newly opened page."""

READ_S: Final = 1.0
"""Longest wait for statuses: pages and the history go on with the last ones while the store hangs."""

STATUSES_PER_ITERATION: Final = 20
"""Statuses parsed per event-loop iteration, in less than 1 ms."""

_MS_PER_S: Final = 1_000

_log = logging.getLogger(__name__)

Listener = Callable[[], Awaitable[None]]
"""Listener of steps; the next step waits for it."""


class NodeView(NamedTuple):
    """One node. ``age_s``: age of its status; ``gone``: too old for a running node, and the last read succeeded."""

    status: NodeStatus
    is_this: bool
    age_s: float
    gone: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """A snapshot of everything on the page.

    ``total`` covers all nodes that are not gone. ``nodes`` begins with this one; the others are sorted by name.
    ``stale_s``: how long statuses of other nodes could not be read; ``None``: the last read succeeded. ``shares``:
    nodes share the buckets.
    """

    total: Sample
    nodes: Sequence[NodeView]
    stale_s: float | None
    shares: bool
    endpoints: Sequence[DeniedEndpoint]
    identifiers: Sequence[DeniedIdentifier]
    holds: Sequence[HeldLimit]
    unmatched: Sequence[DeniedEndpoint] = ()
    """Endpoints without a rule, with their checks per minute."""

    @property
    def alive(self) -> Sequence[NodeStatus]:
        """The nodes that are not gone."""
        return [node.status for node in self.nodes if not node.gone]


@dataclass(slots=True)
class _Others:
    """Statuses of the other nodes, the times of the read and of the last attempt; ``read_failed``: that one failed."""

    statuses: Sequence[NodeStatus] = ()
    read_at_us: int | None = None
    answered_at_us: int = 0
    read_failed: bool = False
    corrupt: frozenset[str] = frozenset()


class Live:
    """The live view of one node.

    ``own`` returns the status of this node with a sample, ``next_sample`` the sample since its last call, and
    ``is_healthy`` the health only. ``board`` is ``None`` for a single node.
    """

    def __init__(
        self,
        own: Callable[[Sample], NodeStatus],
        denials: Denials,
        board: StatusBoard | None,
        clock: Clock,
        *,
        next_sample: Callable[[], Sample],
        is_healthy: Callable[[], bool],
        seal: BucketKeys,
    ) -> None:
        self._own = own
        self._next_sample = next_sample
        self._is_healthy = is_healthy
        self._seal = seal
        self._denials = denials
        self._board = board
        self._clock = clock
        self._status = own(next_sample())
        self._others = _Others(answered_at_us=clock.monotonic_us())
        self._history = History()
        self._listeners: set[Listener] = set()
        self._steps = 0
        self.ended = False
        """Ends the steps of a stopping node."""

    def history(self, span: Span) -> Sequence[Sample]:
        """Return the samples of all nodes over one of :data:`ratelimitd.observe.history.SPANS`, oldest first."""
        return self._history.samples(span)

    def listen(self, listener: Listener) -> None:
        """Call ``listener`` after each step from now on, and at the end."""
        self._listeners.add(listener)

    def unlisten(self, listener: Listener) -> None:
        """Remove a listener."""
        self._listeners.discard(listener)

    async def step(self) -> None:
        """Perform the work due every :data:`ratelimitd.observe.history.SAMPLE_S` seconds."""
        self._denials.fade(SAMPLE_S)
        self._status = status = self._own(self._next_sample())
        if self._board is not None:
            self._board.note_members()
            self._board.publish(encode(status))
        if self._listeners or self._steps % STEPS_UNSEEN == 0:
            await self._read()
        self._history.add(self._total(self._nodes()))
        self._steps += 1
        for listener in [*self._listeners]:
            await listener()

    def watch(self) -> None:
        """Publish the status at once when the node's health has changed; called every :data:`WATCH_S` seconds.

        Other nodes' pages show it after WATCH_S and one step of their own. The sample stays that of the last step: a
        new one would take its checks from the history, which has one sample for each step.
        """
        if self._board is not None and self._is_healthy() is not self._status.healthy:
            self._status = self._own(self._status.sample)
            self._board.publish(encode(self._status))

    async def end(self) -> None:
        """Notify the listeners of the end."""
        self.ended = True
        for listener in [*self._listeners]:
            await listener()

    async def refresh(self) -> None:
        """Read the statuses of other nodes before a page is shown, unless they are recent."""
        read_at_us = self._others.read_at_us
        if read_at_us is None or self._clock.monotonic_us() - read_at_us > FRESH_US:
            await self._read()

    def overview(self, *, named: bool = False) -> Overview:
        """Return a snapshot; ``named``: including the names of denied identifiers that may be shown."""
        nodes = self._nodes()
        alive = [node.status for node in nodes if not node.gone and not node.is_this]
        own = self._denials
        return Overview(
            total=self._total(nodes),
            nodes=nodes,
            stale_s=self._stale_s(),
            shares=self._board is not None,
            endpoints=_merged_endpoints([own.top_endpoints(), *(one.endpoints for one in alive)]),
            identifiers=_merged_identifiers(
                [own.top_identifiers(named=named), *(one.identifiers for one in alive)],
                self._names(alive) if named else {},
            ),
            unmatched=_merged_endpoints([own.top_unmatched(), *(one.unmatched for one in alive)]),
            holds=_merged_holds([self._status.holds, *(one.holds for one in alive)]),
        )

    async def unmatched(self) -> Sequence[DeniedEndpoint]:
        """Return the :data:`TOP_UNMATCHED` endpoints with the most checks without a rule, on all nodes."""
        await self.refresh()
        own = self._denials.top_unmatched(TOP_UNMATCHED)
        # Other nodes publish truncated endpoints.
        whole = {one.endpoint[:MAX_ENDPOINT]: one.endpoint for one in own}
        found = {one.endpoint: one.per_minute for one in own}
        alive = [node.status for node in self._nodes() if not node.gone and not node.is_this]
        for endpoint, per_minute in (one for status in alive for one in status.unmatched):
            name = whole.get(endpoint, endpoint)
            found[name] = found.get(name, 0.0) + per_minute
        return nlargest(TOP_UNMATCHED, map(DeniedEndpoint._make, found.items()), key=_per_minute)

    def _names(self, others: Iterable[NodeStatus]) -> Mapping[str, str]:
        found: dict[str, str] = {}
        for one in others:
            found |= names_within(one.names, self._seal)
        return found

    async def _read(self) -> None:
        if self._board is None:
            return
        others = self._others
        others.read_at_us = self._clock.monotonic_us()
        try:
            async with asyncio.timeout(READ_S):
                found = await self._board.read()
        except (RateLimitdError, TimeoutError):
            # Keep the last statuses, which age. Other components already report that the store is unavailable.
            others.read_failed = True
            return
        statuses, corrupt = [], set()
        for index, (incarnation, octets) in enumerate(found.items()):
            if index and index % STATUSES_PER_ITERATION == 0:
                await asyncio.sleep(0)
            try:
                statuses.append(decode(octets))
            except StoreCorruptError:
                corrupt.add(incarnation)
        if corrupt - others.corrupt:
            _log.warning(
                "statuses of %d other nodes are of another version, or damaged", len(corrupt)
            )
        read_at_us = others.read_at_us
        self._others = _Others(statuses, read_at_us, read_at_us, corrupt=frozenset(corrupt))

    def _stale_s(self) -> float | None:
        if not self._others.read_failed:
            return None
        return (self._clock.monotonic_us() - self._others.answered_at_us) / US_PER_S

    def _nodes(self) -> Sequence[NodeView]:
        views = [self._view(status) for status in self._others.statuses]
        names = {view.status.node_id for view in views if not view.gone} | {self._status.node_id}
        # A node that restarted under the same name is not gone.
        shown = [view for view in views if not view.gone or view.status.node_id not in names]
        shown.sort(key=lambda view: (view.status.node_id, view.status.sample.at_ms))
        return [NodeView(self._status, is_this=True, age_s=0.0, gone=False), *shown]

    def _view(self, status: NodeStatus) -> NodeView:
        """Return a node with the age of its status by the cluster's clock; a future status counts as gone, too.

        While statuses cannot be read, no node counts as gone.
        """
        age_s = self._clock.now_us() / US_PER_S - status.sample.at_ms / _MS_PER_S
        is_silent = abs(age_s) > SILENT_S and not self._others.read_failed
        return NodeView(status, is_this=False, age_s=max(0.0, age_s), gone=is_silent)

    def _total(self, nodes: Iterable[NodeView]) -> Sample:
        """Add up the nodes with recent statuses, at this node's time, so that the history stays in order."""
        recent = [node for node in nodes if not node.gone and node.age_s <= SILENT_S]
        total = summed([node.status.sample for node in recent])
        return total._replace(at_ms=self._status.sample.at_ms)


def _merged_endpoints(lists: Iterable[Iterable[DeniedEndpoint]]) -> Sequence[DeniedEndpoint]:
    """Merge the top endpoints of several nodes; truncates all to the published length."""
    found: dict[str, float] = {}
    for one in (one for each in lists for one in each):
        endpoint = one.endpoint[:MAX_ENDPOINT]
        found[endpoint] = found.get(endpoint, 0.0) + one.per_minute
    return nlargest(TOP, map(DeniedEndpoint._make, found.items()), key=_per_minute)


def _merged_identifiers(
    lists: Iterable[Iterable[DeniedIdentifier]], names: Mapping[str, str]
) -> Sequence[DeniedIdentifier]:
    """Merge the top identifiers; names come from the first list, this node's own, or else from ``names``."""
    found: dict[str, DeniedIdentifier] = {}
    for one in (one for each in lists for one in each):
        first = found.get(one.digest)
        per_minute = one.per_minute + (first.per_minute if first else 0.0)
        found[one.digest] = (first or one)._replace(per_minute=per_minute)
    most = nlargest(TOP, found.values(), key=_per_minute)
    return [one if one.name else one._replace(name=names.get(one.digest, "")) for one in most]


def _merged_holds(lists: Iterable[Iterable[HeldLimit]]) -> Sequence[HeldLimit]:
    """Merge the limits with the most holds of several nodes."""
    found: dict[tuple[str, ...], HeldLimit] = {}
    for one in (one for each in lists for one in each):
        cut = one._replace(endpoint=one.endpoint[:MAX_ENDPOINT])
        known = found.get(cut[:3])
        if known is not None:
            cut = cut._replace(holds=cut.holds + known.holds, tokens=cut.tokens + known.tokens)
        found[cut[:3]] = cut
    return nlargest(TOP, found.values(), key=lambda one: one.holds)


def _most_held(in_flight: Sequence[InFlight]) -> Sequence[HeldLimit]:
    return [
        HeldLimit(rule.endpoint, rule.identifier_type, name, holds, tokens)
        for rule, name, holds, tokens in nlargest(TOP, in_flight, key=lambda one: one.holds)
    ]


def _per_minute(one: DeniedEndpoint | DeniedIdentifier) -> float:
    return one.per_minute


def live_of(
    parts: NodeParts,
    denials: Denials,
    *,
    addresses: Callable[[], tuple[str, str]],
    admin_token_digest: Callable[[], str],
    busiest: Callable[[], Sequence[BusyRule]],
    seal: BucketKeys,
) -> Live:
    """Return the live view of a node with these parts; ``addresses`` are those of gRPC and HTTP, empty if closed."""
    sampler = Sampler(parts.stats, parts.clock)

    def next_sample() -> Sample:
        return sampler.sample(
            buckets=len(parts.buckets),
            memory_bytes=resident_bytes(),
            loop_lag_s=parts.runtime.loop_lag_s,
        )

    def status(sample: Sample) -> NodeStatus:
        judged, cluster = parts.health.report(), parts.cluster
        grpc_address, http_address = addresses()
        return NodeStatus(
            node_id=judged.node_id,
            version=__version__,
            grpc_address=grpc_address,
            http_address=http_address,
            rules_revision=judged.rules_revision,
            healthy=judged.healthy,
            shared_state_connected=judged.shared_state_connected,
            hit_ratio=judged.local_cache_hit_ratio,
            hit_ratio_met=judged.hit_ratio_met,
            average_latency_ms=judged.average_latency_ms,
            latency_met=judged.latency_met,
            error_rate=judged.error_rate,
            breaker_state=judged.breaker_state,
            retry_s=parts.health.shared_state().retry_s,
            sync_lag_s=cluster.sync_lag_s if cluster else 0.0,
            clock_error_s=parts.runtime.clock_error_us / US_PER_S,
            excess_ratio=cluster.worst_excess if cluster else 0.0,
            excess_bound_ratio=cluster.promised_excess if cluster else 0.0,
            admin_token_digest=admin_token_digest(),
            sample=sample,
            endpoints=denials.top_endpoints(),
            identifiers=denials.top_identifiers(),
            holds=_most_held(parts.in_flight()),
            unmatched=denials.top_unmatched(),
            rules=busiest(),
            names=sealed_names(denials.top_identifiers(named=True), seal) if cluster else "",
        )

    board = parts.cluster.board if parts.cluster else None
    return Live(
        status,
        denials,
        board,
        parts.clock,
        next_sample=next_sample,
        is_healthy=lambda: parts.health.report().healthy,
        seal=seal,
    )
