"""TLS contexts from changing files; tests/rpc tests the handshakes."""

import ssl

import pytest
import trustme

from ratelimitd.errors import StartupError
from ratelimitd.rpc.tls import CertificateSource, TlsContexts, TlsFiles


@pytest.fixture(scope="module")
def ca():
    return trustme.CA()


@pytest.fixture
def files(tmp_path, ca):
    found = TlsFiles(tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "ca.pem")
    ca.cert_pem.write_to_path(found.client_ca)
    write(found, ca)
    return found


def write(files, ca):
    certificate = ca.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(files.key)
    certificate.cert_chain_pems[0].write_to_path(files.cert)


class Handshake:
    """A handshake in progress, with the context chosen for it."""

    context: ssl.SSLContext


def chosen(contexts):
    handshake = Handshake()
    contexts.listening.sni_callback(handshake, None, contexts.listening)
    return handshake.context


def contexts_of(files, reported=None):
    report = [] if reported is None else reported
    return TlsContexts(CertificateSource(files, report.append))


def test_a_client_ca_requires_client_certificates(files):
    assert chosen(contexts_of(files)).verify_mode is ssl.CERT_REQUIRED
    assert chosen(contexts_of(files._replace(client_ca=None))).verify_mode is ssl.CERT_NONE


def test_sessions_cannot_be_resumed(files):
    context = contexts_of(files).listening
    assert context.num_tickets == 0
    assert context.options & ssl.OP_NO_TICKET
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_the_context_changes_with_the_files_and_only_then(files, ca):
    contexts = contexts_of(files)
    first = chosen(contexts)
    assert chosen(contexts) is first
    write(files, ca)
    second = chosen(contexts)
    assert second is not first
    assert chosen(contexts) is second


def test_broken_files_keep_the_current_context(files):
    reported = []
    contexts = contexts_of(files, reported)
    first = chosen(contexts)
    files.cert.write_text("no certificate")
    assert chosen(contexts) is first
    assert len(reported) == 1


def test_files_that_change_again_while_they_are_read_are_read_again(files, ca):
    source = CertificateSource(files, lambda _line: None)
    contexts = TlsContexts(source)
    first = chosen(contexts)
    write(files, ca)
    key, changed = files.key.read_bytes(), source.current()
    files.key.unlink()
    source.current = lambda: changed
    assert chosen(contexts) is first
    files.key.write_bytes(key)
    assert chosen(contexts) is not first


def test_unusable_files_are_an_error_at_start(files):
    files.key.write_text("no key")
    with pytest.raises(StartupError, match="TLS_KEY"):
        contexts_of(files)
