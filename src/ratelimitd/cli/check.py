"""``ratelimitd check`` and ``explain``: ask a running node whether a request may proceed, and why.

Never retries: a check that was sent may have been charged.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Annotated, Any, Final

import typer

from ratelimitd.cli.apply import draft_of, window_text
from ratelimitd.cli.client_options import EXIT_NO, CliError, Target, asks_node, demand
from ratelimitd.cli.output import Output, as_dict, duration, enum_name, window
from ratelimitd.errors import printable
from ratelimitd.model import DEFAULT_LIMIT, INT32_MAX, NOMINAL_SECONDS, IdentifierType
from ratelimitd.settings.parsing import UNMATCHED, WHY_UNMATCHED
from ratelimitd_client import NodeClient
from ratelimitd_client.check import MAX_BATCH, identities_of
from ratelimiter.v1 import ratelimiter_pb2 as pb

MAX_COUNT: Final = 1_000_000

_REASONS: Final = {
    pb.WITHIN_LIMIT: "within the limit",
    pb.LIMIT_EXCEEDED: "the limit is used up",
    pb.COST_EXCEEDS_LIMIT: "the cost is above the limit, or its burst: waiting will not help",
    pb.NO_RULE: "no rule applies",
    pb.UNLIMITED: "the plan of an identity is unlimited",
    pb.BLOCKED: "the plan of an identity is blocked",
    pb.FAIL_OPEN_BREAKER: "not checked: the circuit breaker is open",
    pb.FAIL_OPEN_ERROR: "not checked: the shared state did not answer, or the node met an error",
}

Windows = Mapping[tuple[str, str, str], str]
"""Calendar windows in words, by rule id, plan and limit name."""

Places = Mapping[str, str]
"""Endpoint and identifier type of rules, by id."""

_NONE: Final[Mapping[Any, str]] = MappingProxyType({})

NOT_CHECKED: Final = (pb.FAIL_OPEN_BREAKER, pb.FAIL_OPEN_ERROR)

_ITEM: Final = re.compile(r"requests\[\d+\]\.")


def int32(value: int | None) -> int | None:
    """Return the value of an option if it fits the contract's int32; the node validates everything else.

    Not the range of the option: --help would show it, and the bound is no useful hint.

    Raises:
        typer.BadParameter: the value does not fit.
    """
    if value is not None and not -INT32_MAX - 1 <= value <= INT32_MAX:
        message = f"must be {-INT32_MAX - 1} to {INT32_MAX}"
        raise typer.BadParameter(message)
    return value


TypeArgument = Annotated[
    str,
    typer.Argument(
        metavar="TYPE",
        help="Identifier type: user, ip, api_key or one of the node's IDENTIFIER_TYPES.",
        autocompletion=lambda: [*IdentifierType],
    ),
]
AlsoOption = Annotated[
    list[str] | None,
    typer.Option(metavar="TYPE=IDENTIFIER", help="Further identity; may be repeated."),
]
IdentifierArgument = Annotated[
    str,
    typer.Argument(metavar="IDENTIFIER", help="The user id, IP address or API key."),
]
MaxWaitOption = Annotated[
    int,
    typer.Option(
        callback=int32,
        metavar="N",
        help="Also allow the check if it passes within N ms.",
        show_default=False,
    ),
]
CostOption = Annotated[int, typer.Option(callback=int32, metavar="N", help="Tokens to ask for.")]
EndpointArgument = Annotated[
    str,
    typer.Argument(metavar="ENDPOINT", help="The endpoint, as in the rules."),
]


@asks_node
def check(
    target: Target,
    *,
    identifier_type: TypeArgument,
    identifier: IdentifierArgument,
    endpoint: EndpointArgument,
    cost: CostOption = 1,
    count: Annotated[
        int, typer.Option(min=1, max=MAX_COUNT, metavar="N", help="Number of checks to send.")
    ] = 1,
    peek: Annotated[bool, typer.Option("--peek", help="Answer without spending tokens.")] = False,
    also: AlsoOption = None,
    max_wait_ms: MaxWaitOption = 0,
) -> None:
    """Check a request against the limits, and spend its tokens if it is allowed.

    Exit status: 0 when every check was allowed, 3 when any was denied.

    Example:
      ratelimitd check user alice /orders
      ratelimitd check ip 192.0.2.7 /login --count 10 --json
      ratelimitd check user alice /orders --also tenant=acme
    """
    request = request_of(identifier_type, identifier, endpoint, cost, also)
    request.peek, request.max_wait_ms = peek, max_wait_ms
    with target.client() as client:
        denied = (
            _ask_once(client, request, target)
            if count == 1
            else _ask_often(client, request, count, target)
        )
    if denied:
        raise typer.Exit(EXIT_NO)


def further(also: Sequence[str] | None) -> dict[str, str]:
    """Return the identifiers of ``TYPE=IDENTIFIER`` options by type.

    Raises:
        UsageError: one has no type, or two have the same.
    """
    pairs = [one.partition("=") for one in also or ()]
    named = {kind: identifier for kind, separator, identifier in pairs if separator}
    demand(len(named) == len(pairs), "--also must be TYPE=IDENTIFIER, each TYPE once")
    return named


@asks_node
def explain(
    target: Target,
    *,
    identifier_type: TypeArgument,
    identifier: IdentifierArgument,
    endpoint: EndpointArgument,
    cost: CostOption = 1,
    also: AlsoOption = None,
    max_wait_ms: MaxWaitOption = 0,
) -> None:
    """Explain the answer to a check, rule by rule. Spends nothing.

    Exit status: 0 when the check would be allowed, 3 when not.

    Example:
      ratelimitd explain user alice /orders
    """
    request = request_of(identifier_type, identifier, endpoint, cost, also)
    request.max_wait_ms = max_wait_ms
    with target.client() as client:
        found = client.explain(request)
        judged = (limit for rule in found.rules for limit in rule.limits)
        places = {one.rule_id: f"{one.endpoint} {one.identifier_type}" for one in found.rules}
        windows, _ = rules_of(client, judged, target, places)
    if target.output.as_json:
        target.output.message(found)
    else:
        target.output.line(verdict(found.answer, target.output))
        target.output.pairs(describe(found.answer, windows, places))
        if endpoint == UNMATCHED:
            target.output.line(WHY_UNMATCHED)
        would = found.answer.allowed
        rows = [row for rule in found.rules for row in _explained(rule, windows, would=would)]
        _remedies(("ENDPOINT", "TYPE", "LIMIT", "SAYS", "REMEDY"), rows, target.output)
        nearest = [(one.endpoint, one.identifier_type, one.why) for one in found.nearest]
        if nearest:
            target.output.table(("NEAREST ENDPOINT", "TYPE", "WHY IT IS NOT THE SAME"), nearest)
        plans = [(*_assigned(plan, time.time()), plan.remedy) for plan in found.plans]
        _remedies(("TYPE", "PLAN", "EXPIRES", "REMEDY"), plans, target.output)
    if not found.answer.allowed:
        raise typer.Exit(EXIT_NO)


def _remedies(head: Sequence[str], rows: Sequence[Sequence[str]], output: Output) -> None:
    """Print a table, without its last column if it is empty."""
    if rows:
        shown = len(head) if any(row[-1] for row in rows) else len(head) - 1
        output.table(head[:shown], (row[:shown] for row in rows))


def rules_of(
    client: NodeClient,
    judged: Iterable[pb.LimitStatus | pb.RateLimitResponse],
    target: Target,
    known: Places = _NONE,
) -> tuple[Windows, Places]:
    """Return what an answer lacks: calendar windows, of which it has the nominal length, and the places of rules.

    Rules are read if a window may be a calendar's, or to tell several rules apart whose places are not ``known``. If
    the caller may not read the rules, or the output is JSON, there are no windows, and only the known places.
    """
    windows: dict[tuple[str, str, str], str] = {}
    places = dict(known)
    judged = [] if target.output.as_json else [one for one in judged if one.rule_id]
    calendars = {one.rule_id for one in judged if one.window_seconds in NOMINAL_SECONDS.values()}
    rule_ids = {one.rule_id for one in judged}
    unplaced = rule_ids - known.keys() if len(rule_ids) > 1 else set()
    with suppress(CliError), target.explained():
        for rule_id in calendars | unplaced:
            rule = draft_of(client.rule(rule_id))
            places[rule.id] = f"{rule.endpoint} {rule.identifier_type}"
            for plan, limits in (("", rule.limits), *rule.plans):
                found = (limit for limit in limits if limit.period)
                windows |= {(rule.id, plan, limit.name): window_text(limit) for limit in found}
    return windows, places


def _assigned(plan: pb.AssignedPlan, now_s: float) -> tuple[str, str, str]:
    until = expiry(plan.expire_time, now_s) if plan.expire_time else "never"
    return plan.identifier_type, plan.plan, until


def _explained(
    rule: pb.RuleExplanation, windows: Windows, *, would: bool
) -> Iterator[tuple[str, ...]]:
    place = rule.endpoint, rule.identifier_type
    if rule.match != pb.JUDGES:
        says = enum_name(pb.Match, rule.match).lower().replace("_", " ")
        yield (*place, "–", says, rule.remedy)
    for limit in rule.limits:
        words = said(limit, windows, would=would)
        yield (*place, *words, "" if limit.allowed else rule.remedy)


def said(
    limit: pb.LimitStatus, windows: Windows = _NONE, *, would: bool = False
) -> tuple[str, str]:
    """Return a limit and its result; ``would``: for a check that would be allowed and was not made."""
    if limit.reason == pb.UNLIMITED:
        return limit.plan, "is passed over"
    says = "allows" if limit.allowed else "denies"
    if limit.enforcement == pb.OBSERVE:
        says = "would allow" if limit.allowed else "would deny"
    plan = f"{limit.plan}, " if limit.plan else ""
    numbers = f"{plan}{limit.name}: {limit.limit} per {_window(limit, limit.name, windows)}"
    left = "would be left" if would and limit.allowed else "left"
    return numbers, f"{says}, {limit.remaining_tokens} {left}"


def _window(of: pb.LimitStatus | pb.RateLimitResponse, name: str, windows: Windows) -> str:
    return windows.get((of.rule_id, of.plan, name)) or window(of.window_seconds)


def request_of(  # noqa: PLR0917 -- the arguments of a check
    identifier_type: str, identifier: str, endpoint: str, cost: int, also: Sequence[str] | None
) -> pb.RateLimitRequest:
    """Return the check in the arguments."""
    return pb.RateLimitRequest(
        identifier=identifier,
        identifier_type=identifier_type,
        endpoint=endpoint,
        tokens_requested=cost,
        also=identities_of(further(also)),
    )


_NO_LIMIT: Final = (pb.NO_RULE, pb.UNLIMITED)


def describe(
    answer: pb.RateLimitResponse, windows: Windows = _NONE, places: Places = _NONE
) -> list[tuple[str, str]]:
    """Return the answer in words: what decided, and what remains."""
    remaining = str(answer.remaining_tokens)
    if answer.reason in _NO_LIMIT:
        remaining = "unlimited"
    not_checked = answer.reason in NOT_CHECKED
    wait = [("wait", f"{answer.wait_ms} ms before it proceeds")] if answer.wait_ms else []
    return [
        *wait,
        ("reason", _REASONS.get(answer.reason, enum_name(pb.Reason, answer.reason))),
        ("rule", _rule(answer, windows, places) if answer.rule_id else "–"),
        *([("plan", answer.plan)] if answer.plan else []),
        # The numbers of an answer without a check are placeholders of the specification, not those of a limit.
        ("remaining", "–" if not_checked else remaining),
        ("reset", "–" if not_checked else instant(answer.reset_time)),
        *_retry(answer),
    ]


def _rule(answer: pb.RateLimitResponse, windows: Windows, places: Places) -> str:
    """Return the deciding rule and limit, as far as known, with the rule's id in brackets."""
    kind = answer.limits[0].identifier_type if answer.limits else ""
    parts = [printable(places.get(answer.rule_id, kind))]
    if answer.limit:
        # An answer of an only limit has no status of it, and does not need its name.
        name = f"{answer.limit_name}: " if answer.limits else ""
        length = _window(answer, answer.limit_name, windows)
        parts.append(f"{name}{answer.limit} per {length}")
    known = ", ".join(filter(None, parts))
    return f"{known} ({answer.rule_id})" if known else answer.rule_id


def others(
    answer: pb.RateLimitResponse, windows: Windows, places: Places, *, peek: bool = False
) -> list[tuple[str, str]]:
    """Return the limits that applied besides the deciding one."""
    would = peek and answer.allowed
    found = limits_said(answer.limits[1:], windows, places, would=would)
    return [("" if number else "others", text) for number, text in enumerate(found)]


def limits_said(
    limits: Iterable[pb.LimitStatus], windows: Windows, places: Places, *, would: bool = False
) -> list[str]:
    """Return each limit and its result, with the place of its rule, if known."""
    return [
        ", ".join(
            [
                printable(places.get(one.rule_id, one.identifier_type)),
                *said(one, windows, would=would),
            ]
        )
        for one in limits
    ]


def _retry(answer: pb.RateLimitResponse) -> Iterator[tuple[str, str]]:
    """Yield when the check passes; for an allowed one, when a token is available again if none is left."""
    after = duration(answer.retry_after_seconds) if answer.retry_after_seconds else "–"
    if answer.allowed:
        if answer.retry_after_seconds and not answer.remaining_tokens:
            yield "next token", f"in {after}"
    elif answer.reason == pb.BLOCKED and not answer.reset_time:
        yield "retry after", "never, until it is unassigned"
    elif answer.reason == pb.COST_EXCEEDS_LIMIT:
        yield "retry after", "never with this cost"
    else:
        yield "retry after", after


def instant(time_s: int) -> str:
    """Return a time by the clock of the node; a dash if the answer has none."""
    # Not relative: the node rounds up, and the clock of this host may differ.
    if time_s <= 0:
        return "–"
    try:
        return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"Unix time {time_s}"


def expiry(time_s: int, now_s: float) -> str:
    """Return when a plan or a hold ends, relative and absolute; a dash if the answer has no end."""
    if time_s <= 0:
        return "–"
    left_s = max(0, round(time_s - now_s))
    return f"{f'in {duration(left_s)}' if left_s else 'now'} ({instant(time_s)})"


def send(client: NodeClient, request: pb.RateLimitRequest) -> pb.RateLimitResponse:
    """Send one check."""
    return client.check(
        request.identifier,
        request.identifier_type,
        request.endpoint,
        cost=request.tokens_requested,
        timestamp=request.timestamp,
        peek=request.peek,
        also={one.identifier_type: one.identifier for one in request.also},
        max_wait_ms=request.max_wait_ms,
    )


def _ask_once(client: NodeClient, request: pb.RateLimitRequest, target: Target) -> bool:
    """Send one check and print the answer; return whether it was denied."""
    output, answer = target.output, send(client, request)
    if output.as_json:
        output.message(answer)
    else:
        output.line(verdict(answer, output))
        known = rules_of(client, (answer, *answer.limits), target)
        output.pairs([*describe(answer, *known), *others(answer, *known, peek=request.peek)])
    return not answer.allowed


def _ask_often(
    client: NodeClient, request: pb.RateLimitRequest, count: int, target: Target
) -> bool:
    """Send ``count`` checks in batches and print each answer; return whether any was denied."""
    output = target.output
    windows: Windows | None = None
    verdicts = Counter[tuple[bool, bool]]()

    def answers() -> Iterator[pb.RateLimitResponse]:
        for answer in _answers(client, request, count):
            verdicts[answer.allowed, answer.reason in NOT_CHECKED] += 1
            yield answer

    if output.as_json:
        output.json_list(as_dict(answer) for answer in answers())
    else:
        for number, answer in enumerate(answers(), start=1):
            if windows is None and not answer.allowed:
                windows, _ = rules_of(client, [answer], target)
            output.line(_compact(f"{number:>{len(str(count))}}", answer, windows or _NONE, output))
        allowed = _sum("allowed", verdicts[True, False], verdicts[True, True])
        output.line(f"{allowed}, {_sum('denied', verdicts[False, False], verdicts[False, True])}")
    return verdicts[False, False] + verdicts[False, True] > 0


def _sum(word: str, checked: int, unchecked: int) -> str:
    """Return a count of answers, including how many were not checked."""
    return f"{checked + unchecked} {word}" + (f" ({unchecked} not checked)" if unchecked else "")


def _answers(
    client: NodeClient, request: pb.RateLimitRequest, count: int
) -> Iterator[pb.RateLimitResponse]:
    for start in range(0, count, MAX_BATCH):
        for answer in client.check_batch([request] * min(MAX_BATCH, count - start)):
            if answer.reason == pb.INVALID_REQUEST:
                # The same request alone would be refused, so it is an error here as well.
                message = f"invalid argument: {_ITEM.sub('', answer.error)}"
                raise CliError(message)
            yield answer


def verdict(answer: pb.RateLimitResponse, output: Output) -> str:
    """Return whether a check was allowed, in a word."""
    return output.styled("allowed", "good") if answer.allowed else output.styled("denied", "bad")


def _compact(number: str, answer: pb.RateLimitResponse, windows: Windows, output: Output) -> str:
    word = verdict(answer, output) + (" " if not answer.allowed else "")
    facts = dict(describe(answer))
    said = f"remaining {facts['remaining']}  reset {facts['reset']}"
    if answer.reason in NOT_CHECKED:
        said = facts["reason"]
    return (
        f"{number}  {word}  {said}"
        + (
            f"  retry after {facts['retry after']}{_denier(answer, windows)}"
            if not answer.allowed
            else ""
        )
        + (f"  wait {answer.wait_ms} ms" if answer.wait_ms else "")
    )


def _denier(answer: pb.RateLimitResponse, windows: Windows) -> str:
    """Return the limit that denied; with several, including the identifier type of its rule."""
    kind = [answer.limits[0].identifier_type] if answer.limits else []
    words = [*kind, *([f"plan {answer.plan}"] if answer.plan else [])]
    if answer.limit_name:
        is_only = answer.limit_name == DEFAULT_LIMIT and not answer.limits
        name = "" if is_only else f"{answer.limit_name}: "
        words.append(f"{name}{answer.limit} per {_window(answer, answer.limit_name, windows)}")
    return f"  by {', '.join(words)}" if words else ""
