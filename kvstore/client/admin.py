"""The store service as operators see it: its blocks, their leases, and its events."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from kvrelay.block.header import Header, decode
from kvrelay.rpc.channel import open_sync_channel
from kvrelay.v1 import store_pb2 as pb
from kvrelay.v1.store_pb2_grpc import StoreServiceStub
from kvstore.base import ListedBlock
from kvstore.client.calls import mapped_errors


class StoreAdmin:
    """A ``StoreBrowser`` of the service at ``address``, which can watch its events as well."""

    def __init__(self, address: str) -> None:
        self._channel = open_sync_channel(address)
        self._stub = StoreServiceStub(self._channel)

    def list(self, timeout: float, prefix: bytes = b"", limit: int = 0) -> Iterator[ListedBlock]:
        """The blocks at the moment of the call, received page by page while this is read."""
        request = pb.ListRequest(prefix=prefix, limit=limit)
        with mapped_errors():
            call = self._stub.List(request, timeout=timeout)
            try:
                for page in call:
                    yield from map(_listed, page.blocks)
            finally:
                call.cancel()

    def watch(
        self, timeout: float, boot: bytes = b"", sequence: int = 0
    ) -> Generator[pb.WatchResponse, None, None]:
        """Events after number ``sequence`` of the store's start ``boot``, for a ``StoreMirror``.

        Close it to stop. Ends with ``Exhausted`` when it is not read fast enough: watch again.
        """
        with mapped_errors():
            call = self._stub.Watch(pb.WatchRequest(boot=boot, sequence=sequence), timeout=timeout)
            try:
                yield from call
            finally:
                call.cancel()

    def inspect(self, name: bytes, timeout: float, tenant: str = "") -> tuple[ListedBlock, Header]:
        with mapped_errors():
            answer = self._stub.Inspect(
                pb.InspectRequest(name=name, tenant=tenant), timeout=timeout
            )
        return _listed(answer.block), decode(answer.header)

    def close(self) -> None:
        """Close the channel; open calls fail."""
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
