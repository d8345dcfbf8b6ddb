"""How a command fails: one line for a person and an exit status, for every error a call to a node can end with.

Never prints; :func:`ratelimitd.cli.main` does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from ratelimitd.cli.output import printable
from ratelimitd.errors import RateLimitdError

if TYPE_CHECKING:
    import grpc  # `serve` goes without it, see target.py

EXIT_ERROR: Final = 1
"""Any error that is not one of the others; for ``rules``: the node refused."""

EXIT_USAGE: Final = 2
"""A wrong command line, or a node that cannot be reached."""

EXIT_NO: Final = 3
"""A check was denied, or the node is DEGRADED: the answer is no, and that is no error."""

EXIT_INTERRUPTED: Final = 130
"""128 + SIGINT, as shells report it."""

_DETAILS_KEY: Final = "grpc-status-details-bin"

_PREAMBLE: Final = re.compile(r"^.*last error: (?:UNKNOWN: )?", re.DOTALL)
"""What gRPC says before it comes to the point."""

_HINTS: Final[Mapping[str, str]] = {
    "UNAUTHENTICATED": "give a token with --token-file, or a certificate with --cert and --key",
    "UNAVAILABLE": "try again in a moment; if it lasts, the node's log says more",
    "ABORTED": "somebody changed the rule meanwhile; look again and repeat",
    "UNIMPLEMENTED": "is it a ratelimitd of this version?",
}


class CliError(RateLimitdError):
    """Ends a command: ``str(error)`` is one line for stderr, ``exit_code`` the status of the process.

    ``details`` are further lines, for a file in which several things are wrong.
    """

    def __init__(
        self, message: str, exit_code: int = EXIT_ERROR, *, details: Iterable[str] = ()
    ) -> None:
        super().__init__(printable(message))
        self.exit_code = exit_code
        self.details = [printable(detail) for detail in details]


class UsageError(CliError):
    """The command line is wrong in a way that only the command itself can see."""

    def __init__(self, message: str) -> None:
        super().__init__(message, EXIT_USAGE)


def rpc_failure(
    error: grpc.RpcError, target: str, timeout_s: float, *, tls: bool, certificate: bool
) -> CliError:
    """The failure that the error of one call means.

    ``tls`` and ``certificate`` say whether the call was encrypted and whether it showed a client certificate. A node
    explains each of its errors in the trailers. So UNAVAILABLE without an explanation never came from a node.
    """
    code: str = error.code().name
    text: str = error.details() or ""
    if code == "DEADLINE_EXCEEDED":
        message = f"no answer from {target} within {timeout_s:g} s; --timeout gives it longer"
        return CliError(message, EXIT_USAGE)
    status = _status(error)
    if code == "UNAVAILABLE" and not status.details:
        reason = _PREAMBLE.sub("", text)
        question = f"is `ratelimitd serve` running there? {_tls_hint(tls, certificate)}"
        message = f"cannot reach a node at {target}: {reason} ({question})"
        return CliError(message, EXIT_USAGE)
    name = code.lower().replace("_", " ")
    hint = f" ({_HINTS[code]})" if code in _HINTS else ""
    reason = _violations(status) or text
    return CliError(f"{name}{': ' if reason else ''}{reason}{hint}")


def _tls_hint(tls: bool, certificate: bool) -> str:
    """What to look at when a handshake may have failed: gRPC says no more than that the connection ended."""
    if not tls:
        return "a node with TLS needs --ca"
    if not certificate:
        return (
            "is --ca right? a node that asks for client certificates (mTLS) needs --cert and --key"
        )
    return "are --ca, --cert and --key right?"


def _status(error: grpc.RpcError) -> status_pb2.Status:
    """The ``google.rpc.Status`` of the trailers, empty without one."""
    trailers = error.trailing_metadata() or ()
    for item in trailers:
        if item.key == _DETAILS_KEY:
            try:
                return status_pb2.Status.FromString(item.value)
            except DecodeError:
                break
    return status_pb2.Status()


def _violations(status: status_pb2.Status) -> str:
    """Every violated field with what is wrong with it, empty when the status names none."""
    found: list[error_details_pb2.BadRequest.FieldViolation] = []
    for detail in status.details:
        request = error_details_pb2.BadRequest()
        if detail.Unpack(request):
            found += request.field_violations
    return "; ".join(
        f"{violation.field.removeprefix('rate_limit.')}: {violation.description}"
        for violation in found
    )
