"""The connector's part in vLLM's scheduler: lookups with leases, orders, references, accounts.

It never touches KV. A block that is being saved holds a reference of its own in vLLM's pool, so
that it is neither freed nor overwritten before every rank has copied it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvrelay.block.name import Namer
from kvrelay.connector.counters import ConnectorCounters
from kvrelay.connector.store import StoreConnector
from kvrelay.engine.core.audit import Finding
from kvrelay.engine.core.external import BlockContent, Load, Query
from kvrelay.engine.vllm.kv.account import LegListener, RequestAccount, Track
from kvrelay.engine.vllm.kv.audit import audit
from kvrelay.engine.vllm.kv.border import VllmBlock, VllmCacheManager, VllmRequest, VllmStep
from kvrelay.engine.vllm.kv.metrics import add_changes, add_up, ended
from kvrelay.engine.vllm.kv.namespace import space_of
from kvrelay.engine.vllm.kv.orders import LoadOrder, LoadReport, RankReports, SaveOrder, StepOrders
from kvrelay.usage import Miss


@dataclass(frozen=True, slots=True)
class SideOptions:
    """A step may wait ``patience`` seconds in all for answers to first questions of requests.

    If vLLM has nothing to compute it may wait so long for any answers.
    """

    block_size: int
    ranks: int = 1
    patience: float = 0.002
    audits: bool = False


@dataclass(frozen=True, slots=True)
class Shard:
    """The names of one shard of the heads, and the store that is asked for them."""

    namer: Namer
    store: StoreConnector


@dataclass(frozen=True, slots=True)
class _Held:
    """References of an open save: on ``blocks``, for the full blocks ``indices`` and a tail."""

    track: Track
    blocks: tuple[VllmBlock, ...]
    indices: tuple[int, ...]
    tail: bool


class SchedulerSide:
    """One engine's requests; ``shards`` is empty without a store. Used by one thread."""

    def __init__(
        self,
        namer: Namer,
        shards: Sequence[Shard],
        options: SideOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.listener: LegListener | None = None
        self.tracks: dict[str, Track] = {}
        self.held: dict[tuple[str, int, int], _Held] = {}
        self._namer = namer
        self._shards = tuple(shards)
        self._options = options
        self._clock = clock
        self._changes: dict[str, int] = {}
        self._manager: VllmCacheManager | None = None
        self._reports = RankReports()
        self._loads: list[LoadOrder] = []
        self._saves: list[SaveOrder] = []
        self._leaving: dict[str, Track] = {}  # finished, with open saves
        self._epoch = 0
        self._serial = 0
        self._news = threading.Event()
        self._idle = True  # vLLM computed nothing in the last step
        self._left = options.patience  # seconds that this step may still wait for answers
        for shard in self._shards:
            shard.store.start(self._news.set)

    def bind(self, manager: VllmCacheManager) -> None:
        """Take vLLM's cache manager, whose blocks get references."""
        self._manager = manager

    @property
    def manager(self) -> VllmCacheManager:
        """vLLM's cache manager."""
        if self._manager is None:
            raise RuntimeError("vLLM has not bound its cache manager")
        return self._manager

    @property
    def counters(self) -> ConnectorCounters:
        """The sums over the shards."""
        return add_up([shard.store.counters for shard in self._shards])

    @property
    def busy(self) -> bool:
        """Whether vLLM must go on with its steps although no request needs one."""
        return bool(self.held or self._saves)

    # --- requests -------------------------------------------------------------------------------

    def add(self, request: VllmRequest) -> None:
        """A request has arrived."""
        wishes = _wishes(request)
        known = tokens_decide(request) and not wishes.get("skip", False)
        self.tracks[request.request_id] = Track(
            request=request,
            space=space_of(request.cache_salt),
            chains=tuple([] for _ in self._shards),
            looks=known and not request.skip_reading_prefix_cache,
            saves=known,
            save_tail=bool(wishes.get("save_tail", False)),
        )

    def look_up(self, request: VllmRequest, local: int) -> int | None:
        """Tokens in the store after ``local``; ``None``: ask again in the next step."""
        track = self.tracks[request.request_id]
        track.local = local
        if not self._shards or not track.looks or track.lookups_left == 0:
            return 0
        self._news.clear()
        found = self._answers(track, local)
        if found is None and (self._idle or not track.waited):
            found = self._wait(track, local)
        return None if found is None else min(max(found, 0), request.num_tokens - 1 - local)

    def _wait(self, track: Track, local: int) -> int | None:
        """The answers, if they come in time.

        Missing a step costs a request more than this wait. Idle steps that did not wait would spin
        and hold the GIL.
        """
        track.waited = True
        found = None
        while found is None and self._left > 0:
            begun = self._clock()
            came = self._news.wait(self._left)
            self._left = self._left - (self._clock() - begun) if came else 0.0
            self._news.clear()
            found = self._answers(track, local)
        return found

    def _answers(self, track: Track, local: int) -> int | None:
        """What every shard has; ``None`` while one has not answered."""
        request = track.request
        found: list[int | None] = []
        for number, shard in enumerate(self._shards):
            names = self._names(track, number)
            query = Query(track.id, request.all_token_ids, names, local, track.space)
            found.append(shard.store.lookup(query))
        known = [one for one in found if one is not None]
        if len(known) < len(found):
            return None
        track.shortest_shard = known.index(min(known))
        return known[track.shortest_shard]

    def allocate(self, request: VllmRequest, blocks: Sequence[int], external: int) -> None:
        """vLLM gave a request its blocks, to load ``external`` tokens or to compute at once."""
        if request.num_computed_tokens and not external:
            return  # the load of this residency has ended; these are the blocks for the rest
        track = self.tracks[request.request_id]
        self._epoch += 1
        miss = self._why(track) if track.looks else None
        admission = track.begin(self._epoch, external, miss)
        if not external:
            for shard in self._shards:
                shard.store.release(track.id)
            return
        track.ordered_at = self._clock()
        size = self._options.block_size
        ids = tuple(blocks[admission.local // size : -(admission.hit // -size)])
        load = Load(
            track.id,
            admission.epoch,
            admission.local,
            external,
            tuple(request.all_token_ids),
            (),
            ids,
            track.space,
        )
        targets = tuple(
            shard.store.order(replace(load, names=tuple(self._names(track, number))))
            for number, shard in enumerate(self._shards)
        )
        self._loads.append(
            LoadOrder(track.id, admission.epoch, admission.local, external, ids, targets)
        )

    def _why(self, track: Track) -> Miss | None:
        return self._shards[track.shortest_shard].store.why(track.id) if self._shards else None

    def finish(self, request: VllmRequest) -> RequestAccount:
        """A request has finished or was aborted; vLLM frees its blocks after this call."""
        track = self.tracks.pop(request.request_id)
        if track.started and track.resident:
            self._offer(track, min(track.computed, request.num_tokens - 1))
        track.end()
        track.finished = True
        for shard in self._shards:
            shard.store.release(track.id)
        account = self._account(track)
        self._changes = add_changes(self._changes, ended(account))
        if track.open_saves:
            self._leaving[track.id] = track
        elif self.listener is not None:
            self.listener.left(track.id, account)
        return account

    def account(self, request_id: str, saves: bool = True) -> RequestAccount | None:
        """The account of a request as it is now; ``None`` for one that is not here.

        ``saves``: with what is saved, for which the whole prefix is hashed.
        """
        track = self.tracks.get(request_id) or self._leaving.get(request_id)
        return None if track is None else self._account(track, saves)

    def _account(self, track: Track, saves: bool = True) -> RequestAccount:
        saved = track.saved(self._options.block_size) if saves else 0
        return RequestAccount(
            length=track.length,
            runs=track.all_runs,
            failed=track.failed,
            preemptions=track.request.num_preemptions,
            asked=track.asked,
            sources=track.sources,
            missed=track.missed,
            saved=saved,
            last_name=self._last_name(track, saved),
            load_seconds=track.load_seconds,
        )

    def _last_name(self, track: Track, saved: int) -> bytes | None:
        """The canonical name of the last block of the ``saved`` leading tokens."""
        if not saved:
            return None
        size = self._options.block_size
        namer = self._namer.within(track.space)
        tokens = track.request.all_token_ids
        names = namer.chain(tokens[: saved // size * size], size)
        if rest := saved % size:
            return namer.child(names[-1] if names else namer.root, tokens[saved - rest : saved])
        return names[-1]

    def take_account_changes(self) -> dict[str, int]:
        """What the accounts of ended requests added to the counters since the last call."""
        changes = self._changes
        self._changes = {}
        return changes

    # --- steps ----------------------------------------------------------------------------------

    def step(self, output: VllmStep) -> StepOrders:
        """vLLM is about to compute: count positions, and order the transfers of this step."""
        if self._options.audits and (findings := self.audit()):
            raise RuntimeError(f"the accounting is broken: {findings}")
        size = self._options.block_size
        for request_id, count in output.num_scheduled_tokens.items():
            track = self.tracks[request_id]
            position = track.request.num_computed_tokens
            first = track.start(position, size)
            if first and self.listener is not None:
                self.listener.admitted(request_id, self._account(track, saves=False))
            track.computed = position + count
            self._offer(track, track.computed)
        orders = StepOrders(
            tuple(self._loads), tuple(self._saves), output.total_num_scheduled_tokens == 0
        )
        self._loads = []
        self._saves = []
        self._idle = orders.idle
        self._left = self._options.patience
        return orders

    def _offer(self, track: Track, end: int) -> None:
        """Save the blocks that are full, and known, once positions ``[0, end)`` are computed."""
        request, size = track.request, self._options.block_size
        full = min(end, request.num_tokens) // size
        wanted = [index for index in range(track.offered, full) if index not in track.stored]
        track.offered = max(track.offered, full)
        tail = self._tail(track, end)
        if not self._shards or not track.saves or track.admission is None:
            return
        if not wanted and not tail:
            return
        table = self.manager.coordinator.single_type_managers[0].req_to_blocks[track.id]
        spans = [(index, size) for index in wanted]
        if tail:
            spans.append((request.num_prompt_tokens // size, tail))
            track.tail = tail
        blocks = tuple(table[index] for index, _ in spans)
        contents = tuple(
            tuple(self._content(track, number, table, index, count) for index, count in spans)
            for number in range(len(self._shards))
        )
        self._serial += 1
        order = SaveOrder(track.id, track.admission.epoch, self._serial, track.space, contents)
        self.manager.block_pool.touch(blocks)
        held = _Held(track, blocks, tuple(wanted), bool(tail))
        self.held[order.request_id, order.epoch, order.serial] = held
        track.open_saves += 1
        self._saves.append(order)

    def _tail(self, track: Track, end: int) -> int:
        """Positions of the prompt's partial last block, if it is to be saved now."""
        prompt = track.request.num_prompt_tokens
        due = track.save_tail and not track.tail and end >= prompt
        return prompt % self._options.block_size if due else 0

    def _content(
        self, track: Track, number: int, table: Sequence[VllmBlock], index: int, count: int
    ) -> BlockContent:
        size = self._options.block_size
        names = self._names(track, number)
        namer = self._shards[number].namer.within(track.space)
        tokens = tuple(track.request.all_token_ids[index * size : index * size + count])
        parent = names[index - 1] if index else namer.root
        name = names[index] if count == size else namer.child(parent, tokens)
        return BlockContent(table[index].block_id, name, parent, tokens)

    def _names(self, track: Track, number: int) -> list[bytes]:
        """The names of all full blocks in one shard; a name never changes."""
        names, size = track.chains[number], self._options.block_size
        namer = self._shards[number].namer.within(track.space)
        tokens = track.request.all_token_ids
        for start in range(len(names) * size, track.request.num_tokens - size + 1, size):
            parent = names[-1] if names else namer.root
            names.append(namer.child(parent, tokens[start : start + size]))
        return names

    # --- reports --------------------------------------------------------------------------------

    def report(self, reports: RankReports) -> None:
        """Ranks have told which orders ended."""
        self._reports.add(reports)
        done = self._reports.take_complete(self._options.ranks)
        for (request_id, epoch), load in done.loads.items():
            self._loaded(request_id, epoch, load)
        for key, save in done.saves.items():
            self._saved(key, save.stored)

    def _loaded(self, request_id: str, epoch: int, load: LoadReport) -> None:
        for shard in self._shards:
            shard.store.settle(request_id, epoch)
        track = self.tracks.get(request_id)
        if track is not None and track.admission is not None and track.admission.epoch == epoch:
            track.load_seconds = track.load_seconds or self._clock() - track.ordered_at
            track.settle(load.valid, load.missed, load.sources, self._options.block_size)

    def _saved(self, key: tuple[str, int, int], stored: int) -> None:
        held = self.held.pop(key, None)
        if held is None:
            return
        self.manager.block_pool.free_blocks(reversed(held.blocks))
        track = held.track
        track.open_saves -= 1
        track.stored.update(held.indices[:stored])
        track.tail_stored |= held.tail and stored > len(held.indices)
        if track.finished and not track.open_saves:
            if self._leaving.get(track.id) is track:
                del self._leaving[track.id]
            if self.listener is not None:
                self.listener.left(track.id, self._account(track))

    def audit(self) -> list[Finding]:
        """The invariants on vLLM's own pool, between two steps."""
        held = [block for save in self.held.values() for block in save.blocks]
        return audit(self.manager, list(self.tracks.values()), held, self._options.block_size)

    def close(self) -> None:
        """Close the stores."""
        for shard in self._shards:
            shard.store.close()


def tokens_decide(request: VllmRequest) -> bool:
    """Whether the token ids alone decide the KV, so that names by tokens are right."""
    return not (
        request.lora_request is not None
        or request.mm_features
        or request.prompt_embeds is not None
        or request.resumable
    )


def _wishes(request: VllmRequest) -> Mapping[str, object]:
    wishes = (request.kv_transfer_params or {}).get("kvrelay", {})
    return wishes if isinstance(wishes, Mapping) else {}
