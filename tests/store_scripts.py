"""For tests of the scripts in ``cluster/redis/scripts``: how they are called, and states that can be compared."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from struct import pack
from typing import Any

from ratelimitd.cluster.redis.codec import (
    DECIDE,
    FORMAT,
    FORMAT_OF_REFUNDED,
    NUMBERS,
    SETTLE,
    Request,
    Script,
    checks_request,
    decided,
    settle_reply,
    settle_request,
)
from ratelimitd.ledger.protocol import Batch, Reply
from ratelimitd.ledger.shared_state import SharedState, StoreCheck
from ratelimitd.model import Algorithm, IdentifierType, Outcome, Rule
from tests.outcomes import runs_of

TAG = 0xA7


def key_of(number: int) -> bytes:
    """One of the keys of the tag."""
    return bytes([TAG, number]) + bytes(14)


def rule_of(
    algorithm: Algorithm, limit: int = 10, window_s: int = 60, revision: int = 1, *, burst: int = 0
) -> Rule:
    """A rule of which only that counts."""
    return Rule(
        "rule",
        "/",
        IdentifierType.USER,
        limit=limit,
        window_seconds=window_s,
        algorithm=algorithm,
        revision=revision,
        burst=burst,
    )


def run(client: Any, script: Script, request: Request) -> Any:
    """What the script answers to a request."""
    keys, arguments = request
    return client.eval(script.text, len(keys), *keys, *arguments)


def decide(client: Any, *checks: StoreCheck) -> list[Outcome | None]:
    """What the store makes of checks, all in one call."""
    return decided(checks, run(client, DECIDE, checks_request(checks)))


def settle(client: Any, batch: Batch) -> Reply | None:
    """What the store makes of a batch."""
    return settle_reply(batch, run(client, SETTLE, settle_request(TAG, batch)))


def plain(shared: SharedState | None) -> SharedState | tuple[Any, ...] | None:
    """A state whose log is told by its entries, wherever its sums begin."""
    if shared is not None and isinstance(shared.state, bytes):
        return (*shared[:3], runs_of(shared.state), shared.refunded)
    return shared


def log_of(runs: Sequence[tuple[int, int]]) -> bytes:
    """The log of (time in µs, tokens), ascending: all times, then all running sums."""
    times, tokens = zip(*runs, strict=True)
    return array("q", (*times, 0, *accumulate(tokens))).tobytes()


def value_of(shared: SharedState, rule: Rule) -> bytes:
    """The bytes by which a bucket of ``rule`` lies in the store."""
    if shared.burst:
        return value_of(shared._replace(burst=0), rule) + pack("<I", shared.burst)
    generation, revision, limit, state, _, refunded = shared
    form = FORMAT_OF_REFUNDED if refunded else FORMAT
    head = pack("<BBIQI", form, NUMBERS[rule.algorithm], generation, revision, limit)
    if refunded:
        head += pack("<Q", refunded)
    if state is None:
        return head
    if isinstance(state, bytes):
        cells = array("q", state)
        runs = len(cells) // 2
        entries = [
            number for pair in zip(cells, cells[runs + 1 :], strict=False) for number in pair
        ]
        return head + pack(f"<{2 * runs + 1}Q", cells[runs], *entries)
    amount, latest_us, *before = state
    if rule.algorithm is Algorithm.TOKEN_BUCKET:
        return head + pack("<3Q", *divmod(amount, rule.window_us), latest_us)
    return head + pack("<3Q", amount, *(before or [0]), latest_us)
