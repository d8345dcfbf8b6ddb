"""The conversion of every call error to one line and an exit status."""

import grpc
import pytest

from ratelimitd.cli.client_options import CliError, Target, rpc_failure
from tests.fake_node import status

CODE = grpc.StatusCode


class FailedCall(grpc.RpcError):
    """An error as raised by grpc."""

    def __init__(self, code, details="", trailers=()):
        super().__init__()
        self._code, self._details, self._trailers = code, details, trailers

    def code(self):
        return self._code

    def details(self):
        return self._details

    def trailing_metadata(self):
        return self._trailers


def from_node(code, message, *violations):
    """An error sent by a node."""
    explained = status(code, message, *violations)
    trailers = [("other", b""), ("grpc-status-details-bin", explained.SerializeToString())]
    return FailedCall(code, message, trailers)


def failure(error):
    return rpc_failure(error, Target("host:9090", 5.0))


@pytest.mark.parametrize(
    "text",
    [
        "ipv4:1.2.3.4:1: refused",
        "failed to connect to all addresses; last error: UNKNOWN: ipv4:1.2.3.4:1: refused",
    ],
)
def test_unreachable_node_is_status_2_without_grpcs_prefix(text):
    failed = failure(FailedCall(CODE.UNAVAILABLE, text, None))
    assert failed.exit_code == 2
    assert str(failed).startswith("cannot reach a node at host:9090: ipv4:1.2.3.4:1: refused (is")


def test_unavailable_answer_of_a_node_is_status_1():
    failed = failure(from_node(CODE.UNAVAILABLE, "the rule database cannot be reached"))
    assert failed.exit_code == 1
    assert str(failed) == (
        "unavailable: the rule database cannot be reached"
        " (retry; if the error persists, see the log of the node)"
    )


def test_violated_fields_are_named_like_the_options():
    failed = failure(
        from_node(
            CODE.INVALID_ARGUMENT, "two", ("rate_limit.limit", "too low"), ("page_size", "too high")
        )
    )
    assert (failed.exit_code, str(failed)) == (
        1,
        "invalid argument: limit: too low; page_size: too high",
    )


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        (CODE.UNAUTHENTICATED, "--token-file"),
        (CODE.ABORTED, "read it again"),
        (CODE.UNIMPLEMENTED, "another version"),
    ],
)
def test_error_with_a_remedy_has_a_hint(code, hint):
    failed = failure(FailedCall(code, "no"))
    assert failed.exit_code == 1
    assert hint in str(failed)


def test_refused_role_has_only_the_nodes_text():
    assert str(failure(FailedCall(CODE.PERMISSION_DENIED, "needs x"))) == (
        "permission denied: needs x"
    )


def test_invalid_trailer_is_ignored():
    broken = FailedCall(CODE.NOT_FOUND, "no", [("grpc-status-details-bin", b"\xff")])
    assert str(failure(broken)) == "not found: no"


def test_text_of_many_lines_becomes_one():
    assert str(failure(FailedCall(CODE.INTERNAL, "a\nb\x1b"))) == (
        "internal: a b\N{REPLACEMENT CHARACTER}"
    )


def test_error_without_a_text_is_its_code():
    assert str(failure(FailedCall(CODE.INTERNAL, None))) == "internal"


def test_details_contain_no_control_characters():
    assert CliError("x", details=["a\x1b"]).details == ["a\N{REPLACEMENT CHARACTER}"]
