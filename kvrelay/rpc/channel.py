"""Channels to kvrelay servers: message sizes, keepalive, reconnection and credentials."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv6Address

import grpc

from kvrelay.rpc import keepalive
from kvrelay.rpc.bearer import C, with_token
from kvrelay.rpc.renewed import RenewedChannel, RenewedSyncChannel
from kvrelay.rpc.security import renewal
from kvrelay.rpc.security.policy import Security, installed

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ChannelOptions:
    """``security`` defaults to what this process has installed."""

    max_message_bytes: int = 8 * MIB
    keepalive_seconds: float = 10.0
    keepalive_timeout_seconds: float = 20.0
    ping_seconds: float = keepalive.PING_SECONDS
    max_reconnect_seconds: float = 2.0
    connect_seconds: float = 3.0
    resolve_seconds: float = 1.0  # least time between two lookups of a name
    security: Security | None = None

    def arguments(self) -> list[tuple[str, int]]:
        """Channel arguments of gRPC core."""
        return [
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", self.max_message_bytes),
            *keepalive.arguments(
                self.keepalive_seconds, self.keepalive_timeout_seconds, self.ping_seconds
            ),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),
            # The name misleads: this bounds the duration of one attempt, not a wait between two. A
            # short bound fails on a busy machine, where the handshake is answered late.
            ("grpc.min_reconnect_backoff_ms", round(self.connect_seconds * 1000)),
            ("grpc.max_reconnect_backoff_ms", round(self.max_reconnect_seconds * 1000)),
            # A restarted container has another address: by default gRPC would look its name up
            # again half a minute later.
            ("grpc.dns_min_time_between_resolutions_ms", round(self.resolve_seconds * 1000)),
            ("grpc.enable_retries", 0),  # the caller decides where to retry; gRPC cannot know
            ("grpc.enable_http_proxy", 0),  # http_proxy in the environment is meant for others
            ("grpc.service_config_disable_resolution", 1),
            ("grpc.use_local_subchannel_pool", 1),  # one connection per channel, closed with it
        ]


def open_channel(address: str, options: ChannelOptions | None = None) -> grpc.aio.Channel:
    """An asyncio channel to ``HOST:PORT`` or ``unix:PATH``; close it with ``await close()``."""
    made = partial(_open, grpc.aio.insecure_channel, grpc.aio.secure_channel, address, options)
    if _renews(options):
        return RenewedChannel(address, made)
    return _with_token(made(_security(options)), address, options)


def open_sync_channel(address: str, options: ChannelOptions | None = None) -> grpc.Channel:
    """The same for code without an event loop; close it with ``close()``."""
    made = partial(_open, grpc.insecure_channel, grpc.secure_channel, address, options)
    if _renews(options):
        return RenewedSyncChannel(address, made)
    return _with_token(made(_security(options)), address, options)


def target(address: str) -> str:
    """The address as gRPC needs it: it reads ``::1:50`` as a host without a port."""
    host, _, port = address.rpartition(":")
    try:
        return f"[{IPv6Address(host)}]:{port}"
    except ValueError:
        return address


def _open(
    insecure: Callable[..., C],
    secure: Callable[..., C],
    address: str,
    options: ChannelOptions | None,
    security: Security,
) -> C:
    """A channel without a token."""
    chosen: ChannelOptions = options or ChannelOptions()
    arguments: list[tuple[str, int | str]] = [*chosen.arguments()]
    if security.tls is None:
        return insecure(target(address), options=arguments)
    if security.tls.name is not None:
        arguments.append(("grpc.ssl_target_name_override", security.tls.name))
    return secure(target(address), security.tls.channel(), options=arguments)


def _with_token(channel: C, address: str, options: ChannelOptions | None) -> C:
    token = _security(options).token_for(target(address))
    return channel if token is None else with_token(channel, token)


def _security(options: ChannelOptions | None) -> Security:
    return (options and options.security) or installed()


def _renews(options: ChannelOptions | None) -> bool:
    return renewal.runs() and (options is None or options.security is None)
