"""``ratelimitd plans assign``, ``unassign``, ``show``, ``list`` and ``import``: assignments of identities to plans.

The node validates one assignment; a file is validated as a whole before any of it is sent.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import grpc
import typer

from ratelimitd.cli.check import IdentifierArgument, TypeArgument, instant
from ratelimitd.cli.client_options import CliError, Target, asks_node, demand, naming, readable
from ratelimitd.cli.options import group
from ratelimitd.cli.output import as_dict, progress
from ratelimitd.cli.rules import EtagOption
from ratelimitd.errors import FieldViolation, InvalidInputError
from ratelimitd.model import EVERYBODY, RESERVED_PLANS, TYPE_NAME, IdentifierType
from ratelimitd.rules.assignments import MAX_ASSIGNMENTS, expire_time_of, violations
from ratelimitd_client import NodeClient
from ratelimiter.v1 import ratelimiter_pb2 as pb

COLUMNS: Final = ("identifier_type", "identifier", "plan", "expire_time", "note")
"""The columns of a file; the last two may be missing."""

BATCH: Final = 1_000
"""Assignments, or rules, per call; a node accepts no more."""

PlanArgument = Annotated[str, typer.Argument(metavar="PLAN", help="Name of the plan.")]


@asks_node
def assign(
    target: Target,
    *,
    identifier_type: TypeArgument,
    identifier: IdentifierArgument,
    plan: PlanArgument,
    expires: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="When it ends: 30m, 12h, 30d, 2027-01-31, 2027-01-31T12:00:00Z or Unix seconds.",
        ),
    ] = "",
    note: Annotated[str, typer.Option(metavar="TEXT", help="A note for people.")] = "",
    etag: EtagOption = "",
) -> None:
    """Assign an identity to a plan. Replaces its current plan.

    Example:
      ratelimitd plans assign user alice pro --expires 30d --note 'trial'
      ratelimitd plans assign ip 192.0.2.1 blocked
    """
    with naming("--expires "):
        expire_time = expire_time_of(expires, time.time())
    wanted = pb.Assignment(
        identity=pb.Identity(identifier_type=identifier_type, identifier=identifier),
        plan=plan,
        expire_time=expire_time,
        note=note,
        etag=etag,
    )
    with target.client() as client:
        assigned = client.assign(wanted)
        _show("assigned ", assigned, target)
        if not (target.output.as_json or _is_named(client, target, plan)):
            target.output.line(f"no rule names the plan {plan}: the rules' own limits hold")


def _is_named(client: NodeClient, target: Target, plan: str) -> bool:
    """Return whether a rule names a plan; true if one call cannot determine it."""
    if plan in RESERVED_PLANS:
        return True
    with suppress(CliError), target.explained():
        page = client.list_rules(pb.ListRateLimitsRequest(page_size=BATCH))
        return bool(page.next_page_token) or any(plan in rule.plans for rule in page.rate_limits)
    return True


@asks_node
def unassign(
    target: Target,
    *,
    identifier_type: TypeArgument,
    identifier: IdentifierArgument,
    etag: EtagOption = "",
) -> None:
    """Unassign an identity. The rules' own limits hold again.

    Example:
      ratelimitd plans unassign user alice
    """
    identity = pb.Identity(identifier_type=identifier_type, identifier=identifier)
    with target.client() as client:
        client.unassign(identity, etag=etag)
    target.output.answer({}, f"unassigned {identifier_type} {identifier}")


@asks_node
def show(target: Target, *, identifier_type: TypeArgument, identifier: IdentifierArgument) -> None:
    """Show the plan of an identity.

    Example:
      ratelimitd plans show user alice
    """
    identity = pb.Identity(identifier_type=identifier_type, identifier=identifier)
    with target.client() as client:
        found = client.assignment(identity)
    _show("", found, target)


@asks_node
def list_assignments(
    target: Target,
    *,
    plan: Annotated[str, typer.Option(metavar="PLAN", help="Only this plan.")] = "",
    identifier_type: Annotated[
        str, typer.Option("--type", metavar="TYPE", help="Only identities of this type.")
    ] = "",
    prefix: Annotated[
        str,
        typer.Option(metavar="TEXT", help="Only identifiers with this prefix; needs --type."),
    ] = "",
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print the file that `plans import` reads.")
    ] = False,
) -> None:
    """Show assignments, ordered by identifier type and identifier.

    Example:
      ratelimitd plans list --plan blocked
      ratelimitd plans list --type user --prefix al --json
      ratelimitd plans list --csv > plans.csv
    """
    demand(identifier_type or not prefix, "--prefix needs --type")
    demand(not (as_csv and target.output.as_json), "give one of --csv and --json")
    with target.client() as client:
        found = client.assignments(plan=plan, identifier_type=identifier_type, prefix=prefix)
        if target.output.as_json:
            target.output.json_list(as_dict(one) for one in found)
            return
        if as_csv:
            target.output.csv(COLUMNS, map(_cells, found))
            return
        rows = [
            (
                one.identity.identifier_type,
                one.identity.identifier,
                one.plan,
                instant(one.expire_time) if one.expire_time else "never",
                one.note,
            )
            for one in found
        ]
    target.output.table(("TYPE", "IDENTIFIER", "PLAN", "EXPIRES", "NOTE"), rows)


def _cells(one: pb.Assignment) -> tuple[str, str, str, int | str, str]:
    """Return the row of an assignment in a file."""
    named = one.identity
    return named.identifier_type, named.identifier, one.plan, one.expire_time or "", one.note


@asks_node
def import_file(
    target: Target,
    *,
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help=f"CSV with the header {','.join(COLUMNS)}."),
    ],
) -> None:
    """Assign every identity of a CSV file. Nothing is assigned if any row is wrong; all wrong rows are named.

    expire_time is empty or as --expires of `plans assign`; it and note may be missing.

    Example:
      ratelimitd plans import plans.csv
    """
    rows, wrong = read_file(file, time.time())
    with target.client() as client:
        try:
            wrong += _undeclared(client, rows)
        except grpc.RpcError:
            if not wrong:
                raise
        if wrong:
            details = [f"line {line}: {text}" for line, text in sorted(wrong, key=itemgetter(0))]
            message = f"{file}: nothing was assigned, because of invalid rows:"
            raise CliError(message, details=details)
        with progress("assigning", -(-len(rows) // BATCH)) as step:
            for start in range(0, len(rows), BATCH):
                try:
                    with target.explained():
                        client.assign_all(row.assignment for row in rows[start : start + BATCH])
                except CliError as error:
                    message = f"{file}: {_written(rows, start)}: {error}"
                    raise CliError(message, error.exit_code) from None
                step()
    target.output.answer({"assigned": len(rows)}, f"assigned {len(rows)} identities")


class Row(NamedTuple):
    """One row of a file, with the line at which it ends."""

    line: int
    assignment: pb.Assignment


Wrong = list[tuple[int, str]]
"""What is wrong with the rows of a file: the line at which one ends, and its field with a description."""


def read_file(file: Path, now_s: float) -> tuple[Sequence[Row], Wrong]:
    """Return the valid rows of a file, and what is wrong with the others.

    Raises:
        UsageError: the file cannot be read.
        CliError: the header is invalid.
    """
    with (
        readable(file),
        # Invalid bytes become surrogates, so that the error names the field.
        file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as stream,
    ):
        return _rows(csv.DictReader(stream, strict=True), file, now_s)


def _rows(reader: csv.DictReader[str], file: Path, now_s: float) -> tuple[Sequence[Row], Wrong]:
    rows: list[Row] = []
    wrong: Wrong = []
    seen: dict[tuple[str, str], int] = {}
    try:
        names = reader.fieldnames or ()
        demand(
            {*COLUMNS[:3]} <= {*names} <= {*COLUMNS} and len({*names}) == len(names),
            f"{file}: line 1: the header must be {','.join(COLUMNS)}; the last two may be missing",
            CliError,
        )
        for values in reader:
            line = reader.line_num
            try:
                assignment = _assignment(values, now_s)
            except InvalidInputError as error:
                wrong += ((line, f"{named}: {text}") for named, text in error.violations)
                continue
            rows.append(Row(line, assignment))
            identity = assignment.identity
            first = seen.setdefault((identity.identifier_type, identity.identifier), line)
            if first != line:
                wrong.append((line, f"identifier: is the same as in line {first}"))
    except csv.Error as error:
        wrong.append((reader.reader.line_num, str(error)))
    if len(rows) > MAX_ASSIGNMENTS:
        text = f"{len(rows)} rows exceed the {MAX_ASSIGNMENTS} assignments that a node holds"
        wrong.append((rows[-1].line, text))
    return rows, wrong


@dataclass
class _Wire:
    """An identity in the form the service reads."""

    identifier_type: bytes
    identifier: bytes


def _assignment(values: dict[str | Any, str | Any], now_s: float) -> pb.Assignment:
    """Return the assignment of a row, validated by the rules of the service.

    Raises:
        InvalidInputError: names every invalid field.
    """
    # Protobuf and the services take 100 ms to import.
    from ratelimitd.services.convert import Identities, identity_of  # noqa: PLC0415

    if None in values or None in values.values():
        text = "the row must have as many fields as the header"
        raise InvalidInputError(FieldViolation("row", text))
    wrong: list[FieldViolation] = []
    kind, plan, note = values["identifier_type"], values["plan"], values.get("note", "")
    expire_time = 0
    try:
        expire_time = expire_time_of(values.get("expire_time", ""), now_s)
    except ValueError as error:
        wrong.append(FieldViolation("expire_time", str(error)))
    wrong += (FieldViolation(*one) for one in violations(plan, expire_time, note, now_s))
    wire = _Wire(
        *(text.encode("utf-8", "surrogateescape") for text in (kind, values["identifier"]))
    )
    has_form = TYPE_NAME.fullmatch(kind) is not None and kind != EVERYBODY
    try:
        found = identity_of(wire, Identities.of([kind] if has_form else []), "")
    except InvalidInputError as error:
        raise InvalidInputError(*error.violations, *wrong) from None
    if wrong:
        raise InvalidInputError(*wrong)
    identity = pb.Identity(identifier_type=found[0], identifier=found[1].decode())
    return pb.Assignment(identity=identity, plan=plan, expire_time=expire_time, note=note)


def _undeclared(client: NodeClient, rows: Sequence[Row]) -> Wrong:
    """Return the rows of identifier types that the node does not declare.

    Lists each type, so that the node reports it before anything is assigned.
    """
    undeclared = set()
    for kind in sorted(
        {row.assignment.identity.identifier_type for row in rows} - {*IdentifierType}
    ):
        try:
            client.list_assignments(pb.ListAssignmentsRequest(identifier_type=kind, page_size=1))
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
                raise
            undeclared.add(kind)
    kinds = ((row.line, row.assignment.identity.identifier_type) for row in rows)
    return [
        (line, f"identifier_type: {kind} is not declared by the node")
        for line, kind in kinds
        if kind in undeclared
    ]


def _written(rows: Sequence[Row], start: int) -> str:
    """Return what was assigned before a call failed; another run may repeat it."""
    if not start:
        return "nothing was assigned"
    return f"the rows up to line {rows[start - 1].line} were assigned, and no others"


def _show(done: str, assignment: pb.Assignment, target: Target) -> None:
    identity = assignment.identity
    until = f", until {instant(assignment.expire_time)}" if assignment.expire_time else ""
    note = f" ({assignment.note})" if assignment.note else ""
    text = f"{done}{identity.identifier_type} {identity.identifier}: {assignment.plan}{until}{note}"
    target.output.answer(assignment, text)


app = group(
    "Show and change which plan an identity has.",
    {
        "assign": assign,
        "unassign": unassign,
        "show": show,
        "list": list_assignments,
        "import": import_file,
    },
)
