"""What is asked of Redis rarely: figures, configuration, removal of what is wrong or of all."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import redis

from kvrelay.errors import Corrupt, KvrelayError, Unavailable
from kvrelay.rpc.address import Address
from kvrelay.rpc.deadline import Deadline
from kvstore.claims import Claim, check_block
from kvstore.redis.call import NO_VALUE
from kvstore.redis.dialling import library_client
from kvstore.redis.replies import LONGEST_BULK
from kvstore.redis.server import RedisServer, recorded
from kvstore.redis.settings import RedisSettings
from kvstore.redis.topology import Topology, slots
from kvstore.stats import StoreCounters, StoreStats

log = logging.getLogger("kvrelay.store")

AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class ServerReport:
    """Of one server. ``full_coverage`` is ``None`` where there is no cluster or no permission."""

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
    """Ask one server."""
    with library_client(address, settings, deadline) as library:
        info: Mapping[str, object] = library.info()
        cluster = _number(info, "cluster_enabled") == 1
        return ServerReport(
            address,
            version=str(info.get("redis_version", "unknown")),
            run_id=str(info.get("run_id", "")),
            maxmemory=_number(info, "maxmemory"),
            policy=str(info.get("maxmemory_policy", "unknown")),
            used=_number(info, "used_memory"),
            keys=library.dbsize(),
            evicted=_number(info, "evicted_keys"),
            expired=_number(info, "expired_keys"),
            replica=info.get("role") == "slave",
            cluster=cluster,
            full_coverage=_full_coverage(library) if cluster else None,
        )


def examine(settings: RedisSettings, timeout: float) -> dict[Address, ServerReport | KvrelayError]:
    """Every server that a URL names or its cluster tells of, and what is wrong with it, if so."""
    found: dict[Address, ServerReport | KvrelayError] = {}
    todo = list(settings.addresses)
    while todo:
        address, deadline = todo.pop(0), Deadline.after(timeout)
        try:
            found[address] = report_of(address, settings, deadline)
            owners = slots(address, settings, deadline) if settings.cluster else []
            todo += {one for one in owners if one} - found.keys() - set(todo)
        except KvrelayError as error:
            found[address] = error
    return found


def reports_of(
    topology: Topology, settings: RedisSettings, deadline: Deadline
) -> list[ServerReport]:
    """Of every server that answers; raises only if none does."""
    found, failed = [], None
    for node in topology.owners():
        try:
            with recorded(node):
                found.append(report_of(node.address, settings, deadline))
        except KvrelayError as error:
            failed = error
    if failed is not None and not found:
        raise failed
    return found


def stats_of(found: Sequence[ServerReport], counters: StoreCounters) -> StoreStats:
    """The servers' figures added up. Leases and reservations are nothing that Redis has."""
    counters.evicted = sum(one.evicted for one in found)
    counters.expired = sum(one.expired for one in found)
    return StoreStats(
        boot="".join(one.run_id for one in found).encode(),
        budget=sum(one.maxmemory for one in found),
        entries=sum(one.keys for one in found),
        bytes=sum(one.used for one in found),
        reserved_bytes=0,
        leased_bytes=0,
        leases=0,
        reservations=0,
        counters=counters,
    )


def clear_all(topology: Topology, settings: RedisSettings, deadline: Deadline) -> int:
    """Remove every block from every server that is there; how many.

    Keys that are called after no block are somebody else's, whatever they begin with. Raises after
    all have been told if one of them could not do all of it.
    """
    removed, failed = 0, []
    for node in topology.owners():
        try:
            with recorded(node), library_client(node.address, settings, deadline) as library:
                for count, refused in _removed(library, topology, settings.prefix, deadline):
                    removed += count
                    failed += [f"{node.address}: {type(e).__name__} {e}" for e in refused]
        except KvrelayError as error:
            failed.append(str(error))
    if failed:
        raise Unavailable(f"{removed} blocks were removed, but not all: {failed[0]}")
    return removed


def _removed(
    library: redis.Redis, topology: Topology, prefix: str, deadline: Deadline
) -> Iterator[tuple[int, list[Exception]]]:
    """How many keys went with each page of a ``SCAN``, and what those said that did not."""
    cursor = 0
    while True:
        deadline.check("to clear the store")
        cursor, keys = library.scan(cursor, f"{prefix}:*", AT_ONCE)
        with library.pipeline(transaction=False) as commands:  # a cluster takes one key at a time
            for key in keys:
                if topology.name(cast(bytes, key)) is not None:
                    commands.unlink(key)
            answers = commands.execute(raise_on_error=False)
        refused = [one for one in answers if isinstance(one, Exception)]
        yield sum(one for one in answers if isinstance(one, int)), refused
        if not cursor:
            return


def remove_if_wrong(
    place: tuple[RedisServer, bytes], name: bytes, settings: RedisSettings, deadline: Deadline
) -> bool:
    """Remove what lies in the place of a block and is not that block; whether there was such.

    As long as it is there, nobody can put the right one.
    """
    node, key = place
    # That it may not be removed, for want of a permission, says nothing of the server.
    with library_client(node.address, settings, deadline) as library:
        error = _wrong(library, key.decode(), name)
        if error is not None:
            library.unlink(key.decode())
            log.warning("%s: block %s was removed: %s", node.address, name.hex(), error)
    return error is not None


def _wrong(library: redis.Redis, key: str, name: bytes) -> Corrupt | None:
    try:
        size = library.strlen(key)
        value = library.get(key) if 0 < size <= LONGEST_BULK else b""
    except redis.ResponseError as error:
        if not str(error).startswith(NO_VALUE):
            raise
        return Corrupt("type", str(error))
    if not size or value is None:
        return None
    try:
        check_block(Claim(name, size, False), cast(bytes, value))
    except Corrupt as error:
        return error
    return None


def _full_coverage(library: redis.Redis) -> bool | None:
    try:
        found = library.config_get("cluster-require-full-coverage")
    except redis.ResponseError:
        return None
    return {"yes": True, "no": False}.get(str(found.get("cluster-require-full-coverage")))


def _number(info: Mapping[str, object], name: str) -> int:
    value = info.get(name)
    return value if isinstance(value, int) else 0
