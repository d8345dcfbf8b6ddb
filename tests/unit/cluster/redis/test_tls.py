import shutil
import ssl

import pytest
import trustme

from ratelimitd.cluster.redis.topology import ClientTls
from ratelimitd.errors import StartupError
from ratelimitd.settings.urls import TlsFiles


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Paths of an authority, a certificate of it, and its key."""
    directory = tmp_path_factory.mktemp("tls")
    ca, paths = trustme.CA(), {}
    certificate = ca.issue_cert("node-1")
    for name, pem in (
        ("ca", ca.cert_pem),
        ("cert", certificate.cert_chain_pems[0]),
        ("key", certificate.private_key_pem),
    ):
        paths[name] = str(directory / name)
        pem.write_to_path(paths[name])
    return paths


def test_the_systems_authorities_are_trusted_unless_others_are_named(files):
    context = ClientTls(TlsFiles())()
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    before = len(ssl.create_default_context().get_ca_certs())
    assert len(ClientTls(TlsFiles(ca_certs=files["ca"]))().get_ca_certs()) == 1
    assert len(context.get_ca_certs()) == before


def test_only_the_check_of_the_host_name_can_be_disabled():
    context = ClientTls(TlsFiles(check_hostname=False))()
    assert not context.check_hostname
    assert context.verify_mode is ssl.CERT_REQUIRED


def test_a_client_certificate_needs_its_key(files):
    ClientTls(TlsFiles(certfile=files["cert"], keyfile=files["key"]))
    with pytest.raises(StartupError, match="ssl_certfile or ssl_keyfile cannot be used"):
        ClientTls(TlsFiles(certfile=files["cert"], keyfile=files["ca"]))


@pytest.mark.parametrize(
    ("files", "option"),
    [
        (TlsFiles(ca_certs="/absent"), "ssl_ca_certs cannot be used: No such file"),
        (TlsFiles(certfile="/absent", keyfile="/absent"), "ssl_keyfile cannot be used: No such"),
        (TlsFiles(ca_certs=__file__), "ssl_ca_certs cannot be used: it is not valid PEM"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_by_its_option(files, option):
    with pytest.raises(StartupError, match=option):
        ClientTls(files)


def test_changed_files_are_read_for_the_next_connection(files, tmp_path):
    ca, reports = tmp_path / "ca", []
    shutil.copy(files["ca"], ca)
    tls = ClientTls(TlsFiles(ca_certs=str(ca)), reports.append)
    first = tls()
    assert tls() is first
    ca.write_text("no PEM")
    assert [tls(), tls()] == [first, first]
    assert reports == [
        "REDIS_URL: ssl_ca_certs cannot be used: it is not valid PEM; the former files stay in use"
    ]
    trustme.CA().cert_pem.write_to_path(ca)
    assert tls().get_ca_certs() != first.get_ca_certs()
    ca.unlink()
    assert len(tls().get_ca_certs()) == 1
    assert "No such file or directory; the former files stay in use" in reports[-1]
