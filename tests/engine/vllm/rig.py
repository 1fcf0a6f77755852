"""vLLM as the connector sees it, without vLLM: its pool, its scheduler's calls, its pages, ranks.

The calls come in the order in which vLLM 0.32 makes them. The KV of a position is a function of
all tokens up to it, so a wrong, misplaced or unverified block changes what later reads find.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from kvrelay.block import Namer, Namespace
from kvrelay.connector.store import StoreConnector
from kvrelay.engine.vllm.kv.account import RequestAccount
from kvrelay.engine.vllm.kv.border import VllmCacheManager
from kvrelay.engine.vllm.kv.host_copies import HostCopies
from kvrelay.engine.vllm.kv.layout import PageLayout, learn_layout
from kvrelay.engine.vllm.kv.orders import RankReports
from kvrelay.engine.vllm.kv.pages import HostPages, NoPages, PageShape, check_pages
from kvrelay.engine.vllm.kv.scheduler_side import SchedulerSide, Shard, SideOptions
from kvrelay.engine.vllm.kv.shards import HeadShards
from kvrelay.engine.vllm.kv.worker_side import WorkerSide
from kvrelay.rpc.deadline import Deadline
from kvstore import Store
from tests.kvstore.rig import TIMEOUT

B = 4
LAYERS = 2
DIM = 6
SPACE = Namespace("m", "r", "float32", "block,head,layer,k|v,position,dim", B)


class HalvesWriter:
    """As vLLM's attention on a CPU: a half for K, transposed, and a half for V."""

    def do_kv_cache_update(
        self,
        layer: object,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        pages, heads, size, content = kv_cache.shape
        dim = content // 2
        halves = kv_cache.view(pages, heads, 2, size * dim)
        keys = halves[:, :, 0].view(pages, heads, dim, size)
        values = halves[:, :, 1].view(pages, heads, size, dim)
        for row, slot in enumerate(slot_mapping.tolist()):
            keys[slot // size, :, :, slot % size] = key[row]
            values[slot // size, :, slot % size] = value[row]


class TilesWriter:
    """As vLLM's attention on a CPU with AMX: pairs of dims of K, and pairs of positions of V."""

    TILE = 4

    def do_kv_cache_update(
        self,
        layer: object,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        pages, heads, size, content = kv_cache.shape
        dim, tile = content // 2, self.TILE
        halves = kv_cache.view(pages, heads, 2, size * dim)
        keys = halves[:, :, 0].view(pages, heads, size // tile, dim // 2, tile, 2)
        values = halves[:, :, 1].view(pages, heads, dim // 2, size // 2, 2, 2)
        for row, slot in enumerate(slot_mapping.tolist()):
            page, at = slot // size, slot % size
            keys[page, :, at // tile, :, at % tile] = key[row].view(heads, dim // 2, 2)
            values[page, :, :, at // 2, :, at % 2] = value[row].view(heads, dim // 2, 2)


class RowsWriter:
    """As FlashAttention and its kin: a row of K beside a row of V."""

    def do_kv_cache_update(
        self,
        layer: object,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        size, dim = kv_cache.shape[2], key.shape[2]
        for row, slot in enumerate(slot_mapping.tolist()):
            kv_cache[slot // size, :, slot % size, :dim] = key[row]
            kv_cache[slot // size, :, slot % size, dim:] = value[row]


@dataclass(frozen=True)
class FakeLayer:
    impl: HalvesWriter | TilesWriter | RowsWriter


def caches(
    shape: PageShape, page: int | None = None, by_position: bool = False
) -> list[torch.Tensor]:
    """vLLM's tensors, ``[pages, heads, positions, 2 * dim]``, of ``page`` positions a page.

    ``by_position``: positions before heads in memory, as in vLLM's LBNHC.
    """
    page = page or shape.block_size
    pages = shape.num_blocks * (shape.block_size // page)
    content = 2 * shape.head_dim
    if by_position:
        size = (pages, page, shape.num_kv_heads, content)
        return [
            torch.zeros(size, dtype=shape.torch_dtype).transpose(1, 2)
            for _ in range(shape.num_layers)
        ]
    size = (pages, shape.num_kv_heads, page, content)
    return [torch.zeros(size, dtype=shape.torch_dtype) for _ in range(shape.num_layers)]


def expected_kv(tokens: Sequence[int], heads: Iterable[int], start: int, stop: int) -> torch.Tensor:
    """KV of positions: ``[head, layer, k|v, position, dim]``."""
    rows = [
        [
            [
                [_row(tokens[: at + 1], head, layer, kv) for at in range(start, stop)]
                for kv in (0, 1)
            ]
            for layer in range(LAYERS)
        ]
        for head in heads
    ]
    return torch.tensor(rows, dtype=torch.float32)


def _row(tokens: Sequence[int], head: int, layer: int, kv: int) -> list[float]:
    digest = hashlib.sha256(repr((list(tokens), head, layer, kv)).encode()).digest()
    return [float(byte) for byte in digest[:DIM]]


@dataclass(eq=False)
class FakeBlock:
    block_id: int
    ref_cnt: int = 0
    is_null: bool = False
    block_hash: object | None = None


class FakeBlockPool:
    """``BlockPool``: references, and a prefix cache by tokens."""

    def __init__(self, count: int) -> None:
        self.blocks = [FakeBlock(number, is_null=number == 0) for number in range(count)]
        self.cached: dict[tuple[int, ...], FakeBlock] = {}

    def touch(self, blocks: Sequence[FakeBlock]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[FakeBlock]) -> None:
        for block in ordered_blocks:
            assert block.ref_cnt > 0
            block.ref_cnt -= 1

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    @property
    def free(self) -> list[FakeBlock]:
        return [one for one in self.blocks if not one.is_null and not one.ref_cnt]

    def take(self, count: int) -> list[FakeBlock]:
        taken = sorted(self.free, key=lambda one: one.block_hash is not None)[:count]
        for block in taken:
            if block.block_hash is not None:
                del self.cached[block.block_hash]  # type: ignore[arg-type]
                block.block_hash = None
        self.touch(taken)
        return taken

    def name(self, block: FakeBlock, prefix: tuple[int, ...]) -> None:
        if prefix not in self.cached and block.block_hash is None:
            block.block_hash = prefix
            self.cached[prefix] = block

    def leading(self, tokens: Sequence[int], most: int) -> list[FakeBlock]:
        found = []
        for end in range(B, most * B + 1, B):
            block = self.cached.get(tuple(tokens[:end]))
            if block is None:
                break
            found.append(block)
        return found


@dataclass
class FakeTables:
    req_to_blocks: dict[str, list[FakeBlock]] = field(default_factory=dict)


@dataclass
class FakeCoordinator:
    single_type_managers: list[FakeTables]


class FakeManager:
    """``KVCacheManager``."""

    def __init__(self, count: int) -> None:
        self.block_pool = FakeBlockPool(count)
        self.tables = FakeTables()
        self.coordinator = FakeCoordinator([self.tables])


@dataclass(eq=False)
class FakeRequest:
    """``Request``; ``all_token_ids`` grows by one a step once the prompt is computed."""

    request_id: str
    all_token_ids: list[int]
    max_tokens: int = 4
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    cache_salt: str | None = None
    kv_transfer_params: Mapping[str, object] | None = None
    skip_reading_prefix_cache: bool = False
    lora_request: object | None = None
    mm_features: Sequence[object] = ()
    prompt_embeds: object | None = None
    resumable: bool = False

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.all_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


@dataclass(frozen=True)
class FakeStep:
    num_scheduled_tokens: dict[str, int]

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


class Rank:
    """One rank: its pages and its side of the connector."""

    def __init__(self, shards: HeadShards, number: int, blocks: int, store: Store) -> None:
        shard = shards.of_rank(number)
        self.heads = range(shard * shards.width, (shard + 1) * shards.width)
        self.shape = PageShape(blocks, LAYERS, B, shards.width, DIM, "float32")
        self.caches = caches(self.shape)
        self.layers = [FakeLayer(HalvesWriter())] * LAYERS
        self.layout: PageLayout = learn_layout(self.layers[0], self.caches[0], DIM)
        self.pages = HostPages(self.shape, self.caches, self.layout)
        check_pages(self.pages, self.layers, self.caches)
        space = shards.namespace(SPACE, shard)
        copies = HostCopies(self.pages)
        connector = StoreConnector(store, Namer(space), space, self.pages, copies=copies)
        self.side = WorkerSide(connector, self.pages, shard, patience=0.005)

    def compute(self, tokens: Sequence[int], table: Sequence[FakeBlock], at: int) -> None:
        """Check the KV before position ``at``, and write that of ``at``."""
        kv = expected_kv(tokens, self.heads, at, at + 1)
        slot = torch.tensor([table[at // B].block_id * B + at % B])
        for layer, (one, cache) in enumerate(zip(self.layers, self.caches, strict=True)):
            key, value = kv[:, layer, 0].transpose(0, 1), kv[:, layer, 1].transpose(0, 1)
            one.impl.do_kv_cache_update(one, key, value, cache, slot)

    def check(self, tokens: Sequence[int], table: Sequence[FakeBlock], stop: int) -> None:
        """Every valid position holds its KV."""
        for index in range(-(-stop // B)):
            count = min(B, stop - index * B)
            payload = self.pages.read(table[index].block_id, count)
            want = expected_kv(tokens, self.heads, index * B, index * B + count)
            found = torch.frombuffer(bytearray(payload), dtype=torch.float32).view(want.shape)
            assert torch.equal(found, want), f"positions from {index * B} of {list(tokens)}"


class FakeVllm:
    """An engine: requests, steps of at most ``budget`` positions, preemption on demand."""

    def __init__(
        self,
        stores: Callable[[], Store],
        blocks: int = 64,
        heads: int = 2,
        ranks: int = 1,
        budget: int = 7,
        patience: float = 0.05,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        shards = HeadShards(heads, ranks)
        shape = PageShape(blocks, LAYERS, B, shards.width, DIM, "float32")
        sides = []
        for number in range(shards.count):
            space = shards.namespace(SPACE, number)
            namer = Namer(space)
            sides.append(Shard(namer, StoreConnector(stores(), namer, space, NoPages(shape))))
        self.manager = FakeManager(blocks)
        options = SideOptions(block_size=B, ranks=ranks, patience=patience, audits=True)
        self.side = SchedulerSide(Namer(SPACE), sides, options, clock)
        self.side.bind(cast(VllmCacheManager, self.manager))
        self.ranks = [Rank(shards, number, blocks, stores()) for number in range(ranks)]
        self.side.listener = self
        self.admissions: dict[str, RequestAccount] = {}
        self.accounts: dict[str, RequestAccount] = {}
        self.outputs: dict[str, list[int]] = {}
        self.running: list[FakeRequest] = []
        self.waiting: list[FakeRequest] = []
        self.loading: dict[str, FakeRequest] = {}
        self.departing: dict[str, FakeRequest] = {}  # aborted in the middle of a load
        self._budget = budget
        self._received: dict[str, int] = {}
        self._numbers = itertools.count()

    def add(self, tokens: Sequence[int], max_tokens: int = 4, **fields: object) -> FakeRequest:
        """A request arrives."""
        name = f"r{next(self._numbers)}"
        request = FakeRequest(name, list(tokens), max_tokens, **fields)  # type: ignore[arg-type]
        self.side.add(request)
        self.waiting.append(request)
        return request

    def run(self, *requests: FakeRequest) -> None:
        """Step until these have finished, and then until every transfer has ended."""
        for _ in range(3000):
            if all(one.request_id in self.accounts for one in requests) and not self.busy:
                return
            self.step()
        raise AssertionError("the requests did not finish")

    @property
    def busy(self) -> bool:
        return bool(self.departing or self.side.busy)

    def step(self) -> None:
        """One step in vLLM's order: schedule, orders, compute, transfers, reports."""
        counts: dict[str, int] = {}
        budget = self._budget
        for request in list(self.running):
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            if count and not self._grow(request):
                self.preempt(self.running[-1])
                break
            if count:
                counts[request.request_id] = count
                budget -= count
        budget = self._admit(counts, budget)
        orders = self.side.step(FakeStep(counts))
        for rank in self.ranks:
            rank.side.load(orders)
        named = {one.request_id: one for one in self.running}
        for name, count in counts.items():
            self._compute(named[name], count)
        reports = RankReports()
        for rank in self.ranks:
            rank.side.save(orders)
        for rank in self.ranks:
            for name in rank.side.take_loaded(orders.idle):
                self._received[name] = self._received.get(name, 0) + 1
            self._invalid(rank.side.take_invalid())
            if (one := rank.side.take_reports()) is not None:
                reports.add(one)
        for name in counts:
            self._sample(named[name])
        if reports:
            self.side.report(reports)
        self._finish_loads()

    def preempt(self, request: FakeRequest) -> None:
        """Take the blocks of a running request; it waits in front."""
        self.running.remove(request)
        self._free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.insert(0, request)

    def abort(self, request: FakeRequest) -> None:
        """End a request in any state; the blocks of one that loads are freed after its load."""
        self.side.finish(request)
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)
        if self.loading.pop(request.request_id, None) is not None:
            self.departing[request.request_id] = request
        else:
            self._free(request)

    def admitted(self, request_id: str, account: RequestAccount) -> None:
        assert request_id not in self.admissions
        self.admissions[request_id] = account

    def left(self, request_id: str, account: RequestAccount) -> None:
        assert request_id not in self.accounts
        self.accounts[request_id] = account

    def forget(self) -> None:
        """Empty the prefix cache."""
        for block in self.manager.block_pool.blocks:
            block.block_hash = None
        self.manager.block_pool.cached.clear()

    def wait_for_saves(self) -> None:
        """Wait until the store has what was ordered to be saved; no step reports it yet."""
        deadline = Deadline.after(TIMEOUT)
        for rank in self.ranks:
            while rank.side.counters.open_saves:
                assert deadline.remaining()
                time.sleep(0.001)

    def close(self) -> None:
        self.side.close()
        for rank in self.ranks:
            rank.side.close()

    # --- vLLM's part ----------------------------------------------------------------------------

    def _admit(self, counts: dict[str, int], budget: int) -> int:
        pool = self.manager.block_pool
        for request in list(self.waiting):
            if budget <= 0:
                break
            if request.num_computed_tokens == 0:
                hits = pool.leading(request.all_token_ids, (request.num_tokens - 1) // B)
                found = self.side.look_up(request, len(hits) * B)
                if found is None:
                    continue
                table = self.manager.tables.req_to_blocks
                wanted = -(-request.num_tokens // B) - len(hits)
                pool.touch(hits)
                if len(pool.free) < wanted:
                    pool.free_blocks(hits)
                    break
                table[request.request_id] = hits + pool.take(wanted)
                ids = [block.block_id for block in table[request.request_id]]
                self.side.allocate(request, ids, found)
                request.num_computed_tokens = len(hits) * B + found
                if found:
                    self.waiting.remove(request)
                    self.loading[request.request_id] = request
                    continue
            else:  # its load has ended
                ids = [b.block_id for b in self.manager.tables.req_to_blocks[request.request_id]]
                self.side.allocate(request, ids, 0)
            self.waiting.remove(request)
            self.running.append(request)
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            counts[request.request_id] = count
            budget -= count
        return budget

    def _grow(self, request: FakeRequest) -> bool:
        table = self.manager.tables.req_to_blocks[request.request_id]
        wanted = -(-request.num_tokens // B) - len(table)
        taken = self.manager.block_pool.take(wanted)
        table += taken
        return len(taken) == wanted

    def _compute(self, request: FakeRequest, count: int) -> None:
        table = self.manager.tables.req_to_blocks[request.request_id]
        start = request.num_computed_tokens
        for rank in self.ranks:
            rank.check(request.all_token_ids, table, start)
            for at in range(start, start + count):
                rank.compute(request.all_token_ids, table, at)
        request.num_computed_tokens += count
        self._cache(request)

    def _cache(self, request: FakeRequest) -> None:
        table = self.manager.tables.req_to_blocks[request.request_id]
        for index in range(request.num_computed_tokens // B):
            self.manager.block_pool.name(
                table[index], tuple(request.all_token_ids[: (index + 1) * B])
            )

    def _sample(self, request: FakeRequest) -> None:
        if request not in self.running or request.num_computed_tokens < request.num_tokens:
            return
        request.all_token_ids.append(sum(request.all_token_ids[-5:]) % 97)
        made = request.all_token_ids[request.num_prompt_tokens :]
        if len(made) >= request.max_tokens:
            self.outputs[request.request_id] = made
            self.abort(request)

    def _invalid(self, blocks: set[int]) -> None:
        for request in self.loading.values():
            table = self.manager.tables.req_to_blocks[request.request_id]
            for index, block in enumerate(table[: -(-request.num_computed_tokens // B)]):
                if block.block_id in blocks:
                    request.num_computed_tokens = index * B
                    break

    def _finish_loads(self) -> None:
        for name, count in list(self._received.items()):
            if count < len(self.ranks):
                continue
            del self._received[name]
            if (aborted := self.departing.pop(name, None)) is not None:
                self._free(aborted)
                continue
            request = self.loading.pop(name)
            if request.num_computed_tokens:
                self._cache(request)
            else:
                self._free(request)
            self.waiting.insert(0, request)

    def _free(self, request: FakeRequest) -> None:
        table = self.manager.tables.req_to_blocks.pop(request.request_id, [])
        self.manager.block_pool.free_blocks(reversed(table))
