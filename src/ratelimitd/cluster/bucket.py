"""A shared bucket that a node knows: its view of it, and where it belongs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratelimitd.ledger.shared_state import SharedState
from ratelimitd.ledger.view import View
from ratelimitd.model import Rule

if TYPE_CHECKING:
    from ratelimitd.cluster.tag import Tag


class Bucket:
    """One bucket.

    Attributes:
        key: its key on this node.
        name: its name in the store.
        tag: the part of the store that it belongs to.
        view: what this node knows of it.
        is_dirty: whether there is something to settle that no batch carries yet.
        is_denied: whether a check of it was denied since it was last read for that.
        is_watched: whether it is read again now and then.
        is_cached: whether checks find it by its key; else it lives until it is settled.
    """

    __slots__ = ("is_cached", "is_denied", "is_dirty", "is_watched", "key", "name", "tag", "view")

    def __init__(  # noqa: PLR0917 - made for every miss
        self, key: bytes, name: bytes, tag: Tag, rule: Rule, base: SharedState | None
    ) -> None:
        self.key = key
        self.name = name
        self.tag = tag
        self.view = View(rule, base)
        self.is_dirty = self.is_denied = self.is_watched = self.is_cached = False
