"""What the clients for threads and for asyncio share: how they connect, and their errors."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import replace

from kvrelay.client.liveness import Liveness
from kvrelay.client.stream import BaseStream, C
from kvrelay.errors import Rejected, Unavailable
from kvrelay.rpc.address import DEFAULT_ROUTER, Address
from kvrelay.rpc.channel import ChannelOptions
from kvrelay.rpc.security import policy
from kvrelay.rpc.security.options import SecurityOptions
from kvrelay.v1 import router_pb2

MAX_MESSAGE_BYTES = 32 << 20
INPUT_OF = {"prompt": "prompt", "token_ids": "token_ids", "chat": "messages"}
"""The parameter of each kind of input."""


class BaseClient(ABC):
    """The constructor of both clients. ``_connect`` opens the channel of either kind."""

    def __init__(
        self,
        address: str = DEFAULT_ROUTER,
        options: ChannelOptions | None = None,
        *,
        token: str | None = None,
        tls_ca: str | None = None,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        tls_name: str | None = None,
        allow_insecure: bool = False,
    ) -> None:
        """Connects with the first request.

        address: HOST:PORT or unix:PATH of the router. options: sizes and times of the connection.
        token: the bearer token that this client sends. Without TLS it is sent to this machine
            only, unless ``allow_insecure``. Default: what this process has installed.
        tls_ca, tls_cert, tls_key: paths of PEM files: the authority to trust, this client's own
            certificate and its key. tls_name: the name in the router's certificate if it is not its
            address.
        """
        texts = {"token": token, "tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key}
        for name, value in {**texts, "tls_name": tls_name}.items():
            if value is not None and not isinstance(value, str):  # the value may be a secret
                raise Rejected(name, f"must be text (a str), got a {type(value).__name__}")
        access = SecurityOptions(
            token=token,
            tls_ca=tls_ca,
            tls_cert=tls_cert,
            tls_key=tls_key,
            tls_name=tls_name,
            allow_insecure=allow_insecure,
        )
        chosen = options or ChannelOptions(max_message_bytes=MAX_MESSAGE_BYTES)
        if access != SecurityOptions():
            chosen = replace(chosen, security=policy.load(access))
        self._max_message_bytes = chosen.max_message_bytes
        self._liveness = Liveness()
        self._closed = threading.Event()
        self._connect(_checked(address), chosen)

    @abstractmethod
    def _connect(self, address: str, options: ChannelOptions) -> None: ...

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise Unavailable("this client is closed: make another one")

    def _continued(self, stream: BaseStream[C]) -> router_pb2.GenerateRequest:
        """Cancel a stream; the request that resumes it."""
        if not isinstance(stream, BaseStream):
            raise Rejected("stream", f"must be a stream of generate(), got {stream!r:.80}")
        stream.cancel()
        return stream.continued()

    def _check_request(self, request: router_pb2.GenerateRequest) -> None:
        """``Rejected`` for a request that the channel would refuse to send."""
        self._check_open()
        size, most = request.ByteSize(), self._max_message_bytes
        if size > most:
            name = INPUT_OF[request.WhichOneof("input") or "prompt"]
            raise Rejected(name, f"the request has {size} bytes, more than {most}: shorten it")


def _checked(address: str) -> str:
    """The address of a router; ``Rejected`` if a channel would only report it as unreachable."""
    if isinstance(address, str) and not address.startswith(("http://", "https://")):
        with suppress(Rejected):
            Address.parse(address)
            return address
    raise Rejected("address", f"must be HOST:PORT or unix:PATH, got {address!r:.200}")
