"""The options of every command that calls a node: address, credentials and output format.

Sends no call itself.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from ratelimitd.cli.options import with_options
from ratelimitd.cli.output import Output
from ratelimitd.errors import FieldViolation, RateLimitdError, RuleInvalidError, printable
from ratelimitd.node.admin_token import find_admin_token
from ratelimitd.settings.parsing import address
from ratelimitd.settings.sources import ENV_PREFIX

if TYPE_CHECKING:
    # `serve` does not need these: 8 MiB and 12 ms. Code that calls a node imports them on use.
    import grpc

    from ratelimitd_client import NodeClient, Tls

EXIT_ERROR: Final = 1
"""Any other error; for ``rules``: the node refused."""

EXIT_USAGE: Final = 2
"""An invalid command line, or an unreachable node."""

EXIT_NO: Final = 3
"""A negative answer, not an error: a check was denied, or the node is DEGRADED."""

EXIT_CHANGES: Final = 4
"""Done, and there is a difference, such as rules that the file of ``rules diff`` would change."""

EXIT_INTERRUPTED: Final = 130
"""128 + SIGINT, as shells report it."""

_DETAILS_KEY: Final = "grpc-status-details-bin"

_PREAMBLE: Final = re.compile(r"^.*last error: (?:UNKNOWN: )?", re.DOTALL)
"""Prefix of gRPC's error text before the cause."""

_CREDENTIALS: Final = (
    "give --token-file, --cert and --key, or RATELIMITD_STATE_DIR of a node on this host"
)

_NEED: Final = re.compile(r"this call needs the \w+ role")
"""How a node names the role that a call needs, before the credentials that hold it."""

_HINTS: Final[Mapping[str, str]] = {
    "UNAUTHENTICATED": _CREDENTIALS,
    "UNAVAILABLE": "retry; if the error persists, see the log of the node",
    "ABORTED": "it was changed meanwhile; read it again and retry",
    "UNIMPLEMENTED": "the server may be another version, or not ratelimitd",
}


class CliError(RateLimitdError):
    """Ends a command: ``str(error)`` is one line for stderr, ``exit_code`` the exit status of the process.

    ``details`` are further lines, for a file with several errors.
    """

    def __init__(
        self, message: str, exit_code: int = EXIT_ERROR, *, details: Iterable[str] = ()
    ) -> None:
        super().__init__(printable(message))
        self.exit_code = exit_code
        self.details = [printable(detail) for detail in details]


class UsageError(CliError):
    """The command line is invalid in a way that only the command can detect."""

    def __init__(self, message: str) -> None:
        super().__init__(message, EXIT_USAGE)


def demand(condition: object, message: str, error: type[CliError] = UsageError) -> None:
    """Raise an error with this message unless the condition holds."""
    if not condition:
        raise error(message)


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Convert a ``ValueError`` in a ``with`` block to a ``UsageError`` whose text begins with ``option``."""
    try:
        yield
    except ValueError as error:
        message = f"{option}{error}"
        raise UsageError(message) from None


def rpc_failure(error: grpc.RpcError, target: Target) -> CliError:
    """Convert the error of a call to an error of the command.

    A node explains each of its errors in the trailers, so UNAVAILABLE without an explanation is not from a node.
    """
    asked = target.address
    code: str = error.code().name
    text: str = error.details() or ""
    if code == "DEADLINE_EXCEEDED":
        waited = f"within {target.timeout_s:g} s; raise --timeout to wait longer"
        return UsageError(f"no answer from {asked} {waited}")
    from ratelimitd_client.fail_open import HTTP1_PEER  # noqa: PLC0415

    if code == "UNAVAILABLE" and HTTP1_PEER in text:
        return UsageError(
            f"{asked} answers HTTP/1.1, not gRPC; a node's gRPC port is 9090 by default"
        )
    if code == "UNAVAILABLE" and not _status(error).details:
        reason = _PREAMBLE.sub("", text)
        question = f"is `ratelimitd serve` running there? {_tls_hint(target.tls)}"
        return UsageError(f"cannot reach a node at {asked}: {reason} ({question})")
    if code == "UNAUTHENTICATED" and target.why_no_token:
        need = _NEED.match(text)
        why = f"no token was found: {target.why_no_token}; {_CREDENTIALS}"
        return CliError(f"{need[0] if need else text}, and {why}")
    name = code.lower().replace("_", " ")
    hint = f" ({_HINTS[code]})" if code in _HINTS else ""
    violations = (
        f"{field.removeprefix('rate_limit.')}: {what}" for field, what in violations_of(error)
    )
    reason = "; ".join(violations) or text
    return CliError(f"{name}{': ' if reason else ''}{reason}{hint}")


def _tls_hint(tls: Tls | None) -> str:
    """Return a hint after a possibly failed handshake: gRPC reports only that the connection ended."""
    if tls is None:
        return "a node with TLS needs --ca"
    if tls.cert is None:
        return (
            "is --ca right? a node that asks for client certificates (mTLS) needs --cert and --key"
        )
    return "are --ca, --cert and --key right?"


def _status(error: grpc.RpcError) -> status_pb2.Status:
    """Return the ``google.rpc.Status`` of the trailers, empty without one."""
    trailers: dict[str, bytes] = dict(error.trailing_metadata() or ())  # type: ignore[arg-type]
    with suppress(DecodeError):
        return status_pb2.Status.FromString(trailers.get(_DETAILS_KEY, b""))
    return status_pb2.Status()


def violations_of(error: grpc.RpcError) -> list[FieldViolation]:
    """Return every violated field in an error, with its description."""
    found: list[FieldViolation] = []
    for detail in _status(error).details:
        request = error_details_pb2.BadRequest()
        if detail.Unpack(request):
            found += (
                FieldViolation(one.field, one.description) for one in request.field_violations
            )
    return found


MAX_FILE_BYTES: Final = 1024 * 1024
"""Above the size of any token or certificate chain; bounds the memory for endless files."""

SURROGATE: Final = re.compile(r"[\ud800-\udfff]")
"""How Python represents invalid UTF-8 of the command line (PEP 383)."""


@dataclass(frozen=True, slots=True)
class Target:
    """The node to call, and where to print the answer."""

    address: str
    timeout_s: float
    tls: Tls | None = None
    token: str | None = field(default=None, repr=False)
    output: Output = field(default_factory=Output)
    why_no_token: str = ""

    @contextmanager
    def client(self) -> Iterator[NodeClient]:
        """Open a client for a ``with`` block; errors of its calls leave the block as ``CliError``."""
        from ratelimitd_client import NodeClient  # noqa: PLC0415

        with naming(""):
            client = NodeClient(
                self.address, tls=self.tls, token=self.token, timeout_s=self.timeout_s
            )
        with client, self.explained():
            yield client

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Convert errors of calls in a ``with`` block to ``CliError``."""
        import grpc  # noqa: PLC0415

        try:
            yield
        except grpc.RpcError as error:
            raise rpc_failure(error, self) from None


def _variable(name: str, metavar: str, text: str) -> Any:
    """Return an option that an environment variable also sets."""
    return typer.Option(metavar=metavar, envvar=ENV_PREFIX + name, help=text)


def connection_options(
    *,
    target: Annotated[
        str, _variable("TARGET", "HOST:PORT", "The node's gRPC address.")
    ] = "127.0.0.1:9090",
    token: Annotated[
        str | None,
        _variable(
            "TOKEN",
            "TOKEN",
            "Bearer token; default: STATE_DIR/admin-token of a node on this host. On a command line every user of this"
            " machine can read it: prefer --token-file.",
        ),
    ] = None,
    token_file: Annotated[
        Path | None, _variable("TOKEN_FILE", "FILE", "File that holds the bearer token.")
    ] = None,
    ca: Annotated[
        Path | None,
        _variable(
            "CA",
            "FILE",
            "CA certificates that verify the node, PEM; enables TLS. Without it nothing is encrypted.",
        ),
    ] = None,
    cert: Annotated[
        Path | None, _variable("CERT", "FILE", "Client certificate for mTLS, PEM.")
    ] = None,
    key: Annotated[
        Path | None, _variable("KEY", "FILE", "Private key of the client certificate, PEM.")
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(min=0.001, max=3600, metavar="SECONDS", help="Longest wait for each answer."),
    ] = 5.0,
    json: Annotated[
        bool, typer.Option("--json", help="Print the messages as JSON, with the contract's names.")
    ] = False,
) -> Target:
    """Build the target from the options; its parameters are the options.

    Raises:
        UsageError: options are contradictory, or a file cannot be read.
    """
    try:
        address(target)
    except ValueError as error:
        message = f"--target {error}, not {target!r}"
        raise UsageError(message) from None
    demand(
        token is None or token_file is None,
        f"give one of --token and --token-file (or {ENV_PREFIX}TOKEN), not both",
    )
    demand((cert is None) == (key is None), "give --cert and --key together")
    if token_file is not None:
        token = _read("--token-file", token_file).decode(errors="replace").strip()
        demand(token, f"--token-file: {token_file} is empty")
    tls = None
    if ca is not None or cert is not None:
        from ratelimitd_client import Tls  # noqa: PLC0415

        files = {"ca": ca, "cert": cert, "key": key}
        parts = {name: _read(f"--{name}", file) for name, file in files.items() if file is not None}
        with naming("--"):
            tls = Tls(**parts)
    why_no_token = ""
    if token is None:
        target, token, why_no_token = find_admin_token(target, os.environ, tls=tls is not None)
    return Target(target, timeout, tls, token, Output(as_json=json), why_no_token)


def asks_node(command: Callable[..., None]) -> Callable[..., None]:
    """Add the connection options to a command, and pass it the :class:`Target` as its first argument."""
    options = list(inspect.signature(connection_options, eval_str=True).parameters.values())

    def target_of(values: Mapping[str, Any]) -> Target:
        # No message of the contract can contain text that is not valid UTF-8.
        texts = [text for text in values.values() if isinstance(text, str)]
        demand(not any(map(SURROGATE.search, texts)), "an argument is not valid UTF-8")
        return connection_options(**{option.name: values[option.name] for option in options})

    return with_options(command, options, target_of)


STDIN: Final = Path("-")


def read_file(path: Path, max_bytes: int, option: str = "", *, may_be_stdin: bool = False) -> bytes:
    """Return the content of a file that ``option`` names, plus one byte if it is too large.

    Raises:
        UsageError: the file cannot be read.
    """
    with readable(path, option):
        if may_be_stdin and path == STDIN:
            return sys.stdin.buffer.read(max_bytes + 1)
        with path.open("rb") as stream:
            return stream.read(max_bytes + 1)


@contextmanager
def readable(path: Path, option: str = "") -> Iterator[None]:
    """Name the unreadable file and the option in the error.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        yield
    except OSError as error:
        message = f"{option and f'{option}: '}cannot read {path}: {error.strerror}"
        raise UsageError(message) from None


def refusal(file: Path, violations: Iterable[FieldViolation], done: str = "changed") -> CliError:
    """Return an error with one line per violation in a file of rules; nothing was ``done``."""
    details = [f"{field}: {description}" for field, description in violations]
    return CliError(f"{file} is refused, nothing was {done}:", details=details)


@contextmanager
def refusing(file: Path, done: str = "changed") -> Iterator[None]:
    """Convert the violations in a file of rules to a :func:`refusal`."""
    try:
        yield
    except RuleInvalidError as error:
        raise refusal(file, error.violations, done) from None


def _read(option: str, path: Path) -> bytes:
    content = read_file(path, MAX_FILE_BYTES, option)
    demand(
        len(content) <= MAX_FILE_BYTES, f"{option}: {path} is larger than {MAX_FILE_BYTES} bytes"
    )
    return content
