"""The channel of a client: message sizes, and how the client proves who it is."""

from __future__ import annotations

from dataclasses import replace

from kvrelay.errors import Unavailable
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


def check_open(closed: bool) -> None:
    """Raise ``Unavailable`` if the client is closed."""
    if closed:
        raise Unavailable("this client is closed: make another one")
