"""Certificates with keys of any kind; those of `trustme` are all of one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

KEYS: dict[str, Callable[[], CertificateIssuerPrivateKeyTypes]] = {
    "RSA": lambda: rsa.generate_private_key(65_537, 2048),
    "RSA of 1024 bits": lambda: rsa.generate_private_key(65_537, 1024),  # noqa: S505 -- refused
    "P-224": lambda: ec.generate_private_key(ec.SECP224R1()),
    "P-256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "P-384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "P-521": lambda: ec.generate_private_key(ec.SECP521R1()),
    "secp256k1": lambda: ec.generate_private_key(ec.SECP256K1()),
    "brainpoolP256r1": lambda: ec.generate_private_key(ec.BrainpoolP256R1()),
    "Ed25519": ed25519.Ed25519PrivateKey.generate,
    "Ed448": ed448.Ed448PrivateKey.generate,
}
"""Kind of key → makes one."""


class SelfSigned(NamedTuple):
    """PEM texts of a certificate and its key."""

    cert: bytes
    key: bytes


def self_signed(kind: str) -> SelfSigned:
    """Make a certificate of an hour with a key of a kind of :data:`KEYS`."""
    key = KEYS[kind]()
    now = datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, kind)])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + timedelta(hours=1))
        .sign(key, None if kind.startswith("Ed") else SHA256())
    )
    return SelfSigned(
        certificate.public_bytes(Encoding.PEM),
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )
