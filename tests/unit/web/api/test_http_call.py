import pytest
from starlette.datastructures import Headers
from starlette.requests import Request

from ratelimitd.services.auth import is_loopback
from ratelimitd.web.api.http_call import HttpCall, http_call, peer_of, settled


def request(client=("192.0.2.1", 5), headers=()):
    return Request({"type": "http", "client": client, "headers": list(headers)})


@pytest.mark.parametrize(
    ("client", "peer"),
    [
        (("192.0.2.1", 50_000), "ipv4:192.0.2.1:50000"),
        (("::1", 50_000), "ipv6:[::1]:50000"),
        (("2001:db8::7", 1), "ipv6:[2001:db8::7]:1"),
        (("fe80::1%eth0", 1), "ipv6:[fe80::1%eth0]:1"),
        (("::ffff:192.0.2.1", 2), "ipv4:192.0.2.1:2"),
        (("testclient", 2), "unknown:"),
        (None, "unknown:"),
    ],
)
def test_a_peer_has_grpcs_spelling(client, peer):
    assert peer_of(request(client)) == peer


def test_a_peer_that_nobody_knows_is_not_on_this_host():
    assert not is_loopback(http_call(request(None), "/s/m"))
    assert is_loopback(http_call(request(("127.0.0.1", 1)), "/s/m"))


def test_who_forwards_is_seen():
    forwarded = request(("127.0.0.1", 1), [(b"x-forwarded-for", b"127.0.0.1")])
    assert not is_loopback(http_call(forwarded, "/s/m"))


def test_a_call_has_the_headers_of_its_request_and_no_certificate_or_deadline():
    call = http_call(request(headers=[(b"authorization", b"Bearer a"), (b"x", b"1")]), "/s/m")
    assert call.method == "/s/m"
    assert (call.metadata("authorization"), call.metadata("x")) == ("Bearer a", "1")
    assert call.metadata("y") is None
    assert list(call.peer_sans) == []
    assert call.time_remaining_s() is None


def test_what_somebody_logged_in_with_stands_in_for_the_header():
    headers = Headers({"authorization": "Bearer theirs", "x": "1"})
    call = HttpCall("/s/m", "unknown:", headers, "Bearer ours")
    assert (call.metadata("authorization"), call.metadata("x")) == ("Bearer ours", "1")


async def test_an_answer_may_come_at_once_or_later():
    async def later():
        return b"later"

    assert await settled(b"now") == b"now"
    assert await settled(later()) == b"later"
