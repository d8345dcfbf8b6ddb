"""Random calls from a seed: every method of a node, well-formed and malformed.

A call depends on its seed, its number and data of earlier answers (ids, etags, page tokens), so that two nodes with
equal answers receive the same calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

import grpc
from google.protobuf.field_mask_pb2 import FieldMask
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from ratelimitd.services.methods import PACKAGE, ROLES
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.rpc.asking import Asked, Metadata, Seen
from tests.rpc.chance import RULE_IDS, Chance
from tests.rpc.wire import field as wire_field

CHECK: Final = "/ratelimiter.v1.RateLimiter/CheckRateLimit"
BATCH: Final = "/ratelimiter.v1.RateLimiter/CheckRateLimitBatch"
CREATE: Final = "/ratelimiter.v1.RateLimiterConfig/CreateRateLimit"
UPDATE: Final = "/ratelimiter.v1.RateLimiterConfig/UpdateRateLimit"
DELETE: Final = "/ratelimiter.v1.RateLimiterConfig/DeleteRateLimit"
LIST: Final = "/ratelimiter.v1.RateLimiterConfig/ListRateLimits"
APPLY: Final = "/ratelimiter.v1.RateLimiterConfig/ApplyRateLimits"
STATUS: Final = "/ratelimiter.v1.RateLimiterHealth/GetHealthStatus"
METRICS: Final = "/ratelimiter.v1.RateLimiterHealth/GetMetrics"
RESET: Final = "/ratelimiter.v1.RateLimiterHealth/ResetRateLimit"
HEALTH: Final = "/grpc.health.v1.Health/Check"
WATCH: Final = "/grpc.health.v1.Health/Watch"
REFLECTIONS: Final = tuple(path for path in ROLES if path.endswith("/ServerReflectionInfo"))
UNARY: Final = tuple(path for path in ROLES if path not in {WATCH, *REFLECTIONS})

ADMIN_TOKEN: Final = "the-admin-token"
CHECK_TOKEN: Final = "the-check-token"

NOTHING_SPENT: Final = (LIST, METRICS, STATUS, HEALTH, "/grpc.health.v1.Health/List")
"""Methods that change no state, for calls that may or may not reach the node."""

MOMENT_S: Final = 0.05
"""A deadline that is meant to pass."""


@dataclass
class Memory:
    """Data of a node's earlier answers."""

    etags: dict[str, str] = field(default_factory=dict)
    page_tokens: list[str] = field(default_factory=list)

    def learn(self, asked: Asked, seen: Seen) -> None:
        """Store data that later calls can use."""
        method = asked.path.rpartition("/")[2]
        if seen.code is not grpc.StatusCode.OK or not seen.answers:
            return
        if method in {"CreateRateLimit", "UpdateRateLimit"}:
            rule = pb.RateLimit.FromString(seen.answers[0])
            self.etags[rule.id] = rule.etag
        elif method == "DeleteRateLimit":
            self.etags.pop(pb.DeleteRateLimitRequest.FromString(asked.messages[0]).id, None)
        elif method == "ListRateLimits":
            token = pb.ListRateLimitsResponse.FromString(seen.answers[0]).next_page_token
            self.page_tokens += [token] if token else []


def _check(chance: Chance, _memory: Memory) -> Asked:
    return Asked(CHECK, (chance.check().SerializeToString(),))


def _batch(chance: Chance, _memory: Memory) -> Asked:
    size = chance.choice((0, 1, 2, 5, 20, 100, 1_000, 1_001))
    checks = [chance.check() for _ in range(min(size, 20))]
    # A long batch repeats its checks, since only the length matters.
    checks = (checks * (size // 20 + 1))[:size]
    data = pb.BatchRateLimitRequest(requests=checks).SerializeToString()
    if chance.happens(0.2):
        data += wire_field(1, chance.garbage())
    return Asked(BATCH, (data,))


def _create(chance: Chance, memory: Memory) -> Asked:
    message = pb.CreateRateLimitRequest(rate_limit=chance.rule(memory.etags))
    return Asked(CREATE, (message.SerializeToString(),))


def _update(chance: Chance, memory: Memory) -> Asked:
    message = pb.UpdateRateLimitRequest(rate_limit=chance.rule(memory.etags))
    if chance.happens(0.4):
        names = (
            "limit",
            "window_seconds",
            "algorithm",
            "endpoint",
            "enabled",
            "id",
            "nope",
            "\u2028",
        )
        message.update_mask.CopyFrom(FieldMask(paths=chance.sample(names, chance.randint(0, 3))))
    return Asked(UPDATE, (message.SerializeToString(),))


def _delete(chance: Chance, memory: Memory) -> Asked:
    rule_id = chance.choice((*RULE_IDS, *memory.etags, "nope"))
    etag = chance.choice(("", "", "stale", memory.etags.get(rule_id, "")))
    return Asked(DELETE, (pb.DeleteRateLimitRequest(id=rule_id, etag=etag).SerializeToString(),))


def _list(chance: Chance, memory: Memory) -> Asked:
    message = pb.ListRateLimitsRequest(
        endpoint=chance.choice(("", "", "/a", "nope")),
        identifier_type=chance.choice(("", "", "user", "IP")),
        page_size=chance.choice((0, 1, 1, 2, 1_000, -1)),
        page_token=chance.choice(("", "", "forged", *memory.page_tokens[-3:])),
    )
    return Asked(LIST, (message.SerializeToString(),))


def _apply(chance: Chance, memory: Memory) -> Asked:
    message = pb.ApplyRateLimitsRequest(
        rate_limits=[chance.rule(memory.etags) for _ in range(chance.randint(0, 3))],
        prune=chance.happens(0.3),
        dry_run=chance.happens(0.3),
        revision=chance.choice((0, 0, 0, 1, 10**9, -1)),
    )
    return Asked(APPLY, (message.SerializeToString(),))


def _reset(chance: Chance, _memory: Memory) -> Asked:
    message = pb.ResetRequest()
    for name, text in chance.target().items():
        setattr(message, name, text)
    if chance.happens(0.3):
        setattr(
            message, chance.choice(("identifier", "identifier_type", "endpoint")), chance.text()
        )
    return Asked(RESET, (message.SerializeToString(),))


def _status_or_metrics(chance: Chance, _memory: Memory) -> Asked:
    if chance.happens(0.5):
        return Asked(STATUS, (b"",))
    names = chance.choice(([], ["rate_limiter_active_buckets"], ["nope", "\u00e9"], ["n"] * 1_001))
    return Asked(METRICS, (pb.MetricsRequest(names=names).SerializeToString(),))


def _assignments(chance: Chance, _memory: Memory) -> Asked:
    who = chance.target()
    identity = pb.Identity(
        identifier_type=who["identifier_type"], identifier=who["identifier"][:250]
    )
    assignment = pb.Assignment(
        identity=identity,
        plan=chance.choice(("pro", "pro", "free", "blocked", "", "Pro")),
        expire_time=chance.choice((0, 0, 1, 4_000_000_000, 2**62)),
        note=chance.choice(("", "", "n" * 256)),
        etag=chance.choice(("", "", "stale")),
    )
    method, message = chance.choice(
        (
            ("AssignPlan", pb.AssignPlanRequest(assignment=assignment)),
            ("BatchAssignPlans", pb.BatchAssignPlansRequest(assignments=[assignment] * 2)),
            ("UnassignPlan", pb.UnassignPlanRequest(identity=identity)),
            ("GetAssignment", pb.GetAssignmentRequest(identity=identity)),
            ("ListAssignments", pb.ListAssignmentsRequest(plan=assignment.plan, page_size=2)),
        )
    )
    return Asked(f"/ratelimiter.v1.RateLimiterPlans/{method}", (message.SerializeToString(),))


def _health(chance: Chance, _memory: Memory) -> Asked:
    names = (
        "",
        "ratelimiter.v1.RateLimiter",
        "RateLimiter",
        "nope",
        "\u00e9",
        "grpc.health.v1.Health",
    )
    data = health_pb2.HealthCheckRequest(service=chance.choice(names)).SerializeToString()
    path = chance.choice((HEALTH, WATCH, "/grpc.health.v1.Health/List"))
    if path != WATCH:
        return Asked(path, (data,))
    asked = Asked(path, (data,), "unary_stream")
    # A watch has no end.
    if chance.happens(0.7):
        return replace(asked, cancel_after=1)
    return replace(asked, timeout_s=MOMENT_S)


def _reflection(chance: Chance, _memory: Memory) -> Asked:
    request = reflection_pb2.ServerReflectionRequest
    questions = [
        chance.choice(
            (
                request(list_services=""),
                request(file_containing_symbol="ratelimiter.v1.RateLimiterConfig"),
                request(file_containing_symbol="ratelimiter.v1.Nope"),
                request(file_by_filename="ratelimiter/v1/ratelimiter.proto", host="h"),
                request(file_by_filename="\u00e9"),
                request(all_extension_numbers_of_type="ratelimiter.v1.RateLimit"),
                request(),
            )
        ).SerializeToString()
        for _ in range(chance.randint(0, 4))
    ]
    if chance.happens(0.2):
        # Last, because it ends the call: grpc.aio loses the status of a call that ends while the client writes.
        questions.append(chance.garbage())
    asked = Asked(chance.choice(REFLECTIONS), tuple(questions), "stream_stream")
    if questions and chance.happens(0.2):
        # A client that cancels does not half-close, so that the call cannot end before.
        asked = replace(asked, cancel_after=chance.randint(1, len(questions)), hold=True)
    return asked


def _garbage(chance: Chance, _memory: Memory) -> Asked:
    return Asked(chance.choice(UNARY), (b"" if chance.happens(0.3) else chance.garbage(),))


UNKNOWN: Final = (
    "/",
    "/x",
    "/RateLimiter",
    "/RateLimiter/",
    "/RateLimiter/Nope",
    CHECK + "/",
    CHECK.lower(),
    "/" + CHECK,
    CHECK + "?x=1",
    "/%52ateLimiter/CheckRateLimit",
    "/a b",
    "/\u00e9",
    "/" + "n" * 5_000,
)
"""Paths without a method."""


def _unknown_method(chance: Chance, _memory: Memory) -> Asked:
    return Asked(chance.choice(UNKNOWN), (chance.garbage(),))


def _large(chance: Chance, _memory: Memory) -> Asked:
    size = (4 << 20) + chance.choice((-1, 0, 1, 1_000))
    path = chance.choice(UNARY)
    padding = wire_field(15, bytes(size - 5)) if chance.happens(0.6) else bytes(size)
    return Asked(path, (padding,))


def _other_kind(chance: Chance, _memory: Memory) -> Asked:
    """A client that calls a unary method as a streaming one."""
    data = chance.choice((b"", chance.garbage(), chance.check().SerializeToString()))
    return Asked(
        chance.choice(UNARY),
        (data,),
        chance.choice(("unary_stream", "stream_unary", "stream_stream")),
    )


def _late(chance: Chance, memory: Memory) -> Asked:
    """A deadline that has passed, may pass, or is far away; or none."""
    timeout_s = chance.choice((0.0, -1.0, 1e-9, 1e-6, 1e-4, 1e-3, 1e5, 1e9, None))
    may_pass = timeout_s is not None and timeout_s < 1
    return replace(_unspent(chance) if may_pass else _check(chance, memory), timeout_s=timeout_s)


def _unspent(chance: Chance) -> Asked:
    return Asked(chance.choice(NOTHING_SPENT), (b"",))


def _left(chance: Chance, _memory: Memory) -> Asked:
    return replace(_unspent(chance), cancel_after=0)


Maker = Callable[[Chance, Memory], Asked]

MAKERS: Final[dict[Maker, int]] = {
    _check: 32,
    _garbage: 10,
    _batch: 8,
    _create: 6,
    _update: 6,
    _delete: 3,
    _list: 5,
    _apply: 3,
    _reset: 4,
    _assignments: 4,
    _status_or_metrics: 5,
    _health: 5,
    _reflection: 5,
    _unknown_method: 3,
    _other_kind: 2,
    _large: 1,
    _late: 3,
    _left: 2,
}
"""Makers of calls, with their shares in per cent."""


def _credentials(chance: Chance, *, with_tokens: bool) -> Metadata:
    """Mostly valid credentials; ``with_tokens``: the node requires them."""
    usual = ("authorization", f"Bearer {ADMIN_TOKEN}")
    if chance.happens(0.8):
        return (usual,) if with_tokens else ()
    wrong = ("authorization", "Bearer wrong")
    kinds: tuple[Metadata, ...] = (
        (),
        (wrong,),
        (("authorization", f"bearer {CHECK_TOKEN}"),),
        (("authorization", ADMIN_TOKEN),),
        (("authorization", ""),),
        (("authorization", f"Bearer  {ADMIN_TOKEN}"),),
        (wrong, usual),
        (usual, wrong),
        (("authorization-bin", f"Bearer {ADMIN_TOKEN}".encode()),),
        (usual, ("x-forwarded-for", "127.0.0.1")),
        (("x-forwarded-for", ""),),
        (("forwarded-bin", b"for=1.2.3.4"),),
    )
    return chance.choice(kinds)


def _odd_metadata(chance: Chance) -> Metadata:
    """Some fields, including repeated ones."""
    kinds: tuple[tuple[str, str | bytes], ...] = (
        ("x-bin", chance.randbytes(chance.randint(0, 40))),
        ("x-trace-bin", b""),
        ("x", ""),
        ("x", 'a, b ; c="d"'),
        ("x", "~" * chance.choice((1, 100, 3_000))),
        ("x.y_z-0", "%41"),
        ("user-agent", "me/1"),
        ("te", "trailers"),
        ("grpc-previous-rpc-attempts", "1"),
        ("grpc-trace-bin", b"\x00\x01"),
        ("content-language", "en"),
        ("cookie", "a=1; b=2"),
    )  # fmt: skip
    return tuple(chance.choice(kinds) for _ in range(chance.randint(1, 4)))


def generated(seed: str, number: int, memory: Memory, *, with_tokens: bool) -> Asked:
    """Return call ``number`` of a seed; ``with_tokens``: the node requires tokens."""
    chance = Chance(f"{seed}-{number}")
    [maker] = chance.choices(list(MAKERS), list(MAKERS.values()))
    asked = maker(chance, memory)
    if chance.happens(0.3):
        asked = replace(asked, path=asked.path.replace(PACKAGE, "", 1))
    if chance.happens(0.25):
        compression = chance.choice((grpc.Compression.Gzip, grpc.Compression.Deflate))
        asked = replace(asked, compression=compression)
    metadata = _odd_metadata(chance) if chance.happens(0.2) else ()
    return replace(asked, metadata=(*_credentials(chance, with_tokens=with_tokens), *metadata))
