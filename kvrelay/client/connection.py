"""The channel of a client: message sizes, and how the client proves who it is."""

from __future__ import annotations

from dataclasses import replace

from kvrelay.errors import Rejected, Unavailable
from kvrelay.rpc.channel import ChannelOptions
from kvrelay.rpc.security import policy
from kvrelay.rpc.security.options import SecurityOptions

MAX_MESSAGE_BYTES = 32 << 20


def channel_options(options: ChannelOptions | None, access: SecurityOptions) -> ChannelOptions:
    """``options`` with the client's credentials; ``Rejected`` names an invalid parameter.

    Without credentials of its own the channel uses those installed in the process.
    """
    chosen = options or ChannelOptions(max_message_bytes=MAX_MESSAGE_BYTES)
    if access == SecurityOptions():
        return chosen
    return replace(chosen, security=policy.load(access))


def check_address(address: str) -> str:
    """The address of a router; ``Rejected`` if a channel would only report it as unreachable."""
    wrong = not isinstance(address, str) or not address or not address.isprintable()
    if wrong or address.startswith(("http://", "https://")):
        raise Rejected("address", f"must be HOST:PORT or unix:PATH, got {address!r:.200}")
    return address


def check_open(closed: bool) -> None:
    """Raise ``Unavailable`` if the client is closed."""
    if closed:
        raise Unavailable("this client is closed: make another one")
