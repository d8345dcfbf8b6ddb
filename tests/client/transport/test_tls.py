"""TLS contexts: what they demand, and that a key leaves nothing behind."""

import os
import ssl
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from ratelimitd_client import Tls
from ratelimitd_client.transport.tls import open_context
from tests.client.transport.certificates import AUTHORITY, CALLER, MUTUAL, STRANGER, TRUSTING

CA = AUTHORITY.cert_pem.bytes()
CERT = CALLER.cert_chain_pems[0].bytes()
KEY = CALLER.private_key_pem.bytes()


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """Where files are made for a moment."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("comment", ["", "# Főtanúsítvány\n"], ids=["alone", "with a comment"])
def test_the_server_has_to_prove_its_name_to_the_given_authority(comment):
    context = open_context(Tls(ca=comment.encode() + TRUSTING.ca))
    assert context.check_hostname
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    [root] = context.get_ca_certs(binary_form=True)
    assert ssl.DER_cert_to_PEM_cert(root).split() == TRUSTING.ca.decode().split()


def test_a_key_needs_no_disk(directory):
    directory.rmdir()
    open_context(MUTUAL)


def test_without_files_in_memory_a_key_is_in_a_private_one_while_it_is_loaded(
    directory, monkeypatch
):
    monkeypatch.delattr(os, "memfd_create")
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
    ("parts", "error", "problem"),
    [
        ({"ca": "ca.pem"}, TypeError, "ca must be the bytes or the Path of a PEM file, not str"),
        ({"ca": b"no PEM"}, ValueError, "ca must be PEM with a certificate"),
        ({"ca": MUTUAL.key}, ValueError, "ca must be PEM with a certificate"),
        ({"cert": MUTUAL.key, "key": MUTUAL.cert}, ValueError, "cert must be PEM with a certif"),
        ({"cert": MUTUAL.cert, "key": MUTUAL.cert}, ValueError, "key must be PEM with a private"),
    ],
)
def test_what_is_no_pem_of_its_kind_is_refused(parts, error, problem):
    with pytest.raises(error, match=problem):
        Tls(**parts)


@pytest.fixture
def files(tmp_path):
    """TLS material in files, and their paths."""
    paths = {name: tmp_path / f"{name}.pem" for name in ("ca", "cert", "key")}
    for name, path in paths.items():
        path.write_bytes(getattr(MUTUAL, name))
    return Tls(**paths), paths


def test_files_are_read_again(files):
    tls, paths = files
    assert tls.read() == MUTUAL
    assert tls.read() is tls.read()
    assert MUTUAL.read() is MUTUAL
    paths["ca"].write_bytes(STRANGER.ca)
    assert tls.read() == replace(MUTUAL, ca=STRANGER.ca)
    [root] = open_context(tls).get_ca_certs(binary_form=True)
    assert ssl.DER_cert_to_PEM_cert(root).split() == STRANGER.ca.decode().split()


@pytest.mark.parametrize(
    "content", [None, b"", b"no PEM", CERT], ids=["missing", "empty", "no PEM", "of another kind"]
)
def test_files_that_cannot_be_used_do_not_replace_what_was_read(files, content):
    tls, paths = files
    if content is None:
        paths["key"].unlink()
    else:
        paths["key"].write_bytes(content)
    assert tls.read() == MUTUAL
    with pytest.raises((ValueError, OSError), match="key"):
        Tls(**paths)
    paths["key"].write_bytes(MUTUAL.key)
    paths["ca"].write_bytes(STRANGER.ca)
    assert tls.read() == replace(MUTUAL, ca=STRANGER.ca)


def encrypted(key, form):
    return serialization.load_pem_private_key(key, None).private_bytes(
        serialization.Encoding.PEM, form, serialization.BestAvailableEncryption(b"secret")
    )


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"ca": CA[:200]}, "ca cannot be used: damaged PEM"),
        ({"ca": CA + CA[:200]}, "ca cannot be used: bad end line"),
        ({"cert": CERT[:200]}, "cert and key cannot be used: damaged PEM"),
        ({"key": KEY[:100]}, "cert and key cannot be used: damaged PEM"),
        ({"cert": CA}, "cert and key cannot be used: key values mismatch"),
        (
            {"key": encrypted(KEY, serialization.PrivateFormat.PKCS8)},
            "key must not be encrypted",
        ),
        (
            {"key": encrypted(KEY, serialization.PrivateFormat.TraditionalOpenSSL)},
            "key must not be encrypted",
        ),
    ],
    ids=["ca", "second ca", "cert", "key", "another cert", "PKCS8", "traditional"],
)
def test_what_no_connection_could_use_is_refused_at_once(parts, problem, directory):
    with pytest.raises(ValueError, match=f"^{problem}$"):
        replace(MUTUAL, **parts)
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("kind", trustme.KeyType)
def test_bundles_and_chains_of_any_kind_of_key_are_taken(kind):
    authority = trustme.CA(key_type=kind)
    caller = authority.create_child_ca(key_type=kind).issue_cert("caller", key_type=kind)
    bundle, key = TRUSTING.ca + authority.cert_pem.bytes(), caller.private_key_pem.bytes()
    chain = b"".join(pem.bytes() for pem in caller.cert_chain_pems)
    for own in ((chain, key), (key + chain, key + chain)):
        assert len(open_context(Tls(bundle, *own)).get_ca_certs()) == 2
