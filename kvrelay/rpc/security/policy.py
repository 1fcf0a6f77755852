"""What protects the connections of a process: its certificates, its credentials, and the rules.

Set once at a process's edge, as logging is, so that no server and no channel made anywhere in it
can be without by oversight::

    security.install(config)              # a configuration that inherits SecurityOptions

A ``Security`` may also be given to one server or channel in its options; tests do.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
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
    """Without anything: plain text, and everybody may call; so only on this machine."""

    tls: TlsCredentials | None = None
    credentials: Credentials = field(default_factory=Credentials)
    allow_insecure: bool = False

    def check_listen(self, address: Address) -> None:
        """``Rejected`` for an address where strangers could listen in, or call."""
        if address.local:
            return
        lacks = []
        if self.tls is None:
            lacks.append("the connection is not encrypted (--tls-cert, --tls-key)")
        if not self.credentials.required and not (self.tls is not None and self.tls.asks_clients):
            lacks.append("everybody could call it (--credentials, or --tls-ca)")
        if not lacks:
            return
        told = f"{address} can be reached by other machines, and {' and '.join(lacks)}"
        if not self.allow_insecure:
            raise Rejected(
                "address", f"{told}: mend that, listen on 127.0.0.1, or say --allow-insecure"
            )
        log.warning("%s; --allow-insecure was given", told)

    def check_plain(self, field: str, host: str) -> None:
        """``Rejected`` for a port that knows neither TLS nor tokens, beyond this machine."""
        if not (Address(host, 0).local or self.allow_insecure):
            raise Rejected(
                field,
                f"{host} can be reached by other machines, and that port is open to everybody:"
                " take 127.0.0.1, or say --allow-insecure",
            )

    def check_signed(self) -> None:
        """``Rejected`` for a worker that others reach and that could not tell forged hand-offs."""
        if self.credentials.fleet_key is None and not self.allow_insecure:
            raise Rejected(
                "fleet_key",
                "missing: hand-offs would go unsigned between machines; put `fleet` into"
                " --credentials, or say --allow-insecure",
            )

    def check_call(self, address: str) -> None:
        """``Rejected`` where a token would go over a network in plain text."""
        if self.tls is not None or self.credentials.token is None or self.allow_insecure:
            return
        if not Address.parse(address).local:
            raise Rejected(
                "address",
                f"a token would be sent to {address} in plain text: give --tls-ca, or say"
                " --allow-insecure",
            )


OPEN = Security()
_installed = OPEN


def load(options: SecurityOptions, shows: Sequence[CallerKind] = SERVICE_FIRST) -> Security:
    """Read every file named; ``Rejected`` names the option that is wrong."""
    token, fleet_key = options.token, options.fleet_key
    if options.credentials is None:
        known = credentials.given(token, fleet_key)
    else:
        known = credentials.read(options.credentials, token, fleet_key, shows)
    return Security(tls.load(options), known, options.allow_insecure)


def install(options: SecurityOptions, shows: Sequence[CallerKind] = SERVICE_FIRST) -> Security:
    """Load it and use it for every server and channel of this process from now on."""
    global _installed
    _installed = load(options, shows)
    return _installed


def installed() -> Security:
    """What this process uses."""
    return _installed
