"""Options: wrong ones end a start, and are named."""

import pytest

from ratelimitd_client.middleware import Identity, Options


async def coroutine(request):
    """Nothing waits for what it answers, but for ``identify``."""


def test_all_have_a_default():
    options = Options()
    assert options.client_addresses().of("192.0.2.7", ["203.0.113.1"]) == "192.0.2.7"
    assert options.anonymous is None
    assert options.on_error == "allow"


def test_the_type_of_requests_may_be_named():
    assert Options[object](cost=2).cost == 2


def test_what_is_valid_is_taken():
    assert Options(
        identify=lambda request: Identity("alice"),
        identities=lambda request: {"tenant": "acme"},
        api_key_header="X-API-Key",
        trusted_proxies={"10.0.0.0/8", "unix"},
        anonymous=Identity("nobody"),
        on_error="raise",
        on_unavailable="deny",
        endpoint=lambda request: None,
        unmatched=None,
        exempt={"/health"},
        cost=lambda request: 2,
        policy="per user",
        denied_text="No.",
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("identify", "user"),
        ("identities", {"tenant": "acme"}),
        ("api_key_header", ""),
        ("api_key_header", "X Key"),
        ("api_key_header", b"x-key"),
        ("forwarded_header", None),
        ("trusted_proxies", ["proxy"]),
        ("trusted_proxies", "10.0.0.0/8"),
        ("trusted_proxies", None),
        ("trusted_proxies", iter(["10.0.0.0/8"])),
        ("ipv6_prefix", 0),
        ("ipv6_prefix", "64"),
        ("anonymous", "anonymous"),
        ("on_error", "deny"),
        ("on_error", []),
        ("observer", print),
        ("on_unavailable", "closed"),
        ("on_unavailable", []),
        ("endpoint", "/x"),
        ("unmatched", ""),
        ("unmatched", "*"),
        ("with_method", "no"),
        ("exempt", "/health"),
        ("exempt", None),
        ("exempt", [1]),
        ("cost", -1),
        ("cost", "1"),
        ("headers", "no"),
        ("x_ratelimit", "no"),
        ("cost", coroutine),
        ("endpoint", coroutine),
        ("denied_text", coroutine),
        ("policy", 'a "name"'),
        ("policy", None),
        ("denied_text", b"No."),
    ],
)
def test_a_wrong_option_is_named(name, value):
    with pytest.raises((ValueError, TypeError), match=f"{name} must|name of a {name}"):
        Options(**{name: value})
