"""A bucket with holds in flight, or in debt. Pure. See ADR 0055.

Such a bucket is kept apart from the table: it is never evicted, its debts are not capped, and a check of any other
bucket costs what it did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from ratelimitd.algorithms import DECIDE, Decide, concurrency
from ratelimitd.algorithms.concurrency import Slots
from ratelimitd.algorithms.several import uncharged
from ratelimitd.ledger.accounts import ACCOUNTS, Account, Refund
from ratelimitd.model import Algorithm, Limit, Outcome

_NEVER: Final = 1 << 200
"""Above any level."""

_FIRST_SIZE: Final = 16


Segment: TypeAlias = tuple[int, int]
"""(shift of the path from here on, least level until the next segment, after this shift alone), in units."""


class Part(NamedTuple):
    """What one hold is charged on one bucket: ``tokens`` at ``at_us``, the place of its segment in the path."""

    tokens: int
    at_us: int
    segment: int = 0
    is_final: bool = False
    """An edit has capped the bucket since: what it cut off may be this, so that nothing is given back."""


class Path:
    """The least levels of a bucket's free path, between one hold and the next.

    The level of a bucket with refill is its free path, which may fall below zero, less the least of that path below
    zero until then. Another amount of a hold shifts the path behind it: so the least level of each segment between two
    holds, and the shifts, are all it takes to say what the bucket would hold. The segments are the leaves of a tree of
    (sum of shifts, least level after the shifts of the same node): a change takes the logarithm of their number.
    """

    __slots__ = ("_count", "_least", "_shift", "_size")

    def __init__(self, segments: Sequence[Segment] = ()) -> None:
        self._count = 0
        self._make(segments)

    @property
    def least(self) -> int:
        """The least level of the path."""
        return self._least[1]

    @property
    def last(self) -> int:
        """The newest segment."""
        return self._count - 1

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another segment."""
        return self._count == self._size

    def begin(self) -> int:
        """Begin a segment, and return it."""
        segment = self._count
        self._count += 1
        self.set(segment, 0, _NEVER)
        return segment

    def lower(self, level: int) -> None:
        """Note a level of the path in the newest segment, with all shifts."""
        leaf = self._size + self.last
        shifts = self._shift[1]
        if level - shifts + self._shift[leaf] < self._least[leaf]:
            self.set(self.last, self._shift[leaf], level - shifts + self._shift[leaf])

    def shift(self, segment: int, units: int) -> None:
        """Shift the path from a segment on."""
        leaf = self._size + segment
        self.set(segment, self._shift[leaf] + units, min(self._least[leaf] + units, _NEVER))

    def set(self, segment: int, shift: int, least: int) -> None:
        """Set the shift of a segment, and its least level after that shift alone."""
        shifts, leasts = self._shift, self._least
        place = self._size + segment
        shifts[place], leasts[place] = shift, least
        while place > 1:
            place >>= 1
            left, right = 2 * place, 2 * place + 1
            shifts[place] = shifts[left] + shifts[right]
            leasts[place] = min(leasts[left], shifts[left] + leasts[right])

    def compact(self, kept: list[int]) -> dict[int, int]:
        """Join each segment not among ``kept``, in ascending order, to the one before; return the new places."""
        joined: list[Segment] = []
        places: dict[int, int] = {}
        wanted = {0, *kept}
        for segment in range(self._count):
            leaf = self._size + segment
            shift, least = self._shift[leaf], self._least[leaf]
            if segment in wanted:
                places[segment] = len(joined)
                joined.append((shift, least))
            else:
                before, least_before = joined[-1]
                joined[-1] = before + shift, min(least_before, before + least)
        self._make(joined)
        return places

    def segments(self) -> list[Segment]:
        """Return the segments, to make the path anew."""
        leaves = range(self._size, self._size + self._count)
        return [(self._shift[leaf], self._least[leaf]) for leaf in leaves]

    def _make(self, segments: Sequence[Segment]) -> None:
        size = _FIRST_SIZE
        while size < 2 * len(segments):
            size *= 2
        self._size = size
        self._shift = [0] * (2 * size)
        self._least = [_NEVER] * (2 * size)
        self._count = len(segments)
        for segment, (shift, least) in enumerate(segments):
            self.set(segment, shift, least)


class HeldBucket:
    """One bucket that is kept apart.

    Attributes:
        name: the stored name.
        key: what checks look it up by; ``None`` after a restart until one does.
        limit: under which it was last charged.
        state: the algorithm's; of slots :class:`Slots`.
        parts: what is charged for holds in flight, by their number.
    """

    __slots__ = ("_path", "_wasted", "account", "key", "limit", "name", "parts", "state")

    def __init__(self, name: bytes, key: bytes | None, limit: Limit, state: Any) -> None:
        self.name = name
        self.key = key
        self.limit = limit
        self.parts: dict[bytes, Part] = {}
        self._path: Path | None = None
        self._wasted = 0
        """Units of refill that found the bucket full, since the path began; by so much its level is above the path."""
        self.account: Account | None = ACCOUNTS.get(limit.algorithm)
        self.state: Any = Slots() if self.account is None else state

    @property
    def fits_table(self) -> bool:
        """Whether the table can hold it: no hold is in flight, and there is a state without debt or overdraft."""
        if self.parts or self.account is None:
            return False
        state = self.state
        return not isinstance(state, tuple) or (
            len(state) == 2  # noqa: PLR2004 -- a fixed window with a count of the window before has three
            and self.account.judge_of(state, self.limit) is DECIDE[self.limit.algorithm]
        )

    def decide(self, decide: Decide, rule: Limit) -> Decide:
        """Return what decides a check under a rule: ``decide``, unless there is a debt that it does not know."""
        if self.account is None:
            return concurrency.decide
        known = DECIDE[rule.algorithm]
        return decide if self.account.judge_of(self.state, rule) is known else self.account.judge

    def charge(self, rule: Limit, outcome: Outcome) -> None:
        """Take the state of a check that was allowed."""
        if self.account is None:
            return
        self._take_rule(rule)
        state: Any = outcome[5]
        if self._path is not None:
            spent, latest_us = self.state if self.state is not None else (0, state[1])
            spent -= max(0, state[1] - latest_us) * rule.limit
            if spent < 0:
                self._wasted -= spent
                spent = 0
            self._path.lower(spent - self._wasted)
        self.state = state

    def hold(self, number: bytes, tokens: int, end_us: int, outcome: Outcome) -> None:
        """Note that a hold was charged with this outcome; :meth:`charge` comes first."""
        if self.account is None:
            self.state.take(number, end_us)
            self.parts[number] = Part(1, 0)
            return
        at_us, _ = self.account.standing(outcome[5])
        segment = 0
        if self.limit.algorithm is Algorithm.TOKEN_BUCKET:
            segment = self._begin_segment()
        self.parts[number] = Part(tokens, at_us, segment)

    def settle(self, number: bytes, actual: int) -> None:
        """Replace what a hold is charged, if it is charged here."""
        part = self.parts.pop(number, None)
        if part is None:
            return
        more = actual - part.tokens
        if self.account is None:
            self.state.free(number)
        elif more < 0 and part.is_final:
            pass
        elif self._path is not None:
            self._shift(self._path, part.segment, more * self.limit.window_us)
        elif more > 0:
            self.state = self.account.charged(self.state, self.limit, [(part.at_us, more)])
        elif more < 0:
            refund = Refund(0, 0, part.at_us, -more, 0, 0)
            self.state, _ = self.account.refunded(self.state, self.limit, refund, 0)
        self._end_path()

    def drop(self, number: bytes) -> None:
        """Forget a hold that has ended: what it is charged stays, its slot is free."""
        if self.parts.pop(number, None) is not None and self.account is None:
            self.state.free(number)
        self._end_path()

    def extend(self, number: bytes, end_us: int) -> None:
        """Let the slot of a hold end later."""
        if self.account is None and number in self.parts:
            self.state.take(number, end_us)

    def _shift(self, path: Path, segment: int, units: int) -> None:
        """Charge a hold of a token bucket another amount, as of its time."""
        spent, latest_us = self.state
        level = spent - self._wasted
        path.lower(level)
        path.shift(segment, units)
        self._wasted = max(0, -path.least)
        self.state = level + units + self._wasted, latest_us

    def _begin_segment(self) -> int:
        if self._path is None:
            self._path = path = Path()
            self._wasted = 0
            path.begin()
        elif self._path.is_full:
            self._compact(self._path)
        return self._path.begin()

    def _compact(self, path: Path) -> None:
        kept = sorted(part.segment for part in self.parts.values())
        places = path.compact(kept)
        self.parts = {
            number: part._replace(segment=places[part.segment])
            for number, part in self.parts.items()
        }

    def _end_path(self) -> None:
        if not self.parts:
            self._path = None

    def _take_rule(self, rule: Limit) -> None:
        """Cap what is owed if the capacity was lowered, as an edit does everywhere."""
        assert self.account is not None  # noqa: S101 -- of slots there is nothing to cap
        if rule.capacity < self.limit.capacity and self.state is not None:
            capped = self.account.capped(self.state, rule)
            if capped != self.state:
                self.state = capped
                self.parts = {
                    number: part._replace(is_final=True) for number, part in self.parts.items()
                }
        self.limit = rule

    def restored(self, values: Mapping[str, Any], ends_us: Mapping[bytes, int]) -> HeldBucket:
        """Take the rest of what :meth:`dump` has returned; see :func:`load`."""
        self._wasted = int(values["wasted"])
        if values["path"] is not None:
            self._path = Path([(shift, least) for shift, least in values["path"]])
        parts = {bytes.fromhex(number): Part(*part) for number, part in values["parts"].items()}
        self.parts = {number: part for number, part in parts.items() if number in ends_us}
        if self.account is None:
            for number in self.parts:
                self.state.take(number, ends_us[number])
        self._end_path()
        return self

    def level(self, now_us: int) -> Outcome:
        """Return what the bucket has at ``now_us``, as of a check that costs nothing."""
        if self.account is None:
            return concurrency.decide(self.state, self.limit, now_us, 0)
        return uncharged((self.state, self.limit, self.account.judge), now_us)

    def is_over(self, now_us: int) -> bool:
        """Return whether the bucket equals a fresh one at ``now_us``, and no hold is in flight."""
        if self.parts or self.account is None:
            return not self.parts
        return self.account.used(self.state, self.limit, now_us) == 0

    def dump(self) -> Mapping[str, Any]:
        """Return what :func:`load` makes a bucket of, for JSON."""
        limit = self.limit
        state = self.state
        if isinstance(state, bytes):
            state = state.hex()
        elif self.account is None:
            state = None
        return {
            "limit": [limit.limit, limit.window_seconds, limit.algorithm, limit.burst],
            "state": state,
            "parts": {number.hex(): [*part] for number, part in self.parts.items()},
            "path": None if self._path is None else self._path.segments(),
            "wasted": self._wasted,
        }


def load(name: bytes, values: Mapping[str, Any], ends_us: Mapping[bytes, int]) -> HeldBucket:
    """Return the bucket of :meth:`HeldBucket.dump`, with the ends of the holds that are still in flight.

    Raises:
        ValueError, KeyError, TypeError: it is none.
    """
    limit, window_seconds, algorithm, burst = values["limit"]
    rule = Limit(
        limit=limit, window_seconds=window_seconds, algorithm=Algorithm(algorithm), burst=burst
    )
    state = values["state"]
    if isinstance(state, str):
        state = bytes.fromhex(state)
    elif state is not None:
        state = tuple(state)
    bucket = HeldBucket(name, None, rule, state)
    return bucket.restored(values, ends_us)
