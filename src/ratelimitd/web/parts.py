"""The parts of a node that the HTTP side uses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ratelimitd.fair_queue import FairQueue
from ratelimitd.model import Rule
from ratelimitd.observe.live import Live
from ratelimitd.observe.metrics import Definition, Point
from ratelimitd.observe.rule_traffic import RuleTraffic
from ratelimitd.rpc.interface import Call, Methods
from ratelimitd.rules.assignments import Assignments
from ratelimitd.rules.book import RuleBook
from ratelimitd.rules.store import RuleDraft, RuleStore
from ratelimitd.web.api.forward_auth import ForwardAuth
from ratelimitd.web.api.http_call import Requirement
from ratelimitd.web.api.json_api import Translation
from ratelimitd.web.pages.errors import Count
from ratelimitd.web.pages.sessions import ProxyUsers, SessionOf
from ratelimiter.v1 import ratelimiter_pb2

Points = Iterable[tuple[Definition, Iterable[Point]]]
"""Every metric with its readings."""

ReadPoints = Callable[[], Points | Awaitable[Points]]
"""Returns the current readings, or an awaitable of them."""


class Readiness(NamedTuple):
    """Whether the node should receive traffic. ``reason``: why not, or, if ready, which part is not."""

    ready: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a node that the HTTP side uses."""

    node_id: str
    points: ReadPoints
    readiness: Callable[[], Readiness | Awaitable[Readiness]]
    grpc_address: Callable[[], str]
    hosts: Collection[str]
    """The node's names in addition to ``localhost`` and addresses."""
    methods: Methods
    """The methods of the services, each guarded by its role."""
    book: Callable[[], RuleBook | None]
    """Returns the current rule book, ``None`` before the first."""
    assignments: Assignments
    """The assignments in force."""
    audit: RuleStore
    rule_traffic: RuleTraffic
    """The decisions of each rule on this node."""
    live: Live
    """The data of the overview."""
    may_read: Requirement
    may_administer: Requirement
    login: Callable[[Call], str | None]
    """Returns the name of a call's token, empty for the admin token; ``None`` if it may not log in.

    Raises ``RpcError`` after too many wrong tokens.
    """
    session_of: SessionOf
    users: ProxyUsers
    actor: Callable[[Call], str]
    """Returns the name of a call's caller for the log."""
    admit: Requirement
    """Lets a permitted call pass."""
    translate: Translation
    """Converts the error of a call to a status."""
    rate_limit_of: Callable[[Rule], ratelimiter_pb2.RateLimit]
    """Converts a rule to the contract's message, as the services do."""
    draft_of: Callable[[ratelimiter_pb2.RateLimit], RuleDraft]
    """Converts such a message back."""
    admin_token: str
    now_s: Callable[[], float]
    """Returns Unix time that never steps back."""
    refused: Count
    """Counts one refused request."""
    ratelimit_headers: str
    """Revision of the ``RateLimit`` fields."""
    queue: FairQueue
    """Schedules large JSON messages together with the large calls of gRPC."""
    types: Sequence[str]
    """Identifier types accepted in requests."""
    on_breaker_open: str
    """The setting; empty for a strict node, which has no local state to fall back on."""
    auth: ForwardAuth
    record_dir: Path | None
    """Directory of recorded checks, RECORD_DIR; ``None`` if unset."""
