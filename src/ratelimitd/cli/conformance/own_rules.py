"""The rules of a run: created under unique endpoints, and deleted at its end, also after an error.

Never touches another rule.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ratelimitd.cli.client_options import CliError, Target
from ratelimitd.cli.conformance.cases import IDENTIFIER_TYPE, Case
from ratelimiter.v1 import ratelimiter_pb2 as pb

if TYPE_CHECKING:
    from ratelimitd_client import NodeClient


@contextmanager
def own_rules(
    target: Target, client: NodeClient, prefix: str, cases: Sequence[Case]
) -> Iterator[list[str]]:
    """Yield the endpoint of each case while it has its rule.

    Raises:
        CliError: a rule cannot be made, or not be deleted, and then it is said which are left.
    """
    endpoints = [f"{prefix}/{number}" for number in range(len(cases))]
    made: dict[str, str] = {}
    """The ids by endpoint; empty while it is unknown whether the rule exists."""
    with _on_signal(signal.SIGTERM, signal.default_int_handler):
        try:
            for endpoint, case in zip(endpoints, cases, strict=True):
                made[endpoint] = ""
                made[endpoint] = _make(client, endpoint, case)
            yield endpoints
        finally:
            # A server that hangs delays Ctrl-C by one timeout at most.
            with (
                _on_signal(signal.SIGINT, signal.SIG_IGN),
                _on_signal(signal.SIGTERM, signal.SIG_IGN),
            ):
                _delete(target, client, prefix, made)


def _make(client: NodeClient, endpoint: str, case: Case) -> str:
    """Return the id of the rule; say of which case it is when the server takes no such rule."""
    import grpc  # noqa: PLC0415 - see target.py

    try:
        return client.create_rule(_rule_of(case, endpoint)).id
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
            raise
        message = f"no rule for {case}: {error.details()}"
        raise CliError(message) from None


def _rule_of(case: Case, endpoint: str) -> pb.RateLimit:
    return pb.RateLimit(
        endpoint=endpoint,
        identifier_type=IDENTIFIER_TYPE,
        limit=case.limit,
        window_seconds=case.window_seconds,
        algorithm=case.algorithm,
    )


def _delete(target: Target, client: NodeClient, prefix: str, made: dict[str, str]) -> None:
    try:
        with target.explained():
            for endpoint, rule_id in made.items():
                # Interrupted while it was made: only the server knows.
                found = [rule_id] if rule_id else [r.id for r in client.rules(endpoint=endpoint)]
                for known_id in found:
                    client.delete_rule(known_id)
    except CliError as failure:
        if not any(made.values()):
            return  # nothing was made, and why that failed is on its way already
        message = f"{failure}; rules of endpoints that begin with {prefix} may be left there"
        raise CliError(message, failure.exit_code) from None


@contextmanager
def _on_signal(
    number: signal.Signals, handler: Callable[..., object] | signal.Handlers
) -> Iterator[None]:
    """Let a signal do this until the end of the block; outside the main thread nothing can be said of signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)
