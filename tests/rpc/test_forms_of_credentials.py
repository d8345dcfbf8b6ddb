"""One table of results for every form of a credential, on both transports and HTTP, for every method."""

import re
import socket
from functools import partial

import h2.config
import h2.connection
import h2.events
import httpx
import pytest

from ratelimitd.node.serving import TRANSPORTS
from ratelimitd.services import config
from ratelimitd.services.auth import Role
from ratelimitd.services.guesses import MAX_GUESSES, SPARE
from ratelimitd.services.methods import ROLES
from tests.every_surface import REQUESTS
from tests.system.process import Files

CHECK, ADMIN = b"Bearer the-check-token", b"Bearer the-admin-token"
WRONG = b"Bearer wrong"
ENCODED = b"QmVhcmVyIHRoZS1hZG1pbi10b2tlbg=="
"""The admin credential, encoded as binary metadata."""

NOTHING = frozenset[Role]()
EVERYTHING = frozenset({Role.CHECK, Role.READ, Role.ADMIN})
CHECKS = frozenset({Role.CHECK})

FORMS = {
    "none": ((), NOTHING),
    "check": ((CHECK,), CHECKS),
    "admin": ((ADMIN,), EVERYTHING),
    "wrong": ((WRONG,), NOTHING),
    "empty": ((b"",), NOTHING),
    "without a token": ((b"Bearer",), NOTHING),
    "without a scheme": ((b"the-admin-token",), NOTHING),
    "another scheme": ((b"Basic the-admin-token",), NOTHING),
    "upper case": ((b"BEARER the-admin-token",), EVERYTHING),
    "more spaces": ((b"Bearer   the-admin-token",), EVERYTHING),
    "a tab": ((b"Bearer\tthe-admin-token",), NOTHING),
    "octets that are not ASCII": ((ADMIN + b"\xff",), NOTHING),
    "a list, the right one first": ((ADMIN + b", " + WRONG,), NOTHING),
    "a list, the right one last": ((WRONG + b", " + ADMIN,), NOTHING),
    "repeated, the right one first": ((ADMIN, WRONG), EVERYTHING),
    "repeated, the right one last": ((WRONG, ADMIN), NOTHING),
    "empty, then the right one": ((b"", ADMIN), NOTHING),
}
"""Values of ``authorization``, in order, and their roles."""

BINARY = {
    "binary": ((), ENCODED, NOTHING),
    "binary beside the right one": ((CHECK,), ENCODED, CHECKS),
    "binary beside a wrong one": ((WRONG,), ENCODED, NOTHING),
}
"""The same with a value of ``authorization-bin``, which is never a credential."""

NOT_BASE64 = [ADMIN, b"Q", b"QR==", b"a-_b", b"QQ==QQ=="]

METHODS = {path: role for path, role in ROLES.items() if role is not Role.OPEN}
OURS = [path for path in METHODS if path.rpartition("/")[2] in REQUESTS]
"""Without Envoy's method, which only gRPC serves."""


def over_grpc(address, paths, fields):
    """Return the status of a call of each path with an invalid message, all over one connection."""
    connection = h2.connection.H2Connection(
        h2.config.H2Configuration(validate_outbound_headers=False)
    )
    connection.initiate_connection()
    for stream_id, path in zip(range(1, 1_000, 2), paths, strict=False):
        head = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "node")]
        head += [("te", "trailers"), ("content-type", "application/grpc"), *fields]
        connection.send_headers(stream_id, head)
        connection.send_data(stream_id, b"\0\0\0\0\1\xff", end_stream=True)
    codes = {}
    with connected(address) as sock:
        sock.sendall(connection.data_to_send())
        while len(codes) < len(paths):
            for event in connection.receive_data(sock.recv(65_536)):
                if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
                    status = dict(event.headers).get(b"grpc-status")
                    if status is not None:
                        codes[event.stream_id // 2] = int(status)
            sock.sendall(connection.data_to_send())
    return {path: codes[number] for number, path in enumerate(paths)}


def over_http(address, paths, fields):
    """Return the statuses of the same calls over HTTP, as JSON."""
    lines = [b"%s: %s" % (name.encode(), value) for name, value in fields]
    fixed = [b"host: localhost", b"content-type: application/json", *lines, b"content-length: 1"]
    codes = {}
    with connected(address) as sock, sock.makefile("rb") as answers:
        for path in paths:
            sock.sendall(b"\r\n".join([b"POST %s HTTP/1.1" % path.encode(), *fixed, b"", b"x"]))
            codes[path] = {b"400": 3, b"401": 16, b"403": 7}[answers.readline().split()[1]]
            head = dict(line.lower().split(b": ", 1) for line in iter(answers.readline, b"\r\n"))
            answers.read(int(head[b"content-length"]))
    return codes


def connected(address):
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def expected(role, roles):
    """Return the expected status; 3 means that the message was parsed, so the call passed its guard."""
    return 3 if role in roles else 7 if roles else 16


@pytest.fixture(scope="module")
def surfaces(tmp_path_factory):
    """Functions to call each interface, by name, of two nodes with the same tokens."""
    tokens = ("--check-token", "the-check-token", "--admin-token", "the-admin-token")
    files = {name: Files(tmp_path_factory.mktemp(name)) for name in sorted(TRANSPORTS)}
    with (
        files["native"].serving("--transport", "native", *tokens) as native,
        files["grpcio"].serving("--transport", "grpcio", *tokens) as grpcio,
    ):
        yield {
            "native": partial(over_grpc, native.grpc_address, [*METHODS]),
            "grpcio": partial(over_grpc, grpcio.grpc_address, [*METHODS]),
            "http": partial(over_http, native.http_address, [*OURS]),
        }


@pytest.mark.deep
@pytest.mark.parametrize(("values", "roles"), FORMS.values(), ids=FORMS)
def test_a_form_holds_the_same_roles_everywhere(surfaces, values, roles):
    fields = [("authorization", value) for value in values]
    for name, ask in surfaces.items():
        for path, code in ask(fields).items():
            assert code == expected(METHODS[path], roles), (name, path)


@pytest.mark.parametrize(("values", "binary", "roles"), BINARY.values(), ids=BINARY)
def test_binary_metadata_are_not_a_credential(surfaces, values, binary, roles):
    fields = [("authorization", value) for value in values]
    for beside in (
        [*fields, ("authorization-bin", binary)],
        [("authorization-bin", binary), *fields],
    ):
        for name, ask in surfaces.items():
            for path, code in ask(beside).items():
                assert code == expected(METHODS[path], roles), (name, path)


@pytest.mark.parametrize("value", NOT_BASE64)
@pytest.mark.parametrize("name", ["authorization-bin", "x-trace-bin"])
@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
def test_binary_metadata_that_are_not_base64_end_the_call(surfaces, transport, name, value):
    assert {*surfaces[transport]([("authorization", ADMIN), (name, value)]).values()} == {13}


@pytest.mark.parametrize("value", [b"", b"QQ", b"QQ=", b"QQ==", b"QUJD", ENCODED])
@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
def test_base64_may_be_padded_or_not(surfaces, transport, value):
    assert {*surfaces[transport]([("authorization", ADMIN), ("x-bin", value)]).values()} == {3}


@pytest.mark.deep
@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
def test_wrong_tokens_are_slowed_on_every_surface_together(tmp_path, transport):
    lists = f"/{config.SERVICE}/ListRateLimits"
    with Files(tmp_path).serving(
        "--transport", transport, "--admin-token", "the-admin-token"
    ) as node:
        for _ in range(MAX_GUESSES // 100):
            over_grpc(node.grpc_address, [lists] * 100, [("authorization", WRONG)])
        with httpx.Client(base_url=f"http://{node.http_address}") as client:
            right = {"authorization": ADMIN.decode()}
            kinds = ("application/json", "application/grpc-web+proto")
            json, web = ({"content-type": kind} for kind in kinds)
            # A connection without a wrong token has spare guesses; this wrong token ends that.
            wrong = json | {"authorization": WRONG.decode()}
            assert client.post(lists, content="{}", headers=wrong).status_code == 401
            asked = 1

            def slowed(ask, is_refused=lambda answer: answer.status_code == 429):
                """Call until refused; wrong guesses consume the tokens that the bucket regains meanwhile."""
                nonlocal asked
                for _ in range(100):
                    answer = ask()
                    # Counts the refusal, or the wrong guess that follows; a right token adds nothing.
                    asked += 1
                    if is_refused(answer):
                        return answer
                    client.post(lists, content="{}", headers=wrong)
                raise AssertionError

            refused = slowed(lambda: client.post(lists, content="{}", headers=json | right))
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert refused.json()["code"] == "resource_exhausted"
            slowed(
                lambda: client.post(lists, content=bytes(5), headers=web | right),
                lambda answer: b"grpc-status: 8" in answer.content.lower(),
            )
            slowed(lambda: client.get("/rules", headers=right))
            assert client.get("/readyz").status_code == 200
            check = {"identifier": "u", "identifier_type": "user", "endpoint": "/"}
            assert client.post("/v1/check", json=check).status_code == 200, "it needs no token here"
            metrics = client.get("/metrics").text
        found = re.findall(r"rate_limiter_token_guesses_total\{result=\"(\w+)\"\} (\d+)", metrics)
        counts = {result: int(count) for result, count in found}
        assert counts["wrong"] >= MAX_GUESSES - SPARE
        assert counts["wrong"] + counts["refused"] == MAX_GUESSES + asked
