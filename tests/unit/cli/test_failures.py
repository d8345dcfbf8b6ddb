"""What every error of a call becomes: one line, and a status that a script can tell apart."""

import grpc
import pytest

from ratelimitd.cli.client_options import CliError, Target, UsageError, rpc_failure
from ratelimitd_client import Tls
from tests.fake_node import status

CODE = grpc.StatusCode


class Metadatum:
    def __init__(self, key, value):
        self.key = key
        self.value = value


class FailedCall(grpc.RpcError):
    """An error as grpc raises it."""

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
    """An error that a node sent."""
    explained = status(code, message, *violations)
    trailers = [
        Metadatum("other", b""),
        Metadatum("grpc-status-details-bin", explained.SerializeToString()),
    ]
    return FailedCall(code, message, trailers)


def failure(error, tls=None):
    return rpc_failure(error, Target("host:9090", 5.0, tls))


@pytest.mark.parametrize(
    ("tls", "hint"),
    [
        (None, "a node with TLS needs --ca"),
        (Tls(b"ca"), "is --ca right? a node that asks for client certificates (mTLS) needs --cert"),
        (Tls(b"ca", b"cert", b"key"), "are --ca, --cert and --key right?"),
    ],
)
def test_a_node_that_cannot_be_reached_is_status_2_and_says_what_was_tried(tls, hint):
    failed = failure(FailedCall(CODE.UNAVAILABLE, "connection refused", None), tls)
    assert failed.exit_code == 2
    assert "cannot reach a node at host:9090: connection refused" in str(failed)
    assert hint in str(failed)


def test_what_grpc_says_before_it_comes_to_the_point_is_left_out():
    text = "failed to connect to all addresses; last error: UNKNOWN: ipv4:1.2.3.4:1: refused"
    failed = failure(FailedCall(CODE.UNAVAILABLE, text))
    assert str(failed).startswith("cannot reach a node at host:9090: ipv4:1.2.3.4:1: refused (is")


def test_a_node_that_does_not_answer_in_time_is_status_2():
    failed = failure(FailedCall(CODE.DEADLINE_EXCEEDED))
    assert failed.exit_code == 2
    assert "no answer from host:9090 within 5 s" in str(failed)


def test_a_node_that_says_it_cannot_now_was_reached():
    failed = failure(from_node(CODE.UNAVAILABLE, "the rule database cannot be reached"))
    assert failed.exit_code == 1
    assert str(failed) == (
        "unavailable: the rule database cannot be reached"
        " (retry; if the error persists, see the log of the node)"
    )


def test_violated_fields_are_named_as_the_options_are():
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
        (CODE.UNIMPLEMENTED, "of another version"),
    ],
)
def test_an_error_with_a_way_out_hints_at_it(code, hint):
    failed = failure(FailedCall(code, "no"))
    assert failed.exit_code == 1
    assert hint in str(failed)


def test_a_refused_role_is_told_in_the_nodes_own_words_alone():
    assert str(failure(FailedCall(CODE.PERMISSION_DENIED, "needs x"))) == (
        "permission denied: needs x"
    )


def test_an_explanation_that_is_not_one_is_passed_over():
    broken = FailedCall(CODE.NOT_FOUND, "no", [Metadatum("grpc-status-details-bin", b"\xff")])
    assert str(failure(broken)) == "not found: no"


def test_a_text_of_many_lines_becomes_one():
    assert str(failure(FailedCall(CODE.INTERNAL, "a\nb\x1b"))) == (
        "internal: a b\N{REPLACEMENT CHARACTER}"
    )


def test_an_error_without_a_text_is_its_code():
    assert str(failure(FailedCall(CODE.INTERNAL, None))) == "internal"


def test_details_are_lines_of_their_own_and_cannot_drive_the_terminal():
    assert CliError("x", details=["a\x1b"]).details == ["a\N{REPLACEMENT CHARACTER}"]


def test_a_usage_error_is_status_2():
    assert UsageError("x").exit_code == 2
