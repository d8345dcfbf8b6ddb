"""``ratelimitd rules apply``, ``diff``, ``revert``, ``export`` and ``import-envoy``: the whole rule book as a file.

The node determines the changes: it compares and applies a file in one transaction.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final

import grpc
import typer

from ratelimitd.cli.client_options import (
    EXIT_CHANGES,
    CliError,
    Target,
    asks_node,
    demand,
    naming,
    read_file,
    refusal,
    refusing,
    violations_of,
)
from ratelimitd.cli.output import Output, counted, window, working
from ratelimitd.errors import FieldViolation, RuleInvalidError, printable
from ratelimitd.model import EVERY_ENDPOINT, GLOBAL_ENDPOINT, Enforcement
from ratelimitd.rules.applying import MAX_APPLIED
from ratelimitd.rules.envoy_import import MAX_FILE_BYTES as MAX_ENVOY_BYTES
from ratelimitd.rules.envoy_import import import_config
from ratelimitd.rules.rules_file import (
    MAX_FILE_BYTES,
    RULES_KEY,
    dump_rules,
    dump_rules_json,
    parse_rules,
)
from ratelimitd.rules.schema import rules_schema
from ratelimitd.rules.store import EDITABLE, FIRST_LIMIT, LimitDraft, RuleDraft
from ratelimitd.settings.parsing import identifier_keys
from ratelimitd.settings.table import SETTINGS
from ratelimitd_client import NodeClient
from ratelimiter.v1 import ratelimiter_pb2 as pb


def draft_of(rule: pb.RateLimit) -> RuleDraft:
    """Return the stored rule as a file represents it."""
    # Takes 40 ms to import; a node reads a rule the same way.
    from ratelimitd.services.convert_rules import message_draft  # noqa: PLC0415

    return message_draft(rule)


_IN_FILE: Final = re.compile(r"rate_limits\b(?:\[(\d{1,6})\])?")

RULES_PER_S: Final = 500
"""The timeout grows by a second per this many rules; a node applies thousands a second."""

LONG: Final = 1_000
"""Minimum number of rules with an activity display; fewer are applied too quickly."""


FileOption = Annotated[
    Path,
    typer.Option("--file", "-f", metavar="FILE", help="The rules, YAML; - reads standard input."),
]
PruneOption = Annotated[
    bool, typer.Option("--prune", help="Delete rules that the file does not contain.")
]

DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Print the changes without making them.")
]
RevisionOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        metavar="N",
        help="Refuse if a rule was changed after this revision, as `rules diff` shows it.",
    ),
]


@asks_node
def apply(
    target: Target,
    *,
    file: FileOption,
    prune: PruneOption = False,
    dry_run: DryRunOption = False,
    revision: RevisionOption = None,
) -> None:
    """Apply a rules file to a node, all of it or nothing, and print the changes.

    Exit status: 0 when the node has the rules of the file, 1 when the file or a rule is refused.

    Example:
      ratelimitd rules apply -f rules.yaml --dry-run
      ratelimitd rules apply -f rules.yaml --prune
    """
    answer = _ask(target, file, prune=prune, dry_run=dry_run, revision=revision)
    _show_changes(answer, target, dry_run=dry_run)


@asks_node
def diff(target: Target, *, file: FileOption, prune: PruneOption = False) -> None:
    """Print what `rules apply` of a file would change, and change nothing.

    Exit status: 0 when nothing would change, 4 when something would, 1 when the file or a rule is refused.

    Example:
      ratelimitd rules diff -f rules.yaml --prune
    """
    answer = _ask(target, file, prune=prune, dry_run=True)
    counts = _counts(answer, dry_run=True)
    _show(answer, f"{counts}; the rules are at revision {answer.revision}", target)
    if answer.changes:
        raise typer.Exit(EXIT_CHANGES)


@asks_node
def revert(
    target: Target,
    *,
    as_of: Annotated[
        int, typer.Argument(metavar="REVISION", min=1, help="The revision to go back to.")
    ],
    dry_run: DryRunOption = False,
    revision: RevisionOption = None,
) -> None:
    """Bring the rules back to what they were at a revision, in a new revision, and print the changes.

    Assignments to plans stay as they are.

    Exit status: 0 when the node has the rules of then, 1 when it refuses.

    Example:
      ratelimitd rules revert 17 --dry-run
    """
    timeout_s = target.timeout_s + MAX_APPLIED / RULES_PER_S
    with target.client() as client, _named_if_missing(target):
        try:
            answer = client.revert_rules(
                as_of,
                dry_run=dry_run,
                revision=_checked_revision(client, revision),
                timeout_s=timeout_s,
            )
        except grpc.RpcError as error:
            reasons = [why for field, why in violations_of(error) if field == "as_of"]
            if not reasons:
                raise
            message = f"the rules cannot be reverted to revision {as_of}: {'; '.join(reasons)}"
            raise CliError(message) from None
    _show_changes(answer, target, dry_run=dry_run)


def schema() -> None:
    """Print the JSON Schema of rules files, with which editors check and complete them.

    Example:
      ratelimitd rules schema > rules.schema.json
    """
    Output().json(rules_schema())


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


def _ask(
    target: Target, file: Path, *, prune: bool, dry_run: bool, revision: int | None = None
) -> pb.ApplyRateLimitsResponse:
    with refusing(file):
        wanted = parse_rules(read_file(file, MAX_FILE_BYTES, "--file", may_be_stdin=True))
    warn_of_patterns(rule.endpoint for rule in wanted)
    timeout_s = target.timeout_s + len(wanted) / RULES_PER_S
    shown = working("applying") if len(wanted) >= LONG else nullcontext()
    with target.client() as client, shown, _named_if_missing(target):
        try:
            answer = client.apply_rules(
                map(_message, wanted),
                prune=prune,
                dry_run=dry_run,
                revision=_checked_revision(client, revision),
                timeout_s=timeout_s,
            )
        except grpc.RpcError as error:
            if not (violations := violations_of(error)):
                raise
            raise refusal(file, (_in_file(one, wanted) for one in violations)) from None
        moved = [one for one in answer.changes if one.before.endpoint != one.after.endpoint]
        added = {one.after.endpoint for one in moved} - {""}
        warn_of_case(client, added, gone={one.before.id for one in moved})
        return answer


def _checked_revision(client: NodeClient, revision: int | None) -> int:
    """Return the revision to send; in the contract 0 means unchecked, so compare it here, by a call of its own."""
    if revision == 0:
        now = client.apply_rules((), dry_run=True).revision
        why = f"rules may have been changed after revision 0: the revision is {now} now"
        demand(not now, why, CliError)
    return revision or 0


def _in_file(violation: FieldViolation, wanted: Sequence[RuleDraft]) -> FieldViolation:
    """Return a violation in the request as one of the file, which has the same rules, with the name of the rule."""
    place = _IN_FILE.match(violation.field)
    if place is None:
        return violation
    rules = wanted[int(place[1]) :][:1] if place[1] else ()
    named = "".join(f" ({_name(rule)})" for rule in rules)
    field = f"{RULES_KEY}{violation.field.removeprefix('rate_limits')}"
    return FieldViolation(field, f"{violation.description}{named}")


def warn_of_case(client: NodeClient, added: Collection[str], gone: Collection[str] = ()) -> None:
    """Warn about added endpoints that differ from another one only in case: valid, but seldom intended.

    ``gone``: ids of rules that a dry run would move or delete, which the node still lists. Ignores a node that does not
    answer: the rules are valid.
    """
    spelled: dict[str, str] = {}
    with suppress(grpc.RpcError):
        for rule in islice(client.rules(), MAX_APPLIED) if added else ():
            if rule.endpoint not in added and rule.id not in gone:
                spelled[rule.endpoint.lower()] = rule.endpoint
    for endpoint in sorted(added):
        other = spelled.setdefault(endpoint.lower(), endpoint)
        if other != endpoint:
            text = f"Warning: {endpoint} differs in case alone from {other}, which has rules, too"
            print(printable(f"{text}: a check for one does not match the other"), file=sys.stderr)


def warn_of_patterns(endpoints: Iterable[str]) -> None:
    """Warn about endpoints that look like patterns, which are not supported: valid, but seldom intended."""
    for endpoint in endpoints:
        if "*" in endpoint and endpoint not in {GLOBAL_ENDPOINT, EVERY_ENDPOINT}:
            text = (
                f"Warning: {endpoint} is the name of one endpoint, no pattern: callers send the template of a route,"
                " such as /orders/{id}, and * alone is every endpoint without a rule"
            )
            print(printable(text), file=sys.stderr)


@contextmanager
def _named_if_missing(target: Target) -> Iterator[None]:
    """Name the call that a node of an earlier release lacks."""
    try:
        yield
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
            raise
        message = (
            f"the node at {target.address} runs an earlier release, which has no ApplyRateLimits"
        )
        raise CliError(message) from None


def revision_of(client: NodeClient) -> int | None:
    """Return the rules revision of the node, ``None`` if it does not answer."""
    with suppress(grpc.RpcError):
        return client.health().rules_revision
    return None


def revision_text(revision: int) -> str:
    """Return a line with the new revision and how to revert it; before revision 1 there were no rules."""
    back = f"; to go back: ratelimitd rules revert {revision - 1}" if revision > 1 else ""
    return f"the rules are at revision {revision}{back}"


def _show_changes(answer: pb.ApplyRateLimitsResponse, target: Target, *, dry_run: bool) -> None:
    remark = "; this was a dry run" if dry_run else ""
    _show(answer, f"{_counts(answer, dry_run=dry_run)}{remark}", target)
    if answer.changes and not dry_run and not target.output.as_json:
        target.output.line(revision_text(answer.revision))


def _counts(answer: pb.ApplyRateLimitsResponse, *, dry_run: bool) -> str:
    if dry_run:
        return f"{answer.created} to create, {answer.updated} to update, {answer.deleted} to delete"
    return f"{answer.created} created, {answer.updated} updated, {answer.deleted} deleted"


def _show(answer: pb.ApplyRateLimitsResponse, summary: str, target: Target) -> None:
    """Print the changes, and the summary if there are any."""
    output = target.output
    if output.as_json:
        output.message(answer)
        return
    for change in answer.changes:
        _print_change(change, output)
    if more := answer.created + answer.updated + answer.deleted - len(answer.changes):
        output.line(f"… and {more} more")
    output.line(summary if answer.changes else "no changes")


def _print_change(change: pb.RateLimitChange, output: Output) -> None:
    before, after = draft_of(change.before), draft_of(change.after)
    if not change.HasField("before"):
        output.line(output.styled(f"+ create {_name(after)}: {values_text(after)}", "good"))
        return
    if not change.HasField("after"):
        output.line(output.styled(f"- delete {_name(before)}: {values_text(before)}", "bad"))
        return
    output.line(output.styled(f"~ update {_name(before)}", "warn"))
    hidden = FIRST_LIMIT if before.limits or after.limits else ("limits",)
    for name in EDITABLE:
        old, new = _text(before, name), _text(after, name)
        if old != new and name not in hidden:
            output.line(f"    {name.removesuffix('_seconds')}: {old} → {new}")


def _message(draft: RuleDraft) -> pb.RateLimit:
    fields: dict[str, Any] = {name: getattr(draft, name) for name in EDITABLE}
    fields["limits"] = map(_limit, draft.limits)
    fields["plans"] = {
        one.name: pb.LimitList(limits=map(_limit, one.limits)) for one in draft.plans
    }
    return pb.RateLimit(id=draft.id, **fields)


def _limit(limit: LimitDraft) -> pb.Limit:
    fields = asdict(limit)
    enforcement = pb.Enforcement.Value(fields.pop("enforcement").upper())
    if limit.period:
        fields["period"] = pb.Period.Value(limit.period.upper())
    return pb.Limit(**fields, enforcement=enforcement)


def _name(rule: RuleDraft) -> str:
    return f"{printable(rule.endpoint)} {rule.identifier_type}"


def values_text(rule: RuleDraft) -> str:
    """Return the limits of a rule, with their names if there are several, and whether it is disabled, in one line."""
    plans = "".join(f"; plan {plan.name}: {_list_text(plan.limits)}" for plan in rule.plans)
    state = "" if rule.enabled else ", disabled"
    return f"{_own_text(rule)}{plans}{state}"


def _own_text(rule: RuleDraft) -> str:
    """Return the limits for identities without a plan."""
    if rule.limits:
        return _list_text(rule.limits)
    return f"{rule.limit} per {window(rule.window_seconds)}, {rule.algorithm}"


def _list_text(limits: Iterable[LimitDraft]) -> str:
    return "; ".join(
        f"{printable(limit.name)}: {limit.limit} per {window_text(limit)}, {limit.algorithm}"
        + (f", burst {limit.burst}" if limit.burst else "")
        + (", observed" if limit.enforcement == Enforcement.OBSERVE else "")
        for limit in limits
    )


def window_text(limit: LimitDraft) -> str:
    """Return the window of a limit: its length, or its calendar period."""
    return limit.calendar_text or window(limit.window_seconds)


def _text(rule: RuleDraft, name: str) -> str:
    if name == "limits":
        return _own_text(rule)
    if name == "plans":
        return "; ".join(f"{one.name}: {_list_text(one.limits)}" for one in rule.plans) or "none"
    value = getattr(rule, name)
    if name == "window_seconds":
        return window(value)
    return str(value).lower() if isinstance(value, bool) else printable(str(value))


ENVOY_SETTING: Final = "ENVOY_IDENTIFIERS"

_ENVOY_DEFAULT: Final = next(
    setting.default for setting in SETTINGS if setting.name == ENVOY_SETTING
)


def import_envoy(
    *,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Configuration of envoyproxy/ratelimit, YAML.")
    ],
    identifiers: Annotated[
        str,
        typer.Option(
            metavar="KEY=TYPE,…", help=f"The {ENVOY_SETTING} of the node.", show_default=False
        ),
    ] = _ENVOY_DEFAULT,
) -> None:
    """Convert a configuration of envoyproxy/ratelimit to a file for `rules apply`.

    What has no equivalent is listed on stderr, and so is what the setting ENVOY_IDENTIFIERS of the node has to be.

    Exit status: 0 when every limit is a rule, 4 when limits are left out, 1 when the file is wrong.

    Example:
      ratelimitd rules import-envoy config.yaml > rules.yaml
      ratelimitd rules apply -f rules.yaml --dry-run
    """
    with naming("--identifiers "):
        keys = identifier_keys(identifiers)
    try:
        imported = import_config(read_file(file, MAX_ENVOY_BYTES), keys)
    except RuleInvalidError as error:
        message = f"{file}: {printable(error.violations[0].description)}"
        raise CliError(message) from None
    Output().line(dump_rules(imported.rules).rstrip("\n"))
    for note in imported.notes:
        print(printable(str(note)), file=sys.stderr)
    if imported.new_identifiers:
        added = [f"{key}={kind}" for key, kind in imported.new_identifiers.items()]
        needed = ",".join([*filter(None, [identifiers]), *added])
        typed = [f"{key}={key}" for key in imported.new_identifiers]
        other = ",".join([*filter(None, [identifiers]), *typed])
        print(printable(f"nodes need {ENVOY_SETTING}={needed}"), file=sys.stderr)
        hint = f"with types of their own, which IDENTIFIER_TYPES declares: --identifiers {other}"
        print(printable(hint), file=sys.stderr)
    rules = counted(len(imported.rules), "rule")
    print(f"{rules}, {counted(imported.left_out, 'limit')} left out", file=sys.stderr)
    if imported.left_out:
        raise typer.Exit(EXIT_CHANGES)
