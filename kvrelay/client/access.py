"""How a client of the library proves who it is and knows whom it talks to."""

from __future__ import annotations

from dataclasses import replace
from typing import TypedDict

from kvrelay.rpc.channel import ChannelOptions
from kvrelay.rpc.security import policy
from kvrelay.rpc.security.options import SecurityOptions


class Access(TypedDict, total=False):
    """A bearer token, and paths of PEM files: the authority trusted, one's own certificate and key.

    ``tls_name`` is the name in the router's certificate, where it is not its address. A token is
    sent in plain text to this machine only, unless ``allow_insecure``.
    """

    token: str | None
    tls_ca: str | None
    tls_cert: str | None
    tls_key: str | None
    tls_name: str | None
    allow_insecure: bool


def secured(options: ChannelOptions, access: Access) -> ChannelOptions:
    """``options`` with what was given; ``Rejected`` names what cannot be used."""
    if not access:
        return options
    return replace(options, security=policy.load(SecurityOptions(**access)))
