"""What peers who do not speak TLS are told on a port of TLS."""

import pytest

from ratelimitd.rpc.acceptor import answer_to
from tests.http2_peer import GOAWAY, PREFACE, frames_of


def test_http2_in_plaintext_gets_a_goaway_alone_for_settings_would_make_grpc_try_again_at_once():
    [sent] = frames_of(answer_to(PREFACE + b"\x00\x00\x00\x04"))
    assert (sent.type, sent.code) == (GOAWAY, 12)
    assert sent.payload.endswith(b"this port speaks TLS")


def test_http1_gets_an_answer_of_http1():
    answer = answer_to(b"GET / HTTP/1.1\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.endswith(b"\r\n\r\nThis port speaks TLS only.\n")


@pytest.mark.parametrize("octets", [b"", b"P", b"PRI * HTTP/2.0\r\n", b"GE", b"DELETE"])
def test_while_it_is_not_clear_what_a_peer_speaks_nothing_is_said(octets):
    assert answer_to(octets) is None


def test_nothing_is_said_in_an_unknown_language():
    assert answer_to(b"SSH-2.0-") == b""
