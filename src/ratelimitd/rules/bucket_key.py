"""The key of the buckets' names: the rule database's, and a copy beside the buckets for while the database is away.

Never names a bucket. A copy that cannot be used counts as none. See ADR 0013, and ADR 0024 for nodes that share them.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from ratelimitd.errors import StartupError
from ratelimitd.rules.store import SECRET_BYTES, RuleStore

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
