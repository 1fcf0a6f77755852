"""Rare commands: figures and configuration of Redis servers, removal of wrong values or of all."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import redis

from kvrelay.block.verify import verify_tag
from kvrelay.errors import Corrupt, KvrelayError, Unavailable
from kvrelay.rpc.address import Address
from kvrelay.rpc.deadline import Deadline
from kvstore.base import Want
from kvstore.claims import Claim, check_block
from kvstore.redis.call import WRONG_TYPE
from kvstore.redis.connection import library_client
from kvstore.redis.replies import LONGEST_BULK
from kvstore.redis.server import RedisServer
from kvstore.redis.settings import RedisSettings
from kvstore.redis.topology import Topology, slots
from kvstore.stats import StoreCounters, StoreStats

if TYPE_CHECKING:
    from kvrelay.block.mac import BlockKey

log = logging.getLogger("kvrelay.store")

SCAN_COUNT = 1000


@dataclass(frozen=True, slots=True)
class ServerReport:
    """About one server. ``full_coverage`` is ``None`` without a cluster or without permission."""

    address: Address
    version: str
    run_id: str
    maxmemory: int
    policy: str
    used: int
    keys: int
    evicted: int
    expired: int
    replica: bool
    cluster: bool
    full_coverage: bool | None


def report_of(address: Address, settings: RedisSettings, deadline: Deadline) -> ServerReport:
    """The report of one server."""
    with library_client(address, settings, deadline) as client:
        info: Mapping[str, object] = client.info()
        cluster = _number(info, "cluster_enabled") == 1
        return ServerReport(
            address,
            version=str(info.get("redis_version", "unknown")),
            run_id=str(info.get("run_id", "")),
            maxmemory=_number(info, "maxmemory"),
            policy=str(info.get("maxmemory_policy", "unknown")),
            used=_number(info, "used_memory"),
            keys=client.dbsize(),
            evicted=_number(info, "evicted_keys"),
            expired=_number(info, "expired_keys"),
            replica=info.get("role") == "slave",
            cluster=cluster,
            full_coverage=_full_coverage(client) if cluster else None,
        )


def examine(settings: RedisSettings, timeout: float) -> dict[Address, ServerReport | KvrelayError]:
    """The report, or the error, of every server in the URL or in the cluster."""
    reports: dict[Address, ServerReport | KvrelayError] = {}
    todo = list(settings.addresses)
    while todo:
        address = todo.pop(0)
        deadline = Deadline.after(timeout)
        try:
            reports[address] = report_of(address, settings, deadline)
            owners = slots(address, settings, deadline) if settings.cluster else []
            todo += {one for one in owners if one} - reports.keys() - set(todo)
        except KvrelayError as error:
            reports[address] = error
    return reports


def reports_of(
    topology: Topology, settings: RedisSettings, deadline: Deadline
) -> list[ServerReport]:
    """The reports of the servers that answer; raises only if none does."""
    reports = []
    last_error = None
    for server in topology.owners():
        try:
            with server.breaker.recorded():
                reports.append(report_of(server.address, settings, deadline))
        except KvrelayError as error:
            last_error = error
    if last_error is not None and not reports:
        raise last_error
    return reports


def stats_of(reports: Sequence[ServerReport], counters: StoreCounters) -> StoreStats:
    """The sums of the servers' figures. Redis has no leases and no reservations."""
    counters.evicted = sum(one.evicted for one in reports)
    counters.expired = sum(one.expired for one in reports)
    return StoreStats(
        boot="".join(one.run_id for one in reports).encode(),
        budget=sum(one.maxmemory for one in reports),
        entries=sum(one.keys for one in reports),
        bytes=sum(one.used for one in reports),
        reserved_bytes=0,
        leased_bytes=0,
        leases=0,
        reservations=0,
        counters=counters,
    )


def clear_all(topology: Topology, settings: RedisSettings, deadline: Deadline) -> int:
    """Remove every block from every server; how many were removed.

    Keys that are not named after a block stay, whatever they begin with. ``Unavailable`` if a
    server did not remove all of its blocks, after every server has been asked.
    """
    removed = 0
    errors = []
    for server in topology.owners():
        address = server.address
        try:
            with server.breaker.recorded(), library_client(address, settings, deadline) as client:
                for count, refused in _removed(client, topology, settings.prefix, deadline):
                    removed += count
                    errors += [f"{address}: {type(e).__name__} {e}" for e in refused]
        except KvrelayError as error:
            errors.append(str(error))
    if errors:
        raise Unavailable(f"{removed} blocks were removed, but not all: {errors[0]}")
    return removed


def _removed(
    client: redis.Redis, topology: Topology, prefix: str, deadline: Deadline
) -> Iterator[tuple[int, list[Exception]]]:
    """For each page of a ``SCAN``: how many keys were removed, and the errors of the others."""
    cursor = 0
    while True:
        deadline.check("to clear the store")
        cursor, keys = client.scan(cursor, f"{prefix}:*", SCAN_COUNT)
        with client.pipeline(transaction=False) as commands:  # a cluster takes one key at a time
            for key in keys:
                if topology.name(cast(bytes, key)) is not None:
                    commands.unlink(key)
            answers = commands.execute(raise_on_error=False)
        refused = [one for one in answers if isinstance(one, Exception)]
        yield sum(one for one in answers if isinstance(one, int)), refused
        if not cursor:
            return


def remove_if_wrong(
    place: tuple[RedisServer, bytes],
    want: Want,
    settings: RedisSettings,
    deadline: Deadline,
) -> bool:
    """Remove the value in the place of a block if it is not that block; whether it was removed.

    With the reader's key, a block that its fleet did not sign is not that block either: while it
    stays, the right block cannot be put.
    """
    server, location = place
    # A missing permission to remove it is no failure of the server: it is not recorded.
    with library_client(server.address, settings, deadline) as client:
        error = _wrong(client, location.decode(), want.name, want.key)
        if error is not None:
            client.unlink(location.decode())
            log.warning("%s: block %s was removed: %s", server.address, want.name.hex(), error)
    return error is not None


def _wrong(client: redis.Redis, location: str, name: bytes, key: BlockKey | None) -> Corrupt | None:
    try:
        size = client.strlen(location)
        value = client.get(location) if size <= LONGEST_BULK else b""
    except redis.ResponseError as error:
        if not str(error).startswith(WRONG_TYPE):
            raise
        return Corrupt("type", str(error))
    if value is None:
        return None
    try:
        block = memoryview(cast(bytes, value))
        split = check_block(Claim(name, size, False), block).length
        if key is not None:
            verify_tag(bytes(block[:split]), block[split:], key)
    except Corrupt as error:
        return error
    return None


def _full_coverage(client: redis.Redis) -> bool | None:
    try:
        options = client.config_get("cluster-require-full-coverage")
    except redis.ResponseError:
        return None
    return {"yes": True, "no": False}.get(str(options.get("cluster-require-full-coverage")))


def _number(info: Mapping[str, object], name: str) -> int:
    value = info.get(name)
    return value if isinstance(value, int) else 0
