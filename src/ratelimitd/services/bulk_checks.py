"""Answers many checks from their bytes, without message objects.

All checks of one endpoint share most of their bytes: type, endpoint and cost in the request; limit, window and rule in
the answer. The bytes after the identifier are the key of a cache, whose values hold the rule, the suffix of the bucket
key, and the end of the answer. Only the canonical encoding is cached (each field once, in order, shortest varints), so
that other encodings do not get buckets of their own; the general path handles them and all errors. See ADR 0021.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias
from zlib import crc32

from ratelimitd.counters import CheckStats
from ratelimitd.errors import InvalidInputError
from ratelimitd.limiter.limiter import Limiter
from ratelimitd.limiter.scopes import (
    MAX_BY_PLANS,
    MAX_OF_PLANS,
    PlanScopes,
    Scope,
    Unjudged,
    limits_in,
)
from ratelimitd.model import INT32_MAX, Check, IdentifierType, Outcome, Reason
from ratelimitd.rules.book import RuleBook
from ratelimitd.services.convert import (
    CONTRACT_IDENTITIES,
    Identities,
    answer_of,
    check_of,
    is_canonical_address,
)
from ratelimitd.services.wire import WireCheck, parse_check
from ratelimitd.services.wire_format import (
    CONTINUED,
    KEPT,
    KEPT_BITS,
    KEPT_NUMBERS,
    LOW_BITS,
    ONE_BYTE,
    TWICE_KEPT,
    varint,
)

MAX_KNOWN: Final = 4_096
"""Cached endings of requests. Few are needed: endpoints are route templates, and costs are small."""

MAX_KNOWN_BYTES: Final = 256
"""Longest cached ending; 1 MB in all."""

MAX_LEARNED: Final = 100
"""Messages with unknown endings that are parsed per call, 5 µs each; bounds the delay of others."""

MAX_RESET_TIMES: Final = 1_024

MAX_ANSWER_BYTES: Final = 1_023
"""Longest answer: about eight limits."""

_MOST_STATUS_BYTES: Final = 3 + 2 + 6 + 11 + 6 + 2
"""Tag and length of an entry in ``limits``, and its longest outcome."""

# equivalent: a larger number leaves more answers to the general path, which returns the same
_MOST_NUMBERS_BYTES: Final = 2 + 6 + 11 + 6 + 2
"""Longest start of an answer, fields 1 to 5."""

_RESET_BYTES: Final = 1 + 5
"""Tag and reset time, from 1978 to 3058."""

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
_WITHIN_LIMIT: Final = _REASON + KEPT[Reason.WITHIN_LIMIT]
_LIMIT: Final = b"\x30"
_WINDOW_SECONDS: Final = b"\x38"
_RULE_ID: Final = b"\x42"
_LIMITS: Final = b"\x52"
_LIMIT_NAME: Final = b"\x5a"
_PLAN: Final = b"\x62"

# Tags of LimitStatus.
_STATUS_RULE_ID: Final = b"\x0a"
_STATUS_NAME: Final = b"\x12"
_STATUS_TYPE: Final = b"\x1a"
_STATUS_ALLOWED: Final = b"\x20\x01"
_STATUS_REMAINING: Final = b"\x28"
_STATUS_RESET_TIME: Final = b"\x30"
_STATUS_RETRY_AFTER: Final = b"\x38"
_STATUS_LIMIT: Final = b"\x40"
_STATUS_WINDOW_SECONDS: Final = b"\x48"
_STATUS_REASON: Final = b"\x50"
_STATUS_OBSERVE: Final = b"\x58\x01"
_STATUS_PLAN: Final = b"\x62"


_Known: TypeAlias = tuple[Check, "Scope | _ByPlan", int, bool, bytes, bytes, "Sequence[_Parts]"]
"""Cached data of an ending: (check with any identifier, scope, cost, whether identifiers are addresses, end of the
answer after the reason, the same with the reason of an allowed check, parts of the answer by the limits of
``scope.several``). If the identifier may have a plan, the plan selects the scope, and the parts are ``_OF_PLAN``.

A bare tuple for the same reason as :data:`ratelimitd.model.Outcome`. ``None`` is cached for endings without a rule,
which the general path answers.
"""

_Within: TypeAlias = tuple[Sequence[bytes], Sequence[tuple[int, Sequence[bytes]]], bytes]
"""Constant bytes of an answer whose limits all allow the check, if reset times take ``_RESET_BYTES``: what precedes the
remaining tokens in the entry of the deciding limit, by their length; the places of the other limits, and the same for
each; the end.
"""

_Parts: TypeAlias = tuple[tuple[bytes, bytes], tuple[bytes, bytes, bytes], _Within]
"""Constant bytes of the answers for one limit. The answer: limit, window and rule id; the limit's name. Its entry in
``limits``: the beginning; limit and window; the bytes after the reason. Last, for allowed checks it decides.
"""

_OF_PLAN: Final[Sequence[_Parts]] = (((b"", b""), (b"", b"", b""), ((), (), b"")),)
"""Placeholder for parts that depend on the identifier's plan."""


class _ByPlan:
    """Cached data of requests whose identifier may have a plan.

    ``known`` is keyed by the ``id`` of a scope; its values keep the scope alive.
    """

    __slots__ = ("check", "known", "scopes")

    def __init__(self, check: Check, scopes: PlanScopes) -> None:
        self.check = check
        self.scopes = scopes
        self.known: dict[int, tuple[Scope, _Known | None]] = {}


ParsedCheck: TypeAlias = tuple[bytes, _Known]
"""An identifier and the cached data of its request."""


class BulkChecks:
    """Answers messages of ``CheckRateLimit``. ``perf_counter_s`` is in seconds."""

    def __init__(
        self,
        limiter: Limiter,
        stats: CheckStats,
        perf_counter_s: Callable[[], float],
        identities: Identities = CONTRACT_IDENTITIES,
    ) -> None:
        self._identities = identities
        self._limiter = limiter
        self._scopes = limiter.scopes
        self._stats = stats
        self._perf_counter_s = perf_counter_s
        self._known: dict[bytes, _Known | None] = {}
        self._of_plans = 0
        self._book: RuleBook | None = None
        self._reset_times: dict[int, bytes] = {}
        self._status_resets: dict[int, bytes] = {}

    def answer_calls(self, messages: Sequence[bytes]) -> Sequence[bytes | None]:
        """Answer messages of one call each; ``None`` where the unary handler must answer.

        A handler of :attr:`ratelimitd.rpc.interface.Methods.bulk`.
        """
        started_s = self._perf_counter_s()
        answers = self.answer(self.read(messages))
        answered = len(answers) - answers.count(None)
        if answered:
            self._stats.observe_latency(self._perf_counter_s() - started_s, answered)
        return answers

    def read(self, messages: Sequence[bytes]) -> list[ParsedCheck | None]:
        """Parse messages under the rules in force; ``None`` where the general path must answer."""
        if self._scopes.book is not self._book:
            self._book, self._known, self._of_plans = self._scopes.book, {}, 0
        known, to_learn = self._known, MAX_LEARNED
        checks: list[ParsedCheck | None] = []
        add = checks.append
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
                    or (common[3] and not is_canonical_address(identifier))
                ):
                    add(None)
                else:
                    add((identifier, common))
            except Exception:  # noqa: BLE001 -- too short, not an address, or an error: the general path reports it
                add(None)
        return checks

    def answer(  # noqa: C901, PLR0912 -- one loop: a call more costs every check 50 ns
        self, checks: Sequence[ParsedCheck | None]
    ) -> list[bytes | None]:
        """Decide questions in order, at one instant; ``None`` where the general path must answer."""
        charge, reset_times = self._limiter.charge, self._reset_times
        recorder, sampled = self._limiter.recorder, []
        seed, below = (recorder.seed, recorder.below) if recorder is not None else (0, 0)
        try:
            now_us = self._limiter.now_us()
        except Exception:  # noqa: BLE001 -- as below
            return [None] * len(checks)
        answers: list[bytes | None] = []
        add = answers.append
        for check in checks:
            if check is None:
                add(None)
                continue
            identifier, (_, scope, cost, _, rule_part, within_part, parts) = check
            if below and crc32(identifier, seed) < below:
                sampled.append(len(answers))
            try:
                if parts is _OF_PLAN:
                    by_plan: _ByPlan = scope  # type: ignore[assignment]
                    of_plan = self._of_plan(identifier, by_plan, now_us)
                    if of_plan is None:
                        add(self._answer_wholly(identifier, by_plan, now_us))
                        continue
                    _, scope, cost, _, rule_part, within_part, parts = of_plan
                # From here on it is a scope; a cast would cost every check 50 ns.
                if parts:
                    judged = self._limiter.judge((identifier,), scope, now_us, cost)  # type: ignore[arg-type]
                    if judged is not None and len(parts) > 1:
                        add(self._answer_several(judged, parts))
                        continue
                    outcome = None if judged is None else judged[1]
                else:
                    outcome = charge(identifier, scope, now_us, cost)  # type: ignore[arg-type]
            except Exception:  # noqa: BLE001 -- the general path raises the same error and handles it
                add(None)
                continue
            if outcome is None:
                add(None)
                continue
            allowed, remaining, reset_time, retry_after, reason, _ = outcome
            reset = reset_times.get(reset_time)
            if reset is None:
                reset = self._reset(reset_time)
            if remaining and allowed:
                # All algorithms: the reason is WITHIN_LIMIT and the retry delay 0.
                left = KEPT[remaining] if remaining < KEPT_NUMBERS else varint(remaining)
                add(_ALLOWED_AND_REMAINING + left + reset + within_part)
            else:
                start = _start(allowed, remaining)
                add(start + reset + _end(retry_after, reason) + rule_part)
        for place in sampled:
            self._record(checks[place], answers[place], now_us)
        return answers

    def _record(self, check: ParsedCheck | None, answer: bytes | None, now_us: int) -> None:
        recorder = self._limiter.recorder
        # Without an answer the general path records the check.
        if recorder is not None and check is not None and answer is not None:
            identifier, known = check
            recorder.record(identifier, known[0], now_us, allowed=answer.startswith(_ALLOWED))

    def _answer_wholly(self, identifier: bytes, by_plan: _ByPlan, now_us: int) -> bytes | None:
        """Answer a check without a cached ending here, in order: later checks may share its buckets."""
        check = by_plan.check._replace(identifier=identifier)
        decision = self._limiter.check(check, now_us, is_recorded=False)
        return None if decision is None else answer_of(decision).SerializeToString()

    def _of_plan(self, identifier: bytes, by_plan: _ByPlan, now_us: int) -> _Known | None:
        """Return the cached data for the plan of an identifier; ``None`` if the answer cannot be encoded here."""
        resolved = self._scopes.resolve_plans((identifier,), by_plan.scopes, now_us)
        if isinstance(resolved, Unjudged):
            return None
        found = by_plan.known.get(id(resolved))
        if found is None:
            self._of_plans += limits_in(resolved)
            if self._of_plans > MAX_OF_PLANS:
                self._known, self._of_plans = {}, 0
            if len(by_plan.known) >= MAX_BY_PLANS:
                by_plan.known.clear()
            found = by_plan.known[id(resolved)] = resolved, _known(by_plan.check, resolved)
        return found[1]

    def _answer_several(
        self, judged: tuple[int, Outcome, Sequence[Outcome]], parts: Sequence[_Parts]
    ) -> bytes:
        """Encode an answer; fastest if all limits allow the check and have tokens left."""
        first, _, outcomes = judged
        _, _, (starts, others, end) = parts[first]
        allowed, remaining, reset_time, _, _, _ = outcomes[first]
        resets = self._status_resets
        # As in :meth:`answer`: the reason is WITHIN_LIMIT and the retry delay 0.
        if not (allowed and remaining):
            return self._answer_any(judged, parts)
        if remaining < KEPT_NUMBERS:
            left = KEPT[remaining]
        elif remaining < TWICE_KEPT:
            left = CONTINUED[remaining & LOW_BITS] + KEPT[remaining >> KEPT_BITS]
        else:
            left = varint(remaining)
        try:
            reset, status_reset = self._reset_times[reset_time], resets[reset_time]
            pieces = [_ALLOWED_AND_REMAINING, left, reset, starts[len(left)], left, status_reset]
            for place, starts in others:
                allowed, remaining, reset_time, _, _, _ = outcomes[place]
                if not (allowed and remaining):
                    return self._answer_any(judged, parts)
                if remaining < KEPT_NUMBERS:
                    left = KEPT[remaining]
                elif remaining < TWICE_KEPT:
                    left = CONTINUED[remaining & LOW_BITS] + KEPT[remaining >> KEPT_BITS]
                else:
                    left = varint(remaining)
                pieces += (starts[len(left)], left, resets[reset_time])
            pieces.append(end)
            return b"".join(pieces)
        except KeyError:  # a new reset time, or one of another length
            return self._answer_any(judged, parts)

    def _answer_any(
        self, judged: tuple[int, Outcome, Sequence[Outcome]], parts: Sequence[_Parts]
    ) -> bytes:
        first, (allowed, remaining, reset_time, retry_after, reason, _), outcomes = judged
        (numbers, name), _, (_, others, _) = parts[first]
        reset = self._reset_times.get(reset_time) or self._reset(reset_time)
        answer = _start(allowed, remaining) + reset + _end(retry_after, reason) + numbers
        for place in (first, *[place for place, _ in others]):
            answer += self._status(outcomes[place], parts[place])
        return answer + name

    def _status(self, outcome: Outcome, parts: _Parts) -> bytes:
        """Encode the entry of ``limits`` for one outcome."""
        allowed, remaining, reset_time, retry_after, reason, _ = outcome
        head, numbers, enforcement = parts[1]
        status = head + _STATUS_ALLOWED if allowed else head
        if remaining:
            status += _STATUS_REMAINING + varint(remaining)
        reset = self._reset_times.get(reset_time) or self._reset(reset_time)
        if reset:
            status += _STATUS_RESET_TIME + reset[1:]
        if retry_after:
            status += _STATUS_RETRY_AFTER + varint(retry_after)
        status += numbers + _STATUS_REASON + KEPT[reason] + enforcement
        return _field(_LIMITS, status)

    def _learn(self, message: bytes) -> _Known | None:
        """Cache the ending of a request if it is canonical."""
        try:
            wire = parse_check(message)
            if wire.timestamp or wire.peek:
                return None
            check = check_of(wire, self._identities)
        except InvalidInputError:
            return None
        ending, size = _ending(wire), len(wire.identifier)
        # equivalent: a length of ONE_BYTE is encoded in two bytes, so the message differs
        if size >= ONE_BYTE or message != bytes((_IDENTIFIER, size)) + wire.identifier + ending:
            return None
        if len(ending) > MAX_KNOWN_BYTES:
            return None
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        scope = self._scopes.find(check.endpoint, check.identifier_type)
        known = self._known[ending] = _known(check, scope)
        return known

    def _reset(self, reset_time: int) -> bytes:
        """Encode a reset time. Cached: few distinct seconds occur at a time, each many times."""
        if len(self._reset_times) >= MAX_RESET_TIMES:
            self._reset_times.clear()
            self._status_resets.clear()
        octets = _RESET_TIME + varint(reset_time) if reset_time else b""
        self._reset_times[reset_time] = octets
        if len(octets) == _RESET_BYTES:
            self._status_resets[reset_time] = _STATUS_RESET_TIME + octets[1:]
        return octets


def _known(check: Check, scope: Scope | PlanScopes | None) -> _Known | None:
    is_address = check.identifier_type == IdentifierType.IP
    if isinstance(scope, PlanScopes):
        return check, _ByPlan(check, scope), check.cost, is_address, b"", b"", _OF_PLAN
    if scope is None or scope.passed_over:
        return None
    parts = _parts(scope.several)
    rule_part = b"".join(_rule_part(scope))
    longest = sum(map(_longest, parts)) or len(rule_part)
    if _MOST_NUMBERS_BYTES + longest > MAX_ANSWER_BYTES:
        return None  # many limits, or the id was not made by a node
    within_part = _WITHIN_LIMIT + rule_part
    return check, scope, check.cost, is_address, rule_part, within_part, parts


def _ending(wire: WireCheck) -> bytes:
    """Return the canonical encoding of the fields after the identifier."""
    parts = [_field(_IDENTIFIER_TYPE, wire.identifier_type), _field(_ENDPOINT, wire.endpoint)]
    if wire.tokens_requested:
        parts += [_TOKENS_REQUESTED, varint(wire.tokens_requested)]
    return b"".join(parts)


def _field(tag: bytes, octets: bytes) -> bytes:
    return tag + varint(len(octets)) + octets


def _rule_part(scope: Scope) -> tuple[bytes, bytes]:
    """Return limit, window and rule id of an answer, and the name of the limit and the plan, which end it."""
    limit, window = varint(scope.rule_limit.limit), varint(scope.rule_limit.window_seconds)
    numbers = _LIMIT + limit + _WINDOW_SECONDS + window
    return (
        numbers + _field(_RULE_ID, scope.rule.id.encode()),
        _field(_LIMIT_NAME, scope.rule_limit.name.encode()) + _text_field(_PLAN, scope.plan),
    )


def _text_field(tag: bytes, text: str) -> bytes:
    return _field(tag, text.encode()) if text else b""


def _parts(several: Sequence[Scope]) -> Sequence[_Parts]:
    entries = [_entry(scope) for scope in several]
    within = [_within(entry) for entry in entries]
    parts = []
    for first, scope in enumerate(several):
        numbers, name = _rule_part(scope)
        others = [place for place in range(len(several)) if place != first]
        all_starts, before = [], _WITHIN_LIMIT + numbers
        for place in (first, *others):
            starts, rest = within[place]
            all_starts.append([before + start for start in starts])
            before = rest
        first_starts, *starts_of_others = all_starts
        all_within = first_starts, [*zip(others, starts_of_others, strict=True)], before + name
        parts.append(((numbers, name), entries[first], all_within))
    return parts


def _entry(scope: Scope) -> tuple[bytes, bytes, bytes]:
    rule, limit = scope.rule, scope.rule_limit
    head = _field(_STATUS_RULE_ID, rule.id.encode()) + _field(_STATUS_NAME, limit.name.encode())
    head += _field(_STATUS_TYPE, rule.identifier_type.encode())
    numbers = (
        _STATUS_LIMIT + varint(limit.limit) + _STATUS_WINDOW_SECONDS + varint(limit.window_seconds)
    )
    end = b"" if scope.would_deny is None else _STATUS_OBSERVE
    return head, numbers, end + _text_field(_STATUS_PLAN, scope.plan)


def _within(entry: tuple[bytes, bytes, bytes]) -> tuple[Sequence[bytes], bytes]:
    head, numbers, end = entry
    within = numbers + _STATUS_REASON + KEPT[Reason.WITHIN_LIMIT] + end
    start = head + _STATUS_ALLOWED + _STATUS_REMAINING
    fixed = len(start) + _RESET_BYTES + len(within)
    sizes = range(len(varint(INT32_MAX)) + 1)
    return [_LIMITS + varint(fixed + size) + start for size in sizes], within


def _longest(parts: _Parts) -> int:
    rule_part, entry, *_ = parts
    return _MOST_STATUS_BYTES + sum(map(len, (*rule_part, *entry)))


# Zeros are not encoded (proto3).


def _start(allowed: bool, remaining: int) -> bytes:  # noqa: FBT001 -- as it stands in an outcome
    if not remaining:
        return _ALLOWED if allowed else b""
    return (_ALLOWED_AND_REMAINING if allowed else _REMAINING) + varint(remaining)


def _end(retry_after: int, reason: Reason) -> bytes:
    """Encode retry delay and reason; the reason is never zero."""
    end = _REASON + KEPT[reason]
    return _RETRY_AFTER + varint(retry_after) + end if retry_after else end
