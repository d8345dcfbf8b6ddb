"""``ratelimitd rules list``, ``get``, ``create``, ``update``, ``delete`` and ``unmatched``: the rules of a node.

Validates nothing itself: the node does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final

import typer

from ratelimitd.cli.apply import (
    apply,
    diff,
    draft_of,
    export,
    import_envoy,
    revert,
    revision_of,
    revision_text,
    schema,
    values_text,
    warn_of_case,
    warn_of_patterns,
)
from ratelimitd.cli.check import int32
from ratelimitd.cli.client_options import CliError, Target, UsageError, asks_node, demand, naming
from ratelimitd.cli.options import group
from ratelimitd.cli.output import as_dict
from ratelimitd.model import Algorithm, IdentifierType, Period
from ratelimitd.rules.rules_file import window_of
from ratelimitd.rules.store import DEFAULT_ALGORITHM
from ratelimitd.rules.validation import MAX_ANCHOR_DAY, is_rule_id
from ratelimitd.settings.parsing import UNMATCHED, WHY_UNMATCHED
from ratelimitd_client import NodeClient
from ratelimiter.v1 import ratelimiter_pb2 as pb

RuleArgument = Annotated[
    str,
    typer.Argument(metavar="ID|ENDPOINT", help="Id of the rule, or its endpoint."),
]
OfTypeArgument = Annotated[
    str, typer.Argument(metavar="TYPE", help="With an endpoint: the rule's identifier type.")
]
EtagOption = Annotated[
    str, typer.Option(metavar="ETAG", help="Refuse if the etag is no longer this one.")
]
LimitOption = typer.Option(callback=int32, metavar="N", help="Tokens per window, at least 1.")
WindowOption = typer.Option(
    callback=int32, metavar="N", help="Length of the window in s, at least 1."
)
ALGORITHM_HELP: Final = (
    "How to count: token_bucket takes a burst of N and then N in each window, sliding_window never more than N in any"
    " window, fixed_window N from each start of a window on."
)
DurationOption = typer.Option(
    metavar="DURATION",
    help="Length of the window, such as 30s, 1m, 12h or 1d; instead of --window-seconds.",
)

RuleTypeArgument = Annotated[
    str,
    typer.Argument(
        metavar="TYPE",
        help="user, ip, api_key or one of the node's IDENTIFIER_TYPES; several joined by +; or all.",
        autocompletion=lambda: [*IdentifierType],
    ),
]


@asks_node
def list_rules(
    target: Target,
    *,
    endpoint: Annotated[
        str, typer.Option(metavar="ENDPOINT", help="Only the rules for exactly this endpoint.")
    ] = "",
    identifier_type: Annotated[
        str, typer.Option(metavar="TYPE", help="Only the rules for this type.")
    ] = "",
    unused: Annotated[
        bool,
        typer.Option(
            "--unused",
            help="Only the rules that have judged no check on this node since it started.",
        ),
    ] = False,
) -> None:
    """Show the rules, ordered by endpoint and identifier type.

    Example:
      ratelimitd rules list
      ratelimitd rules list --endpoint '*' --json
      ratelimitd rules list --unused
    """
    with target.client() as client:
        rules = list(
            client.rules(endpoint=endpoint, identifier_type=identifier_type, unused=unused)
        )
    if target.output.as_json:
        target.output.json_list(as_dict(rule) for rule in rules)
    elif rules:
        _show_table(rules, target)
    else:
        target.output.line(_why_none(endpoint, identifier_type, unused=unused))


@asks_node
def get(target: Target, *, rule: RuleArgument, of_type: OfTypeArgument = "") -> None:
    """Show one rule.

    Example:
      ratelimitd rules get /login ip
      ratelimitd rules get 6f2c1d9e-0b4a-4f58-9d3e-2a7b8c9d0e1f --json
    """
    with target.client() as client:
        found = (
            client.rule(endpoint=rule, identifier_type=of_type)
            if of_type
            else client.rule(_id_of(client, rule, ""))
        )
    if target.output.as_json:
        target.output.message(found)
    else:
        _show_table([found], target)


@asks_node
def unmatched(target: Target) -> None:
    """Show the endpoints that are asked for and have no rule, so that their checks are all allowed.

    Those of the last minutes, on all nodes of a cluster, with the most checks first; at most 100.

    Example:
      ratelimitd rules unmatched
    """
    with target.client() as client:
        endpoints = client.unmatched()
    target.output.listed(
        endpoints,
        ("ENDPOINT", "CHECKS_PER_MIN"),
        lambda one: (one.endpoint, one.checks_per_minute),
        "every check of the last minutes had a rule",
    )
    if not target.output.as_json and any(one.endpoint == UNMATCHED for one in endpoints):
        target.output.line(WHY_UNMATCHED)


def _why_none(endpoint: str, identifier_type: str, *, unused: bool) -> str:
    if endpoint or identifier_type:
        return "no such rules"
    return "every rule has judged a check" if unused else "no rules: every check is allowed"


def _show_table(rules: Iterable[pb.RateLimit], target: Target) -> None:
    head = ("ENDPOINT", "TYPE", "LIMIT", "WINDOW_S", "ALGORITHM", "ENABLED", "ID")
    target.output.table(head, (row for rule in rules for row in _rows(rule)))


def _rows(rule: pb.RateLimit) -> Iterator[tuple[object, ...]]:
    """Yield a row for a rule, then one per further limit and per limit of a plan."""
    own = (rule.limit, rule.window_seconds, rule.algorithm)
    first, *more = [*map(_cells, rule.limits)] or [own]
    yield (rule.endpoint, rule.identifier_type, *first, "yes" if rule.enabled else "no", rule.id)
    for cells in more:
        yield ("", "", *cells, "", "")
    for plan in sorted(rule.plans):
        for cells in map(_cells, rule.plans[plan].limits):
            yield ("", f"plan {plan}", *cells, "", "")


def _cells(limit: pb.Limit) -> tuple[int, int | str, str]:
    """Return the columns LIMIT, WINDOW_S and ALGORITHM of a limit."""
    window = pb.Period.Name(limit.period).lower() if limit.period else limit.window_seconds
    return limit.limit, window, f"{limit.algorithm}{_marks(limit)}"


def _marks(limit: pb.Limit) -> str:
    marks = [limit.name, f"burst {limit.burst}" if limit.burst else ""]
    if limit.period:
        marks.append(f"from day {limit.anchor_day}" if limit.anchor_day else "")
        marks.append(limit.time_zone)
    marks.append("observed" if limit.enforcement == pb.OBSERVE else "")
    return f" ({', '.join(filter(None, marks))})"


@asks_node
def create(
    target: Target,
    *,
    endpoint: Annotated[
        str,
        typer.Argument(
            metavar="ENDPOINT",
            help="The endpoint, '*' for those without a rule, or '**' for all together.",
        ),
    ],
    identifier_type: RuleTypeArgument,
    limit: Annotated[int, LimitOption],
    window: Annotated[str | None, DurationOption] = None,
    window_seconds: Annotated[int | None, WindowOption] = None,
    algorithm: Annotated[Algorithm, typer.Option(help=ALGORITHM_HELP)] = DEFAULT_ALGORITHM,
    period: Annotated[
        Period | None,
        typer.Option(help="Calendar window, instead of --window-seconds."),
    ] = None,
    time_zone: Annotated[
        str, typer.Option(metavar="ZONE", help="IANA time zone of the period; default: UTC.")
    ] = "",
    anchor_day: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_ANCHOR_DAY,
            metavar="DAY",
            help="Day on which --period month begins; default: 1.",
        ),
    ] = None,
    burst: Annotated[
        int,
        typer.Option(callback=int32, metavar="N", help="Capacity of a token bucket; 0: the limit."),
    ] = 0,
    rule_id: Annotated[
        str, typer.Option("--id", metavar="UUID", help="Id to give the rule instead of a new one.")
    ] = "",
    disabled: Annotated[
        bool, typer.Option("--disabled", help="Store the rule, but do not apply it yet.")
    ] = False,
) -> None:
    """Create a rule.

    The endpoint is compared byte for byte and no pattern: callers send the template of a route, such as /orders/{id}.
    Rules with several limits, or with plans, are written in a file, for `rules apply`.

    Example:
      ratelimitd rules create /login ip --limit 5 --window 1m --algorithm fixed_window
      ratelimitd rules create /api user --limit 10000 --period month --time-zone Europe/Berlin --algorithm fixed_window
    """
    window_seconds = _seconds(window, window_seconds)
    is_given = window_seconds is not None or period is not None
    demand(is_given, "name the window: --window, --window-seconds or --period")
    more: dict[str, Any] = {"burst": burst, "time_zone": time_zone, "anchor_day": anchor_day}
    if period is not None:
        more["period"] = pb.Period.Value(period.name)
    rule = pb.RateLimit(
        id=rule_id,
        endpoint=endpoint,
        identifier_type=identifier_type,
        limit=limit,
        window_seconds=window_seconds or 0,
        algorithm=algorithm,
        enabled=not disabled,
    )
    if any(more.values()):
        rule.limits.add(limit=limit, window_seconds=window_seconds, algorithm=algorithm, **more)
    warn_of_patterns([endpoint])
    with target.client() as client, _print_new_revision(client, target):
        created = client.create_rule(rule)
        warn_of_case(client, {endpoint})
        _show("created", created, target)


@asks_node
def update(
    target: Target,
    *,
    rule: RuleArgument,
    of_type: OfTypeArgument = "",
    endpoint: Annotated[
        str | None, typer.Option(metavar="ENDPOINT", help="Move the rule to this endpoint.")
    ] = None,
    identifier_type: Annotated[
        str | None, typer.Option(metavar="TYPE", help="Move the rule to this type.")
    ] = None,
    limit: Annotated[int | None, LimitOption] = None,
    window: Annotated[str | None, DurationOption] = None,
    window_seconds: Annotated[int | None, WindowOption] = None,
    algorithm: Annotated[Algorithm | None, typer.Option(help=ALGORITHM_HELP)] = None,
    enabled: Annotated[
        bool | None,
        typer.Option("--enable/--disable", help="Apply the rule, or ignore it."),
    ] = None,
    etag: EtagOption = "",
) -> None:
    """Change the named fields of a rule.

    Example:
      ratelimitd rules update /login ip --limit 100 --enable
      ratelimitd rules update 6f2c1d9e-0b4a-4f58-9d3e-2a7b8c9d0e1f --limit 100
    """
    given = {
        "endpoint": endpoint,
        "identifier_type": identifier_type,
        "limit": limit,
        "window_seconds": _seconds(window, window_seconds),
        "algorithm": algorithm,
        "enabled": enabled,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    demand(changes, "nothing to change: name at least one field, such as --limit")
    with target.client() as client, _print_new_revision(client, target):
        rule_id = _id_of(client, rule, of_type)
        change = pb.RateLimit(id=rule_id, etag=etag, **changes)  # type: ignore[arg-type]
        updated = client.update_rule(change, list(changes))
        warn_of_case(client, {endpoint} if endpoint else ())
        _show("updated", updated, target)


@asks_node
def promote(
    target: Target,
    *,
    named: Annotated[
        list[str],
        typer.Argument(
            metavar="ID|ENDPOINT [TYPE] NAME",
            help="Id of the rule, or its endpoint and identifier type; then the observed limit to enforce.",
        ),
    ],
    replaces: Annotated[
        str, typer.Option(metavar="LIMIT", help="Limit to replace; default: the first.")
    ] = "",
) -> None:
    """Enforce an observed limit in place of another. Its count is kept.

    Example:
      ratelimitd rules promote /login ip candidate
    """
    match named:
        case [one, name]:
            of_type = ""
        case [one, of_type, name]:
            pass
        case _:
            message = "name the rule, by its id or its endpoint and type, and the limit"
            raise UsageError(message)
    with target.client() as client, _print_new_revision(client, target):
        rule_id = _id_of(client, one, of_type)
        rule = next((rule for rule in client.rules() if rule.id == rule_id), None)
        if rule is None:
            message = f"there is no rule {rule_id}"
            raise CliError(message)
        limits = list(rule.limits)
        names = [limit.name for limit in limits]
        observing = {limit.name for limit in limits if limit.enforcement == pb.OBSERVE}
        replaced = replaces or (names[0] if names else "")
        demand(name in observing, f"the rule has no observed limit {name}", CliError)
        demand(replaced in names, f"the rule has no limit {replaced}", CliError)
        former = pb.RateLimit(limits=[limits[names.index(replaced)]])
        candidate = limits[names.index(name)]
        candidate.enforcement = pb.ENFORCE
        limits[names.index(replaced)] = candidate
        kept = {limit.name: limit for limit in limits}
        change = pb.RateLimit(id=rule.id, etag=rule.etag, limits=kept.values())
        updated = client.update_rule(change, ["limits"])
        _show("updated", updated, target)
        if replaced != name and not target.output.as_json:
            target.output.line(f"{name} replaces {values_text(draft_of(former))}")


@asks_node
def delete(
    target: Target, *, rule: RuleArgument, of_type: OfTypeArgument = "", etag: EtagOption = ""
) -> None:
    """Delete a rule.

    Example:
      ratelimitd rules delete /login ip
      ratelimitd rules delete 6f2c1d9e-0b4a-4f58-9d3e-2a7b8c9d0e1f
    """
    with target.client() as client, _print_new_revision(client, target):
        rule_id = _id_of(client, rule, of_type)
        client.delete_rule(rule_id, etag=etag)
        target.output.answer({}, f"deleted {rule_id}")


@contextmanager
def _print_new_revision(client: NodeClient, target: Target) -> Iterator[None]:
    """Print the revision that a change created.

    The answer to the change does not contain it. Prints nothing if another writer changed the rules meanwhile.
    """
    if target.output.as_json:
        yield
        return
    before = revision_of(client)
    yield
    if before is not None and revision_of(client) == before + 1:
        target.output.line(revision_text(before + 1))


def _id_of(client: NodeClient, rule: str, identifier_type: str) -> str:
    """Return the id of a rule given by its id, or by its endpoint and identifier type."""
    if not identifier_type:
        # Else the node would refuse an endpoint as an id that is no UUID.
        demand(is_rule_id(rule), f"{rule} is not the id of a rule: after an endpoint name the TYPE")
        return rule
    listed = client.rules(endpoint=rule, identifier_type=identifier_type)
    # An empty endpoint lists all.
    found = next((one for one in listed if one.endpoint == rule), None)
    if found is None:
        message = f"there is no rule for {rule} {identifier_type}"
        raise CliError(message)
    return found.id


def _seconds(window: str | None, window_seconds: int | None) -> int | None:
    if window is None:
        return window_seconds
    demand(window_seconds is None, "give one of --window and --window-seconds")
    with naming("--window "):
        return int32(window_of(window))


def _show(done: str, rule: pb.RateLimit, target: Target) -> None:
    place = f"{rule.endpoint} {rule.identifier_type}"
    target.output.answer(rule, f"{done} {rule.id}: {place}, {values_text(draft_of(rule))}")


app = group(
    "Show and change the rules of a node.",
    {
        "list": list_rules,
        "get": get,
        "unmatched": unmatched,
        "create": create,
        "update": update,
        "promote": promote,
        "delete": delete,
        "apply": apply,
        "diff": diff,
        "revert": revert,
        "export": export,
        "schema": schema,
        "import-envoy": import_envoy,
    },
)
