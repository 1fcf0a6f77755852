"""The gRPC face of a catalog: blocks in memory, checked before they are kept.

Everything runs on one event loop, so the catalog needs no lock; a block is copied once on its way
in and once on its way out.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import grpc
from google.protobuf.message import DecodeError, Message

from common.errors import Corrupt, Rejected
from kvstore.base import NOT_SENT, Kept, Outcome
from kvstore.catalog import Catalog
from kvstore.check import check_block
from kvstore.messages import (
    MAX_LEASE_MS,
    MAX_NAMES,
    MAX_SMALL,
    VERDICTS,
    checked_names,
    claims_of,
    outcome_message,
    stats_message,
    tails_of,
)
from kvstore.policy import LeastRecentlyUsed
from kvstore.records import Claim, Grant, Verdict
from kvstore.wire import DATA, HEAD, Pour, cut, data_message, parse, skip
from protos import kvstore_pb2 as pb

NAME = "kvrelay.v1.KVStore"


@dataclass(frozen=True, slots=True)
class Limits:
    """What the service keeps and for how long; bytes and seconds."""

    budget: int
    max_block: int = 256 << 20
    partial_life: float = 60.0
    ticket_life: float = 30.0


class StoreService:
    """Handlers of ``kvrelay.v1.KVStore``. ``boot`` tells this start from every other."""

    def __init__(self, limits: Limits) -> None:
        self.boot = os.urandom(16)
        self._limits = limits
        self._catalog: Catalog[memoryview] = Catalog(
            limits.budget, LeastRecentlyUsed(), limits.partial_life, self.boot
        )
        self._changed = asyncio.Condition()

    async def lookup(self, request: pb.LookupRequest, context: object) -> pb.LookupResponse:
        """``Lookup``."""
        checked_names("names", request.names, len(request.names), MAX_NAMES)
        if request.lease_ms > MAX_LEASE_MS:
            raise Rejected("lease_ms", f"{request.lease_ms} is more than {MAX_LEASE_MS}")
        ttl = request.lease_ms / 1000
        held = self._catalog.lookup(request.names, tails_of(request), ttl, time.monotonic())
        return pb.LookupResponse(
            boot=self.boot,
            lead=held.lead,
            tail=held.tail,
            places=pb.Places(lengths=held.sizes),
            lease=held.lease or 0,
            lease_ms=request.lease_ms if held.lease else 0,
        )

    async def get(self, request: pb.GetRequest, context: object) -> AsyncGenerator[bytes, None]:
        """``Get``; the messages are made by hand, see ``kvstore.wire``."""
        checked_names("names", request.names, len(request.names), MAX_NAMES)
        now = time.monotonic()
        blocks = [self._catalog.get(name, now) for name in request.names]
        lengths = [0 if block is None else len(block) for block in blocks]
        head = pb.GetHead(boot=self.boot, lengths=lengths)
        yield pb.GetResponse(head=head).SerializeToString()
        for message in cut(block for block in blocks if block is not None):
            yield message

    async def reserve(self, request: pb.ReserveRequest, context: object) -> pb.ReserveResponse:
        """``Reserve``."""
        claims = claims_of(request.claims, len(request.claims), self._limits.max_block)
        await self._wait_for_others(claims, min(request.wait_ms, MAX_LEASE_MS) / 1000)
        grant = self._reserve(claims)
        return pb.ReserveResponse(
            boot=self.boot,
            ticket=grant.ticket or 0,
            verdicts=[VERDICTS[verdict] for verdict in grant.verdicts],
            ticket_ms=round(self._limits.ticket_life * 1000),
        )

    async def put(self, requests: AsyncIterator[bytes], context: object) -> pb.PutResponse:
        """``Put``."""
        head = await self._head(requests)
        return await self._put(head, requests)

    async def put_small(self, request: pb.PutRequest, context: object) -> pb.PutResponse:
        """``PutSmall``."""
        if len(request.data) > MAX_SMALL:
            raise Rejected("data", f"{len(request.data)} bytes are more than {MAX_SMALL}: use Put")

        async def data() -> AsyncIterator[bytes]:
            yield data_message([memoryview(request.data)])

        return await self._put(request.head, data())

    async def _put(self, head: pb.PutHead, data: AsyncIterator[bytes]) -> pb.PutResponse:
        claims = claims_of(head.claims, len(head.claims), self._limits.max_block)
        grant = self._granted(head.ticket, claims)
        try:
            outcomes = await self._receive(data, claims, grant)
        except Corrupt as error:
            raise Rejected("data", str(error)) from error
        finally:
            if grant.ticket is not None:
                self._catalog.abandon(grant.ticket)
            async with self._changed:
                self._changed.notify_all()
        return pb.PutResponse(boot=self.boot, outcomes=map(outcome_message, outcomes))

    async def release(self, request: pb.ReleaseRequest, context: object) -> pb.ReleaseResponse:
        """``Release``."""
        if len(request.leases) > MAX_NAMES:
            raise Rejected("leases", f"{len(request.leases)} are more than {MAX_NAMES}")
        if request.boot == self.boot:
            for lease in request.leases:
                self._catalog.release(lease)
        return pb.ReleaseResponse(boot=self.boot)

    async def stats(self, request: pb.StatsRequest, context: object) -> pb.StatsResponse:
        """``Stats``."""
        self._catalog.expire(time.monotonic())
        return stats_message(self._catalog.stats())

    async def clear(self, request: pb.ClearRequest, context: object) -> pb.ClearResponse:
        """``Clear``."""
        return pb.ClearResponse(boot=self.boot, removed=self._catalog.clear(time.monotonic()))

    def _reserve(self, claims: Sequence[Claim]) -> Grant:
        return self._catalog.reserve(claims, self._limits.ticket_life, time.monotonic())

    def _granted(self, ticket: int, claims: Sequence[Claim]) -> Grant:
        """The grant of an earlier ``Reserve``, or one made in passing."""
        if ticket == 0:
            return self._reserve(claims)
        for index, claim in enumerate(claims):
            reserved = self._catalog.reserved(ticket, claim.name)
            if reserved is not None and reserved != claim:
                raise Rejected(f"claims[{index}]", "is not as it was reserved")
        return Grant(ticket, 0.0, (Verdict.RESERVED,) * len(claims))

    async def _head(self, requests: AsyncIterator[bytes]) -> pb.PutHead:
        try:
            async for message in requests:
                part, body = parse(message)
                if part == HEAD:
                    return pb.PutHead.FromString(bytes(body))
                break
        except (Corrupt, DecodeError) as error:
            raise Rejected("head", str(error)) from error
        raise Rejected("head", "must be the first message of a Put")

    async def _receive(
        self, requests: AsyncIterator[bytes], claims: Sequence[Claim], grant: Grant
    ) -> list[Outcome]:
        outcomes: list[Outcome] = []
        pour = Pour(self._buffers(claims, grant, outcomes))
        async for message in requests:
            part, body = parse(message)
            if part != DATA:
                raise Rejected("head", "must not be sent twice")
            pour.feed(body)
            if grant.ticket is not None:
                self._catalog.prolong(grant.ticket, time.monotonic() + self._limits.ticket_life)
        if not pour.full:
            raise Rejected("data", "ended before the last block was whole")
        return outcomes

    def _buffers(
        self, claims: Sequence[Claim], grant: Grant, outcomes: list[Outcome]
    ) -> Iterator[memoryview]:
        """A buffer for each claim; when it is full, the block is checked and made visible."""
        for claim, verdict in zip(claims, grant.verdicts, strict=True):
            if verdict is not Verdict.RESERVED or grant.ticket is None:
                yield from skip(claim.size)
                outcomes.append(Outcome(NOT_SENT[verdict]))
            elif self._catalog.reserved(grant.ticket, claim.name) is None:
                yield from skip(claim.size)
                outcomes.append(Outcome(Kept.EXPIRED))
            else:
                buffer = memoryview(bytearray(claim.size))
                yield buffer
                outcomes.append(self._keep(grant.ticket, claim, buffer))

    def _keep(self, ticket: int, claim: Claim, data: memoryview) -> Outcome:
        try:
            header = check_block(claim, data)
        except Corrupt as error:
            self._catalog.tally.corrupt += 1
            self._catalog.abandon(ticket, [claim.name])
            return Outcome(Kept.CORRUPT, str(error))
        value = data.toreadonly()
        stored = self._catalog.commit(ticket, claim.name, value, time.monotonic(), header.parent)
        return Outcome(Kept.STORED if stored else Kept.EXPIRED)

    async def _wait_for_others(self, claims: Sequence[Claim], seconds: float) -> None:
        """Until one of ``claims`` is not being written by another, at most ``seconds``."""

        def all_pending() -> bool:
            self._catalog.expire(time.monotonic())
            return all(self._catalog.is_being_written(claim.name) for claim in claims)

        end = time.monotonic() + seconds
        while claims and all_pending() and (left := end - time.monotonic()) > 0:
            async with self._changed:
                try:
                    # In slices: a reservation that runs out by itself wakes nobody.
                    await asyncio.wait_for(self._changed.wait(), min(left, 1.0))
                except TimeoutError:
                    continue


def register(service: StoreService, server: grpc.aio.Server) -> None:
    """Add the handlers; ``Get`` and ``Put`` with messages as bytes."""
    unary = grpc.unary_unary_rpc_method_handler
    bytes_out = grpc.unary_stream_rpc_method_handler
    bytes_in = grpc.stream_unary_rpc_method_handler
    table = {
        "Lookup": unary(service.lookup, pb.LookupRequest.FromString, _serialized),
        "Reserve": unary(service.reserve, pb.ReserveRequest.FromString, _serialized),
        "Release": unary(service.release, pb.ReleaseRequest.FromString, _serialized),
        "Stats": unary(service.stats, pb.StatsRequest.FromString, _serialized),
        "Clear": unary(service.clear, pb.ClearRequest.FromString, _serialized),
        "PutSmall": unary(service.put_small, pb.PutRequest.FromString, _serialized),
        "Get": bytes_out(service.get, pb.GetRequest.FromString, None),
        "Put": bytes_in(service.put, None, _serialized),
    }
    handlers = cast("dict[str, grpc.RpcMethodHandler[object, object]]", table)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))


def _serialized(message: Message) -> bytes:
    return message.SerializeToString()
