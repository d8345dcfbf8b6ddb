import pytest

from ratelimitd.http2.errors import Cause
from ratelimitd.http2.settings import PREFACE, mistaken_protocol, undecided


@pytest.mark.parametrize("size", range(len(PREFACE)))
def test_any_beginning_of_the_preface_may_become_it(size):
    assert undecided(PREFACE[:size])


@pytest.mark.parametrize("octets", [b"P", b"PO", b"POST", b"G", b"DELETE "])
def test_a_method_of_http_1_is_waited_for(octets):
    assert undecided(octets)


@pytest.mark.parametrize("octets", [b"PRI * HTTP/1", b"PX", b"\x16", b"GET /", b"get", b"\0"])
def test_what_can_become_neither_is_decided_at_once(octets):
    assert not undecided(octets)


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "CONNECT"])
def test_http_1_is_answered_in_its_own_words(method):
    cause, answer = mistaken_protocol(f"{method} / HTTP/1.1\r\n".encode())
    assert cause is Cause.HTTP1
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"HTTP/1.1 400 Bad Request"
    assert b"connection: close" in lines
    assert f"content-length: {len(body)}".encode() in lines
    assert b"HTTP/2" in body


def test_tls_is_answered_by_an_alert():
    cause, answer = mistaken_protocol(b"\x16\x03\x01\x02\x00\x01")
    assert cause is Cause.TLS
    kind, major, _, length, level, description = (
        answer[0],
        answer[1],
        answer[2],
        int.from_bytes(answer[3:5], "big"),
        answer[5],
        answer[6],
    )
    assert (kind, major, length, level, description) == (21, 3, 2, 2, 10)


@pytest.mark.parametrize("octets", [b"INVALID CONNECTION PREFACE\r\n\r\n", b"\0\0", b"GETS /"])
def test_anything_else_has_no_words_that_we_know(octets):
    assert mistaken_protocol(octets) == (Cause.PREFACE, b"")
