"""The rows of the store's speed table: each moves some bytes and says how fast."""

from __future__ import annotations

import random
import time

from benchmarks.store.rig import (
    GB,
    GET_BLOCKS,
    PUT_BLOCKS,
    TIMEOUT,
    Run,
    StoreRig,
    all_stored,
    get_blocks,
)
from kvrelay.errors import Corrupt
from kvstore.base import NameQuery
from kvstore.client.remote import RemoteStore
from kvstore.client.transports.selector import TRANSPORTS


def get_rows(rig: StoreRig) -> dict[str, Run]:
    """With copy into the pool and verification, by each transport."""

    def row(store: RemoteStore) -> Run:
        def run(total: int) -> float:
            began, done = time.perf_counter(), 0
            while done < total // rig.size:
                first = done % rig.count
                indices = range(first, min(first + GET_BLOCKS, rig.count))
                indices = indices[: total // rig.size - done]
                get_blocks(rig, store, indices)
                done += len(indices)
            return done * rig.size / (time.perf_counter() - began) / GB

        return run

    return {f"{transport} get": row(rig.store(transport)) for transport in TRANSPORTS}


def put_rows(rig: StoreRig) -> dict[str, Run]:
    """New blocks, checksums made and checked, by each transport."""

    def row(store: RemoteStore) -> Run:
        def run(total: int) -> float:
            offers = rig.new_offers(total // rig.size)
            began = time.perf_counter()
            for start in range(0, len(offers), PUT_BLOCKS):
                all_stored(store, offers[start : start + PUT_BLOCKS])
            return len(offers) * rig.size / (time.perf_counter() - began) / GB

        return run

    return {f"{transport} put": row(rig.store(transport)) for transport in TRANSPORTS}


def lookup_seconds(names: int, blocks: int) -> float:
    """The median of lookups of ``names`` neighbours among ``blocks`` small blocks, with a lease."""
    with StoreRig(256, blocks * 256) as rig:
        store, chooser, times = rig.store("grpc"), random.Random(7), []
        for _ in range(200):
            first = chooser.randrange(blocks - names + 1)
            wanted = [wanted.name for wanted in rig.wanted[first : first + names]]
            began = time.perf_counter()
            found = store.lookup(NameQuery(wanted, ttl=30.0), TIMEOUT)
            times.append(time.perf_counter() - began)
            store.release([found.lease] if found.lease else [], TIMEOUT)
            if found.lead != names:
                raise Corrupt("lookup", f"{found.lead} of {names} names were found")
    return sorted(times)[len(times) // 2]
