"""Answers checks straight from their bytes, many at a time: no message object, no field read that is not needed.

The larger part of a check is what all checks of one endpoint have in common: type, endpoint and cost in the request,
limit, window and rule in the answer. So the octets of a request behind its identifier are looked up as they are, and
what is found has the rule, the key's suffix and the octets of the answer behind its three numbers. Only the canonical
encoding is ever kept (each field once, in order, shortest varints), so that no spelling of a request gets a bucket of
its own; a message that is anything else is for the general way, which also answers every error. See ADR 0021.

Never decides anything, and never fails open: that is the general way's business, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias

from ratelimitd.counters import CheckStats
from ratelimitd.errors import InvalidInputError
from ratelimitd.limiter import Scope
from ratelimitd.model import Check, IdentifierType, Outcome, Reason, Rule
from ratelimitd.rules.book import RuleBook
from ratelimitd.services.convert import check_of, is_canonical_address
from ratelimitd.services.wire import KEPT, ONE_BYTE, WireCheck, parse_check, varint

MAX_KNOWN: Final = 4_096
"""Endings of requests that are kept. Endpoints are route templates and costs small, so there are few."""

MAX_KNOWN_BYTES: Final = 256
"""Longest ending that is kept: 1 MB of them in all."""

MAX_LEARNED: Final = 100
"""Messages with unknown endings that are parsed in one go, 5 µs each; bounds what new ones delay."""

MAX_RESET_TIMES: Final = 1_024

MAX_ANSWER_BYTES: Final = 127
"""Longest answer: its length fits one byte when it is embedded in another message."""

_MOST_NUMBERS_BYTES: Final = 2 + 6 + 11 + 6 + 2
"""Of an answer in front of what it says of the rule: fields 1 to 5."""

_KEPT_VARINTS: Final = len(KEPT)

# Tags of the contract: field number << 3 | wire type.
_IDENTIFIER: Final = 0x0A
_IDENTIFIER_TYPE: Final = b"\x12"
_ENDPOINT: Final = b"\x1a"
_TOKENS_REQUESTED: Final = b"\x20"
_ALLOWED_AND_REMAINING: Final = b"\x08\x01\x10"
_ALLOWED: Final = b"\x08\x01"
_REMAINING: Final = b"\x10"
_RESET_TIME: Final = b"\x18"
_RETRY_AFTER: Final = b"\x20"
_REASON: Final = b"\x28"
_LIMIT: Final = b"\x30"
_WINDOW_SECONDS: Final = b"\x38"
_RULE_ID: Final = b"\x42"


class BulkChecker(Protocol):
    """What answering needs of a :class:`ratelimitd.limiter.Limiter`."""

    @property
    def book(self) -> RuleBook | None:
        """The rules in force."""

    def now_us(self) -> int:
        """The node's time, in µs since the Unix epoch."""

    def scope(self, endpoint: str, identifier_type: IdentifierType) -> Scope | None:
        """What all checks of an endpoint have in common until the next book; ``None`` without rule or book."""

    def charge(self, identifier: bytes, scope: Scope, now_us: int, cost: int) -> Outcome | None:
        """Answer one check, and charge it if it is allowed. Without an answer, or what it raises, was not charged."""


_Known: TypeAlias = tuple[Scope, int, bool, bytes, bytes]
"""What the requests with one ending have in common: scope, cost, whether identifiers are addresses; and of the answer
what is behind the reason, and the same with the reason of an allowed check.

A bare tuple for the same reason as :data:`ratelimitd.model.Outcome`. ``None`` is kept for endings to which no rule
applies: those are for the general way, and need not be learned again.
"""

Question: TypeAlias = tuple[bytes, _Known]
"""An identifier, and what is asked about it."""


class BulkChecks:
    """Answers messages of ``CheckRateLimit``. ``perf_counter_s`` is in seconds."""

    def __init__(
        self, limiter: BulkChecker, stats: CheckStats, perf_counter_s: Callable[[], float]
    ) -> None:
        self._limiter = limiter
        self._stats = stats
        self._perf_counter_s = perf_counter_s
        self._known: dict[bytes, _Known | None] = {}
        self._book: RuleBook | None = None
        self._reset_times: dict[int, bytes] = {}

    def answer_calls(self, messages: Sequence[bytes]) -> Sequence[bytes | None]:
        """Answer messages that are a call each; ``None`` where the ordinary handler has to.

        A handler of :attr:`ratelimitd.rpc.interface.Methods.bulk`.
        """
        started_s = self._perf_counter_s()
        answers = self.answer(self.read(messages))
        answered = len(answers) - answers.count(None)
        if answered:
            self._stats.observe_latency(self._perf_counter_s() - started_s, answered)
        return answers

    def read(self, messages: Sequence[bytes]) -> list[Question | None]:
        """What messages ask, under the rules of now; ``None`` for those that are for the general way."""
        if self._limiter.book is not self._book:
            self._book, self._known = self._limiter.book, {}
        known, to_learn = self._known, MAX_LEARNED
        questions: list[Question | None] = []
        ask = questions.append
        for message in messages:
            try:
                size = message[1]
                ending = message[size + 2 :]
                common = known.get(ending)
                if common is None and to_learn and ending not in known:
                    to_learn -= 1
                    common = self._learn(message)
                identifier = message[2 : size + 2]
                if (
                    common is None
                    or message[0] != _IDENTIFIER
                    or not 0 < size < ONE_BYTE
                    or not identifier.isascii()
                    or (common[2] and not is_canonical_address(identifier))
                ):
                    ask(None)
                else:
                    ask((identifier, common))
            except Exception:  # noqa: BLE001 -- too short for a message, no address, or what the general way meets, too
                ask(None)
        return questions

    def answer(self, questions: Sequence[Question | None]) -> list[bytes | None]:
        """Decide questions in their order, all at the same instant; ``None`` where the general way has to."""
        charge, reset_times = self._limiter.charge, self._reset_times
        try:
            now_us = self._limiter.now_us()
        except Exception:  # noqa: BLE001 -- as below
            return [None] * len(questions)
        answers: list[bytes | None] = []
        tell = answers.append
        for question in questions:
            if question is None:
                tell(None)
                continue
            identifier, (scope, cost, _, rule_part, within_part) = question
            try:
                outcome = charge(identifier, scope, now_us, cost)
            except Exception:  # noqa: BLE001 -- whatever it is, the general way meets it too, and knows what to do
                tell(None)
                continue
            if outcome is None:
                tell(None)
                continue
            allowed, remaining, reset_time, retry_after, reason, _ = outcome
            reset = reset_times.get(reset_time)
            if reset is None:
                reset = self._reset(reset_time)
            if remaining and allowed:
                # Within the limit then, and no need to wait: every algorithm says so.
                left = KEPT[remaining] if remaining < _KEPT_VARINTS else varint(remaining)
                tell(_ALLOWED_AND_REMAINING + left + reset + within_part)
            else:
                start = _start(allowed, remaining)
                tell(start + reset + _end(retry_after, reason) + rule_part)
        return answers

    def _learn(self, message: bytes) -> _Known | None:
        """Keep the ending of a request if it is canonical and a rule applies to it; what it holds is looked at once."""
        try:
            wire = parse_check(message)
            if wire.timestamp or wire.peek:
                return None
            check = check_of(wire)
        except InvalidInputError:
            return None
        ending, size = _ending(wire), len(wire.identifier)
        if size >= ONE_BYTE or message != bytes((_IDENTIFIER, size)) + wire.identifier + ending:
            return None
        if len(ending) > MAX_KNOWN_BYTES:
            return None
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        scope = self._limiter.scope(check.endpoint, check.identifier_type)
        known = self._known[ending] = None if scope is None else _known(check, scope)
        return known

    def _reset(self, reset_time: int) -> bytes:
        """The octets of a reset time: few seconds are asked for at a time, and each many times."""
        if len(self._reset_times) >= MAX_RESET_TIMES:
            self._reset_times.clear()
        octets = _RESET_TIME + varint(reset_time) if reset_time else b""
        self._reset_times[reset_time] = octets
        return octets


def _known(check: Check, scope: Scope) -> _Known | None:
    rule_part = _rule_part(scope.rule)
    if _MOST_NUMBERS_BYTES + len(rule_part) > MAX_ANSWER_BYTES:
        return None  # its id is not one of ours
    within_part = _REASON + varint(Reason.WITHIN_LIMIT) + rule_part
    is_address = check.identifier_type is IdentifierType.IP
    return scope, check.cost, is_address, rule_part, within_part


def _ending(wire: WireCheck) -> bytes:
    """What is behind the identifier in the canonical encoding."""
    parts = [_field(_IDENTIFIER_TYPE, wire.identifier_type), _field(_ENDPOINT, wire.endpoint)]
    if wire.tokens_requested:
        parts += [_TOKENS_REQUESTED, varint(wire.tokens_requested)]
    return b"".join(parts)


def _field(tag: bytes, octets: bytes) -> bytes:
    return tag + varint(len(octets)) + octets


def _rule_part(rule: Rule) -> bytes:
    """The end of an answer: what it says of the rule."""
    limit, window = varint(rule.limit), varint(rule.window_seconds)
    return _LIMIT + limit + _WINDOW_SECONDS + window + _field(_RULE_ID, rule.id.encode())


# Numbers that are zero stay away.


def _start(allowed: bool, remaining: int) -> bytes:  # noqa: FBT001 -- as it stands in an outcome
    start = _ALLOWED if allowed else b""
    return start + _REMAINING + varint(remaining) if remaining else start


def _end(retry_after: int, reason: Reason) -> bytes:
    """Retry delay and reason; the reason is never zero."""
    end = _REASON + varint(reason)
    return _RETRY_AFTER + varint(retry_after) + end if retry_after else end
