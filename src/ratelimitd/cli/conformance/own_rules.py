"""The rules of the cases on a server: created for endpoints of the run, and always deleted."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import grpc

from ratelimitd.cli.client_options import CliError, Target
from ratelimitd.cli.conformance.cases import IDENTIFIER_TYPE, Case
from ratelimitd.cli.output import on_signal
from ratelimitd.model import EVERY_ENDPOINT, Period
from ratelimitd_client import NodeClient
from ratelimiter.v1 import ratelimiter_pb2 as pb


class Place(NamedTuple):
    """The endpoint of a case; for a policy case, the error of a server that refused its rules."""

    endpoint: str
    refused: str = ""


@contextmanager
def own_rules(
    target: Target, client: NodeClient, prefix: str, cases: Sequence[Case]
) -> Iterator[list[Place]]:
    """Yield the endpoint of each case while its rules exist.

    Raises:
        CliError: a rule cannot be created or deleted; the message names those that are left.
    """
    places: list[Place] = []
    made: dict[str, str] = {}
    """The ids by endpoint; empty while it is unknown whether the rule exists."""
    policies: list[str] = []
    """The ids of policy rules that may exist."""
    with on_signal(signal.SIGTERM, signal.default_int_handler):
        try:
            for number, case in enumerate(cases):
                endpoint = f"{prefix}/{number}"
                refused = ""
                if case.rules:
                    policies += case.rule_ids(endpoint)
                    refused = _make_policy(client, endpoint, case)
                else:
                    made[endpoint] = ""
                    made[endpoint] = _make(client, endpoint, case)
                places.append(Place(endpoint, refused))
            yield places
        finally:
            # A hanging server delays Ctrl-C by at most one timeout.
            with (
                on_signal(signal.SIGINT, signal.SIG_IGN),
                on_signal(signal.SIGTERM, signal.SIG_IGN),
            ):
                _delete(target, client, prefix, made, policies=policies)


def _make(client: NodeClient, endpoint: str, case: Case) -> str:
    """Create a rule and return its id; the error names the case if the server refuses it."""
    try:
        return client.create_rule(_rule_of(case, endpoint)).id
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
            raise
        message = f"no rule for {case}: {error.details()}"
        raise CliError(message) from None


def _make_policy(client: NodeClient, endpoint: str, case: Case) -> str:
    """Create the rules of a case; return the server's error if it refuses one."""
    for rule_id, rule in zip(case.rule_ids(endpoint), case.rules, strict=True):
        own = pb.RateLimit(id=rule_id)
        own.MergeFrom(rule)
        if own.endpoint != EVERY_ENDPOINT:
            own.endpoint = f"{endpoint}{rule.endpoint}"
        try:
            client.create_rule(own)
        except grpc.RpcError as error:
            if error.code() not in {
                grpc.StatusCode.INVALID_ARGUMENT,
                grpc.StatusCode.ALREADY_EXISTS,
            }:
                raise
            return error.details() or error.code().name
    return ""


def _rule_of(case: Case, endpoint: str) -> pb.RateLimit:
    rule = pb.RateLimit(
        endpoint=endpoint,
        identifier_type=IDENTIFIER_TYPE,
        limit=case.limit,
        window_seconds=case.window_seconds,
        algorithm=case.algorithm,
    )
    if case.burst or case.calendar is not None:
        limit = rule.limits.add(limit=case.limit, algorithm=case.algorithm, burst=case.burst)
        if case.calendar is None:
            limit.window_seconds = case.window_seconds
        else:
            period, limit.time_zone, anchor_day = case.calendar
            limit.period = pb.Period.Value(period.name)
            limit.anchor_day = anchor_day if period is Period.MONTH else 0
    return rule


def _delete(
    target: Target,
    client: NodeClient,
    prefix: str,
    made: Mapping[str, str],
    *,
    policies: Iterable[str],
) -> None:
    try:
        with target.explained():
            for endpoint, rule_id in made.items():
                # Interrupted during creation: only the server knows the id.
                found = [rule_id] if rule_id else [r.id for r in client.rules(endpoint=endpoint)]
                for known_id in found:
                    client.delete_rule(known_id)
            for rule_id in policies:
                try:
                    client.delete_rule(rule_id)
                except grpc.RpcError as error:
                    if error.code() is not grpc.StatusCode.NOT_FOUND:
                        raise
    except CliError as failure:
        if not any(made.values()):
            return  # nothing was created, and the cause is being raised
        message = f"{failure}; rules of endpoints that begin with {prefix} may be left there"
        raise CliError(message, failure.exit_code) from None
