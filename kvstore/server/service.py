"""The gRPC service of the store: lookups, leases, reservations, and the gRPC transport.

Everything here runs on one event loop; the block store is shared with the threads of the socket
transport.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import cast

import grpc
from google.protobuf.message import Message

from kvrelay.block.name import NAME_BYTES
from kvrelay.errors import Corrupt, DeadlineExceeded, Rejected
from kvrelay.rpc import tracing
from kvrelay.rpc.security.identity import caller
from kvrelay.v1 import store_pb2 as pb
from kvstore.base import Lease, Outcome
from kvstore.claims import Claim
from kvstore.disk.tier import DiskTier
from kvstore.index.eviction.hints import Hint
from kvstore.limits import MAX_FIRST_BLOCK_HASHES, MAX_LEASE_MS, MAX_NAMES, MAX_SMALL
from kvstore.server.block_store import BlockStore
from kvstore.server.puts import first_head, grant_for, receive_stream
from kvstore.server.responses import (
    DISK_LOAD_SECONDS,
    inspect_response,
    list_responses,
    locate_response,
    reserve_response,
    snapshot_matching,
    stats_response,
)
from kvstore.server.spans import traced, traced_get
from kvstore.server.tenants import TenantScope
from kvstore.server.watching import WatchOptions, WatchServer, WatchStream
from kvstore.wire.buffers import data_message, data_messages
from kvstore.wire.messages import (
    check_hints,
    checked_names,
    claims_of,
    miss_message,
    put_message,
    tails_of,
)

log = logging.getLogger("kvrelay.store")

SERVICE_NAME = "kvrelay.v1.StoreService"
MAX_LISTED = 1 << 31
STREAM_SECONDS = 60.0
"""A ``Get`` whose reader takes no message for this long is ended."""


class ChangeSignal:
    """Wakes waiters on one event loop when any thread reports a change."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Report a change, from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    def listen(self) -> None:
        """Miss no change from now on: call this, test whether to wait, then ``wait``."""
        self._loop = asyncio.get_running_loop()

    async def wait(self, seconds: float) -> None:
        """Return at the next change or after ``seconds``."""
        self.listen()
        try:
            async with asyncio.timeout(seconds):
                await self._next.wait()
        except TimeoutError:
            return

    def _wake(self) -> None:
        self._next.set()
        self._next = asyncio.Event()


class StoreService:
    """Handlers of ``kvrelay.v1.StoreService``, by the names in ``register``.

    ``transports`` is what ``GetTransports`` answers.
    """

    def __init__(
        self,
        store: BlockStore,
        transports: pb.GetTransportsResponse | None = None,
        watch_options: WatchOptions | None = None,
        disk: DiskTier | None = None,
    ) -> None:
        self._disk = disk
        self._store = store
        self._transports = transports or pb.GetTransportsResponse(boot=store.boot)
        self._changed = ChangeSignal()
        self._rechecking = asyncio.Lock()
        self._watching = WatchServer(store, watch_options)
        store.on_change(self._changed.notify)

    @property
    def watchers(self) -> int:
        """The number of running ``Watch`` calls."""
        return self._watching.count

    async def transports(
        self, request: pb.GetTransportsRequest, context: object
    ) -> pb.GetTransportsResponse:
        return self._transports

    async def lookup(self, request: pb.LookupRequest, context: object) -> pb.LookupResponse:
        asked = checked_names("names", request.names, MAX_NAMES)
        if request.lease_ms > MAX_LEASE_MS:
            raise Rejected("lease_ms", f"{request.lease_ms} is more than {MAX_LEASE_MS}")
        if (count := len(request.first_block_hashes)) > MAX_FIRST_BLOCK_HASHES:
            raise Rejected("first_block_hashes", f"{count} are more than {MAX_FIRST_BLOCK_HASHES}")
        if request.each:
            return self._surveyed(request, asked)
        scope, seconds = self._scope(), request.lease_ms / 1000
        names, tails = scope.keys(asked), scope.tails(tails_of(request))
        first_block_hashes = scope.first_block_hashes(request.first_block_hashes)
        found = self._store.lookup(names, tails, seconds, first_block_hashes)
        return pb.LookupResponse(
            boot=self._store.boot,
            lead=found.lead,
            tail=found.tail,
            lengths=found.sizes,
            lease=found.lease.id if found.lease else 0,
            lease_ms=request.lease_ms if found.lease else 0,
            first_miss=miss_message(found.missing),
        )

    def _surveyed(self, request: pb.LookupRequest, asked: Sequence[bytes]) -> pb.LookupResponse:
        if request.tails:
            raise Rejected("tails", "must be empty with each: ask for them as names")
        scope, seconds = self._scope(), request.lease_ms / 1000
        first_block_hashes = scope.first_block_hashes(request.first_block_hashes)
        found = self._store.survey(scope.keys(asked), seconds, first_block_hashes)
        return pb.LookupResponse(
            boot=self._store.boot,
            lengths=[size or 0 for size in found.sizes],
            lease=found.lease.id if found.lease else 0,
            lease_ms=request.lease_ms if found.lease else 0,
            misses=map(miss_message, found.misses),
            first_block=miss_message(found.first_block),
        )

    async def locate(self, request: pb.LocateRequest, context: object) -> pb.LocateResponse:
        names = checked_names("names", request.names, MAX_NAMES)
        scope = self._scope()
        seconds = min(DISK_LOAD_SECONDS, request.lease_ms / 2000)
        await self._load(scope.keys(names), seconds)
        return locate_response(self._store, request, scope)

    async def get(self, request: pb.GetRequest, context: object) -> AsyncGenerator[bytes, None]:
        """``Get``. The blocks are leased while the call lasts; see ``kvstore.wire.buffers``."""
        names = self._scope().keys(checked_names("names", request.names, MAX_NAMES))
        await self._load(names, DISK_LOAD_SECONDS)
        found = self._store.locate(names, STREAM_SECONDS)
        try:
            lengths = [0 if block is None else block[0] for block in found.blocks]
            head = pb.GetHead(boot=self._store.boot, lengths=lengths)
            yield pb.GetResponse(head=head).SerializeToString()
            there = (block for block in found.blocks if block is not None)
            views = (self._store.arena.view(place, size) for size, place in there)
            for message in data_messages(views):
                self._check_lease(found.lease)
                yield message
        finally:
            if found.lease is not None:
                self._store.release([found.lease.id])

    async def reserve(self, request: pb.ReserveRequest, context: object) -> pb.ReserveResponse:
        claims = claims_of(request.claims, len(request.claims), self._store.limits.max_block)
        wanted = self._scope().claims(claims)
        if request.wait_ms:
            await self._wait_for_others(wanted, min(request.wait_ms, MAX_LEASE_MS) / 1000)
        return reserve_response(self._store, self._store.reserve(wanted))

    async def put(self, requests: AsyncIterator[bytes], context: object) -> pb.PutResponse:
        head = await first_head(requests)
        return put_message(pb.PutResponse, self._store.boot, await self._put(head, requests))

    async def put_small(self, request: pb.PutSmallRequest, context: object) -> pb.PutSmallResponse:
        if len(request.data) > MAX_SMALL:
            raise Rejected("data", f"{len(request.data)} bytes are more than {MAX_SMALL}: use Put")

        async def data() -> AsyncIterator[bytes]:
            yield data_message([memoryview(request.data)])

        outcomes = await self._put(request.head, data())
        return put_message(pb.PutSmallResponse, self._store.boot, outcomes)

    async def release(self, request: pb.ReleaseRequest, context: object) -> pb.ReleaseResponse:
        if len(request.leases) > MAX_NAMES:
            raise Rejected("leases", f"{len(request.leases)} are more than {MAX_NAMES}")
        if request.boot == self._store.boot:
            self._store.release(request.leases, self._scope().prefix)
        return pb.ReleaseResponse(boot=self._store.boot)

    async def hint(self, request: pb.HintRequest, context: object) -> pb.HintResponse:
        """``Hint``: a reuse that is unknown here is ignored, as any hint may be."""
        check_hints(request.hints)
        self._store.hint(
            [
                Hint(
                    names=one.names,
                    soon=one.reuse == pb.REUSE_SOON,
                    life=one.life_ms / 1000,
                    tenant=one.tenant,
                    most=self._store.hinted_bytes(one.tenant),
                )
                for one in request.hints
                if one.reuse in (pb.REUSE_SOON, pb.REUSE_LATE)
            ]
        )
        return pb.HintResponse(boot=self._store.boot)

    async def recheck(self, request: pb.RecheckRequest, context: object) -> pb.RecheckResponse:
        """``Recheck``; one at a time, so that it does not occupy every thread."""
        checked_names("name", [request.name], 1)
        key = self._scope().key(request.name)
        async with self._rechecking:
            error = await asyncio.to_thread(self._store.recheck, key, request.proof)
        if error is not None:
            log.warning("block %s is corrupt and was removed: %s", request.name.hex(), error)
        return pb.RecheckResponse(boot=self._store.boot, removed=error is not None)

    async def stats(self, request: pb.GetStatsRequest, context: object) -> pb.GetStatsResponse:
        return stats_response(self._store, caller())

    async def clear(self, request: pb.ClearRequest, context: object) -> pb.ClearResponse:
        removed = self._store.clear()
        if self._disk is not None:
            await asyncio.to_thread(self._disk.sweep)
        return pb.ClearResponse(boot=self._store.boot, removed=removed)

    async def list(
        self, request: pb.ListRequest, context: object
    ) -> AsyncGenerator[pb.ListResponse, None]:
        if len(request.prefix) > NAME_BYTES:
            raise Rejected("prefix", f"{len(request.prefix)} bytes are more than a name has")
        if request.limit > MAX_LISTED:
            raise Rejected("limit", f"{request.limit} is more than {MAX_LISTED}; 0 is all of them")
        last, entries = await asyncio.to_thread(snapshot_matching, self._store, request.prefix)
        for page in list_responses(self._store, last, entries, request.limit):
            yield page

    async def watch(self, request: pb.WatchRequest, context: WatchStream) -> None:
        await self._watching.serve(request, context)

    async def inspect(self, request: pb.InspectRequest, context: object) -> pb.InspectResponse:
        checked_names("name", [request.name], 1)
        key = self._store.tenants.named(request.tenant).key(request.name)
        return await asyncio.to_thread(inspect_response, self._store, self._disk, key)

    async def _put(self, head: pb.PutHead, data: AsyncIterator[bytes]) -> Sequence[Outcome]:
        scope, most = self._scope(), self._store.limits.max_block
        claims = scope.claims(claims_of(head.claims, len(head.claims), most))
        grant = grant_for(self._store, head.ticket, claims, scope.prefix)
        try:
            return await receive_stream(self._store, data, claims, grant)
        except Corrupt as error:
            raise Rejected("data", str(error)) from error
        finally:
            if grant.ticket is not None:
                self._store.abandon(grant.ticket)

    def _scope(self) -> TenantScope:
        """The tenant's scope, which follows from the call's credential alone."""
        return self._store.tenants.scope(caller())

    async def _load(self, names: Sequence[bytes], seconds: float) -> None:
        """Load blocks that are on disk; a block that takes longer counts as absent."""
        disk_index = self._store.disk_index
        if disk_index is None or not disk_index.load(names):
            return
        self._changed.listen()
        begun = time.monotonic()
        end = begun + seconds
        while disk_index.is_loading(names) and (left := end - time.monotonic()) > 0:
            await self._changed.wait(min(left, 1.0))
        tracing.current().record("disk", begun, time.monotonic())

    def _check_lease(self, lease: Lease | None) -> None:
        """A copied message is valid only if its blocks were leased until the copy ended."""
        if lease is None or not self._store.extend(lease.id, STREAM_SECONDS):
            raise DeadlineExceeded(f"the client read nothing for {STREAM_SECONDS} s")

    async def _wait_for_others(self, claims: Sequence[Claim], seconds: float) -> None:
        """Return when a claim is no longer being written by another, or after ``seconds``."""
        end = time.monotonic() + seconds
        while claims and self._store.all_pending(claims) and (left := end - time.monotonic()) > 0:
            # In slices: a reservation that times out notifies no waiter.
            await self._changed.wait(min(left, 1.0))


def register(service: StoreService, server: grpc.aio.Server) -> None:
    """Add the handlers; the messages of ``Get`` and ``Put`` stay bytes."""
    unary = grpc.unary_unary_rpc_method_handler
    bytes_out = grpc.unary_stream_rpc_method_handler
    bytes_in = grpc.stream_unary_rpc_method_handler
    table = {
        "GetTransports": unary(
            traced("GetTransports", service.transports),
            pb.GetTransportsRequest.FromString,
            _serialized,
        ),
        "Lookup": unary(traced("Lookup", service.lookup), pb.LookupRequest.FromString, _serialized),
        "Locate": unary(traced("Locate", service.locate), pb.LocateRequest.FromString, _serialized),
        "Reserve": unary(
            traced("Reserve", service.reserve), pb.ReserveRequest.FromString, _serialized
        ),
        "Hint": unary(service.hint, pb.HintRequest.FromString, _serialized),
        "Release": unary(service.release, pb.ReleaseRequest.FromString, _serialized),
        "Recheck": unary(
            traced("Recheck", service.recheck), pb.RecheckRequest.FromString, _serialized
        ),
        "GetStats": unary(service.stats, pb.GetStatsRequest.FromString, _serialized),
        "Clear": unary(service.clear, pb.ClearRequest.FromString, _serialized),
        "PutSmall": unary(
            traced("PutSmall", service.put_small), pb.PutSmallRequest.FromString, _serialized
        ),
        "Inspect": unary(service.inspect, pb.InspectRequest.FromString, _serialized),
        "List": bytes_out(service.list, pb.ListRequest.FromString, _serialized),
        "Watch": bytes_out(service.watch, pb.WatchRequest.FromString, _serialized),
        "Get": bytes_out(traced_get(service.get), pb.GetRequest.FromString, None),
        "Put": bytes_in(traced("Put", service.put), None, _serialized),
    }
    handlers = cast("dict[str, grpc.RpcMethodHandler[object, object]]", table)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))


def _serialized(message: Message) -> bytes:
    return message.SerializeToString()
