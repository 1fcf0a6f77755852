"""The invariants of docs/accounting.md, checked on vLLM's own block pool between two steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from kvrelay.engine.core.audit import Finding
from kvrelay.engine.vllm.kv.account import RequestAccount, Track
from kvrelay.engine.vllm.kv.border import VllmBlock, VllmCacheManager


def audit(
    manager: VllmCacheManager, tracks: Sequence[Track], held: Iterable[VllmBlock], block_size: int
) -> list[Finding]:
    """All broken invariants; ``held`` are the blocks that open saves refer to."""
    tables = manager.coordinator.single_type_managers[0].req_to_blocks
    findings = list(_references(manager, tables.values(), held))
    for track in tracks:
        findings += _positions(track, tables.get(track.id, ()), block_size)
    return findings


def _references(
    manager: VllmCacheManager, tables: Iterable[Sequence[VllmBlock]], held: Iterable[VllmBlock]
) -> Iterator[Finding]:
    """I1: a block has as many references as holders; only blocks without holders are free."""
    pool = manager.block_pool
    holders = Counter(block.block_id for table in tables for block in table)
    holders.update(block.block_id for block in held)
    free = 0
    for block in pool.blocks:
        if block.is_null:
            continue
        free += block.ref_cnt == 0
        if block.ref_cnt != holders[block.block_id]:
            message = f"{block.ref_cnt} references, {holders[block.block_id]} holders"
            yield Finding("I1", None, f"block {block.block_id} has {message}")
    if free != pool.get_num_free_blocks():
        message = f"{free} blocks have no holder, {pool.get_num_free_blocks()} are free"
        yield Finding("I1", None, message)


def _positions(track: Track, table: Sequence[VllmBlock], block_size: int) -> Iterator[Finding]:
    """I2, I3 and I4 of one request, as far as vLLM's state and the account both show them."""
    admission = track.admission
    if admission is None or not track.resident:
        return
    if track.computed > len(table) * block_size:
        yield Finding("I2", track.id, f"{track.computed} computed in {len(table)} blocks")
    if track.started and track.computed < admission.hit:
        yield Finding("I3", track.id, f"{track.computed} computed, {admission.hit} admitted")
    if track.started and track.request.num_computed_tokens not in (0, track.computed):
        theirs = track.request.num_computed_tokens
        yield Finding("I2", track.id, f"{track.computed} computed, vLLM has {theirs}")
    if track.loading:
        last = -(admission.hit // -block_size)
        for block in table[admission.local // block_size : last]:
            if block.block_hash is not None:
                message = f"block {block.block_id} is written by a load and visible"
                yield Finding("I4", track.id, message)


def account_findings(request_id: str, account: RequestAccount) -> Iterator[Finding]:
    """I5 and I6: what the account says, against the positions of every run, one by one."""
    spans = [range(run.admission.hit, run.frontier) for run in account.runs]
    executed = sum(map(len, spans))
    again = executed - len({position for span in spans for position in span})
    if (account.executed, account.recomputed) != (executed, again):
        message = f"{executed} positions executed, {again} of them again: {account}"
        yield Finding("I5", request_id, message)
    if sum(account.sources.values()) != account.external:
        yield Finding("I6", request_id, f"the stores do not sum to the external tokens: {account}")
