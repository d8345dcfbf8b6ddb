"""The status that a node publishes: the value, its encoding, and the validation of other nodes' bytes.

Pure. Anyone with access to the shared state can write there: bytes that are not a valid status within bounds are
rejected. See ADR 0029.
"""

from __future__ import annotations

import json
import math
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeVar, cast

from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.counters import LATENCY_BOUNDS_S
from ratelimitd.errors import StoreCorruptError
from ratelimitd.observe.denials import TOP, DeniedEndpoint, DeniedIdentifier
from ratelimitd.observe.health import BREAKER_STATES, BreakerStateName
from ratelimitd.observe.history import Sample

FORMAT: Final = 1
"""Version of the format. Nodes ignore statuses of other versions."""

MAX_BYTES: Final = 4_096
"""A status without denials takes about 700."""

MAX_ENDPOINT: Final = 60
"""Characters of an endpoint in a published status: ten endpoints leave room in :data:`MAX_BYTES`."""

MAX_NAMES_BYTES: Final = 600
"""Bytes of JSON for names in a status: those of the most denied identifiers."""

MAX_SEALED: Final = 1_000
"""Characters of sealed names, in base64."""

MAX_TEXT: Final = 256
MAX_NUMBER: Final = 2**53
"""Largest exact count."""


Row = TypeVar("Row")


class HeldLimit(NamedTuple):
    """Holds in flight on one limit, and their tokens; endpoint and type are the rule's."""

    endpoint: str
    identifier_type: str
    name: str
    holds: int
    tokens: int


class BusyRule(NamedTuple):
    """One of the busiest rules of a node, with the checks per second that it decides there."""

    rule_id: str
    allowed_per_s: float
    blocked_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """The status of one node. ``sample`` holds the time and the recent counts.

    ``healthy`` and the seven fields after it are those of :class:`ratelimitd.observe.health.HealthReport`. ``retry_s``:
    seconds until an open breaker is tried again; 0 while it is closed. ``clock_error_s``: wall clock (in a cluster, the
    shared state's) minus node clock. ``admin_token_digest``: equal on all nodes with the same admin token; empty
    without.
    """

    node_id: str
    version: str
    grpc_address: str
    http_address: str
    rules_revision: int
    healthy: bool
    shared_state_connected: bool
    hit_ratio: float
    hit_ratio_met: bool
    average_latency_ms: float
    latency_met: bool
    error_rate: float
    breaker_state: BreakerStateName
    retry_s: float
    sync_lag_s: float
    clock_error_s: float
    excess_ratio: float
    excess_bound_ratio: float
    admin_token_digest: str
    sample: Sample
    endpoints: Sequence[DeniedEndpoint] = ()
    identifiers: Sequence[DeniedIdentifier] = ()
    holds: Sequence[HeldLimit] = ()
    unmatched: Sequence[DeniedEndpoint] = ()
    """Endpoints without a rule, with their checks per minute."""
    rules: Sequence[BusyRule] = ()
    """The busiest rules."""
    names: str = ""
    """The names of ``identifiers``, sealed for nodes with the same secret; empty if there are none."""


def encode(status: NodeStatus) -> bytes:
    """Encode for other nodes in at most :data:`MAX_BYTES`; names of identifiers are sealed.

    If it is longer, drops the rules, then the sealed names, and then, for endpoints of many multi-byte characters, all
    lists.
    """
    fields = {
        "v": FORMAT,
        **{name: getattr(status, name) for name in _FIELDS},
        "sample": _rounded(status.sample),
        "endpoints": _written(status.endpoints),
        "unmatched": _written(status.unmatched),
        "identifiers": [
            [one.digest, one.identifier_type, one.masked, round(one.per_minute, 1)]
            for one in status.identifiers
        ],
        "holds": [[one.endpoint[:MAX_ENDPOINT], *one[1:]] for one in status.holds],
        "names": status.names,
        "rules": [[one.rule_id, *(round(rate, 2) for rate in one[1:])] for one in status.rules],
    }
    octets = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    if len(octets) > MAX_BYTES:
        if status.rules:
            return encode(replace(status, rules=()))
        if status.names:
            return encode(replace(status, names=""))
        without_lists = replace(status, endpoints=(), identifiers=(), holds=(), unmatched=())
        return octets if status == without_lists else encode(without_lists)
    return octets


def decode(octets: bytes) -> NodeStatus:
    """Decode the status of another node.

    Raises:
        StoreCorruptError: the bytes are not a status of this format within bounds.
    """
    try:
        if len(octets) > MAX_BYTES:
            raise _NoStatusError
        fields = _mapping(json.loads(octets))
        if fields["v"] != FORMAT:
            raise _NoStatusError
        return NodeStatus(
            **{name: read(fields[name]) for name, read in _FIELDS.items()},
            sample=_row(fields["sample"], Sample, *_SAMPLE.values()),
            endpoints=_rows(fields["endpoints"], DeniedEndpoint, _text, _number),
            identifiers=_rows(
                fields["identifiers"], DeniedIdentifier, _text, _text, _text, _number
            ),
            # Absent in statuses of the previous release.
            unmatched=_rows(fields.get("unmatched", []), DeniedEndpoint, _text, _number),
            holds=_rows(fields.get("holds", []), HeldLimit, _text, _text, _text, _count, _count),
            names=_sealed(fields.get("names", "")),
            rules=_rows(fields.get("rules", []), BusyRule, _text, _number, _number),
        )
    except (ValueError, KeyError, RecursionError) as error:
        message = "the status of a node is malformed"
        raise StoreCorruptError(message) from error


def sealed_names(identifiers: Sequence[DeniedIdentifier], seal: BucketKeys) -> str:
    """Return the sealed names of the first identifiers, as many as fit; empty if there are none."""
    names: dict[str, str] = {}
    octets = b""
    for one in identifiers:
        if one.name:
            names[one.digest] = one.name
            more = json.dumps(names, separators=(",", ":")).encode()
            if len(more) > MAX_NAMES_BYTES:
                break
            octets = more
    return b64encode(seal.seal(octets)).decode() if octets else ""


def names_within(sealed: str, seal: BucketKeys) -> Mapping[str, str]:
    """Return names by the digest of their identifier; empty if another secret sealed them."""
    try:
        octets = seal.unseal(b64decode(sealed))
        names = _mapping(json.loads(octets or b"{}"))
        return {_text(digest): _text(name) for digest, name in names.items()}
    except ValueError:
        return {}


class _NoStatusError(ValueError):
    """The bytes are not a status."""


def _written(endpoints: Iterable[DeniedEndpoint]) -> list[Any]:
    return [[one.endpoint[:MAX_ENDPOINT], round(one.per_minute, 1)] for one in endpoints]


def _rounded(sample: Sample) -> list[Any]:
    return [round(one, 4) if isinstance(one, float) else one for one in sample]


def _counts(value: Any) -> tuple[int, ...]:
    return tuple(map(_count, _list(value, len(LATENCY_BOUNDS_S) + 1, exactly=True)))


def _rows(value: Any, kind: Callable[..., Row], *readers: Callable[[Any], Any]) -> list[Row]:
    return [_row(one, kind, *readers) for one in _list(value, TOP)]


def _row(value: Any, kind: Callable[..., Row], *readers: Callable[[Any], Any]) -> Row:
    """Return the values of a list as fields, each parsed by its reader."""
    parts = _list(value, len(readers), exactly=True)
    return kind(*(read(part) for read, part in zip(readers, parts, strict=True)))


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _NoStatusError
    return value


def _list(value: Any, most: int, *, exactly: bool = False) -> Sequence[Any]:
    if not isinstance(value, list) or len(value) > most or (exactly and len(value) < most):
        raise _NoStatusError
    return value


def _text(value: Any) -> str:
    """Return text for a table, with invisible and bidirectional control characters replaced."""
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise _NoStatusError
    return "".join([one if one.isprintable() else "\ufffd" for one in value])


def _sealed(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_SEALED:
        raise _NoStatusError
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _NoStatusError
    return value


def _number(value: Any) -> float:
    # Also rejects NaN, for which the comparison is false.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MAX_NUMBER:
        raise _NoStatusError
    return float(value)


def _signed(value: Any) -> float:
    return math.copysign(_number(abs(value)), value) if isinstance(value, float) else _number(value)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_NUMBER:
        raise _NoStatusError
    return value


def _breaker_state(value: Any) -> BreakerStateName:
    if value not in BREAKER_STATES:
        raise _NoStatusError
    return cast("BreakerStateName", value)


_FIELDS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "node_id": _text,
    "version": _text,
    "grpc_address": _text,
    "http_address": _text,
    "rules_revision": _count,
    "healthy": _flag,
    "shared_state_connected": _flag,
    "hit_ratio": _number,
    "hit_ratio_met": _flag,
    "average_latency_ms": _number,
    "latency_met": _flag,
    "error_rate": _number,
    "breaker_state": _breaker_state,
    "retry_s": _number,
    "sync_lag_s": _number,
    "clock_error_s": _signed,
    "excess_ratio": _number,
    "excess_bound_ratio": _number,
    "admin_token_digest": _text,
}
"""Single-value fields and their parsers."""

_SAMPLE: Final[Mapping[str, Callable[[Any], Any]]] = {
    "at_ms": _count,
    "allowed_per_s": _number,
    "blocked_per_s": _number,
    "fail_open_per_s": _number,
    "looked_per_s": _number,
    "known_per_s": _number,
    "latency_counts": _counts,
    "buckets": _count,
    "memory_bytes": _count,
    "loop_lag_s": _number,
}
"""Fields of a sample, in its order, and their parsers."""
