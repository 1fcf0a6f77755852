"""For those who look after a store, not for those who use it: what is there, and who holds it."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

import grpc

from kvrelay.block.header import Header, decode
from kvrelay.rpc.channel import open_sync_channel
from kvrelay.v1 import store_pb2 as pb
from kvstore.client.calls import PATH, mapped_errors


@dataclass(frozen=True, slots=True)
class ListedBlock:
    """A block that is there: ``size`` bytes of header and payload, ``tokens`` positions."""

    name: bytes
    size: int
    tokens: int
    partial: bool
    leases: int
    tenant: str
    memory: bool
    disk: bool


class StoreAdmin:
    """A connection to the service at ``address``. Timeouts are in seconds."""

    def __init__(self, address: str) -> None:
        self._channel = open_sync_channel(address)
        self._list: grpc.UnaryStreamMultiCallable[pb.ListRequest, pb.ListResponse]
        self._list = self._channel.unary_stream(
            PATH + "List", pb.ListRequest.SerializeToString, pb.ListResponse.FromString
        )
        self._watch: grpc.UnaryStreamMultiCallable[pb.WatchRequest, pb.WatchResponse]
        self._watch = self._channel.unary_stream(
            PATH + "Watch", pb.WatchRequest.SerializeToString, pb.WatchResponse.FromString
        )
        self._inspect: grpc.UnaryUnaryMultiCallable[pb.InspectRequest, pb.InspectResponse]
        self._inspect = self._channel.unary_unary(
            PATH + "Inspect", pb.InspectRequest.SerializeToString, pb.InspectResponse.FromString
        )

    def list(self, timeout: float, prefix: bytes = b"", limit: int = 0) -> Iterator[ListedBlock]:
        """What was there when this was asked; ``limit`` 0 is none. It comes as it is read."""
        request = pb.ListRequest(prefix=prefix, limit=limit)
        with mapped_errors():
            call = self._list(request, timeout=timeout)
            try:
                for page in call:
                    yield from map(_listed, page.blocks)
            finally:
                call.cancel()

    def watch(
        self, timeout: float, boot: bytes = b"", sequence: int = 0
    ) -> Generator[pb.WatchResponse, None, None]:
        """What comes and what leaves, after what was read before; ``Mirror`` makes sense of it.

        Close it to stop. Ends with ``Exhausted`` when it is not read fast enough: watch again.
        """
        with mapped_errors():
            call = self._watch(pb.WatchRequest(boot=boot, sequence=sequence), timeout=timeout)
            try:
                yield from call
            finally:
                call.cancel()

    def inspect(self, name: bytes, timeout: float, tenant: str = "") -> tuple[ListedBlock, Header]:
        """One block and its header; ``NotFound`` if it is not there."""
        with mapped_errors():
            found = self._inspect(pb.InspectRequest(name=name, tenant=tenant), timeout=timeout)
        return _listed(found.block), decode(found.header)

    def close(self) -> None:
        """End the calls under way."""
        self._channel.close()


def _listed(info: pb.BlockInfo) -> ListedBlock:
    return ListedBlock(
        name=info.name,
        size=info.length,
        tokens=info.tokens,
        partial=info.partial,
        leases=info.leases,
        tenant=info.tenant,
        memory=info.memory,
        disk=info.disk,
    )
