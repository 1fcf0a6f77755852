"""Certificates of an authority of one's own, for trying TLS and for tests. Needs ``cryptography``.

Keys are elliptic (P-256), so that making them takes no time.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvrelay.errors import Rejected

SKEW = timedelta(hours=1)  # clocks of other machines
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class IssuedCertificate:
    """A certificate and its private key, PEM."""

    cert: bytes
    key: bytes = field(repr=False)


class CertificateAuthority:
    """Signs certificates that are good for both ends of a connection."""

    def __init__(self, name: str = "kvrelay development CA", days: float = 365) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        subject = _name(name)
        self._cert = (
            _begun(subject, subject, self._key, _until(days))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def own(self) -> IssuedCertificate:
        """The authority itself. Its key is for whoever signs, and for no server."""
        return _issued(self._cert, self._key)

    def issue(
        self, name: str, hosts: Sequence[str] = LOCAL_NAMES, days: float = 365
    ) -> IssuedCertificate:
        """For a process reached as any of ``hosts``; ``days`` below 0: it has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        cert = (
            _begun(_name(name), self._cert.subject, key, _until(days))
            .add_extension(x509.SubjectAlternativeName([_host(one) for one in hosts]), False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(both), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return _issued(cert, key)


def write_private(path: Path, content: bytes) -> None:
    """A new file that only its owner can read; ``Rejected`` if there is one already."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise Rejected("dir", f"{path} exists already: name another directory") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def _begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, until: datetime
) -> x509.CertificateBuilder:
    begins = min(datetime.now(UTC), until) - SKEW
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(until)
    )


def _until(days: float) -> datetime:
    return datetime.now(UTC) + timedelta(days=days)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


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
