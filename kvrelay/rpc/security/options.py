"""The options of a process that has to do with TLS and credentials: the same ones everywhere.

Configurations inherit them; ``kvrelay.rpc.security.policy.load`` makes of them what servers and
channels use.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.config.option import option

GROUP = "security"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityOptions:
    """Flags, environment and file; see docs/security.md."""

    tls_cert: str | None = option(
        None, "certificate of this process, PEM; switches TLS on", metavar="FILE", group=GROUP
    )
    tls_key: str | None = option(None, "private key of it, PEM", metavar="FILE", group=GROUP)
    tls_ca: str | None = option(
        None, "authority whose certificates are trusted, PEM", metavar="FILE", group=GROUP
    )
    tls_mutual: bool = option(
        True, "take clients that show no certificate, although there is a --tls-ca", group=GROUP
    )
    tls_name: str | None = option(
        None, "name in the certificates of others, where it is not their address", group=GROUP
    )
    credentials: str | None = option(
        None, "tokens and keys, TOML; whoever calls must then show one", metavar="FILE", group=GROUP
    )
    allow_insecure: bool = option(
        False,
        "let other machines reach it without TLS, or without a proof of who they are",
        group=GROUP,
    )
    token: str | None = option(
        None,
        "the token to show to others, instead of one of --credentials",
        secret=True,
        group=GROUP,
    )
    fleet_key: str | None = option(
        None,
        "the key that signs hand-offs, where --credentials has none",
        secret=True,
        group=GROUP,
    )
