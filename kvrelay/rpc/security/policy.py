"""Protection of a process's connections: certificates, credentials, and rules for both.

Installed once at the process's edge, like logging, so that every server and channel has it::

    policy.install(config)              # a configuration that inherits SecurityOptions

A single server or channel can be given another ``Security`` in its options; tests do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvrelay.errors import Rejected
from kvrelay.rpc.address import Address
from kvrelay.rpc.security import credentials, tls
from kvrelay.rpc.security.credentials import SERVICE_FIRST, Credentials
from kvrelay.rpc.security.identity import CallerKind
from kvrelay.rpc.security.options import SecurityOptions
from kvrelay.rpc.security.tls import TlsCredentials

log = logging.getLogger("kvrelay.rpc")


@dataclass(frozen=True, slots=True)
class Security:
    """The default is plain text without authentication, for this machine only."""

    tls: TlsCredentials | None = None
    credentials: Credentials = field(default_factory=Credentials)
    allow_insecure: bool = False

    @property
    def used_tls(self) -> TlsCredentials:
        """The certificates of a process that has TLS."""
        assert self.tls is not None, "asked only where TLS is on"
        return self.tls

    def check_listen(self, address: Address, field: str = "address") -> None:
        """Raise ``Rejected`` if other machines reach it without encryption or authentication."""
        if address.local:
            return
        lacks = []
        if self.tls is None:
            lacks.append("the connection is not encrypted (--tls-cert, --tls-key)")
        if self.credentials.open or not self._asks_callers:
            lacks.append("anyone could call it (--credentials, or --tls-ca)")
        if not lacks:
            return
        problem = f"{address} can be reached by other machines, and {' and '.join(lacks)}"
        if not self.allow_insecure:
            raise Rejected(
                field, f"{problem}: fix that, listen on 127.0.0.1, or give --allow-insecure"
            )
        log.warning("%s; --allow-insecure was given", problem)

    def warn_if_open(self) -> None:
        """Log that any user of this machine may call this process, if that is so."""
        if not self._asks_callers:
            log.warning(
                "no credentials: every user of this machine may call this process; give"
                " --credentials, or the same KVRELAY_CLUSTER_TOKEN to all processes"
            )

    @property
    def _asks_callers(self) -> bool:
        """Whether callers must show a token or a certificate."""
        return self.credentials.required or (self.tls is not None and self.tls.asks_clients)

    def check_signed(self) -> None:
        """Raise ``Rejected`` for a worker on a network that could not detect forged handoffs."""
        if self.credentials.fleet_key is None and not self.allow_insecure:
            raise Rejected(
                "fleet_key",
                "missing: handoffs would go unsigned between machines; put `fleet` into"
                " --credentials, or give --allow-insecure",
            )

    def token_for(self, address: str) -> str | None:
        """The token to send to ``address``, after ``check_call``. A cluster's stays on its host."""
        self.check_call(address)
        token, own = self.credentials.token, self.credentials.cluster_token
        return own if token is None and own and Address.parse(address).local else token

    def check_call(self, address: str) -> None:
        """Raise ``Rejected`` if a token would cross a network in plain text."""
        if self.tls is not None or self.credentials.token is None or self.allow_insecure:
            return
        if not Address.parse(address).local:
            raise Rejected(
                "address",
                f"a token would be sent to {address} in plain text: give --tls-ca or"
                " --allow-insecure",
            )


INSECURE = Security()
_installed = INSECURE


def load(options: SecurityOptions, shows: Sequence[CallerKind] = SERVICE_FIRST) -> Security:
    """Read every file that is named; ``Rejected`` names the wrong option."""
    known = credentials.load(options, shows)
    return Security(tls.load(options), known, options.allow_insecure)


def install(options: SecurityOptions, shows: Sequence[CallerKind] = SERVICE_FIRST) -> Security:
    """Load the options' ``Security``; every new server and channel of this process uses it."""
    global _installed
    _installed = load(options, shows)
    return _installed


def renew(options: SecurityOptions, check: Callable[[Credentials, Credentials], None]) -> None:
    """Read the files of a service again and use them from now on.

    Raises an error, and keeps what is in use, if they cannot be used, or if ``check`` of the
    credentials before and after does.
    """
    global _installed
    before, after = _installed.credentials, load(options)
    if after.credentials.fleet_key != before.fleet_key:
        raise Rejected(
            credentials.FIELD, "`fleet` has changed: restart all routers and workers at once"
        )
    if before.required and not after.credentials.required:
        raise Rejected(credentials.FIELD, f"{options.credentials} holds no token any more")
    check(before, after.credentials)
    _installed = after


def installed() -> Security:
    """The security that this process uses."""
    return _installed
