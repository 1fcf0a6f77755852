"""What is asked of Redis rarely: figures, configuration, removal of everything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import redis

from common.errors import KvrelayError
from kvstore.redis.dialling import client
from kvstore.redis.node import guarded
from kvstore.redis.settings import Settings
from kvstore.redis.topology import Topology, slots
from kvstore.stats import Stats, Tally
from rpc.address import Address
from rpc.deadline import Deadline

AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class Reading:
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
    cluster: bool
    full_coverage: bool | None


def reading(address: Address, settings: Settings, deadline: Deadline) -> Reading:
    """Ask one server."""
    with client(address, settings, deadline) as library:
        info: Mapping[str, object] = library.info()
        cluster = _number(info, "cluster_enabled") == 1
        return Reading(
            address,
            version=str(info.get("redis_version", "unknown")),
            run_id=str(info.get("run_id", "")),
            maxmemory=_number(info, "maxmemory"),
            policy=str(info.get("maxmemory_policy", "unknown")),
            used=_number(info, "used_memory"),
            keys=library.dbsize(),
            evicted=_number(info, "evicted_keys"),
            expired=_number(info, "expired_keys"),
            cluster=cluster,
            full_coverage=_full_coverage(library) if cluster else None,
        )


def examined(settings: Settings, timeout: float) -> dict[Address, Reading | KvrelayError]:
    """Every server that a URL names or its cluster tells of, and what is wrong with it, if so."""
    found: dict[Address, Reading | KvrelayError] = {}
    todo = list(settings.addresses)
    while todo:
        address, deadline = todo.pop(0), Deadline.after(timeout)
        try:
            found[address] = reading(address, settings, deadline)
            owners = slots(address, settings, deadline) if settings.cluster else []
            todo += {one for one in owners if one} - found.keys() - set(todo)
        except KvrelayError as error:
            found[address] = error
    return found


def readings(topology: Topology, settings: Settings, deadline: Deadline) -> list[Reading]:
    """Of every server that answers; raises only if none does."""
    found, failed = [], None
    for node in topology.owners():
        try:
            with guarded(node):
                found.append(reading(node.address, settings, deadline))
        except KvrelayError as error:
            failed = error
    if failed is not None and not found:
        raise failed
    return found


def stats_of(found: Sequence[Reading], tally: Tally) -> Stats:
    """The servers' figures added up. Leases and reservations are nothing that Redis has."""
    tally.evicted = sum(one.evicted for one in found)
    tally.expired = sum(one.expired for one in found)
    return Stats(
        boot="".join(one.run_id for one in found).encode(),
        budget=sum(one.maxmemory for one in found),
        entries=sum(one.keys for one in found),
        bytes=sum(one.used for one in found),
        reserved_bytes=0,
        leased_bytes=0,
        leases=0,
        reservations=0,
        tally=tally,
    )


def cleared(topology: Topology, settings: Settings, deadline: Deadline) -> int:
    """Remove every block under the prefix from every server that is there; how many."""
    removed, failed, nodes = 0, None, topology.owners()
    for node in nodes:
        try:
            with guarded(node), client(node.address, settings, deadline) as library:
                removed += _removed(library, f"{settings.prefix}:*", deadline)
        except KvrelayError as error:
            failed = error
    if failed is not None and len(nodes) == 1:
        raise failed
    return removed


def _removed(library: redis.Redis, pattern: str, deadline: Deadline) -> int:
    cursor = removed = 0
    while True:
        deadline.check("to clear the store")
        cursor, keys = library.scan(cursor, pattern, AT_ONCE)
        with library.pipeline(transaction=False) as commands:  # a cluster takes one key at a time
            for key in keys:
                commands.unlink(key)
            removed += sum(map(int, commands.execute()))
        if not cursor:
            return removed


def _full_coverage(library: redis.Redis) -> bool | None:
    try:
        found = library.config_get("cluster-require-full-coverage")
    except redis.ResponseError:
        return None
    return {"yes": True, "no": False}.get(str(found.get("cluster-require-full-coverage")))


def _number(info: Mapping[str, object], name: str) -> int:
    value = info.get(name)
    return value if isinstance(value, int) else 0
