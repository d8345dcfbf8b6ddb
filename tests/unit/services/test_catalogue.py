import pytest

from ratelimitd.counters import CheckStats
from ratelimitd.errors import StartupError
from ratelimitd.rpc.interface import Methods, RpcError, StatusCode
from ratelimitd.services.auth import Credentials, NamedTokens, Role, Token, digest_of
from ratelimitd.services.errors import ErrorEdge
from ratelimitd.services.methods import OUR_SERVICES, ROLES, admission, guarded, names_of
from ratelimiter.v1 import ratelimiter_pb2
from tests.access import access_of
from tests.unit.services.fake_call import FakeCall, bearer

CHECK = "/ratelimiter.v1.RateLimiter/CheckRateLimit"
LIST = "/ratelimiter.v1.RateLimiterConfig/ListRateLimits"
WATCH = "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
CLOSED = Credentials(admin_token="admin-secret", check_token="check-secret")


def echo(data, _call):
    return data


async def echo_later(data, _call):
    return data


async def echo_stream(data, _call):
    yield data


def fail(_data, _call):
    raise ZeroDivisionError


async def fail_later(_data, _call):
    raise ZeroDivisionError


async def fail_stream(_data, _call):
    yield b"one"
    raise ZeroDivisionError


def served(credentials=None, **methods):
    access = access_of(credentials or Credentials(loopback_admin=True))
    return guarded([Methods(**methods)], access, ErrorEdge(CheckStats()))


def test_every_method_of_the_contract_has_a_role():
    services = ratelimiter_pb2.DESCRIPTOR.services_by_name.values()
    assert {service.full_name for service in services} == set(OUR_SERVICES)
    for service in services:
        for method in service.methods:
            assert f"/{service.full_name}/{method.name}" in ROLES


def test_a_method_without_a_role_is_an_error_at_start():
    with pytest.raises(StartupError, match=r"/x\.Y/Z has no role"):
        served(unary={"/x.Y/Z": echo})


def test_the_contracts_services_are_served_under_both_names_and_others_under_theirs():
    methods = served(unary={CHECK: echo}, server_stream={WATCH: echo_stream})
    assert set(methods.unary) == {CHECK, "/RateLimiter/CheckRateLimit"}
    assert set(methods.server_stream) == {WATCH}
    assert names_of(["ratelimiter.v1.RateLimiter", "a.B"]) == {
        "ratelimiter.v1.RateLimiter", "RateLimiter", "a.B",
    }  # fmt: skip


async def test_an_immediate_answer_stays_bytes_and_a_waiting_one_an_awaitable():
    methods = served(unary={CHECK: echo, LIST: echo_later})
    assert methods.unary[CHECK](b"x", FakeCall()) == b"x"
    assert await methods.unary[LIST](b"x", FakeCall()) == b"x"


async def test_streams_pass_through():
    methods = served(server_stream={WATCH: echo_stream}, bidi_stream={REFLECTION: echo_stream})
    for handler in (methods.server_stream[WATCH], methods.bidi_stream[REFLECTION]):
        assert [answer async for answer in handler(b"x", FakeCall())] == [b"x"]


async def test_every_exception_of_a_handler_becomes_an_rpc_error():
    methods = served(unary={CHECK: fail, LIST: fail_later}, server_stream={WATCH: fail_stream})
    with pytest.raises(RpcError) as caught:
        methods.unary[CHECK](b"", FakeCall())
    assert caught.value.code is StatusCode.INTERNAL
    with pytest.raises(RpcError):
        await methods.unary[LIST](b"", FakeCall())
    answers = methods.server_stream[WATCH](b"", FakeCall())
    assert await anext(answers) == b"one"
    with pytest.raises(RpcError):
        await anext(answers)


@pytest.mark.parametrize("path", [CHECK, "/RateLimiter/CheckRateLimit"])
def test_a_guarded_method_is_guarded_under_both_names(path):
    handler = served(CLOSED, unary={CHECK: echo}).unary[path]
    with pytest.raises(RpcError) as caught:
        handler(b"", FakeCall())
    assert caught.value.code is StatusCode.UNAUTHENTICATED
    assert handler(b"x", bearer("check-secret")) == b"x"


async def test_a_guarded_stream_does_not_begin(monkeypatch):
    roles = {**ROLES, WATCH: Role.ADMIN}
    monkeypatch.setattr("ratelimitd.services.methods.ROLES", roles)
    handler = served(CLOSED, server_stream={WATCH: echo_stream}).server_stream[WATCH]
    with pytest.raises(RpcError) as caught:
        await anext(handler(b"", FakeCall()))
    assert caught.value.code is StatusCode.UNAUTHENTICATED
    assert [answer async for answer in handler(b"x", bearer("admin-secret"))] == [b"x"]


@pytest.mark.parametrize("path", [CHECK, "/RateLimiter/CheckRateLimit"])
@pytest.mark.parametrize(
    ("credentials", "is_offered"),
    [
        (Credentials(), True),
        (Credentials(check_token="secret"), False),
        (Credentials(admin_token="secret"), True),
        (CLOSED, False),
    ],
)
def test_a_bulk_handler_is_offered_only_while_no_credentials_are_needed(
    path, credentials, is_offered
):
    def shortcut(messages):
        return messages

    methods = served(credentials, unary={CHECK: echo}, bulk={CHECK: shortcut})
    assert path in methods.unary
    assert (methods.bulk.get(path) is shortcut) is is_offered


def test_a_bulk_handler_of_a_method_without_a_role_is_an_error_at_start():
    with pytest.raises(StartupError, match=r"/x\.Y/Z has no role"):
        served(bulk={"/x.Y/Z": list})


def test_a_call_is_admitted_if_its_guard_permits_it():
    admit = admission(access_of(CLOSED))
    for method in (LIST, LIST.replace("ratelimiter.v1.", "")):
        with pytest.raises(RpcError) as refused:
            admit(bearer("check-secret", method=method))
        assert refused.value.code is StatusCode.PERMISSION_DENIED
        admit(bearer("admin-secret", method=method))
    admit(bearer("check-secret", method=CHECK))


def test_all_callers_are_admitted_to_open_methods():
    admission(access_of(Credentials()))(FakeCall(method=CHECK, peer="ipv4:192.0.2.7:1"))


def test_the_bulk_handler_of_checks_ends_when_a_tokens_file_requires_credentials():
    named = NamedTokens(lambda: 0.0)
    methods = served(
        Credentials(admin_token="a", named=named),
        unary={CHECK: echo},
        bulk={CHECK: lambda messages: [b"answered"] * len(messages)},
    )
    assert methods.bulk[CHECK]([b"x", b"y"]) == [b"answered"] * 2
    assert methods.unary[CHECK](b"x", FakeCall()) == b"x"
    token = Token(name="shop", role=Role.CHECK, digest=digest_of("t"))
    named.replace(NamedTokens(lambda: 0.0, [token]))
    assert methods.bulk[CHECK]([b"x", b"y"]) == [None, None]
    for call, code in ((FakeCall(), StatusCode.UNAUTHENTICATED), (bearer("t"), None)):
        assert status_of(methods.unary[CHECK], call) is code
    named.replace(NamedTokens(lambda: 0.0))
    assert methods.bulk[CHECK]([b"x"]) == [None]
    assert status_of(methods.unary[CHECK], FakeCall()) is StatusCode.UNAUTHENTICATED


def status_of(handler, call):
    try:
        handler(b"x", call)
    except RpcError as error:
        return error.code
    return None
