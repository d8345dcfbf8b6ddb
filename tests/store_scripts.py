"""For tests of the scripts in ``sharedstate/scripts``: how they are called, and states that can be compared."""

from __future__ import annotations

from typing import Any

from ratelimitd.algorithms.sliding_window import runs_of
from ratelimitd.ledger.batches import Batch, Reply
from ratelimitd.ledger.shared_state import SharedState
from ratelimitd.model import Algorithm, IdentifierType, Rule
from ratelimitd.sharedstate.encoding import SETTLE, Request, settle_reply, settle_request
from ratelimitd.sharedstate.script import Script

TAG = 0xA7


def key_of(number: int) -> bytes:
    """One of the keys of the tag."""
    return bytes([TAG, number]) + bytes(14)


def rule_of(algorithm: Algorithm, limit: int = 10, window_s: int = 60, revision: int = 1) -> Rule:
    """A rule of which only that counts."""
    return Rule("rule", "/", IdentifierType.USER, limit, window_s, algorithm, revision=revision)


def run(client: Any, script: Script, request: Request) -> Any:
    """What the script answers to a request."""
    keys, arguments = request
    return client.eval(script.text, len(keys), *keys, *arguments)


def settle(client: Any, batch: Batch) -> Reply | None:
    """What the store makes of a batch."""
    return settle_reply(batch, run(client, SETTLE, settle_request(TAG, batch)))


def plain(shared: SharedState | None) -> SharedState | tuple[Any, ...] | None:
    """A state whose log is told by its entries, wherever its sums begin."""
    if shared is not None and isinstance(shared.state, bytes):
        return (*shared[:3], runs_of(shared.state))
    return shared
