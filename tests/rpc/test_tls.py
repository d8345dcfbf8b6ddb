"""TLS and mTLS with real handshakes: admission, identity, and changed files."""

import grpc
import grpc.aio
import pytest
import trustme

from ratelimitd.errors import StartupError
from ratelimitd.rpc.tls import TlsFiles
from ratelimitd.services.auth import Credentials
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.certificates import self_signed
from tests.rpc.node import running_node

LIST = "/ratelimiter.v1.RateLimiterConfig/ListRateLimits"
CHECK = "/ratelimiter.v1.RateLimiter/CheckRateLimit"
A_CHECK = pb.RateLimitRequest(
    identifier="u", identifier_type="user", endpoint="/a"
).SerializeToString()
OK, UNAVAILABLE = grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE


@pytest.fixture(scope="module")
def ca():
    return trustme.CA()


def write(files, certificate):
    certificate.private_key_pem.write_to_path(files.key)
    files.cert.write_bytes(b"".join(pem.bytes() for pem in certificate.cert_chain_pems))


@pytest.fixture
def files(tmp_path, ca):
    found = TlsFiles(tmp_path / "cert.pem", tmp_path / "key.pem")
    write(found, ca.issue_cert("127.0.0.1"))
    return found


@pytest.fixture
def mutual(tmp_path, ca, files):
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    return files._replace(client_ca=tmp_path / "ca.pem")


async def call(node, ca, path=CHECK, *, client=None, metadata=()):
    """Return the status of a call over a new connection, with the certificate of ``client``."""
    identity = {}
    if client is not None:
        identity = {
            "private_key": client.private_key_pem.bytes(),
            "certificate_chain": client.cert_chain_pems[0].bytes(),
        }
    credentials = grpc.ssl_channel_credentials(ca.cert_pem.bytes(), **identity)
    # Without this option, channels with the same target and options share a connection.
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(node.address, credentials, options=options) as channel:
        try:
            data = A_CHECK if path == CHECK else b""
            await channel.unary_unary(path)(data, timeout=10, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK


async def test_a_caller_who_trusts_the_ca_is_answered_and_plain_text_is_not(
    tmp_path, transport, ca, files
):
    async with running_node(tmp_path, transport=transport, tls=files) as node:
        assert await call(node, ca) is OK
        assert await call(node, trustme.CA()) is UNAVAILABLE
        assert (await node.outcome(CHECK, A_CHECK))[0] is UNAVAILABLE


async def test_with_a_client_ca_only_its_certificates_are_accepted(tmp_path, transport, ca, mutual):
    async with running_node(tmp_path, transport=transport, tls=mutual) as node:
        assert await call(node, ca, client=ca.issue_cert("anybody")) is OK
        assert await call(node, ca) is UNAVAILABLE
        assert await call(node, ca, client=trustme.CA().issue_cert("anybody")) is UNAVAILABLE


async def test_an_intermediate_authority_may_be_the_client_ca(tmp_path, transport, ca, mutual):
    intermediate = ca.create_child_ca()
    intermediate.cert_pem.write_to_path(mutual.client_ca)
    async with running_node(tmp_path, transport=transport, tls=mutual) as node:
        assert await call(node, ca, client=intermediate.issue_cert("anybody")) is OK
        assert await call(node, ca, client=ca.issue_cert("anybody")) is UNAVAILABLE


async def test_a_verified_name_holds_the_role_it_is_listed_for(tmp_path, transport, ca, mutual):
    credentials = Credentials(
        admin_sans=frozenset({"ops.example"}), check_sans=frozenset({"shop.example"})
    )
    ops, shop, other = map(ca.issue_cert, ("ops.example", "shop.example", "other.example"))
    denied = grpc.StatusCode.PERMISSION_DENIED
    async with running_node(
        tmp_path, transport=transport, tls=mutual, credentials=credentials
    ) as node:
        assert [await call(node, ca, CHECK, client=who) for who in (ops, shop, other)] == [
            OK, OK, denied,
        ]  # fmt: skip
        assert [await call(node, ca, LIST, client=who) for who in (ops, shop, other)] == [
            OK, denied, denied,
        ]  # fmt: skip
        header = (("x509_subject_alternative_name", "ops.example"),)
        assert await call(node, ca, LIST, client=other, metadata=header) is denied


async def test_a_name_that_is_an_ipv6_address_holds_its_role(tmp_path, transport, ca, mutual):
    credentials = Credentials(admin_sans=frozenset({"2001:db8::1"}))
    async with running_node(
        tmp_path, transport=transport, tls=mutual, credentials=credentials
    ) as node:
        assert await call(node, ca, LIST, client=ca.issue_cert("2001:db8::1")) is OK


async def test_a_new_certificate_is_served_from_the_next_connection_on(
    tmp_path, transport, ca, files
):
    async with running_node(tmp_path, transport=transport, tls=files) as node:
        assert await call(node, ca) is OK
        new_ca = trustme.CA()
        write(files, new_ca.issue_cert("127.0.0.1"))
        assert await call(node, new_ca) is OK
        assert await call(node, ca) is UNAVAILABLE


async def test_a_new_client_ca_is_required_from_the_next_connection_on(
    tmp_path, transport, ca, mutual
):
    async with running_node(tmp_path, transport=transport, tls=mutual) as node:
        new_ca = trustme.CA()
        new_ca.cert_pem.write_to_path(mutual.client_ca)
        assert await call(node, ca, client=new_ca.issue_cert("anybody")) is OK
        assert await call(node, ca, client=ca.issue_cert("anybody")) is UNAVAILABLE


async def test_a_broken_new_file_keeps_the_old_certificate_and_is_reported_once(  # noqa: PLR0917 -- fixtures
    tmp_path, transport, ca, files, caplog
):
    async with running_node(tmp_path, transport=transport, tls=files) as node:
        files.cert.write_text("not a certificate")
        assert [await call(node, ca) for _ in range(3)] == [OK] * 3
        assert node.stats.errors_by_transport["tls_files"] == 1
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == 1
        assert lines[0].startswith("TLS_CERT: ")
        write(files, ca.issue_cert("127.0.0.1"))
        assert await call(node, ca) is OK


async def test_unusable_files_prevent_the_start_and_name_the_setting(tmp_path, transport, files):
    files.key.write_text("not a key")
    with pytest.raises(StartupError, match=r"TLS_KEY: .*key\.pem holds no unencrypted PEM"):
        async with running_node(tmp_path, transport=transport, tls=files):
            pass


def write_unknown_to_grpc(files):
    found = self_signed("Ed448")
    files.key.write_bytes(found.key)
    files.cert.write_bytes(found.cert)


async def test_a_kind_of_key_that_grpc_lacks_prevents_the_start_and_names_the_setting(
    tmp_path, files
):
    write_unknown_to_grpc(files)
    with pytest.raises(
        StartupError, match=r"^TLS_CERT: .*cert\.pem has a kind of key that .* Ed25"
    ):
        async with running_node(tmp_path, transport="grpcio", tls=files):
            pass


async def test_a_kind_of_key_that_grpc_lacks_keeps_the_old_certificate_and_is_reported(
    tmp_path, ca, files, caplog
):
    async with running_node(tmp_path, transport="grpcio", tls=files) as node:
        write_unknown_to_grpc(files)
        assert await call(node, ca) is OK
        assert node.stats.errors_by_transport["tls_files"] == 1
        [line] = [record.getMessage() for record in caplog.records]
        assert line.startswith("TLS_CERT: ")
