"""The channel of a client: message sizes, and how the client proves who it is."""

from __future__ import annotations

from dataclasses import replace

from kvrelay.errors import Unavailable
from kvrelay.rpc.channel import ChannelOptions
from kvrelay.rpc.security import policy
from kvrelay.rpc.security.options import SecurityOptions

MAX_MESSAGE_BYTES = 32 << 20


def channel_options(options: ChannelOptions | None, access: SecurityOptions) -> ChannelOptions:
    """``options`` with this access; ``Rejected`` names the parameter that cannot be used.

    Without any access the channel uses what the process has installed.
    """
    chosen = options or ChannelOptions(max_message_bytes=MAX_MESSAGE_BYTES)
    if access == SecurityOptions():
        return chosen
    return replace(chosen, security=policy.load(access))


def check_open(closed: bool) -> None:
    """``Unavailable`` once a client was closed."""
    if closed:
        raise Unavailable("this client is closed: make another one")
