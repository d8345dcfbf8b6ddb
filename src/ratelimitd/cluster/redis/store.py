"""The shared state in Valkey or Redis: each request as a command over the links.

Repeats only checks that a slot's move kept from running. A malformed bucket counts as full, so that the next batch
replaces it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar, cast

from ratelimitd.cluster.redis.codec import (
    DECIDE,
    FIRST_CHECK,
    JOINED,
    RESET,
    SETTLE,
    Script,
    bucket_key,
    bucket_of,
    checks_request,
    decided,
    first_checked,
    load,
    replaced,
    reset_request,
    settle_reply,
    settle_request,
    state_of,
)
from ratelimitd.cluster.redis.connection import deliver
from ratelimitd.cluster.redis.hold_codec import (
    HOLD,
    HOLD_STEP,
    hold_reply,
    hold_request,
    step_reply,
    step_request,
)
from ratelimitd.cluster.redis.link import Link
from ratelimitd.cluster.redis.topology import Topology
from ratelimitd.errors import RateLimitdError, StoreCorruptError, StoreMovingError
from ratelimitd.ledger.protocol import Batch, Reply
from ratelimitd.ledger.shared_holds import HoldCall, HoldReply, StepCall, StepReply
from ratelimitd.ledger.shared_state import FirstResult, SharedState, StoreCheck
from ratelimitd.model import MAX_TIME_US, Limit, Outcome
from ratelimitd.tracing import Tracer

CHECKS_PER_CALL: Final = 100
"""Checks in one script call: as many as a batch may have updates, about 1 ms of the store; more only for long logs."""

CHECKS_PER_WEIGHT: Final = 3
"""A script call costs the server as much as this many checks in it (ADR 0041)."""

Answer = TypeVar("Answer")

OnAnswer: TypeAlias = Callable[[Answer | RateLimitdError], None]
"""Takes an answer, or the error in its place."""


class Combiner(Generic[Answer]):
    """Combines the checks of one event-loop iteration into as few calls of one script as possible.

    ``read`` returns the answers to checks, in their order, from the reply to their call, or raises
    ``StoreCorruptError``.
    """

    def __init__(
        self,
        topology: Topology,
        script: Script,
        read: Callable[[Sequence[StoreCheck], Any], Sequence[Answer | RateLimitdError]],
    ) -> None:
        self._topology = topology
        self._script = script
        self._read = read
        self._call_soon = asyncio.get_running_loop().call_soon
        self._checks: list[StoreCheck] = []
        self._dones: list[OnAnswer[Answer]] = []
        self._links: set[Link] = set()
        """Links with unflushed requests."""
        self._under_way = 0
        self._come_alone = False
        """Whether the last check was the only one of its iteration and of its round trip."""

    def add(self, check: StoreCheck, done: OnAnswer[Answer]) -> None:
        """Queue for this iteration's call; send immediately when the link is idle."""
        is_alone = self._come_alone and not self._under_way and not self._checks
        if is_alone and not check.peek & JOINED:
            self._send([check], [done])
            self._flush()
            return
        if not self._checks:
            self._call_soon(self._leave)
        self._checks.append(check)
        self._dones.append(done)

    def _leave(self) -> None:
        checks, self._checks = self._checks, []
        dones, self._dones = self._dones, []
        self._come_alone = len(checks) == 1 and not self._under_way
        if self._topology.is_cluster:
            self._send_by_tag(checks, dones)
        else:
            self._send_all(checks, dones)
        self._flush()

    def _flush(self) -> None:
        """Flush all links: the iteration is over, and waiting for the next would take 5 µs."""
        for link in self._links:
            link.flush()
        self._links.clear()

    def _send_by_tag(self, checks: Sequence[StoreCheck], dones: Sequence[OnAnswer[Answer]]) -> None:
        """Send one call per hash tag: in a Cluster all keys of a call must be of one slot."""
        places: dict[int, list[int]] = {}
        for place, check in enumerate(checks):
            places.setdefault(check.name[0], []).append(place)
        for of_tag in places.values():
            self._send_all([checks[place] for place in of_tag], [dones[place] for place in of_tag])

    def _send_all(self, checks: Sequence[StoreCheck], dones: Sequence[OnAnswer[Answer]]) -> None:
        start = 0
        while start < len(checks):
            end = start + CHECKS_PER_CALL
            while end < len(checks) and checks[end - 1].peek & JOINED:
                end += 1
            self._send(checks[start:end], dones[start:end])
            start = end

    def _send(self, checks: Sequence[StoreCheck], dones: Sequence[OnAnswer[Answer]]) -> None:
        try:
            keys, arguments = checks_request(checks)
        except Exception as error:  # noqa: BLE001 - a defect; the waiting checks must be answered
            defect = StoreCorruptError(f"checks cannot be sent: {error}")
            self._call_soon(self._deliver, dones, [defect] * len(dones))
            return
        link = self._topology.of_tag(checks[0].name[0])
        self._under_way += 1
        weight = 1 + len(checks) // CHECKS_PER_WEIGHT
        link.run(self._script, keys, arguments, partial(self._answered, checks, dones), weight)
        self._links.add(link)

    def _answered(
        self,
        checks: Sequence[StoreCheck],
        dones: Sequence[OnAnswer[Answer]],
        reply: Any,
    ) -> None:
        self._under_way -= 1
        if isinstance(reply, StoreMovingError) and len(checks) > 1:
            # A slot is being moved, with some of its keys already gone: each check alone is answered or redirected.
            for check, done in zip(checks, dones, strict=True):
                self._send([check], [done])
            self._flush()
            return
        answers: Sequence[Answer | RateLimitdError]
        if isinstance(reply, RateLimitdError):
            answers = [reply] * len(checks)
        else:
            try:
                answers = self._read(checks, reply)
            except StoreCorruptError as error:
                answers = [error] * len(checks)
        self._deliver(dones, answers)

    @staticmethod
    def _deliver(
        dones: Sequence[OnAnswer[Answer]],
        answers: Sequence[Answer | RateLimitdError],
    ) -> None:
        for done, answer in zip(dones, answers, strict=True):
            deliver(done, answer)


BEAT: Final = load("beat")

TAGS_PER_BATCH: Final = 16
"""Hash tags per batch if one server has all of them: a thousand buckets in use make 16 batches per interval instead of
256 of four updates, each with the cost of a script call. In a Cluster all keys of a call must be of one slot.
"""

MEMBERS_TAG: Final = 0
MEMBERS_KEY: Final = b"rl1:{00}:members"
_MEMBERS_KEYS: Final = (MEMBERS_KEY, b"rl1:{00}:secret")

_PROBER_BYTES: Final = 6

Heartbeat = tuple[int, str, tuple[str, ...]]
"""The store's time in µs, the fingerprint of the cluster's secret, and the incarnations alive."""

_STATUS_PREFIX: Final = b"rl1:{%02x}:status:" % MEMBERS_TAG

MAX_STATUS_BYTES: Final = 8_192
"""Limit of bytes read of a status; a value of this length or more is no status."""

Statuses = list[bytes | None]

_TIME_DIGITS: Final = len(str(MAX_TIME_US))

READS_PER_COMMAND: Final = 256

_NO_BUCKET: Final = StoreCorruptError("the value of a bucket is malformed")
_NO_VALUES: Final = StoreCorruptError("the reply to a reading is malformed")


class _Reading(NamedTuple):
    """One requested read."""

    name: bytes
    rule: Limit
    done: OnAnswer[SharedState | None]


class RedisStore:
    """The shared buckets, heartbeats and statuses over ``topology``, which it opens and closes.

    A bucket's ``name`` is :meth:`ratelimitd.buckets.keys.BucketKeys.stored` of its key. Each request is sent in the
    event-loop iteration in which it is made, together with the others of that iteration. ``done`` is called exactly
    once, in a later iteration, with the answer or the error.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._loop = asyncio.get_running_loop()
        self._readings: list[_Reading] = []
        self._first_checks = Combiner(topology, FIRST_CHECK, self._first_checked)
        self._decisions = Combiner(topology, DECIDE, self._decided)
        self._prober = f"probe/{secrets.token_hex(_PROBER_BYTES)}"
        self._probes = 0
        self.corrupt_total = 0
        """Malformed bucket values received."""

    async def start(self) -> None:
        """Connect, or try once; never raises."""
        await self._topology.start()

    async def close(self) -> None:
        """Disconnect; requests in flight fail."""
        await self._topology.close()

    @property
    def connected(self) -> bool:
        """Whether every hash tag has a server, and every server is connected."""
        return self._topology.connected

    @property
    def decides_together(self) -> bool:
        """Whether one call of :meth:`decide` decides all buckets: there is one server."""
        return not self._topology.is_cluster

    @property
    def tags_per_batch(self) -> int:
        """Neighbouring hash tags that one batch may hold; a divisor of 256."""
        return 1 if self._topology.is_cluster else TAGS_PER_BATCH

    def server_of(self, tag: int) -> str:
        """Return the name of the server that holds a hash tag."""
        return self._topology.of_tag(tag).name

    def is_connected(self, tag: int) -> bool:
        """Return whether the server that holds a hash tag is connected; if not, the link is connecting."""
        return self._topology.of_tag(tag).connected

    def read(self, name: bytes, rule: Limit, done: OnAnswer[SharedState | None]) -> None:
        """Read a bucket, also from a late answer; ``None``: it is full.

        The reads of one iteration share a command, except in a Cluster.
        """
        if self._topology.is_cluster:
            # All keys of a command must be of one slot.
            self._read([_Reading(name, rule, done)])
            return
        if not self._readings:
            self._loop.call_soon(self._read_all)
        self._readings.append(_Reading(name, rule, done))

    def _read_all(self) -> None:
        readings, self._readings = self._readings, []
        for start in range(0, len(readings), READS_PER_COMMAND):
            self._read(readings[start : start + READS_PER_COMMAND])

    def _read(self, readings: Sequence[_Reading]) -> None:
        link = self._topology.of_tag(readings[0].name[0])
        command = (b"MGET", *[bucket_key(reading.name) for reading in readings])
        link.send(command, partial(self._were_read, readings), is_patient=True)

    def _were_read(self, readings: Sequence[_Reading], reply: Any) -> None:
        values: Sequence[Any]
        if isinstance(reply, list) and len(reply) == len(readings):
            values = reply
        else:
            error = reply if isinstance(reply, RateLimitdError) else _NO_VALUES
            values = [error] * len(readings)
        for reading, value in zip(readings, values, strict=True):
            state = value if isinstance(value, RateLimitdError) else self._state(value, reading)
            deliver(reading.done, state)

    def _state(self, value: Any, reading: _Reading) -> SharedState | None:
        try:
            return state_of(value, reading.rule)
        except StoreCorruptError:
            self.corrupt_total += 1
            return None

    def first_check(self, check: StoreCheck, done: OnAnswer[FirstResult]) -> None:
        """Decide the first check of a bucket, and return its state. After an error it may have been charged."""
        self._first_checks.add(check, done)

    def _first_checked(
        self, checks: Sequence[StoreCheck], reply: Any
    ) -> Sequence[FirstResult | RateLimitdError]:
        replaced_now, answers = first_checked(checks, reply)
        unreadable = sum([isinstance(answer, StoreCorruptError) for answer in answers])
        self.corrupt_total += replaced_now + unreadable
        return answers

    def decide(self, check: StoreCheck, done: OnAnswer[Outcome]) -> None:
        """Decide a check, at ``STORE_TIME`` or at its own. After an error it may have been charged."""
        self._decisions.add(check, done)

    def _decided(
        self, checks: Sequence[StoreCheck], reply: Any
    ) -> Sequence[Outcome | RateLimitdError]:
        answers = decided(checks, reply)
        if None not in answers:
            return cast("list[Outcome]", answers)
        self.corrupt_total += answers.count(None)
        return [_NO_BUCKET if answer is None else answer for answer in answers]

    def settle(self, tag: int, batch: Batch, done: OnAnswer[Reply | None]) -> None:
        """Apply a batch; idempotent. ``None``: it is older than the last one of its sender."""
        keys, arguments = settle_request(tag, batch)
        settled = partial(self._settled, batch, done)
        # Checks in a batch have deadlines of their own. A batch that takes longer than the timeout would be repeated
        # for ever if its late replies were dropped.
        self._topology.of_tag(tag).run(SETTLE, keys, arguments, settled, is_patient=True)

    def _settled(self, batch: Batch, done: OnAnswer[Reply | None], reply: Any) -> None:
        self.corrupt_total += replaced(reply)
        _answer(done, partial(settle_reply, batch), reply)

    def hold(self, tag: int, call: HoldCall, done: OnAnswer[HoldReply]) -> None:
        """Make a hold, or its part for the buckets of one hash tag; idempotent.

        Its record is stored under ``tag``.
        """
        keys, arguments = hold_request(tag, call)
        held = partial(_answer, done, partial(self._held, call))
        self._topology.of_tag(tag).run(HOLD, keys, arguments, held, 1 + len(call.checks))

    def _held(self, call: HoldCall, reply: Any) -> HoldReply:
        corrupt, held = hold_reply(call, reply)
        self.corrupt_total += corrupt
        return held

    def step_hold(self, tag: int, call: StepCall, done: OnAnswer[StepReply]) -> None:
        """Settle, extend or withdraw a hold whose record is under ``tag``; idempotent."""
        keys, arguments = step_request(tag, call)
        stepped = partial(_answer, done, partial(step_reply, call))
        weight = 1 + len(call.names)
        # Nobody waits for it before a request: a late answer is better than an error.
        self._topology.of_tag(tag).run(HOLD_STEP, keys, arguments, stepped, weight, is_patient=True)

    def reset(self, name: bytes, rule: Limit, least: int, done: OnAnswer[SharedState]) -> None:
        """Reset a bucket to full, in a new generation of at least ``least``. A late answer is taken, too."""
        keys, arguments = reset_request(name, rule, least)
        answer = partial(_answer, done, lambda reply: bucket_of(reply, rule))
        self._topology.of_tag(name[0]).run(RESET, keys, arguments, answer, is_patient=True)

    def probe(self, tag: int, done: OnAnswer[Reply | None]) -> None:
        """Test whether the server of a hash tag settles, late or not, by an empty batch, which writes."""
        self._probes += 1
        self.settle(tag, Batch(self._prober, self._probes, 0, {}), done)

    def beat(
        self, incarnation: str, ttl_us: int, fingerprint: str, done: OnAnswer[Heartbeat]
    ) -> None:
        """Send a heartbeat, which holds for ``ttl_us``; 0: the node leaves. A late answer is taken, too."""
        arguments = (incarnation.encode(), ttl_us, fingerprint.encode())
        answer = partial(_answer, done, _beat)
        self._topology.of_tag(MEMBERS_TAG).run(
            BEAT, _MEMBERS_KEYS, arguments, answer, is_patient=True
        )

    def put_status(self, incarnation: str, status: bytes, ttl_ms: int) -> None:
        """Replace the status of an incarnation. Fire and forget: a lost write only leaves the status stale."""
        command = (b"SET", status_key(incarnation), status, b"PX", ttl_ms)
        self._topology.of_tag(MEMBERS_TAG).send(command, _ignore)

    def remove_status(self, incarnation: str) -> None:
        """Remove the status of an incarnation that leaves."""
        command = (b"EXPIRE", status_key(incarnation), 0)
        self._topology.of_tag(MEMBERS_TAG).send(command, _ignore)

    def read_statuses(self, incarnations: Sequence[str], done: OnAnswer[Statuses]) -> None:
        """Read the statuses of one or more incarnations, in order; ``None`` for a missing one.

        A late answer is taken, too. Only :data:`MAX_STATUS_BYTES` of each are read: a foreign value may have 512 MB.
        """
        statuses: Statuses = [None] * len(incarnations)
        missing, failure = len(incarnations), None

        def take(place: int, reply: Any) -> None:
            nonlocal missing, failure
            if isinstance(reply, bytes):
                statuses[place] = reply or None
            # A value of another type is no status, and does not affect the others.
            elif isinstance(reply, RateLimitdError) and not isinstance(reply, StoreCorruptError):
                failure = reply
            missing -= 1
            if not missing:
                done(failure or statuses)

        link = self._topology.of_tag(MEMBERS_TAG)
        for place, incarnation in enumerate(incarnations):
            command = (b"GETRANGE", status_key(incarnation), 0, MAX_STATUS_BYTES - 1)
            link.send(command, partial(take, place), is_patient=True)


def status_key(incarnation: str) -> bytes:
    """Return the key of the status of an incarnation."""
    return _STATUS_PREFIX + incarnation.encode()


def _ignore(_reply: object) -> None:
    """Ignore the reply."""


def _answer(done: Callable[[Any], None], read: Callable[[Any], Any], reply: Any) -> None:
    """Pass ``done`` the parsed reply, or the error that came instead or that parsing raised."""
    if not isinstance(reply, RateLimitdError):
        try:
            reply = read(reply)
        except StoreCorruptError as error:
            reply = error
    done(reply)


def _beat(reply: Any) -> Heartbeat:
    match reply:
        case [bytes() as now_us, bytes() as fingerprint, list() as names] if (
            now_us.isdigit()
            and len(now_us) <= _TIME_DIGITS
            and all(isinstance(name, bytes) for name in names)
        ):
            # Names are only counted and shown: one with invalid UTF-8 is a node, too.
            alive = tuple([name.decode(errors="replace") for name in names])
            return int(now_us), fingerprint.decode(errors="replace"), alive
    message = "the reply to a heartbeat is malformed"
    raise StoreCorruptError(message)


SYNC_SPAN: Final = "ratelimitd.sync"


class TracedStore(RedisStore):
    """A :class:`RedisStore` with a span around each batch that is settled."""

    def __init__(self, *arguments: Any, tracer: Tracer, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._tracer = tracer

    def settle(self, tag: int, batch: Batch, done: OnAnswer[Reply | None]) -> None:
        """Settle as the store does."""
        span = self._tracer.begin(SYNC_SPAN)
        if span is None:
            super().settle(tag, batch, done)
            return
        span.set_attribute("ratelimitd.buckets", len(batch.updates) + len(batch.cold))
        span.set_attribute("server.address", self.server_of(tag))

        def settled(reply: Reply | RateLimitdError | None) -> None:
            span.end(type(reply).__name__ if isinstance(reply, RateLimitdError) else "")
            done(reply)

        super().settle(tag, batch, settled)
