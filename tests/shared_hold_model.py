"""The store's side of holds in Python, for the simulation and as the reference of the Lua scripts. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ratelimitd.algorithms import concurrency
from ratelimitd.algorithms.several import MORE_THAN_ANY_LIMIT
from ratelimitd.ledger.accounts import ACCOUNTS, Refund
from ratelimitd.ledger.holds import GRACE_S
from ratelimitd.ledger.shared_holds import (
    MAX_ATTEMPTS,
    HoldCall,
    HoldReply,
    Made,
    Step,
    StepCall,
    Stepped,
    StepReply,
)
from ratelimitd.ledger.shared_state import (
    OBSERVES,
    STORE_TIME,
    SharedState,
    StoreCheck,
    Update,
    refunded,
)
from ratelimitd.model import (
    ALLOWED,
    MAX_TIME_US,
    US_PER_S,
    WITHIN_LIMIT,
    Algorithm,
    Limit,
    Outcome,
)
from tests import ledger_model


class Kept(NamedTuple):
    """A bucket in the store.

    ``mark`` is when it was first charged for a hold, 0 if it was not: it is that of no other bucket of the name, and
    ends when an edit lowers the limit or forgives something. Only what was charged under it is given back.
    """

    shared: SharedState
    mark: int = 0


class Charged(NamedTuple):
    """What a hold has charged to a bucket: all that a refund needs."""

    rule: Limit
    generation: int
    mark: int
    at_us: int
    tokens: int
    spent: int
    refunded: int


class Entry(NamedTuple):
    """A bucket of a hold: what its caller was told, and what was charged, ``None`` where a limit only observes."""

    outcome: Outcome
    charged: Charged | None


class Record(NamedTuple):
    """A hold as the store remembers it; ``last_us`` is the latest end that it may have."""

    check_digest: bytes
    attempts: tuple[bytes, ...]
    made_us: int
    end_us: int
    last_us: int
    kept_until_us: int
    entries: dict[bytes, Entry]
    settled: int | None = None


PEEK = 1
"""The flag of a check that charges nothing."""

Slots = dict[bytes, int]
"""The holds of a bucket that are open, by their numbers: when they end, in µs."""


@dataclass
class _Judged:
    """A check of a hold that is being decided."""

    check: StoreCheck
    at_us: int
    outcome: Outcome
    slots: Slots
    kept: Kept | None
    is_edited: bool = False

    @property
    def rule(self) -> Limit:
        """The rule that it was judged by."""
        if self.kept is None:
            return self.check.rule
        return ledger_model.ruling_of(self.kept.shared, self.check.rule)


@dataclass(eq=False)
class HoldStore:
    """One server. ``now_us`` is its clock; ``slots`` are those in use, and of other buckets their open holds."""

    now_us: int = 0
    buckets: dict[bytes, Kept] = field(default_factory=dict)
    slots: dict[bytes, Slots] = field(default_factory=dict)
    records: dict[bytes, Record] = field(default_factory=dict)

    def log(self, kind: str, name: bytes, *what: Any) -> None:
        """Hear of a change, if that is of interest."""

    # Holds

    def hold(self, call: HoldCall) -> HoldReply:
        """Charge all buckets or none, and remember the hold; one that there is is answered as it was."""
        record = self.record(call.number)
        if record is not None:
            return self._found(call, record)
        judged = [self.judge(check) for check in call.checks]
        passing = [one for one in judged if one.outcome[0]]
        is_denied = any(not one.outcome[0] and not one.check.peek & OBSERVES for one in judged)
        if is_denied or any(len(one.slots) >= call.most for one in passing):
            for one in judged:
                self._keep_edit(one)
            made = Made.DENIED if is_denied else Made.FULL
            return HoldReply(made, 0, [self._without(one) for one in judged], call.names)
        last_us = min(
            [self.now_us + one.rule.window_us for one in passing if one.kept is None],
            default=MAX_TIME_US,
        )
        last_us = min(last_us, self.now_us + call.longest_us)
        end_us = min(self.now_us + call.ttl_us, last_us)
        entries = {one.check.name: self._charge(call, one, end_us) for one in judged}
        self.records[call.number] = Record(
            call.check_digest,
            (call.attempt,),
            self.now_us,
            end_us,
            last_us,
            self._kept_until(end_us),
            entries,
        )
        outcomes = [entry.outcome for entry in entries.values()]
        return HoldReply(Made.MADE, end_us, outcomes, call.names)

    def _found(self, call: HoldCall, record: Record) -> HoldReply:
        if record.check_digest != call.check_digest:
            return HoldReply(Made.OF_ANOTHER_CHECK, 0, (), ())
        if record.settled is not None or record.end_us <= self.now_us:
            return HoldReply(Made.OVER, 0, (), ())
        self.records[call.number] = self.joined(record, call.attempt)
        outcomes = [entry.outcome for entry in record.entries.values()]
        made = Made.MADE if record.attempts == (call.attempt,) else Made.FOUND
        return HoldReply(made, record.end_us, outcomes, [*record.entries])

    @staticmethod
    def joined(record: Record, attempt: bytes) -> Record:
        """The record after another attempt has met it; one that cannot be withdrawn has none."""
        if attempt in record.attempts or not record.attempts:
            return record
        is_full = len(record.attempts) == MAX_ATTEMPTS
        return record._replace(attempts=() if is_full else (*record.attempts, attempt))

    def judge(self, check: StoreCheck) -> _Judged:
        """Judge one check, and free the slots of holds that have ended."""
        name, rule, at_us, cost, _ = check
        at_us = self.now_us if at_us == STORE_TIME else at_us
        slots = self.slots_of(name)
        if rule.algorithm is Algorithm.CONCURRENCY:
            outcome = self._of_slots(slots, rule)
            if not outcome[0]:
                self.log("denied", name, rule.limit)
            return _Judged(check, self.now_us, outcome, slots, None)
        stored = self.buckets.get(name)
        kept = self.opened(stored, rule)
        ruling = ledger_model.ruling_of(kept.shared, rule)
        outcome = ACCOUNTS[rule.algorithm].judge(kept.shared.state, ruling, at_us, cost)
        is_edited = stored is not None and kept.shared[2::2] != stored.shared[2::2]
        return _Judged(check, at_us, outcome, slots, kept, is_edited)

    @staticmethod
    def opened(kept: Kept | None, rule: Limit) -> Kept:
        """A bucket as a node finds it that goes by ``rule``."""
        if kept is None:
            return Kept(ledger_model.settle(None, Update(rule, None)).shared)
        shared = ledger_model.settle(kept.shared, Update(rule, None)).shared
        is_marked = kept.mark and shared.limit >= kept.shared.limit
        if is_marked and shared.state == kept.shared.state:
            return Kept(shared, kept.mark)
        return Kept(shared)

    def _keep_edit(self, one: _Judged) -> None:
        if one.kept is not None and one.is_edited:
            self.buckets[one.check.name] = one.kept
            self.log("edit", one.check.name, one.check.rule)

    def _without(self, one: _Judged) -> Outcome:
        """What is said of a bucket in a hold that is not made."""
        if not one.outcome[0]:
            return _reported(one.outcome)
        if one.kept is None:
            return _there(one.outcome)
        return has_now(one.kept.shared, one.rule, one.at_us)

    def _charge(self, call: HoldCall, one: _Judged, end_us: int) -> Entry:
        name, rule, cost = one.check.name, one.rule, one.check.cost
        if not one.outcome[0]:
            self._keep_edit(one)
            return Entry(_reported(one.outcome), None)
        self.slots[name] = one.slots
        one.slots[call.number] = end_us
        if one.kept is None:
            self.log("take", name, call.number, end_us, rule)
            outcome = self._of_slots(one.slots, rule, taken=1)
            return Entry(_reported(outcome), Charged(rule, 0, 0, self.now_us, cost, 0, 0))
        shared = one.kept.shared._replace(state=one.outcome[5])
        mark = one.kept.mark or self.now_us
        self.buckets[name] = Kept(shared, mark)
        account = ACCOUNTS[rule.algorithm]
        at_us, _ = account.standing(shared.state)
        charged = Charged(
            rule, shared.generation, mark, at_us, cost, account.spent(shared.state, rule), shared.refunded
        )  # fmt: skip
        self.log("hold", name, one.check.rule, call.number, at_us, cost)
        return Entry(_reported(one.outcome), charged)

    # Steps

    def step(self, call: StepCall) -> StepReply:
        """Settle a hold once, let it end later, or withdraw an attempt to make it."""
        record = self.record(call.number)
        if record is None:
            return StepReply(Stepped.UNKNOWN)
        if call.step is Step.WITHDRAW:
            return self._withdraw(call, record)
        if record.settled is not None:
            return self._after_settle(call, record)
        if record.end_us <= self.now_us:
            return StepReply(Stepped.ENDED, record.end_us)
        return (self._extend if call.step is Step.EXTEND else self._settle)(call, record)

    def _after_settle(self, call: StepCall, record: Record) -> StepReply:
        if call.step is Step.SETTLE and record.settled == call.amount:
            outcomes = self._outcomes(call, record)
            return StepReply(Stepped.AS_BEFORE, record.end_us, outcomes=outcomes)
        return StepReply(Stepped.SETTLED, record.end_us)

    def _settle(self, call: StepCall, record: Record) -> StepReply:
        given_back = owed = 0
        for name in call.names:
            entry = record.entries.get(name)
            if entry is not None and entry.charged is not None:
                change = self.settle_bucket(call.number, name, entry.charged, call.amount)
                given_back += max(0, -change)
                owed += max(0, change)
        self.records[call.number] = record._replace(
            settled=call.amount, kept_until_us=self._kept_until(record.end_us)
        )
        outcomes = self._outcomes(call, record)
        return StepReply(Stepped.DONE, record.end_us, given_back, owed, outcomes)

    def settle_bucket(self, number: bytes, name: bytes, charged: Charged, actual: int) -> int:
        """Charge ``actual`` in place of what is held; return the tokens charged, negative if given back."""
        self.slots_of(name).pop(number, None)
        kept = self.buckets.get(name)
        if charged.rule.algorithm is Algorithm.CONCURRENCY:
            self.log("free", name, number)
            return 0
        if kept is None:
            return 0
        shared, mark = kept
        rule, change = ledger_model.ruling_of(shared, charged.rule), 0
        account = ACCOUNTS[rule.algorithm]
        if actual < charged.tokens and self.may_refund(kept, charged):
            refund = Refund(
                *shared[:2], charged.at_us, charged.tokens - actual, charged.spent, charged.refunded
            )
            after = refunded(shared, rule, [refund])
            change = shared.refunded - after.refunded
            shared = after
        elif actual > charged.tokens and charged.generation == shared.generation:
            change = self.owed(charged, actual)
            state = account.charged(
                shared.state, self.owing(rule, charged), [(charged.at_us, change)]
            )
            shared = shared._replace(state=state)
        self.buckets[name] = Kept(shared, mark)
        self.log("settle", name, charged.rule, number, actual, change)
        return change

    @staticmethod
    def may_refund(kept: Kept, charged: Charged) -> bool:
        """Whether a bucket is the one that was charged, as it is by what has been since."""
        return kept.mark == charged.mark

    @staticmethod
    def owed(charged: Charged, actual: int) -> int:
        """How much more than was held is charged."""
        return actual - charged.tokens

    @staticmethod
    def owing(rule: Limit, charged: Charged) -> Limit:
        """By what more tokens are charged: a window overdrawn under a lower limit is not forgiven by a higher one."""
        return replace(rule, limit=min(rule.limit, charged.rule.limit))

    def _extend(self, call: StepCall, record: Record) -> StepReply:
        end_us = max(record.end_us, min(self.now_us + call.amount, record.last_us))
        for name in call.names:
            entry, slots = record.entries.get(name), self.slots_of(name)
            if entry is not None and entry.charged is not None and call.number in slots:
                slots[call.number] = end_us
                self.log("extend", name, call.number, end_us)
        self.records[call.number] = record._replace(
            end_us=end_us, kept_until_us=self._kept_until(end_us)
        )
        return StepReply(Stepped.DONE, end_us)

    def _withdraw(self, call: StepCall, record: Record) -> StepReply:
        if call.attempt not in record.attempts:
            return StepReply(Stepped.AS_BEFORE, record.end_us)
        attempts = tuple([one for one in record.attempts if one != call.attempt])
        if attempts or record.settled is not None:
            self.records[call.number] = record._replace(attempts=attempts)
            return StepReply(Stepped.AS_BEFORE, record.end_us)
        for name in call.names:
            self.log("withdraw", name, call.number)
        reply = self._settle(call._replace(amount=0), record)
        del self.records[call.number]
        return reply._replace(outcomes=())

    def _outcomes(self, call: StepCall, record: Record) -> Sequence[Outcome | None]:
        return [self._has_now(call, name, record.entries.get(name)) for name in call.names]

    def _has_now(self, call: StepCall, name: bytes, entry: Entry | None) -> Outcome | None:
        if entry is None or entry.charged is None:
            return None
        rule, now = entry.charged.rule, call.limits.get(name)
        if now and (now.algorithm, now.window_us) != (rule.algorithm, rule.window_us):
            now = None  # it has another bucket
        if rule.algorithm is Algorithm.CONCURRENCY:
            return _there(self._of_slots(self.slots_of(name), now or rule))
        kept = self.buckets.get(name)
        if kept is None:
            return None
        if now:
            rule, kept = now, self.opened(kept, now)
        shared, at_us = kept.shared, self.now_us if call.at_us == STORE_TIME else call.at_us
        return has_now(shared, ledger_model.ruling_of(shared, rule), at_us)

    # What else the store does

    def decide(self, check: StoreCheck) -> Outcome:
        """Decide one check, which takes no slot."""
        return self.decide_all([check])[0]

    def decide_all(self, checks: Sequence[StoreCheck]) -> list[Outcome]:
        """Decide one check on several buckets: all are charged, or none if one is denied that does not only observe."""
        judged = [self.judge(check) for check in checks]
        is_denied = any(not one.outcome[0] and not one.check.peek & OBSERVES for one in judged)
        for one in judged:
            self._charge_check(one, is_denied=is_denied)
        if is_denied:
            return [self._without(one) for one in judged]
        return [_reported(one.outcome) for one in judged]

    def _charge_check(self, one: _Judged, *, is_denied: bool) -> None:
        check = one.check
        if one.kept is None or check.peek & PEEK:
            return
        self._keep_edit(one)
        if one.outcome[0] and not is_denied:
            shared = one.kept.shared._replace(state=one.outcome[5])
            self.buckets[check.name] = Kept(shared, one.kept.mark)
            at_us, _ = ACCOUNTS[one.rule.algorithm].standing(shared.state)
            self.log("charge", check.name, check.rule, at_us, check.cost)

    def charge_late(self, name: bytes, rule: Limit, runs: Sequence[tuple[int, int]]) -> None:
        """A node settles what it has allowed."""
        kept = self.opened(self.buckets.get(name), rule)
        shared = ledger_model.settle(kept.shared, Update(rule, None, runs)).shared
        self.buckets[name] = Kept(shared, kept.mark)
        self.log("late", name, rule, runs)

    def reset(self, name: bytes, rule: Limit, least: int = 0) -> None:
        """Make a bucket full, in the next generation, and free its slots."""
        self.slots.pop(name, None)
        self.log("reset", name, rule)
        if rule.algorithm is Algorithm.CONCURRENCY:
            return
        kept = self.buckets.get(name)
        self.buckets[name] = Kept(ledger_model.reset(kept and kept.shared, rule, least))

    def record(self, number: bytes) -> Record | None:
        """What is remembered of a hold."""
        record = self.records.get(number)
        if record is not None and record.kept_until_us <= self.now_us:
            del self.records[number]
            return None
        return record

    def slots_of(self, name: bytes) -> Slots:
        """The slots of a bucket that are in use now."""
        slots = self.slots.get(name, {})
        for number in [number for number, end_us in slots.items() if end_us <= self.now_us]:
            del slots[number]
            self.log("over", name, number)
        return slots

    def _of_slots(self, slots: Slots, rule: Limit, taken: int = 0) -> Outcome:
        state = concurrency.Slots()
        for number, end_us in slots.items():
            state.take(number, end_us)
        if taken:
            return concurrency.held(state, rule, self.now_us)
        return (*concurrency.decide(state, rule, self.now_us, 1)[:5], None)

    def _kept_until(self, end_us: int) -> int:
        left_s = max(0, -(-(end_us - self.now_us) // US_PER_S))
        return self.now_us + (left_s + GRACE_S) * US_PER_S


def has_now(shared: SharedState, rule: Limit, at_us: int) -> Outcome:
    """What a check that costs nothing says of a bucket."""
    account = ACCOUNTS[rule.algorithm]
    return _there(account.judge(shared.state, rule, at_us, MORE_THAN_ANY_LIMIT))


def _there(denied: Outcome) -> Outcome:
    """What a denial says of a bucket, as an outcome that allows."""
    return ALLOWED, denied[1], min(denied[2], MAX_TIME_US), 0, WITHIN_LIMIT, None


def _reported(outcome: Outcome) -> Outcome:
    return (*outcome[:2], min(outcome[2], MAX_TIME_US), *outcome[3:5], None)
