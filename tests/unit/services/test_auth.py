import pytest

from ratelimitd.rpc.interface import RpcError, StatusCode
from ratelimitd.services.auth import FORWARDING_HEADERS, Credentials, Role, is_loopback
from tests.access import access_of
from tests.unit.services.fake_call import FakeCall, bearer

TOKENS = access_of(Credentials(admin_token="admin-secret", check_token="check-secret"))
SANS = access_of(
    Credentials(admin_sans=frozenset({"ops.example"}), check_sans=frozenset({"shop.example"}))
)
LOOPBACK = access_of(Credentials(check_token="t", loopback_admin=True))
ELSEWHERE = "ipv4:10.0.0.1:50000"


def verdict(access, role, call):
    """Return ``None`` if the call may pass, else the status of the refusal."""
    required = access.requirement(role)
    if required is None:
        return None
    try:
        required(call)
    except RpcError as error:
        return error.code
    return None


@pytest.mark.parametrize("access", [access_of(Credentials()), LOOPBACK, TOKENS, SANS])
def test_open_methods_need_no_credentials(access):
    assert access.requirement(Role.OPEN) is None


def test_checks_need_no_credentials_until_one_is_set():
    assert access_of(Credentials(admin_token="t")).requirement(Role.CHECK) is None
    assert access_of(Credentials(check_token="t")).requirement(Role.CHECK) is not None
    assert access_of(Credentials(check_sans=frozenset({"n"}))).requirement(Role.CHECK) is not None


@pytest.mark.parametrize("role", [Role.READ, Role.ADMIN])
def test_without_admin_credentials_reads_and_changes_are_refused(role):
    for peer in ("ipv4:127.0.0.1:1", "ipv6:[::1]:1", "unix:", ELSEWHERE):
        for call in (FakeCall(peer), bearer("t", peer=peer)):
            assert verdict(access_of(Credentials()), role, call) is StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("role", [Role.READ, Role.ADMIN])
def test_an_admin_credential_revokes_the_role_of_loopback(role):
    for credentials in ({"admin_token": "a"}, {"admin_sans": frozenset({"n"})}):
        access = access_of(Credentials(loopback_admin=True, **credentials))
        assert verdict(access, role, FakeCall()) is StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("role", [Role.READ, Role.ADMIN])
def test_with_loopback_admin_only_loopback_reads_and_changes(role):
    access = LOOPBACK
    assert verdict(access, role, FakeCall()) is None
    assert verdict(access, role, FakeCall(ELSEWHERE)) is StatusCode.PERMISSION_DENIED
    # The check role does not allow changes of rules from elsewhere.
    assert verdict(access, role, bearer("t", peer=ELSEWHERE)) is StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize(
    ("token", "on_check", "on_admin"),
    [
        ("admin-secret", None, None),
        ("check-secret", None, StatusCode.PERMISSION_DENIED),
        ("wrong", StatusCode.UNAUTHENTICATED, StatusCode.UNAUTHENTICATED),
        ("admin-secre", StatusCode.UNAUTHENTICATED, StatusCode.UNAUTHENTICATED),
        ("", StatusCode.UNAUTHENTICATED, StatusCode.UNAUTHENTICATED),
    ],
)
def test_a_token_holds_its_roles_from_every_peer(token, on_check, on_admin):
    for peer in ("ipv4:127.0.0.1:1", ELSEWHERE):
        call = bearer(token, peer=peer)
        assert verdict(TOKENS, Role.CHECK, call) is on_check
        assert verdict(TOKENS, Role.READ, call) is on_admin
        assert verdict(TOKENS, Role.ADMIN, call) is on_admin


def test_the_bearer_scheme_is_case_insensitive_and_the_only_one():
    for header, expected in (
        ("bearer admin-secret", None),
        ("BEARER  admin-secret", None),
        ("Basic admin-secret", StatusCode.UNAUTHENTICATED),
        ("admin-secret", StatusCode.UNAUTHENTICATED),
    ):
        call = FakeCall(headers={"authorization": header})
        assert verdict(TOKENS, Role.ADMIN, call) is expected


@pytest.mark.parametrize(
    ("sans", "on_check", "on_admin"),
    [
        (("x.example", "ops.example"), None, None),
        (("shop.example",), None, StatusCode.PERMISSION_DENIED),
        (("x.example",), StatusCode.PERMISSION_DENIED, StatusCode.PERMISSION_DENIED),
        ((), StatusCode.UNAUTHENTICATED, StatusCode.UNAUTHENTICATED),
    ],
)
def test_a_certificate_holds_the_roles_of_its_names(sans, on_check, on_admin):
    call = FakeCall(ELSEWHERE, peer_sans=sans)
    assert verdict(SANS, Role.CHECK, call) is on_check
    assert verdict(SANS, Role.ADMIN, call) is on_admin


BOTH = access_of(Credentials(admin_token="t", check_sans=frozenset({"shop.example"})))
TOKEN_NEED = "the bearer token CHECK_TOKEN or ADMIN_TOKEN"
NAMES_NEED = "a client certificate with a name of CHECK_SANS or ADMIN_SANS"


@pytest.mark.parametrize(
    ("access", "role", "call", "need"),
    [
        (TOKENS, Role.CHECK, FakeCall(), f"the check role: {TOKEN_NEED}; no valid one was sent"),
        (TOKENS, Role.READ, bearer("wrong"), "the read role: the bearer token ADMIN_TOKEN; no"),
        (
            TOKENS,
            Role.ADMIN,
            bearer("check-secret"),
            "the admin role: the bearer token ADMIN_TOKEN; the",
        ),
        (SANS, Role.CHECK, FakeCall(peer_sans=("x",)), f"the check role: {NAMES_NEED}; the"),
        (
            SANS,
            Role.ADMIN,
            FakeCall(),
            "the admin role: a client certificate with a name of ADMIN_SANS; no",
        ),
        (
            BOTH,
            Role.CHECK,
            FakeCall(),
            "the bearer token ADMIN_TOKEN, or a client certificate with a",
        ),
        (BOTH, Role.ADMIN, FakeCall(), "the admin role: the bearer token ADMIN_TOKEN; no"),
        (
            LOOPBACK,
            Role.ADMIN,
            FakeCall(ELSEWHERE),
            "is for loopback only",
        ),
        (
            access_of(Credentials()),
            Role.READ,
            FakeCall(),
            "the read role: no credential that holds it is set; no valid one was sent",
        ),
        (
            access_of(Credentials(admin_token="t", admin_token_name="in a file")),
            Role.ADMIN,
            FakeCall(),
            "the admin role: the bearer token in a file; no",
        ),
    ],
)
def test_a_refusal_names_the_required_credentials_without_their_values(access, role, call, need):
    with pytest.raises(RpcError) as caught:
        access.requirement(role)(call)
    assert need in caught.value.message
    assert "secret" not in caught.value.message
    assert "example" not in caught.value.message


def test_a_wrong_token_with_an_unknown_certificate_is_unauthenticated():
    call = bearer("wrong", peer_sans=("x.example",))
    assert verdict(SANS, Role.CHECK, call) is StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        ("ipv4:127.0.0.1:50000", True),
        ("ipv4:127.8.9.10:50000", True),
        ("ipv6:[::1]:50000", True),
        ("ipv6:[::ffff:127.0.0.1]:50000", True),
        ("unix:", True),
        ("unix:/run/node.sock", True),
        ("ipv4:10.0.0.1:50000", False),
        ("ipv6:[2001:db8::1]:50000", False),
        ("ipv6:[fe80::1%eth0]:50000", False),
        ("ipv4:localhost:50000", False),
        ("ipv4:", False),
        ("", False),
        ("vsock:2:1", False),
    ],
)
def test_loopback_is_detected_by_the_peers_address(peer, expected):
    assert is_loopback(FakeCall(peer)) is expected


@pytest.mark.parametrize("header", FORWARDING_HEADERS)
@pytest.mark.parametrize("peer", ["ipv4:127.0.0.1:1", "unix:"])
def test_a_forwarded_call_is_never_loopback(header, peer):
    assert not is_loopback(FakeCall(peer, headers={header: ""}))


def test_the_actor_is_the_certificates_name_or_the_role_at_the_host():
    assert SANS.actor(FakeCall(peer_sans=("x.example", "ops.example"))) == "ops.example"
    assert TOKENS.actor(FakeCall(peer_sans=("x.example", "y.example"))) == "x.example"
    assert TOKENS.actor(FakeCall("ipv6:[2001:db8::1]:50000")) == "admin@2001:db8::1"
    assert TOKENS.actor(FakeCall("unix:")) == "admin@unix"
    assert TOKENS.actor(FakeCall("unknown:")) == "admin@unknown"


def test_the_principal_is_the_name_of_a_certificate_with_a_role_or_the_role_of_a_token():
    assert SANS.principal(FakeCall(peer_sans=("x.example", "shop.example"))) == "shop.example"
    assert SANS.principal(FakeCall(peer_sans=("ops.example",))) == "ops.example"
    assert SANS.principal(FakeCall(peer_sans=("x.example",))) == ""
    assert TOKENS.principal(bearer("check-secret", peer_sans=("x.example",))) == "check"
    assert TOKENS.principal(bearer("admin-secret")) == "admin"
    assert TOKENS.principal(bearer("wrong")) == ""


def test_the_repr_of_credentials_hides_them():
    assert repr(Credentials(admin_token="secret")) == "Credentials(…)"


@pytest.mark.parametrize("role", [Role.READ, Role.ADMIN])
def test_demand_refuses_calls_without_the_role(role):
    LOOPBACK.demand(role, FakeCall())
    TOKENS.demand(role, bearer("admin-secret", peer=ELSEWHERE))
    with pytest.raises(RpcError) as raised:
        TOKENS.demand(role, bearer("check-secret"))
    assert raised.value.code is StatusCode.PERMISSION_DENIED
