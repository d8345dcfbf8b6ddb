"""``ratelimitd hold``, ``settle`` and ``holds``: tokens charged before their cost is known."""

from __future__ import annotations

import time
from typing import Annotated, Final

import typer

from ratelimitd.cli.check import (
    AlsoOption,
    EndpointArgument,
    IdentifierArgument,
    TypeArgument,
    describe,
    expiry,
    int32,
    limits_said,
    others,
    request_of,
    rules_of,
    verdict,
)
from ratelimitd.cli.client_options import EXIT_NO, Target, asks_node
from ratelimitd.cli.options import group
from ratelimitd.ledger.holds import DEFAULT_TTL_S
from ratelimiter.v1 import ratelimiter_pb2 as pb

HoldArgument = Annotated[
    str,
    typer.Argument(metavar="HOLD", help="The text that `hold` printed."),
]
TtlOption = Annotated[
    int,
    typer.Option("--ttl", callback=int32, metavar="S", help="Seconds until the hold ends."),
]


@asks_node
def hold(
    target: Target,
    *,
    identifier_type: TypeArgument,
    identifier: IdentifierArgument,
    endpoint: EndpointArgument,
    cost: Annotated[int, typer.Option(callback=int32, metavar="N", help="Tokens to hold.")] = 1,
    also: AlsoOption = None,
    ttl: TtlOption = DEFAULT_TTL_S,
    hold_id: Annotated[
        str,
        typer.Option(
            metavar="ID",
            help="ID of the hold, for safe retries; default: a new one.",
        ),
    ] = "",
) -> None:
    """Check a request, and hold its tokens until `settle` says what it has cost.

    Prints the hold, which `settle` and `holds extend` take. Exit status: 0 when it was allowed, 3 when denied.

    Example:
      ratelimitd hold user alice /v1/chat --cost 2000 --ttl 120
    """
    check = request_of(identifier_type, identifier, endpoint, cost, also)
    request = pb.HoldRequest(check=check, ttl_seconds=ttl, hold_id=hold_id)
    with target.client() as client:
        held = client.hold(request)
        known = rules_of(client, (held.answer, *held.answer.limits), target)
    if target.output.as_json:
        target.output.message(held)
    else:
        target.output.line(verdict(held.answer, target.output))
        rows = [*describe(held.answer, *known), *others(held.answer, *known)]
        if held.answer.allowed:
            rows += [("ends", expiry(held.expire_time, time.time())), ("hold", held.hold)]
        target.output.pairs(rows)
    if not held.answer.allowed:
        raise typer.Exit(EXIT_NO)


@asks_node
def settle(
    target: Target,
    *,
    hold: HoldArgument,
    actual: Annotated[
        int,
        typer.Argument(
            callback=int32,
            metavar="ACTUAL",
            help="Tokens that the request has cost; 0 refunds all.",
        ),
    ],
) -> None:
    """Charge what a request has cost in place of what was held.

    Once, however often it is sent. Exit status: 0 when it was charged, 3 when the hold is not there any more.

    Example:
      ratelimitd settle "$HOLD" 1234
    """
    with target.client() as client:
        settled = client.settle(hold, actual)
        known = rules_of(client, settled.limits, target)
    limits = [f"  {text}" for text in limits_said(settled.limits, *known)]
    charged = f"charged {settled.charged}" if settled.known else _NOT_THERE
    target.output.answer(settled, "\n".join([charged, *limits]))
    if not settled.known:
        raise typer.Exit(EXIT_NO)


@asks_node
def extend(target: Target, *, hold: HoldArgument, ttl: TtlOption = DEFAULT_TTL_S) -> None:
    """Let a hold end so many seconds from now, never sooner than it would.

    Exit status: 0 when it was extended, 3 when the hold is not there any more.

    Example:
      ratelimitd holds extend "$HOLD" --ttl 600
    """
    with target.client() as client:
        extended = client.extend(hold, ttl)
    ends = f"ends {expiry(extended.expire_time, time.time())}"
    target.output.answer(extended, ends if extended.known else _NOT_THERE)
    if not extended.known:
        raise typer.Exit(EXIT_NO)


@asks_node
def list_holds(target: Target) -> None:
    """List by limit how many holds in flight the node has made, and what they hold.

    Example:
      ratelimitd holds list
    """
    with target.client() as client:
        limits = client.holds()
    target.output.listed(
        limits,
        ("ENDPOINT", "TYPE", "LIMIT", "HOLDS", "TOKENS"),
        lambda one: (one.endpoint, one.identifier_type, one.name, str(one.holds), str(one.tokens)),
        "no holds are in flight",
    )


_NOT_THERE: Final = "not known: the hold no longer exists, or no limit was checked for it"

app = group("List and extend holds in flight.", {"list": list_holds, "extend": extend})
