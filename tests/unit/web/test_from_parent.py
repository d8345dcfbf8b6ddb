import pytest

from ratelimitd.web.worker_proxy import PEER_HEADER, FromParent


@pytest.mark.parametrize(
    ("given", "client"),
    [
        (b"192.0.2.1 50000", ("192.0.2.1", 50_000)),
        (b"2001:db8::1 50000", ("2001:db8::1", 50_000)),
        (b"", None),
        (b"192.0.2.1", None),
        (b"192.0.2.1 x", None),
        (b"\xff 1", ("\ufffd", 1)),
    ],
)
async def test_the_peer_is_the_one_that_the_parent_names(given, client):
    seen = []

    async def app(scope, receive, send):
        seen.append(scope)

    headers = [(b"host", b"node"), (PEER_HEADER, given)]
    scope = {"type": "http", "client": ("127.0.0.1", 1), "headers": headers}
    for scheme in ("http", "https"):
        await FromParent(app, scheme)(scope, None, None)
    expected = {"type": "http", "client": client, "headers": [(b"host", b"node")]}
    assert seen == [{**expected, "scheme": scheme} for scheme in ("http", "https")]


async def test_a_request_without_a_peer_is_nobodys():
    async def app(scope, receive, send):
        assert scope["client"] is None

    await FromParent(app)({"type": "http", "client": ("127.0.0.1", 1), "headers": []}, None, None)
