"""``kvrelay make-certs``: an authority, a certificate and tokens to try a secured cluster."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvrelay.cli.authority import LOCAL_NAMES, CertificateAuthority, write_private
from kvrelay.cli.screen import print_out
from kvrelay.config.reader import load, option, required
from kvrelay.errors import Rejected
from kvrelay.installation import command

DESCRIPTION = """\
Makes a directory with a certificate authority (ca.pem), a certificate for servers and clients
(cert.pem, key.pem), and tokens (credentials.toml; client.toml for a client). For development: in
production, keep ca.key elsewhere, and give each process its own certificate and credentials."""
CREDENTIALS = """\
# Tokens and keys of a cluster; see docs/security.md. Keep it private.
service = "{service}"
admin = "{admin}"
fleet = "{fleet}"

[tenants.demo]
token = "{token}"
max-requests = 64
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeCertsConfig:
    """The directory, the host names, and the validity."""

    dir: str = required(str, "directory to create", metavar="DIR", positional=True)
    host: tuple[str, ...] = option((), "another name or address of the servers", metavar="HOST")
    days: int = option(365, "validity of the certificates", low=1, high=3650)


def main(argv: Sequence[str]) -> int:
    config = load(MakeCertsConfig, argv, "kvrelay make-certs", DESCRIPTION)
    directory = Path(config.dir)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise Rejected("dir", f"cannot create {directory}: {error.strerror}") from None
    for name, content in _files(config).items():
        write_private(directory / name, content)
    flags = {"--tls-cert": "cert.pem", "--tls-key": "key.pem", "--tls-ca": "ca.pem"}
    print_out(f"Created {directory}. Try:")
    for words, own, prompt in (
        ("up", "credentials.toml", ()),
        ("generate", "client.toml", ("Once",)),
    ):
        files = {**flags, "--credentials": own}
        given = (part for flag, file in files.items() for part in (flag, str(directory / file)))
        print_out(f"  {command(words)} {shlex.join((*given, *prompt))}")
    return 0


def _files(config: MakeCertsConfig) -> dict[str, bytes]:
    authority = CertificateAuthority(days=config.days)
    issued = authority.issue("kvrelay", (*LOCAL_NAMES, *config.host), config.days)
    drawn = {name: secrets.token_urlsafe(32) for name in ("service", "admin", "fleet", "token")}
    return {
        "ca.pem": authority.own.cert,
        "ca.key": authority.own.key,
        "cert.pem": issued.cert,
        "key.pem": issued.key,
        "credentials.toml": CREDENTIALS.format(**drawn).encode(),
        "client.toml": f'token = "{drawn["token"]}"\n'.encode(),
    }
