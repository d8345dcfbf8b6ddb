import pytest

from ratelimitd.buckets.keys import joined
from ratelimitd.model import IdentifierType
from ratelimitd.observe.logs import masked


@pytest.mark.parametrize(
    ("identifier", "identifier_type", "expected"),
    [
        ("ada.lovelace@example.com", "user", "ada.…"),
        ("ada", "user", "…"),
        ("ada-lov", "user", "a…"),
        ("Ünal Öztürk 12345", "user", "Ünal…"),
        ("sk_live_0123456789abcdef", "api_key", "sk_l…"),
        ("k3y", "api_key", "…"),
        ("203.0.113.77", "ip", "203.0.…"),
        ("2001:db8::1", "ip", "2001:db8:…"),
        ("::1", "ip", "::…"),
    ],
)
def test_only_the_beginning_is_shown(identifier, identifier_type, expected):
    assert masked(identifier.encode(), IdentifierType(identifier_type)) == expected


def test_what_is_no_text_is_masked_all_the_same():
    assert masked(b"\xff" * 8, IdentifierType.USER) == "\ufffd\ufffd…"


def test_each_identifier_of_a_combination_is_masked():
    assert masked(joined([b"203.0.113.77", b"ada.lovelace"]), "ip+user") == "203.0.…+ada…"


def test_everybody_has_no_identifier():
    assert masked(b"", "all") == "all"
