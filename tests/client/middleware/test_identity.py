"""Who a request is counted for."""

import pytest

from ratelimitd_client import Check
from ratelimitd_client.middleware import Identity


def test_a_user_is_the_usual_case():
    assert Identity("alice") == Identity("alice", "user")


@pytest.mark.parametrize("kind", ["user", "api_key"])
@pytest.mark.parametrize("text", ["k" * 257, "é" * 129, "k" * 65_536, "\ud800", "\udcff" * 300])
def test_what_a_check_cannot_carry_is_hashed(kind, text):
    identity = Identity(text, kind)
    assert identity.identifier.startswith("sha256:")
    assert Check(identity.identifier, identity.identifier_type, "/x")
    assert identity == Identity(text, kind)
    assert identity != Identity(text + "x", kind)


@pytest.mark.parametrize("text", ["k" * 256, "é" * 128])
def test_what_fits_is_sent_as_it_is(text):
    assert Identity(text).identifier == text


@pytest.mark.parametrize("text", ["192.0.2.7", "::ffff:192.0.2.7", "192.0.2.7:80"])
def test_an_address_has_one_form(text):
    assert Identity(text, "ip").identifier == "192.0.2.7"


@pytest.mark.parametrize(
    ("identifier", "kind", "error", "problem"),
    [
        (42, "user", TypeError, "identifier must be text, not int"),
        (None, "user", TypeError, "identifier must be text, not NoneType"),
        (
            "secret",
            "Customer",
            ValueError,
            "identifier_type must be user, ip, api_key or a type that the nodes declare",
        ),
    ],
)
def test_what_is_no_identity_is_refused_without_its_value(identifier, kind, error, problem):
    with pytest.raises(error) as refused:
        Identity(identifier, kind)
    assert str(refused.value) == problem


@pytest.mark.parametrize(
    ("identifier", "kind"), [("", "user"), ("", "api_key"), ("", "ip"), ("not an address", "ip")]
)
def test_what_names_nobody_is_no_error(identifier, kind):
    assert Identity(identifier, kind).is_empty
    assert not Identity("192.0.2.7", kind).is_empty
