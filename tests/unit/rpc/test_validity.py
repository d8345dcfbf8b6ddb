"""The validity of certificates, compared with a real library."""

import ssl
from datetime import UTC, datetime, timedelta

import pytest
import trustme
from cryptography import x509

from ratelimitd.rpc.tls import validities, validity

TWO_DIGITS = datetime(2030, 5, 6, 7, 8, 9, tzinfo=UTC)
FOUR_DIGITS = datetime(2060, 1, 2, 3, 4, 5, tzinfo=UTC)


def der_of(expires):
    blob = trustme.CA().issue_cert("localhost", not_after=expires).cert_chain_pems[0]
    return ssl.PEM_cert_to_DER_cert(blob.bytes().decode())


@pytest.mark.parametrize("expires", [TWO_DIGITS, FOUR_DIGITS])
def test_validity_is_as_issued(expires):
    der = der_of(expires)
    certificate = x509.load_der_x509_certificate(der)
    assert validity(der) == (certificate.not_valid_before_utc, expires)
    assert certificate.not_valid_after_utc == expires


def test_two_digit_year_of_the_last_century_is_recognised():
    old = datetime(1999, 1, 1, tzinfo=UTC)
    day_before = old - timedelta(days=1)
    blob = trustme.CA().issue_cert("x", not_before=day_before, not_after=old)
    assert validities(blob.cert_chain_pems[0].bytes().decode()) == [(day_before, old)]


def test_certificates_of_a_text_are_read_in_order():
    ca = trustme.CA()
    leaf = ca.issue_cert("localhost", not_after=TWO_DIGITS).cert_chain_pems[0].bytes()
    pem = b"# ours\n" + leaf + b"# theirs\n" + ca.cert_pem.bytes()
    assert validities(pem.decode())[0].ends == TWO_DIGITS
    assert len(validities(pem.decode())) == 2


def test_certificate_of_version_1_has_no_version_field():
    serial = algorithm = issuer = b"\x30\x00"
    dates = b"\x30\x1e\x17\x0d300101000000Z\x17\x0d310101000000Z"
    body = serial + algorithm + issuer + dates
    inner = b"\x30" + bytes([len(body)]) + body
    der = b"\x30" + bytes([len(inner)]) + inner
    assert validity(der) == (datetime(2030, 1, 1, tzinfo=UTC), datetime(2031, 1, 1, tzinfo=UTC))


@pytest.mark.parametrize("cut", [0, 1, 3, 20, 60, 90])
def test_truncated_certificate_is_invalid(cut):
    with pytest.raises(ValueError):
        validity(der_of(TWO_DIGITS)[:cut])


@pytest.mark.parametrize("label", ["X509 CERTIFICATE", "TRUSTED CERTIFICATE"])
def test_every_label_that_the_tls_loader_accepts_is_read(label):
    blob = trustme.CA().issue_cert("localhost", not_after=TWO_DIGITS).cert_chain_pems[0].bytes()
    [found] = validities(blob.decode().replace(" CERTIFICATE", f" {label}"))
    assert found.ends == TWO_DIGITS
