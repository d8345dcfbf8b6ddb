"""The rule book: which rule decides a check, as an immutable snapshot that is swapped whole.

Never does I/O and never changes once built: a check in flight keeps the book it started with. See ADR 0001 for the
precedence and ADR 0013 for how a book is kept current.

A book is two indexes, by (endpoint, identifier type) and by id, each cut into ``SHARDS`` dicts. A successor shares
every dict it does not change with its predecessor, so that changing one rule of 100,000 copies three or four dicts of
about 400 entries (some 20 µs) instead of two of 100,000 (several ms, during which no check would be answered).
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from ratelimitd.errors import StartupError
from ratelimitd.model import GLOBAL_ENDPOINT, IdentifierType, Rule
from ratelimitd.rules.store import SECRET_BYTES, RuleStore

SHARDS: Final = 256
"""Dicts per index; a power of two. At 100,000 rules each holds about 400, and the tuple of them is copied in 0.5 µs."""

_MASK: Final = SHARDS - 1

_Pair = tuple[str, IdentifierType]
_Shards = tuple[dict[_Pair, Rule], ...]
_IdShards = tuple[dict[str, Rule], ...]


class RuleBook:
    """Every rule as of one revision of the store, at most one for each id and each (endpoint, identifier type).

    ``revision`` is the store's revision that the book shows. Sharding uses the process's own ``hash``, so shards never
    leave the process; endpoints are compared byte for byte.
    """

    __slots__ = ("_by_id", "_by_pair", "_size", "revision")

    def __init__(self, by_pair: _Shards, by_id: _IdShards, size: int, revision: int) -> None:
        self._by_pair = by_pair
        self._by_id = by_id
        self._size = size
        self.revision: Final = revision

    @classmethod
    def empty(cls, revision: int = 0) -> Self:
        """A book without rules."""
        # One shared empty dict stands for all shards: an editor copies a shard before it writes to it.
        no_pairs: dict[_Pair, Rule] = {}
        no_ids: dict[str, Rule] = {}
        return cls((no_pairs,) * SHARDS, (no_ids,) * SHARDS, 0, revision)

    @classmethod
    def of(cls, rules: Iterable[Rule], revision: int) -> RuleBook:
        """A book of these rules; of two with the same id or pair the later one stays."""
        return cls.empty().with_changes(rules, (), revision)

    def match(self, endpoint: str, identifier_type: IdentifierType) -> Rule | None:
        """The rule that decides: the endpoint's own if enabled, else the enabled ``*`` rule, else ``None``."""
        rule = self._by_pair[hash(endpoint) & _MASK].get((endpoint, identifier_type))
        if rule is not None and rule.enabled:
            return rule
        rule = self._by_pair[_GLOBAL_SHARD].get((GLOBAL_ENDPOINT, identifier_type))
        return rule if rule is not None and rule.enabled else None

    def candidates(self, endpoint: str, identifier_type: IdentifierType) -> tuple[Rule, ...]:
        """The endpoint's own rule and the ``*`` rule, in order of precedence, enabled or not."""
        found = []
        for name in dict.fromkeys((endpoint, GLOBAL_ENDPOINT)):
            rule = self._by_pair[hash(name) & _MASK].get((name, identifier_type))
            if rule is not None:
                found.append(rule)
        return tuple(found)

    def get(self, rule_id: str) -> Rule | None:
        """The rule with this id."""
        return self._by_id[hash(rule_id) & _MASK].get(rule_id)

    def rules(self) -> Iterator[Rule]:
        """Every rule, in no particular order; cheap to pause between two of them."""
        for shard in self._by_id:
            yield from shard.values()

    def __len__(self) -> int:
        return self._size

    def with_changes(
        self, changed: Iterable[Rule], removed_ids: Iterable[str], revision: int
    ) -> RuleBook:
        """The book after these changes: first the removals, then the changed and new rules in their order.

        Unknown ids among ``removed_ids`` are ignored. This takes about 2 µs a rule: use :class:`BookEditor` in slices
        for more than a few hundred.
        """
        editor = BookEditor(self)
        changed = tuple(changed)
        for rule_id in removed_ids:
            editor.remove(rule_id)
        # Two rules may swap their endpoints in one change: leave every old place before taking a new one.
        for rule in changed:
            editor.remove(rule.id)
        for rule in changed:
            editor.put(rule)
        return editor.finish(revision)

    def parts(self) -> Iterator[object]:
        """The dicts the book is made of, so that an owner can let go of them one at a time.

        Freeing 100,000 rules at once stalls the loop for some 10 ms.
        """
        yield from self._by_pair
        yield from self._by_id


_GLOBAL_SHARD: Final = hash(GLOBAL_ENDPOINT) & _MASK


class BookEditor:
    """Builds the successor of a book step by step, so that a caller can give the loop a turn between steps.

    The book it starts from never changes. An editor is used up by :meth:`finish`.
    """

    __slots__ = ("_by_id", "_by_pair", "_own_ids", "_own_pairs", "_size")

    def __init__(self, book: RuleBook) -> None:
        self._by_pair = list(book._by_pair)  # noqa: SLF001 -- the other half of the same structure
        self._by_id = list(book._by_id)  # noqa: SLF001
        self._own_pairs: set[int] = set()
        self._own_ids: set[int] = set()
        self._size = len(book)

    def put(self, rule: Rule) -> None:
        """Add a rule, or replace the one with the same id; a different rule with the same pair leaves the book."""
        self.remove(rule.id)
        pair = (rule.endpoint, rule.identifier_type)
        shard = self._pairs(rule.endpoint)
        holder = shard.get(pair)
        if holder is not None:
            self.remove(holder.id)
        shard[pair] = rule
        self._ids(rule.id)[rule.id] = rule
        self._size += 1

    def remove(self, rule_id: str) -> None:
        """Take the rule with this id out; an unknown id is ignored."""
        if rule_id not in self._by_id[hash(rule_id) & _MASK]:
            return
        rule = self._ids(rule_id).pop(rule_id)
        del self._pairs(rule.endpoint)[(rule.endpoint, rule.identifier_type)]
        self._size -= 1

    def finish(self, revision: int) -> RuleBook:
        """The new book."""
        return RuleBook(tuple(self._by_pair), tuple(self._by_id), self._size, revision)

    def _pairs(self, endpoint: str) -> dict[_Pair, Rule]:
        index = hash(endpoint) & _MASK
        if index not in self._own_pairs:
            self._own_pairs.add(index)
            self._by_pair[index] = self._by_pair[index].copy()
        return self._by_pair[index]

    def _ids(self, rule_id: str) -> dict[str, Rule]:
        index = hash(rule_id) & _MASK
        if index not in self._own_ids:
            self._own_ids.add(index)
            self._by_id[index] = self._by_id[index].copy()
        return self._by_id[index]


# The key of the buckets' names: the rule database's, and a copy beside the buckets for while the database is away.
#
# Never names a bucket. A copy that cannot be used counts as none. See ADR 0013, and ADR 0024 for nodes that share them.

STORED_NAME: Final = "key"
"""The store's secret that stands in for an empty KEY_SECRET."""

FILE_NAME: Final = "bucket-key"

FINGERPRINT_NAME: Final = "key fingerprint"
"""Where the store keeps what tells whether nodes have the same key."""

_FINGERPRINT_OF: Final = b"ratelimitd: which key names the buckets"


async def require_same_key(store: RuleStore, key_secret: bytes) -> None:
    """See that this node's key is that of the first node that asked; of nodes that share buckets, all must ask.

    ``key_secret`` is the setting; empty = the node uses the store's key. What is kept is a keyed hash of a fixed text:
    it tells nothing of a random key, though it lets a reader of the database test guesses of a weak one.

    Raises:
        StartupError: it is another one: such a node would count in buckets of its own.
        StoreUnavailableError: the store cannot be read now.
    """
    key = key_secret or await store.secret(STORED_NAME)
    fingerprint = hmac.digest(key, _FINGERPRINT_OF, "sha256")
    if not hmac.compare_digest(await store.secret(FINGERPRINT_NAME, fingerprint), fingerprint):
        message = (
            "KEY_SECRET is not that of the other nodes on this rule database: it must be the same on all of them, or"
            " set on none"
        )
        raise StartupError(message)


class BucketKey:
    """The key of one node: the store's if it can be read in time, else the copy in ``state_dir``, else a new one.

    ``report`` takes one line for an operator; it never holds the key.
    """

    def __init__(self, state_dir: Path, *, report: Callable[[str], None]) -> None:
        self._path = state_dir / FILE_NAME
        self._report = report
        self._copy = self._load()
        self._key = self._copy or secrets.token_bytes(SECRET_BYTES)
        self._in_use = False

    async def settle(self, store: RuleStore) -> None:
        """Make the store's key this node's, or this one the store's if it has none; too late once it is in use.

        Raises:
            StoreUnavailableError: the store cannot be read now.
        """
        stored = await store.secret(STORED_NAME, self._key)
        if stored == self._key:
            return
        if self._in_use:
            self._report(
                "the rule database has another bucket key than this node uses; the next start takes the database's,"
                " and buckets start full"
            )
            return
        if self._copy is not None:
            self._report(
                "the rule database has another bucket key than the state directory; it is used, and buckets start full"
            )
        self._key = stored

    def use(self) -> bytes:
        """The key from now on, for the life of the node; leaves a copy of it in the state directory."""
        self._in_use = True
        if self._key != self._copy:
            self._save()
        return self._key

    def _load(self) -> bytes | None:
        try:
            with self._path.open("rb") as file:
                key = file.read(SECRET_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._report(f"the copy of the bucket key cannot be read: {error.strerror}")
            return None
        if len(key) == SECRET_BYTES:
            return key
        self._report("the copy of the bucket key is not one of ours and is replaced")
        return None

    def _save(self) -> None:
        """Write aside and rename, so that a kill leaves the old copy or the new one, whole."""
        aside = self._path.with_name(f"{FILE_NAME}.tmp")
        try:
            with suppress(FileNotFoundError):
                aside.unlink()  # what a kill left over may have another mode
            descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(self._key)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(self._path)
        except OSError as error:
            self._report(
                f"the bucket key cannot be copied to the state directory: {error.strerror}"
            )
