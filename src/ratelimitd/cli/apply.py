"""``ratelimitd rules apply`` and ``export``: the whole rule book as a file.

Applying is idempotent and overwrites no concurrent edit: every step carries the etag it was planned on.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from ratelimitd.cli.client_options import CliError, Target, UsageError, asks_node
from ratelimitd.cli.output import Output, as_dict, printable, progress
from ratelimitd.errors import FieldViolation, RuleInvalidError
from ratelimitd.model import Enforcement
from ratelimitd.rules.rules_file import MAX_FILE_BYTES, dump_rules, dump_rules_json, parse_rules
from ratelimitd.rules.store import EDITABLE, LimitDraft, PlanDraft, RuleDraft
from ratelimiter.v1 import ratelimiter_pb2 as pb

if TYPE_CHECKING:
    from ratelimitd_client import NodeClient

Pair = tuple[str, str]
"""Endpoint and identifier type: no two rules have the same."""


class Create(NamedTuple):
    """Add a rule."""

    draft: RuleDraft


class Update(NamedTuple):
    """Set ``fields`` of the rule that is ``current`` to their values in ``draft``."""

    current: pb.RateLimit
    draft: RuleDraft
    fields: tuple[str, ...]


class Delete(NamedTuple):
    """Take a rule out."""

    current: pb.RateLimit


Step = Create | Update | Delete


def make_plan(
    wanted: Sequence[RuleDraft], current: Iterable[pb.RateLimit], *, prune: bool
) -> tuple[Step, ...]:
    """Return the steps from ``current`` to ``wanted``, none when there is nothing to do.

    A wanted rule with an id is that rule; one without is the rule for its endpoint and identifier type. With ``prune``,
    superfluous rules are deleted – last, unless one is in the way, so that a plan that stops half way has rather
    too many rules than too few.

    Raises:
        RuleInvalidError: no order of steps leads there; names each rule in the way as ``rules[i]``.
    """
    rules = {rule.id: rule for rule in current}
    matches = _matches(wanted, rules)
    matched = {rule.id for rule in matches if rule is not None}
    unwanted = [rule for rule_id, rule in rules.items() if rule_id not in matched]
    if not prune:
        _refuse_taken_pairs(wanted, unwanted)
        unwanted = []
    creates = [Create(draft) for draft, rule in zip(wanted, matches, strict=True) if rule is None]
    updates = [
        Update(rule, draft, fields)
        for draft, rule in zip(wanted, matches, strict=True)
        if rule is not None and (fields := _differences(rule, draft))
    ]
    needed = {_pair(step.draft) for step in creates} | {_pair(step.draft) for step in updates}
    in_the_way = [Delete(rule) for rule in unwanted if _pair(rule) in needed]
    others = [Delete(rule) for rule in unwanted if _pair(rule) not in needed]
    return (*in_the_way, *_ordered(updates, wanted), *creates, *others)


def draft_of(rule: pb.RateLimit) -> RuleDraft:
    """The stored rule as a file would say it."""
    return RuleDraft(
        id=rule.id,
        endpoint=rule.endpoint,
        identifier_type=rule.identifier_type,
        limit=rule.limit,
        window_seconds=rule.window_seconds,
        algorithm=rule.algorithm,
        enabled=rule.enabled or not rule.HasField("enabled"),
        limits=_drafts(rule.limits),
        plans=tuple(
            PlanDraft(name, _drafts(rule.plans[name].limits)) for name in sorted(rule.plans)
        ),
    )


def _drafts(limits: Iterable[pb.Limit]) -> tuple[LimitDraft, ...]:
    return tuple(
        LimitDraft(
            limit.name,
            limit.limit,
            limit.window_seconds,
            limit.algorithm,
            burst=limit.burst,
            period=pb.Period.Name(limit.period).lower() if limit.period else None,
            time_zone=limit.time_zone or None,
            anchor_day=limit.anchor_day or None,
            enforcement=pb.Enforcement.Name(limit.enforcement).lower(),
        )
        for limit in limits
    )


def _matches(
    wanted: Iterable[RuleDraft], rules: Mapping[str, pb.RateLimit]
) -> list[pb.RateLimit | None]:
    """The stored rule that each wanted one is, ``None`` for a new one; ids first, since a rule may move."""
    claimed = {draft.id for draft in wanted if draft.id in rules}
    by_pair = {_pair(rule): rule for rule in rules.values() if rule.id not in claimed}
    return [rules.get(draft.id) if draft.id else by_pair.get(_pair(draft)) for draft in wanted]


def _refuse_taken_pairs(
    wanted: Iterable[RuleDraft],
    unwanted: Iterable[pb.RateLimit],
) -> None:
    """Refuse a rule whose endpoint and identifier type belong to a stored rule that is to stay."""
    taken = {_pair(rule): rule.id for rule in unwanted}
    violations = [
        FieldViolation(
            f"rules[{index}].id",
            f"the rule for this endpoint and identifier_type has the id {taken[_pair(draft)]}:"
            " give that one, give none, or delete that rule with --prune",
        )
        for index, draft in enumerate(wanted)
        if _pair(draft) in taken
    ]
    if violations:
        raise RuleInvalidError(*violations)


def _differences(rule: pb.RateLimit, draft: RuleDraft) -> tuple[str, ...]:
    stored = draft_of(rule)
    return tuple(name for name in EDITABLE if getattr(stored, name) != getattr(draft, name))


def _ordered(updates: Sequence[Update], wanted: Sequence[RuleDraft]) -> Iterator[Update]:
    """Yield the updates so that each finds its endpoint and identifier type free."""
    held = {_pair(update.current): update.current.id for update in updates}
    waiting = list(updates)
    while waiting:
        ready: list[Update] = []
        blocked: list[Update] = []
        for update in waiting:
            holder = held.get(_pair(update.draft), update.current.id)
            (ready if holder == update.current.id else blocked).append(update)
        if not ready:
            message = "rules trade their endpoints: move one to a free endpoint first"
            raise RuleInvalidError(
                *(
                    FieldViolation(f"rules[{wanted.index(update.draft)}]", message)
                    for update in blocked
                )
            )
        for update in ready:
            held.pop(_pair(update.current), None)
            held[_pair(update.draft)] = update.current.id
        yield from ready
        waiting = blocked


def _pair(rule: RuleDraft | pb.RateLimit) -> Pair:
    return (rule.endpoint, rule.identifier_type)


STDIN: Final = Path("-")


@asks_node
def apply(
    target: Target,
    *,
    file: Annotated[
        Path,
        typer.Option(
            "--file", "-f", metavar="FILE", help="The rules, YAML; - reads standard input."
        ),
    ],
    prune: Annotated[
        bool, typer.Option("--prune", help="Delete rules that the file does not contain.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the changes without making them.")
    ] = False,
) -> None:
    """Apply a rules file to a node, and print the changes.

    Exit status: 0 when the node has the rules of the file, 1 when the file or a rule is refused.

    Example:
      ratelimitd rules apply -f rules.yaml --dry-run
      ratelimitd rules apply -f rules.yaml --prune
    """
    output = target.output
    with _refusal_of(file):
        wanted = parse_rules(_content(file))
    with target.client() as client:
        with _refusal_of(file):
            plan = make_plan(wanted, client.rules(), prune=prune)
        if not output.as_json:
            _print_plan(plan, output)
        if not dry_run:
            _carry_out(plan, client, target)
    if output.as_json:
        output.json_list(map(_as_json, plan))
    else:
        output.line(_summary(plan, dry_run=dry_run))


@asks_node
def export(target: Target) -> None:
    """Print the rules as a file for `rules apply`, in YAML, or in JSON with --json.

    Example:
      ratelimitd rules export > rules.yaml
      ratelimitd rules export --json | jq '.rules[].limit'
    """
    with target.client() as client:
        drafts = [draft_of(rule) for rule in client.rules()]
    dump = dump_rules_json if target.output.as_json else dump_rules
    target.output.line(dump(drafts).rstrip("\n"))


def _content(file: Path) -> bytes:
    """The bytes of the file, one more than allowed when it is too large."""
    try:
        if file == STDIN:
            return sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
        with file.open("rb") as stream:
            return stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        message = f"--file: cannot read {file}: {error.strerror}"
        raise UsageError(message) from None


@contextmanager
def _refusal_of(file: Path) -> Iterator[None]:
    """End the command with everything that is wrong with the file, a line for each."""
    try:
        yield
    except RuleInvalidError as error:
        details = [f"{field}: {description}" for field, description in error.violations]
        message = f"{file} is refused, nothing was changed:"
        raise CliError(message, details=details) from None


def _carry_out(plan: Sequence[Step], client: NodeClient, target: Target) -> None:
    """Carry out the steps up to the first that fails; then say how far it came."""
    with progress("applying", len(plan)) as step_done:
        for done, step in enumerate(plan):
            try:
                with target.explained():
                    _execute(client, step)
            except CliError as failure:
                if target.output.as_json:
                    target.output.json_list(map(_as_json, plan[:done]))
                made = f"{done} of {len(plan)} changes were made before it"
                message = f"{_what(step)}: {failure}; {made}"
                raise CliError(message, failure.exit_code) from None
            step_done()


def _what(step: Step) -> str:
    """The action of a step, and its rule as the file has it."""
    rule = draft_of(step.current) if isinstance(step, Delete) else step.draft
    return f"{type(step).__name__.lower()} {_name(rule)}"


def _execute(client: NodeClient, step: Step) -> None:
    """Carry out one step."""
    match step:
        case Create(draft):
            client.create_rule(_message(draft))
        case Update(current, draft, fields):
            changes = {name: _value(draft, name) for name in fields}
            rule = pb.RateLimit(id=current.id, etag=current.etag, **changes)
            client.update_rule(rule, fields)
        case _:
            client.delete_rule(step.current.id, etag=step.current.etag)


def _print_plan(plan: Sequence[Step], output: Output) -> None:
    for step in plan:
        match step:
            case Create(draft):
                output.line(output.styled(f"+ create {_name(draft)}: {_values(draft)}", "good"))
            case Update(current, draft, fields):
                stored = draft_of(current)
                output.line(output.styled(f"~ update {_name(stored)}", "warn"))
                for name in fields:
                    old, new = _text(getattr(stored, name)), _text(getattr(draft, name))
                    output.line(f"    {name}: {old} → {new}")
            case _:
                stored = draft_of(step.current)
                output.line(output.styled(f"- delete {_name(stored)}: {_values(stored)}", "bad"))


def _as_json(step: Step) -> dict[str, Any]:
    match step:
        case Create(draft):
            return {"action": "create", "rate_limit": as_dict(_message(draft))}
        case Update(current, draft, fields):
            changed = as_dict(_message(draft))
            rule = as_dict(current) | {name: changed[name] for name in fields}
            return {"action": "update", "fields": list(fields), "rate_limit": rule}
        case _:
            return {"action": "delete", "rate_limit": as_dict(step.current)}


def _message(draft: RuleDraft) -> pb.RateLimit:
    return pb.RateLimit(id=draft.id, **{name: _value(draft, name) for name in EDITABLE})


def _value(draft: RuleDraft, name: str) -> Any:
    """A field as the contract has it."""
    if name == "limits":
        return [*map(limit_message, draft.limits)]
    if name == "plans":
        return {
            plan.name: pb.LimitList(limits=map(limit_message, plan.limits)) for plan in draft.plans
        }
    return getattr(draft, name)


def limit_message(limit: LimitDraft) -> pb.Limit:
    """A limit as the contract has it."""
    fields = asdict(limit)
    enforcement = pb.Enforcement.Value(fields.pop("enforcement").upper())
    if limit.period:
        fields["period"] = pb.Period.Value(limit.period.upper())
    return pb.Limit(**fields, enforcement=enforcement)


def _name(rule: RuleDraft) -> str:
    return f"{printable(rule.endpoint)} {rule.identifier_type}"


def _values(rule: RuleDraft) -> str:
    state = "" if rule.enabled else ", disabled"
    return f"{limits_text(rule)}{state}"


def limits_text(rule: RuleDraft | pb.RateLimit) -> str:
    """The limits of a rule in one line; with their names if there are several."""
    if isinstance(rule, pb.RateLimit):
        rule = draft_of(rule)
    own = f"{rule.limit} per {rule.window_seconds} s, {rule.algorithm}"
    if rule.limits:
        own = _list_text(rule.limits)
    return own + "".join(f"; plan {plan.name}: {_list_text(plan.limits)}" for plan in rule.plans)


def _list_text(limits: Iterable[LimitDraft]) -> str:
    return "; ".join(
        f"{printable(limit.name)}: {limit.limit} per {window_text(limit)}, {limit.algorithm}"
        + (f", burst {limit.burst}" if limit.burst else "")
        + (", observed" if limit.enforcement == Enforcement.OBSERVE else "")
        for limit in limits
    )


def window_text(limit: LimitDraft) -> str:
    """The window of a limit: its seconds, or what of the calendar it is."""
    if limit.period is None:
        return f"{limit.window_seconds} s"
    anchor = f" from day {limit.anchor_day}" if limit.anchor_day else ""
    return f"{limit.period}{anchor} ({printable(limit.time_zone)})"


def _text(value: object) -> str:
    """A value as the file spells it."""
    if isinstance(value, tuple):
        plans = {one.name: one.limits for one in value if isinstance(one, PlanDraft)}
        value = json.dumps(plans or value, default=_as_listed)
    return str(value).lower() if isinstance(value, bool) else printable(str(value))


def _as_listed(limit: LimitDraft) -> dict[str, Any]:
    return asdict(limit)


def _summary(plan: Sequence[Step], *, dry_run: bool) -> str:
    if not plan:
        return "no changes"
    done = Counter(type(step) for step in plan)
    counts = f"{done[Create]} to create, {done[Update]} to update, {done[Delete]} to delete"
    if dry_run:
        return f"{counts}; this was a dry run"
    return f"{done[Create]} created, {done[Update]} updated, {done[Delete]} deleted"
