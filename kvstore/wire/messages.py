"""Conversion between the store's protobuf messages and its own values, both ways."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

from google.protobuf.message import Message

from kvrelay.block.header import SHORTEST
from kvrelay.block.name import NAME_BYTES
from kvrelay.errors import Corrupt, Rejected
from kvrelay.usage import Miss
from kvrelay.v1 import store_pb2 as pb
from kvrelay.v1 import types_pb2
from kvstore.base import Offer, Outcome, PutStatus, Tail
from kvstore.claims import Claim
from kvstore.limits import (
    MAX_HINTS,
    MAX_LATE_MS,
    MAX_NAMES,
    MAX_SOON_MS,
    MAX_TAILS,
    MAX_TENANT,
)
from kvstore.stats import DiskCounters, DiskStats, StoreCounters, StoreStats, TenantStats

C = TypeVar("C", StoreCounters, DiskCounters)
P = TypeVar("P", pb.PutResponse, pb.PutSmallResponse)

VERDICTS: dict[PutStatus, pb.Verdict.ValueType] = {
    PutStatus.RESERVED: pb.VERDICT_RESERVED,
    PutStatus.STORED: pb.VERDICT_STORED,
    PutStatus.EXISTED: pb.VERDICT_EXISTS,
    PutStatus.PENDING: pb.VERDICT_PENDING,
    PutStatus.NO_ROOM: pb.VERDICT_NO_ROOM,
    PutStatus.NO_PARENT: pb.VERDICT_NO_PARENT,
    PutStatus.CORRUPT: pb.VERDICT_CORRUPT,
    PutStatus.EXPIRED: pb.VERDICT_EXPIRED,
}
_OUTCOMES = {
    verdict: Outcome(status)
    for status, verdict in VERDICTS.items()
    if status is not PutStatus.RESERVED
}
_UNKNOWN = Outcome(PutStatus.CORRUPT)


def checked_names(field: str, names: Collection[bytes], limit: int) -> list[bytes]:
    """The names; ``Rejected`` if there are more than ``limit`` or one has the wrong length."""
    if len(names) > limit:
        raise Rejected(field, f"{len(names)} are more than {limit}: split the call")
    checked = list(names)
    if not {NAME_BYTES}.issuperset(map(len, checked)):
        index, name = next((i, name) for i, name in enumerate(checked) if len(name) != NAME_BYTES)
        raise Rejected(f"{field}[{index}]", f"{len(name)} bytes are not {NAME_BYTES}")
    return checked


def tails_of(request: pb.LookupRequest) -> list[Tail]:
    """The request's tails, checked."""
    checked_names("tails", [tail.name for tail in request.tails[: MAX_TAILS + 1]], MAX_TAILS)
    return [Tail(tail.after, tail.name) for tail in request.tails]


def claims_of(claims: Iterable[pb.Claim], count: int, max_block: int) -> list[Claim]:
    """The claims; ``Rejected`` for too many, a bad name or length, or a name given twice."""
    if count > MAX_NAMES:
        raise Rejected("claims", f"{count} are more than {MAX_NAMES}: split the call")
    values = []
    for index, claim in enumerate(claims):
        name, size = claim.name, claim.length
        if len(name) != NAME_BYTES:
            raise Rejected(f"claims.name[{index}]", f"{len(name)} bytes are not {NAME_BYTES}")
        if not SHORTEST <= size <= max_block:
            raise Rejected(
                f"claims[{index}].length",
                f"{size} is not in {SHORTEST} .. {max_block};"
                " raise the store's --max-block if your blocks are larger",
            )
        first_block_hash = claim.first_block_hash if claim.HasField("first_block_hash") else None
        if len(parent := claim.parent) not in (0, NAME_BYTES):
            raise Rejected(f"claims[{index}].parent", f"{len(parent)} bytes are not {NAME_BYTES}")
        values.append(
            Claim(name, size, claim.partial, first_block_hash, parent or None, claim.detached)
        )
    if len({claim.name for claim in values}) != count:
        raise Rejected("claims", "a name is given twice: send each block once")
    return values


def claim_message(offer: Offer) -> pb.Claim:
    """The message of an offer's claim."""
    return pb.Claim(
        name=offer.name,
        length=offer.size,
        partial=offer.partial,
        first_block_hash=offer.first_block_hash,
        parent=offer.parent or b"",
        detached=offer.detached,
    )


def check_hints(hints: Sequence[pb.BlockHint]) -> None:
    """``Rejected`` for too many hints or names, a bad name, or a life that is too long."""
    if (count := len(hints)) > MAX_HINTS:
        raise Rejected("hints", f"{count} are more than {MAX_HINTS}")
    if (count := sum(len(hint.names) for hint in hints)) > MAX_NAMES:
        raise Rejected("hints.names", f"{count} are more than {MAX_NAMES}: split the call")
    for index, hint in enumerate(hints):
        checked_names(f"hints[{index}].names", hint.names, MAX_NAMES)
        if len(hint.tenant) > MAX_TENANT:
            raise Rejected(f"hints[{index}].tenant", f"has more than {MAX_TENANT} characters")
        longest = MAX_LATE_MS if hint.reuse == pb.REUSE_LATE else MAX_SOON_MS
        if hint.life_ms > longest:
            raise Rejected(f"hints[{index}].life_ms", f"{hint.life_ms} is more than {longest}")


def miss_message(missing: Miss | None) -> types_pb2.Miss.ValueType:
    """The message's value; unspecified if nothing is missing."""
    return types_pb2.MISS_UNSPECIFIED if missing is None else types_pb2.Miss.Value(_label(missing))


def miss_of(wire: types_pb2.Miss.ValueType) -> Miss | None:
    """The miss in a message; ``UNKNOWN`` for a value unknown to this version."""
    return None if wire == types_pb2.MISS_UNSPECIFIED else _MISSES.get(wire, Miss.UNKNOWN)


def _label(missing: Miss) -> str:
    return f"MISS_{missing.name}"


_MISSES = {types_pb2.Miss.Value(_label(missing)): missing for missing in Miss}


def put_message(kind: type[P], boot: bytes, outcomes: Sequence[Outcome]) -> P:
    """The response to a put."""
    reasons = {i: outcome.reason for i, outcome in enumerate(outcomes) if outcome.reason}
    verdicts = [VERDICTS[outcome.status] for outcome in outcomes]
    return kind(boot=boot, verdicts=verdicts, reasons=reasons)


def outcomes_of(message: pb.PutResponse | pb.PutSmallResponse, count: int) -> list[Outcome]:
    """The outcomes of ``count`` blocks; ``CORRUPT`` for a verdict that is unknown here."""
    if len(message.verdicts) != count:
        raise Corrupt("verdicts", f"{len(message.verdicts)} were answered for {count} blocks")
    outcomes = [_OUTCOMES.get(verdict, _UNKNOWN) for verdict in message.verdicts]
    for index, reason in message.reasons.items():
        if index < count:
            outcomes[index] = Outcome(outcomes[index].status, reason)
    return outcomes


def stats_message(stats: StoreStats) -> pb.GetStatsResponse:
    """The message of a reading; its fields have the names of the values' fields."""
    message = pb.GetStatsResponse()
    for source in (stats, stats.counters):
        _fill(message, source)
    if stats.disk is not None:
        for part in (stats.disk, stats.disk.counters):
            _fill(message.disk, part)
    return message


def _fill(message: Message, source: StoreStats | StoreCounters | DiskStats | DiskCounters) -> None:
    for field in dataclasses.fields(source):
        if field.name not in ("counters", "disk", "tenants"):
            setattr(message, field.name, getattr(source, field.name))


def stats_of(message: pb.GetStatsResponse) -> StoreStats:
    """The reading in a message."""
    return StoreStats(
        boot=message.boot,
        budget=message.budget,
        entries=message.entries,
        bytes=message.bytes,
        reserved_bytes=message.reserved_bytes,
        leased_bytes=message.leased_bytes,
        leases=message.leases,
        reservations=message.reservations,
        counters=_counters(StoreCounters, message),
        disk=_disk_of(message.disk) if message.HasField("disk") else None,
        eviction=message.eviction,
        overhead_bytes=message.overhead_bytes,
        tenants=tuple(
            TenantStats(one.name, one.quota, one.entries, one.bytes) for one in message.tenants
        ),
    )


def _disk_of(message: pb.DiskStats) -> DiskStats:
    return DiskStats(
        budget=message.budget,
        bytes=message.bytes,
        entries=message.entries,
        unsaved=message.unsaved,
        counters=_counters(DiskCounters, message),
    )


def _counters(kind: type[C], message: Message) -> C:
    return kind(**{field.name: getattr(message, field.name) for field in dataclasses.fields(kind)})
