"""The RateLimiterConfig service: creates, changes, deletes, reads and lists rules.

A write is answered once it is stored and in this node's rule book, so it decides the caller's next check on this node.
:mod:`ratelimitd.rules.validation` defines valid rules. See ADR 0008 and ADR 0013.
"""

from __future__ import annotations

import asyncio
import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, Final, Protocol

from ratelimitd.errors import FieldViolation, RuleInvalidError, RuleNotFoundError
from ratelimitd.model import IdentifierType
from ratelimitd.rpc.interface import Call, Methods
from ratelimitd.rules.applying import MAX_APPLIED
from ratelimitd.rules.assignments import is_utf8
from ratelimitd.rules.store import (
    MAX_PAGE_LIMITS,
    Applied,
    RuleDraft,
    RuleStore,
    in_order,
    limit_count,
)
from ratelimitd.rules.validation import type_problem
from ratelimitd.services.convert_rules import change_of, draft_of, rate_limit_of, update_of
from ratelimitd.services.wire import EMPTY, parse, parse_rule, rules_within, text_of
from ratelimiter.v1.ratelimiter_pb2 import (
    ApplyRateLimitsRequest,
    ApplyRateLimitsResponse,
    CreateRateLimitRequest,
    DeleteRateLimitRequest,
    GetRateLimitRequest,
    ListRateLimitsRequest,
    ListRateLimitsResponse,
    UpdateRateLimitRequest,
)

SEAL_BYTES: Final = 16
"""128 bits, compared in constant time."""

# A separator: no endpoint or identifier type contains a control character.
_PART: Final = "\x00"


Place = tuple[str, str]
"""Endpoint and identifier type of a rule; as a filter, an empty text matches all."""


def sealed(body: bytes, seal: Callable[[bytes], bytes]) -> str:
    """Return a text that holds a body and, behind it, its seal of ``SEAL_BYTES``.

    It begins as the body does: a text that began with the seal could begin with a hyphen, as options of commands do.
    """
    return urlsafe_b64encode(body + seal(body)).decode().rstrip("=")


def unsealed(text: bytes, seal: Callable[[bytes], bytes]) -> bytes | None:
    """Return the body of a text of :func:`sealed`; ``None`` if it was not made with this ``seal``."""
    try:
        body = urlsafe_b64decode(text + b"=" * (-len(text) % 4))[:-SEAL_BYTES]
    except ValueError:
        return None
    # Encoded again and compared whole, since base64 has several texts for the same bytes.
    return body if hmac.compare_digest(text, sealed(body, seal).encode()) else None


def page_token(position: Place, query: Sequence[str], key: bytes) -> str:
    """Return the token that continues ``query`` after ``position``, two texts without NUL. ``key`` is 1 to 64 bytes."""
    return sealed(_PART.join(position).encode(), partial(_seal, query, key))


def position_of(token: str, query: Sequence[str], key: bytes) -> Place:
    """Return the position in a token.

    Raises:
        RuleInvalidError: the token was not made with this key for this query.
    """
    text = unsealed(token.encode(errors="replace"), partial(_seal, query, key))
    if text is None:
        message = "must be a token of the page before, with its filters"
        raise RuleInvalidError(FieldViolation("page_token", message))
    name, identifier_type = text.decode().split(_PART)
    return name, identifier_type


def _seal(query: Sequence[str], key: bytes, text: bytes) -> bytes:
    bound = _PART.join(query).encode("utf-8", "surrogateescape")
    keyed = blake2b(key=key, digest_size=SEAL_BYTES, person=b"page token")
    keyed.update(len(bound).to_bytes(4, "big") + bound + text)
    return keyed.digest()


SERVICE: Final = "ratelimiter.v1.RateLimiterConfig"

DEFAULT_PAGE_SIZE: Final = 100
MAX_PAGE_SIZE: Final = 1_000
"""Rules in one answer: at most 1.4 MB, with ``MAX_PAGE_LIMITS`` 2.6 MB, well below the 4 MiB of a message."""

MAX_CHANGES: Final = 1_000
MAX_CHANGES_BYTES: Final = 2 * 1024 * 1024
"""Changes in one answer, and their bytes: a rule with many plans takes 10 KB."""

BYTES_PER_STEP: Final = 4_096
"""Bytes of rules that are read or written per event-loop iteration: about 1 ms."""

PAGE_KEY_NAME: Final = "page-token"
"""Name of the secret that seals page tokens; it is in the store, so that every node accepts every node's tokens."""


class Feed(Protocol):
    """A :class:`ratelimitd.rules.feed.RuleFeed`, or a wrapper that notifies other nodes as well."""

    async def notify(self) -> None:
        """Load the changes in the store; does not raise on errors of the store, since polling will catch up."""


class ConfigService:
    """Handlers of the rules.

    ``actor`` returns the actor of a call for the audit trail. ``types`` are the identifier types that rules may have,
    alone or combined. ``is_unused`` returns whether the rule of an id has decided no check since this node started.
    """

    def __init__(
        self,
        store: RuleStore,
        feed: Feed,
        actor: Callable[[Call], str],
        *,
        types: Collection[str] = tuple(IdentifierType),
        is_unused: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._store = store
        self._feed = feed
        self._actor = actor
        self._types = types
        self._is_unused = is_unused
        self._page_key = b""
        self._applying = asyncio.Lock()

    def methods(self) -> Methods:
        """Return the handlers by path."""
        return Methods(
            unary={
                f"/{SERVICE}/CreateRateLimit": self.create_rate_limit,
                f"/{SERVICE}/UpdateRateLimit": self.update_rate_limit,
                f"/{SERVICE}/DeleteRateLimit": self.delete_rate_limit,
                f"/{SERVICE}/ListRateLimits": self.list_rate_limits,
                f"/{SERVICE}/GetRateLimit": self.get_rate_limit,
                f"/{SERVICE}/ApplyRateLimits": self.apply_rate_limits,
            }
        )

    async def create_rate_limit(self, data: bytes, call: Call) -> bytes:
        """Create a rule; its id may be a UUID of the caller's choice."""
        draft = draft_of(parse(CreateRateLimitRequest, data).rate_limit)
        rule = await self._store.create(draft, self._actor(call))
        await self._feed.notify()
        return rate_limit_of(rule).SerializeToString()

    async def update_rate_limit(self, data: bytes, call: Call) -> bytes:
        """Change a rule: the fields in the mask, or all without one."""
        update = update_of(parse(UpdateRateLimitRequest, data), self._types)
        try:
            rule = await self._store.update(
                update.rule_id, update.changes, update.etag, self._actor(call)
            )
        except RuleNotFoundError:
            if update.undeclared:
                raise RuleInvalidError(*update.undeclared) from None
            raise
        await self._feed.notify()
        return rate_limit_of(rule).SerializeToString()

    async def delete_rate_limit(self, data: bytes, call: Call) -> bytes:
        """Delete a rule."""
        message = parse(DeleteRateLimitRequest, data)
        await self._store.delete(text_of(message.id), text_of(message.etag), self._actor(call))
        await self._feed.notify()
        return EMPTY

    async def list_rate_limits(self, data: bytes, _call: Call) -> bytes:
        """Return one page of the rules, ordered by the bytes of endpoint, then identifier type."""
        message = parse(ListRateLimitsRequest, data)
        query, size = _query_of(message, self._types)
        token = text_of(message.page_token)
        after = position_of(token, query, await self.page_key()) if token else None
        # One more than requested shows whether there is a next page.
        rules = await self._store.page(*query, after, size + 1)
        page = rules[:size]
        parts = (
            ListRateLimitsResponse(rate_limits=[rate_limit_of(rule)]).SerializeToString()
            for rule in page
            if not message.unused or self._is_unused(rule.id)
        )
        answer = [part async for part in _paced(parts)]
        if len(rules) > size or sum(map(limit_count, rules)) >= MAX_PAGE_LIMITS:
            position = page[-1].endpoint, page[-1].identifier_type
            end = page_token(position, query, await self.page_key())
            answer.append(ListRateLimitsResponse(next_page_token=end).SerializeToString())
        # The concatenation of messages is one message with the repeated fields of all of them.
        return b"".join(answer)

    async def get_rate_limit(self, data: bytes, _call: Call) -> bytes:
        """Return one rule, by its id or by its endpoint and identifier type."""
        message = parse(GetRateLimitRequest, data)
        if message.id:
            if message.endpoint or message.identifier_type:
                text = "replaces endpoint and identifier_type: send it without them"
                raise RuleInvalidError(FieldViolation("id", text))
            rule = await self._store.rule(text_of(message.id))
        else:
            place = _place_of(message, self._types)
            found = await self._store.page(*place, None, 1)
            if not found:
                raise RuleNotFoundError(*place)
            rule = found[0]
        return rate_limit_of(rule).SerializeToString()

    async def apply_rate_limits(self, data: bytes, call: Call) -> bytes:
        """Apply a whole set of rules. Calls run one at a time: each holds up to 20,000 rules in memory."""
        async with self._applying:
            drafts: list[RuleDraft] = []
            others = bytearray()
            async for rule in _paced(rules_within(data, others)):
                if len(drafts) == MAX_APPLIED:
                    text = f"must be at most {MAX_APPLIED}"
                    raise RuleInvalidError(FieldViolation("rate_limits", text))
                drafts.append(draft_of(parse_rule(rule)))
            message = parse(ApplyRateLimitsRequest, bytes(others))
            _refuse_wrong_revisions(message, has_rules=bool(drafts))
            actor, dry_run, since = self._actor(call), message.dry_run, message.revision
            if message.as_of:
                applied = await self._store.revert(
                    message.as_of, actor, dry_run=dry_run, since=since
                )
            else:
                applied = await self._store.apply(
                    drafts, actor, prune=message.prune, dry_run=dry_run, since=since
                )
        if not message.dry_run:
            await self._feed.notify()
        return await _applied_answer(applied, dry_run=message.dry_run)

    async def page_key(self) -> bytes:
        """Return the key of page tokens; read on first use, since a node also starts without its store.

        Call it for a token only: the first use of a store creates the key, which a read-only one refuses.
        """
        if not self._page_key:
            self._page_key = await self._store.secret(PAGE_KEY_NAME)
        return self._page_key


async def _paced(rules: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield serialised rules, about 1 ms of work per event-loop iteration."""
    size = 0
    for rule in rules:
        yield rule
        size += len(rule) + 2
        if size >= BYTES_PER_STEP:
            size = 0
            await asyncio.sleep(0)


def _refuse_wrong_revisions(message: Any, *, has_rules: bool) -> None:
    violations = [
        FieldViolation(name, "must not be negative")
        for name in ("revision", "as_of")
        if getattr(message, name) < 0
    ]
    if message.as_of and (has_rules or message.prune):
        text = "replaces rate_limits and prune: send it without them"
        violations.append(FieldViolation("as_of", text))
    if violations:
        raise RuleInvalidError(*violations)


async def _applied_answer(applied: Applied, *, dry_run: bool) -> bytes:
    """Return the answer to an applied set, with its changes up to the bounds."""
    numbers = ApplyRateLimitsResponse(
        revision=applied.revision,
        created=applied.counts["create"],
        updated=applied.counts["update"],
        deleted=applied.counts["delete"],
        unchanged=applied.counts[""],
    )
    changes = bytearray()
    parts = (
        ApplyRateLimitsResponse(changes=[change_of(change, dry_run=dry_run)]).SerializeToString()
        for change in applied.changes[:MAX_CHANGES]
    )
    async for part in _paced(parts):
        if len(changes) + len(part) > MAX_CHANGES_BYTES:
            break
        changes += part
    return numbers.SerializeToString() + changes


def _place_of(message: Any, types: Collection[str]) -> Place:
    """Return the endpoint and the identifier type of the requested rule."""
    violations = []
    place = text_of(message.endpoint), in_order(text_of(message.identifier_type))
    if not message.endpoint:
        text = "must be the rule's, with its identifier_type, unless id is sent"
        violations.append(FieldViolation("endpoint", text))
    elif problem := _text_problem(message.endpoint):
        violations.append(FieldViolation("endpoint", problem))
    if problem := type_problem(place[1], types):
        violations.append(FieldViolation("identifier_type", problem))
    if violations:
        raise RuleInvalidError(*violations)
    return place


def _query_of(message: Any, types: Collection[str]) -> tuple[Place, int]:
    """Return the filters and the page size: the default for 0, and at most the maximum."""
    violations = []
    query = text_of(message.endpoint), in_order(text_of(message.identifier_type))
    if problem := _text_problem(message.endpoint):
        violations.append(FieldViolation("endpoint", problem))
    if query[1] and (problem := type_problem(query[1], types)):
        violations.append(FieldViolation("identifier_type", problem))
    if message.page_size < 0:
        violations.append(FieldViolation("page_size", "must not be negative"))
    if violations:
        raise RuleInvalidError(*violations)
    return query, min(message.page_size, MAX_PAGE_SIZE) or DEFAULT_PAGE_SIZE


def _text_problem(octets: bytes) -> str:
    """Return the problem of a text to look up, or an empty text; PostgreSQL stores no zero bytes."""
    if not is_utf8(octets):
        return "must be valid UTF-8"
    return "must not contain control characters" if b"\0" in octets else ""
