"""TLS contexts: what they demand, and that a key leaves nothing behind."""

import ssl
import tempfile
from pathlib import Path

import pytest

from ratelimitd_client import Tls
from ratelimitd_client.transport.tls import open_context
from tests.client.transport.certificates import MUTUAL, TRUSTING


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """Where files are made for a moment."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_server_has_to_prove_its_name_to_the_given_authority():
    context = open_context(TRUSTING)
    assert context.check_hostname
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    [root] = context.get_ca_certs(binary_form=True)
    assert ssl.DER_cert_to_PEM_cert(root).split() == TRUSTING.ca.decode().split()


def test_a_key_is_in_a_private_file_while_it_is_loaded_and_in_none_afterwards(
    directory, monkeypatch
):
    seen = []
    load = ssl.SSLContext.load_cert_chain

    def loaded(self, path, **arguments):
        seen.append(Path(path).stat().st_mode & 0o777)
        load(self, path, **arguments)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", loaded)
    open_context(MUTUAL)
    assert seen == [0o600]
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize(
    "tls",
    [Tls(ca=b"no PEM"), Tls(ca="Grüße".encode()), Tls(ca=TRUSTING.ca, cert=b"no", key=b"PEM")],
    ids=["authority", "not ASCII", "certificate"],
)
def test_what_is_no_pem_is_an_error_that_the_channel_expects(tls, directory):
    with pytest.raises((OSError, ValueError)):
        open_context(tls)
    assert list(directory.iterdir()) == []
