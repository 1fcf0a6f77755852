"""The options for TLS and credentials, the same in every process.

Configurations inherit them; ``policy.load`` makes a ``Security`` from them.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.config.option import option

GROUP = "security"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Certificates of a client or server; see docs/security.md."""

    tls_cert: str | None = option(
        None, "certificate of this process, PEM; switches TLS on", metavar="FILE", group=GROUP
    )
    tls_key: str | None = option(
        None, "private key of --tls-cert, PEM", metavar="FILE", group=GROUP
    )
    tls_ca: str | None = option(
        None, "certificate authority to trust, PEM", metavar="FILE", group=GROUP
    )
    tls_name: str | None = option(
        None, "name in the certificates of other processes, if it is not their address", group=GROUP
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityOptions(TlsFiles):
    """Flags, environment and file; see docs/security.md."""

    tls_mutual: bool = option(
        True, "accept clients without a certificate although --tls-ca is given", group=GROUP
    )
    credentials: str | None = option(
        None, "tokens and keys, TOML; callers must then show a token", metavar="FILE", group=GROUP
    )
    allow_insecure: bool = option(
        False,
        "let other machines connect without TLS or without authentication",
        group=GROUP,
    )
    token: str | None = option(
        None,
        "the token to send to other processes, in place of the one in --credentials",
        secret=True,
        group=GROUP,
    )
    cluster_token: str | None = option(
        None,
        "token of one cluster, which its processes require of all but clients",
        secret=True,
        group=GROUP,
    )
    fleet_key: str | None = option(
        None,
        "the key that signs handoffs and blocks, if --credentials has none",
        secret=True,
        group=GROUP,
    )
