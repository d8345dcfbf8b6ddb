import re
from datetime import UTC, datetime

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from ratelimitd.errors import StartupError
from ratelimitd.rpc import tls
from ratelimitd.rpc.tls import CertificateSource, TlsFiles
from tests.certificates import self_signed


@pytest.fixture(scope="module")
def ca():
    return trustme.CA()


@pytest.fixture(scope="module")
def first(ca):
    return ca.issue_cert("first.example")


@pytest.fixture(scope="module")
def second(ca):
    return ca.issue_cert("second.example")


@pytest.fixture
def files(tmp_path, ca, first):
    found = TlsFiles(tmp_path / "cert", tmp_path / "key", tmp_path / "ca")
    put(found, first)
    ca.cert_pem.write_to_path(found.client_ca)
    return found


@pytest.fixture
def lines():
    return []


@pytest.fixture
def source(files, lines):
    return CertificateSource(files, lines.append)


def put(files, certificate):
    """Replace both files, as a renewal does: new inodes, so that the change is detected at any clock resolution."""
    for path, pem in (
        (files.cert, certificate.cert_chain_pems[0]),
        (files.key, certificate.private_key_pem),
    ):
        pem.write_to_path(path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)


def test_files_are_loaded_whole(files, first, ca):
    found = CertificateSource(files, pytest.fail).current()
    assert found.chain == first.cert_chain_pems[0].bytes()
    assert found.key == first.private_key_pem.bytes()
    assert found.client_ca == ca.cert_pem.bytes()
    assert (
        CertificateSource(files._replace(client_ca=None), pytest.fail).current().client_ca is None
    )


def encrypted(certificate):
    key = load_pem_private_key(certificate.private_key_pem.bytes(), None)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("cert", b"", "TLS_CERT: .* holds no PEM certificate"),
        ("cert", b"x", "TLS_CERT: .* holds no PEM certificate"),
        ("key", b"", "TLS_KEY: .* holds no unencrypted PEM private key"),
        ("client_ca", b"\xff", "TLS_CLIENT_CA: .* holds no PEM certificate"),
    ],
)
def test_an_unusable_file_is_named_by_its_setting(files, name, content, problem):
    getattr(files, name).write_bytes(content)
    with pytest.raises(StartupError, match=problem):
        CertificateSource(files, pytest.fail)


@pytest.mark.parametrize("name", ["cert", "key", "client_ca"])
def test_a_missing_file_is_named_by_its_setting(files, name):
    getattr(files, name).unlink()
    with pytest.raises(StartupError, match=f"TLS_{name.upper()}: cannot read .*: No such file"):
        CertificateSource(files, pytest.fail)


def test_a_key_of_another_certificate_and_an_encrypted_key_have_different_errors(
    files, first, second
):
    files.key.write_bytes(second.private_key_pem.bytes())
    with pytest.raises(StartupError, match=r"TLS_KEY: .* is not the key of the certificate"):
        CertificateSource(files, pytest.fail)
    files.key.write_bytes(encrypted(first))
    with pytest.raises(StartupError, match=r"TLS_KEY: .* no unencrypted"):
        CertificateSource(files, pytest.fail)


@pytest.mark.parametrize("kinds", [("RSA", "P-256"), ("P-256", "RSA"), ("Ed25519", "P-256")])
def test_a_key_of_another_kind_is_not_that_of_the_certificate(files, kinds):
    cert, key = map(self_signed, kinds)
    files.cert.write_bytes(cert.cert)
    files.key.write_bytes(key.key)
    with pytest.raises(StartupError, match=r"^TLS_KEY: .*key is not the key of the certificate"):
        CertificateSource(files, pytest.fail)


def test_a_certificate_that_is_too_weak_for_openssl_is_named_with_the_reason(files):
    weak = self_signed("RSA of 1024 bits")
    files.cert.write_bytes(weak.cert)
    files.key.write_bytes(weak.key)
    with pytest.raises(StartupError, match=r"^TLS_CERT: .*cert is too weak .*: ee key too small$"):
        CertificateSource(files, pytest.fail)


@pytest.mark.parametrize("kind", ["P-224", "secp256k1", "Ed448"])
def test_a_key_that_many_clients_do_not_accept_is_reported(files, source, lines, kind):
    unusual = self_signed(kind)
    files.cert.write_bytes(unusual.cert)
    files.key.write_bytes(unusual.key)
    assert source.current().chain == unusual.cert
    [line] = lines
    assert line.startswith(f"TLS_CERT: {files.cert} has a kind of key that many clients do not")


def test_a_comment_in_any_language_is_accepted(files, first):
    files.cert.write_bytes("# Zertifikat für …\n".encode() + first.cert_chain_pems[0].bytes())
    assert CertificateSource(files, pytest.fail).current()


def test_certificates_change_with_the_files_and_only_then(source, files, second, lines):
    before = source.current()
    assert source.current() is before
    put(files, second)
    after = source.current()
    assert after.chain == second.cert_chain_pems[0].bytes()
    assert source.current() is after
    assert lines == []


def test_files_rewritten_without_a_change_are_equal(source, files, first, lines):
    before = source.current()
    put(files, first)
    assert source.current() == before
    assert lines == []


def test_broken_files_are_reported_once_per_change_and_read_again_when_repaired(
    source, files, second, lines
):
    before = source.current()
    files.key.unlink()
    assert [source.current() for _ in range(3)] == [before] * 3
    assert len(lines) == 1
    assert lines[0].endswith("the old certificate stays in service")
    put(files, second)
    assert source.current() != before


def test_files_that_change_while_they_are_read_are_read_again(source, files, second, monkeypatch):
    read, before = tls._read, source.current()

    def read_and_change(*given):
        found = read(*given)
        put(files, second)
        return found

    put(files, second)
    monkeypatch.setattr(tls, "_read", read_and_change)
    assert source.current() is before
    monkeypatch.setattr(tls, "_read", read)
    assert source.current() != before


IN_2040, IN_2050, IN_2060 = (datetime(year, 1, 1, tzinfo=UTC) for year in (2040, 2050, 2060))


def expiry_s(files):
    return CertificateSource(files, pytest.fail).expiry_s()


def test_the_expiry_of_a_file_is_that_of_its_first_certificate_to_expire(files, ca):
    leaf, intermediate = (
        ca.issue_cert("first.example", not_after=end) for end in (IN_2060, IN_2040)
    )
    put(files, leaf)
    with files.cert.open("ab") as chain:
        chain.write(intermediate.cert_chain_pems[0].bytes())
    authorities = [ca.issue_cert("ca.example", not_after=end) for end in (IN_2050, IN_2060)]
    files.client_ca.write_bytes(b"".join(one.cert_chain_pems[0].bytes() for one in authorities))
    ends_s = {"TLS_CERT": IN_2040.timestamp(), "TLS_CLIENT_CA": IN_2050.timestamp()}
    assert expiry_s(files) == ends_s
    assert expiry_s(files._replace(client_ca=None)) == {"TLS_CERT": IN_2040.timestamp()}


def test_a_date_that_cannot_be_read_is_left_out(files, monkeypatch):
    monkeypatch.setattr(tls, "_VALIDITY", re.compile(b"(?!)"))
    assert expiry_s(files) == {}


def test_the_expiry_changes_with_the_files_without_a_handshake(files, ca):
    put(files, ca.issue_cert("first.example", not_after=IN_2040))
    source = CertificateSource(files, lambda _line: None)
    put(files, ca.issue_cert("first.example", not_after=IN_2050))
    assert source.expiry_s()["TLS_CERT"] == IN_2050.timestamp()
    files.key.unlink()
    files.cert.write_bytes(ca.issue_cert("x", not_after=IN_2060).cert_chain_pems[0].bytes())
    assert source.expiry_s()["TLS_CERT"] == IN_2050.timestamp(), "the old one stays in service"


def test_a_certificate_that_the_transport_refuses_leaves_the_expiry(files, ca):
    put(files, ca.issue_cert("first.example", not_after=IN_2040))
    source = CertificateSource(files, lambda _line: None, is_grpcio=True)
    refused = self_signed("secp256k1")
    files.cert.write_bytes(refused.cert)
    files.key.write_bytes(refused.key)
    assert source.expiry_s()["TLS_CERT"] == IN_2040.timestamp()
