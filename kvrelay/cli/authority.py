"""A private certificate authority, for trying TLS and for tests. Needs ``cryptography``.

Keys are elliptic (P-256): they take milliseconds to make.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvrelay.errors import Rejected

SKEW = timedelta(hours=1)  # between the clocks of two machines
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class IssuedCertificate:
    """A certificate and its private key, PEM."""

    cert: bytes
    key: bytes = field(repr=False)


class CertificateAuthority:
    """Signs certificates that are valid for both ends of a connection."""

    def __init__(self, days: float = 365) -> None:
        """Its name is its own: a verifier that trusts two authorities finds the issuer by name."""
        self._name = f"kvrelay development CA {secrets.token_hex(4)}"
        self._key = ec.generate_private_key(ec.SECP256R1())
        public = self._key.public_key()
        self._issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(public)
        self._cert = (
            _builder(self._name, self._name, self._key, days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(_usage(signs=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def own(self) -> IssuedCertificate:
        """The authority itself. Its key is for signing only; no server may have it."""
        return _issued(self._cert, self._key)

    def issue(
        self, name: str, hosts: Sequence[str] = LOCAL_NAMES, days: float = 365
    ) -> IssuedCertificate:
        """A certificate for ``hosts``; with ``days`` below 0 it has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        cert = (
            _builder(name, self._name, key, days)
            .add_extension(x509.SubjectAlternativeName([_host(one) for one in hosts]), False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(both), critical=False)
            .add_extension(self._issuer, critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
            .sign(self._key, hashes.SHA256())
        )
        return _issued(cert, key)


def write_private(path: Path, content: bytes) -> None:
    """Write a new file that only its owner can read; ``Rejected`` if it exists."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise Rejected("dir", f"{path} exists: name another directory") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def _builder(
    subject: str, issuer: str, key: ec.EllipticCurvePrivateKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    expiry = now + timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, expiry) - SKEW)
        .not_valid_after(expiry)
    )


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _issued(cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> IssuedCertificate:
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return IssuedCertificate(cert.public_bytes(pem), private)
