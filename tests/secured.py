"""Certificates and credentials for tests, made when they run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvrelay.cli.authority import LOCAL_NAMES, CertificateAuthority
from kvrelay.rpc.security.options import SecurityOptions

OWN_HOST = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"
"""Where servers listen whose connections a test counts.

Clients of workers that were killed go on connecting to ports of 127.0.0.1, which a new server may
have got.
"""

SERVICE = "service-secret-of-the-test"
ADMIN = "admin-secret-of-the-test"
FLEET = "fleet-secret-of-the-test"
ALICE, BOB = "alice-secret-of-the-test", "bob-secret-of-the-test"
SECRETS = (SERVICE, ADMIN, FLEET, ALICE, BOB)

CREDENTIALS = f"""
service = "{SERVICE}"
admin = "{ADMIN}"
fleet = "{FLEET}"
[tenants.alice]
token = "{ALICE}"
[tenants.bob]
token = "{BOB}"
"""


@dataclass(frozen=True, slots=True)
class Files:
    """Paths of one party's certificate and key, and of the authority."""

    cert: str
    key: str
    ca: str

    def options(self, credentials: str | None = None, token: str | None = None) -> SecurityOptions:
        """What a process with these files is configured with."""
        return SecurityOptions(
            tls_cert=self.cert,
            tls_key=self.key,
            tls_ca=self.ca,
            credentials=credentials,
            token=token,
        )


def write_files(
    folder: Path,
    name: str,
    authority: CertificateAuthority,
    days: float = 1,
    hosts: Sequence[str] = (*LOCAL_NAMES, OWN_HOST),
) -> Files:
    """A certificate for ``name``, good for ``days``."""
    issued = authority.issue(name, hosts, days)
    paths = [folder / f"{name}.{kind}" for kind in ("cert", "key", "ca")]
    for path, content in zip(paths, (issued.cert, issued.key, authority.own.cert), strict=True):
        path.write_bytes(content)
        path.chmod(0o600)
    return Files(*map(str, paths))


def write_credentials(folder: Path, text: str = CREDENTIALS) -> str:
    """The path of a private file with these credentials."""
    path = folder / "credentials.toml"
    path.write_text(text)
    path.chmod(0o600)
    return str(path)
