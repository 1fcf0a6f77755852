"""The gRPC face of the store: finding, leasing, reserving, and the way that always works.

Everything here runs on one event loop; the store is shared with the threads of the lane.
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
from kvrelay.rpc.security.identity import caller
from kvrelay.v1 import store_pb2 as pb
from kvstore.base import Lease, Outcome
from kvstore.claims import Claim
from kvstore.disk.tier import DiskTier
from kvstore.limits import MAX_LEASE_MS, MAX_NAMES, MAX_OPENINGS, MAX_SMALL
from kvstore.server.block_store import BlockStore
from kvstore.server.changes import ChangeSignal
from kvstore.server.locating import DISK_LOAD_SECONDS, locate_response, reserve_response
from kvstore.server.puts import first_head, grant_for, receive_stream
from kvstore.server.responses import (
    inspect_response,
    list_responses,
    snapshot_matching,
    stats_response,
)
from kvstore.server.tenants import TenantScope
from kvstore.server.watching import WatchOptions, WatchServer, WatchStream
from kvstore.wire.buffers import data_message, data_messages
from kvstore.wire.messages import checked_names, claims_of, miss_message, put_message, tails_of

log = logging.getLogger("kvrelay.store")

SERVICE_NAME = "kvrelay.v1.StoreService"
MAX_LISTED = 1 << 31
STREAM_SECONDS = 60.0
"""A reader of ``Get`` that takes no message for so long loses the rest."""


class StoreService:
    """Handlers of ``kvrelay.v1.StoreService``; ``ways`` is what ``GetTransports`` answers."""

    def __init__(
        self,
        store: BlockStore,
        ways: pb.GetTransportsResponse | None = None,
        pace: WatchOptions | None = None,
        disk: DiskTier | None = None,
    ) -> None:
        self._disk = disk
        self._store = store
        self._ways = ways or pb.GetTransportsResponse(boot=store.boot)
        self._changed = ChangeSignal()
        self._rechecking = asyncio.Lock()
        self._watching = WatchServer(store, pace)
        store.watch(self._changed.tell)

    @property
    def watchers(self) -> int:
        """How many calls of ``Watch`` there are."""
        return self._watching.count

    async def ways(
        self, request: pb.GetTransportsRequest, context: object
    ) -> pb.GetTransportsResponse:
        """``GetTransports``."""
        return self._ways

    async def lookup(self, request: pb.LookupRequest, context: object) -> pb.LookupResponse:
        """``Lookup``."""
        asked = checked_names("names", request.names, MAX_NAMES)
        if request.lease_ms > MAX_LEASE_MS:
            raise Rejected("lease_ms", f"{request.lease_ms} is more than {MAX_LEASE_MS}")
        if (count := len(request.first_block_hashes)) > MAX_OPENINGS:
            raise Rejected("first_block_hashes", f"{count} are more than {MAX_OPENINGS}")
        if request.each:
            return self._surveyed(request, asked)
        scope, seconds = self._scope(), request.lease_ms / 1000
        names, tails = scope.keys(asked), scope.tails(tails_of(request))
        openings = scope.openings(request.first_block_hashes)
        held = self._store.lookup(names, tails, seconds, openings)
        return pb.LookupResponse(
            boot=self._store.boot,
            lead=held.lead,
            tail=held.tail,
            lengths=held.sizes,
            lease=held.lease.id if held.lease else 0,
            lease_ms=request.lease_ms if held.lease else 0,
            first_miss=miss_message(held.missing),
        )

    def _surveyed(self, request: pb.LookupRequest, asked: Sequence[bytes]) -> pb.LookupResponse:
        if request.tails:
            raise Rejected("tails", "must be empty with each: ask for them as names")
        scope, seconds = self._scope(), request.lease_ms / 1000
        openings = scope.openings(request.first_block_hashes)
        seen = self._store.survey(scope.keys(asked), seconds, openings)
        return pb.LookupResponse(
            boot=self._store.boot,
            lengths=[size or 0 for size in seen.sizes],
            lease=seen.lease.id if seen.lease else 0,
            lease_ms=request.lease_ms if seen.lease else 0,
            misses=map(miss_message, seen.misses),
            first_block_known=seen.opening,
        )

    async def locate(self, request: pb.LocateRequest, context: object) -> pb.LocateResponse:
        """``Locate``."""
        names = checked_names("names", request.names, MAX_NAMES)
        scope = self._scope()
        seconds = min(DISK_LOAD_SECONDS, request.lease_ms / 2000)
        await self._bring(scope.keys(names), seconds)
        return locate_response(self._store, request, scope)

    async def get(self, request: pb.GetRequest, context: object) -> AsyncGenerator[bytes, None]:
        """``Get``; messages made by hand, see ``kvstore.wire.buffers``. Held while it lasts."""
        names = self._scope().keys(checked_names("names", request.names, MAX_NAMES))
        await self._bring(names, DISK_LOAD_SECONDS)
        found = self._store.locate(names, STREAM_SECONDS)
        try:
            lengths = [0 if block is None else block[0] for block in found.blocks]
            head = pb.GetHead(boot=self._store.boot, lengths=lengths)
            yield pb.GetResponse(head=head).SerializeToString()
            there = (block for block in found.blocks if block is not None)
            views = (self._store.arena.view(place, size) for size, place in there)
            for message in data_messages(views):
                self._still(found.lease)
                yield message
        finally:
            if found.lease is not None:
                self._store.release([found.lease.id])

    async def reserve(self, request: pb.ReserveRequest, context: object) -> pb.ReserveResponse:
        """``Reserve``."""
        claims = claims_of(request.claims, len(request.claims), self._store.limits.max_block)
        wanted = self._scope().claims(claims)
        if request.wait_ms:
            await self._wait_for_others(wanted, min(request.wait_ms, MAX_LEASE_MS) / 1000)
        return reserve_response(self._store, self._store.reserve(wanted))

    async def put(self, requests: AsyncIterator[bytes], context: object) -> pb.PutResponse:
        """``Put``."""
        head = await first_head(requests)
        return put_message(pb.PutResponse, self._store.boot, await self._put(head, requests))

    async def put_small(self, request: pb.PutSmallRequest, context: object) -> pb.PutSmallResponse:
        """``PutSmall``."""
        if len(request.data) > MAX_SMALL:
            raise Rejected("data", f"{len(request.data)} bytes are more than {MAX_SMALL}: use Put")

        async def data() -> AsyncIterator[bytes]:
            yield data_message([memoryview(request.data)])

        outcomes = await self._put(request.head, data())
        return put_message(pb.PutSmallResponse, self._store.boot, outcomes)

    async def release(self, request: pb.ReleaseRequest, context: object) -> pb.ReleaseResponse:
        """``Release``."""
        if len(request.leases) > MAX_NAMES:
            raise Rejected("leases", f"{len(request.leases)} are more than {MAX_NAMES}")
        if request.boot == self._store.boot:
            self._store.release(request.leases, self._scope().prefix)
        return pb.ReleaseResponse(boot=self._store.boot)

    async def recheck(self, request: pb.RecheckRequest, context: object) -> pb.RecheckResponse:
        """``Recheck``; one at a time, for threads are there for others too."""
        checked_names("name", [request.name], 1)
        key = self._scope().key(request.name)
        async with self._rechecking:
            error = await asyncio.to_thread(self._store.recheck, key)
        if error is not None:
            log.warning("block %s was taken out: %s", request.name.hex(), error)
        return pb.RecheckResponse(boot=self._store.boot, removed=error is not None)

    async def stats(self, request: pb.GetStatsRequest, context: object) -> pb.GetStatsResponse:
        """``GetStats``."""
        return stats_response(self._store, caller())

    async def clear(self, request: pb.ClearRequest, context: object) -> pb.ClearResponse:
        """``Clear``."""
        removed = self._store.clear()
        if self._disk is not None:
            await asyncio.to_thread(self._disk.sweep)
        return pb.ClearResponse(boot=self._store.boot, removed=removed)

    async def list(
        self, request: pb.ListRequest, context: object
    ) -> AsyncGenerator[pb.ListResponse, None]:
        """``List``."""
        if len(request.prefix) > NAME_BYTES:
            raise Rejected("prefix", f"{len(request.prefix)} bytes are more than a name has")
        if request.limit > MAX_LISTED:
            raise Rejected("limit", f"{request.limit} is more than {MAX_LISTED}; 0 is all of them")
        last, entries = await asyncio.to_thread(snapshot_matching, self._store, request.prefix)
        for page in list_responses(self._store, last, entries, request.limit):
            yield page

    async def watch(self, request: pb.WatchRequest, context: WatchStream) -> None:
        """``Watch``."""
        await self._watching.serve(request, context)

    async def inspect(self, request: pb.InspectRequest, context: object) -> pb.InspectResponse:
        """``Inspect``."""
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
        """Whose blocks this call is about; only its credential says so."""
        return self._store.tenants.scope(caller())

    async def _bring(self, names: Sequence[bytes], seconds: float) -> None:
        """Wait for those of ``names`` that lie on disk; those that are late are absent."""
        disk_index = self._store.disk_index
        if disk_index is None or not disk_index.bring(names):
            return
        self._changed.listen()
        end = time.monotonic() + seconds
        while disk_index.coming(names) and (left := end - time.monotonic()) > 0:
            await self._changed.wait(min(left, 1.0))

    def _still(self, lease: Lease | None) -> None:
        """What was just copied is what was asked for only if the lease stood until now."""
        if lease is None or not self._store.extend(lease.id, STREAM_SECONDS):
            raise DeadlineExceeded(f"nothing was read from this stream for {STREAM_SECONDS} s")

    async def _wait_for_others(self, claims: Sequence[Claim], seconds: float) -> None:
        """Until one of ``claims`` is not being written by another, at most ``seconds``."""
        end = time.monotonic() + seconds
        while claims and self._store.all_pending(claims) and (left := end - time.monotonic()) > 0:
            # In slices: a reservation that runs out by itself tells nobody.
            await self._changed.wait(min(left, 1.0))


def register(service: StoreService, server: grpc.aio.Server) -> None:
    """Add the handlers; ``Get`` and ``Put`` with messages as bytes."""
    unary = grpc.unary_unary_rpc_method_handler
    bytes_out = grpc.unary_stream_rpc_method_handler
    bytes_in = grpc.stream_unary_rpc_method_handler
    table = {
        "GetTransports": unary(service.ways, pb.GetTransportsRequest.FromString, _serialized),
        "Lookup": unary(service.lookup, pb.LookupRequest.FromString, _serialized),
        "Locate": unary(service.locate, pb.LocateRequest.FromString, _serialized),
        "Reserve": unary(service.reserve, pb.ReserveRequest.FromString, _serialized),
        "Release": unary(service.release, pb.ReleaseRequest.FromString, _serialized),
        "Recheck": unary(service.recheck, pb.RecheckRequest.FromString, _serialized),
        "GetStats": unary(service.stats, pb.GetStatsRequest.FromString, _serialized),
        "Clear": unary(service.clear, pb.ClearRequest.FromString, _serialized),
        "PutSmall": unary(service.put_small, pb.PutSmallRequest.FromString, _serialized),
        "Inspect": unary(service.inspect, pb.InspectRequest.FromString, _serialized),
        "List": bytes_out(service.list, pb.ListRequest.FromString, _serialized),
        "Watch": bytes_out(service.watch, pb.WatchRequest.FromString, _serialized),
        "Get": bytes_out(service.get, pb.GetRequest.FromString, None),
        "Put": bytes_in(service.put, None, _serialized),
    }
    handlers = cast("dict[str, grpc.RpcMethodHandler[object, object]]", table)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))


def _serialized(message: Message) -> bytes:
    return message.SerializeToString()
