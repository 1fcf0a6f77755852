"""The parts of vLLM 0.32 that the adapter reads and calls, as protocols.

vLLM is not installed where kvrelay is checked and tested. These protocols name what the adapter
relies on; only ``connector`` and ``sampling`` import vLLM itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch


class VllmRequest(Protocol):
    """``vllm.v1.request.Request``: prompt and output so far, and what vLLM has computed of it."""

    @property
    def request_id(self) -> str: ...
    @property
    def all_token_ids(self) -> Sequence[int]: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def kv_transfer_params(self) -> Mapping[str, object] | None: ...
    @property
    def skip_reading_prefix_cache(self) -> bool: ...
    @property
    def lora_request(self) -> object | None: ...
    @property
    def mm_features(self) -> Sequence[object]: ...
    @property
    def prompt_embeds(self) -> object | None: ...
    @property
    def resumable(self) -> bool: ...


class VllmStep(Protocol):
    """``SchedulerOutput``: positions to compute by request."""

    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]: ...
    @property
    def total_num_scheduled_tokens(self) -> int: ...


class VllmBlocks(Protocol):
    """``KVCacheBlocks``: the block table of a request, one for each cache group."""

    def get_block_ids(self) -> tuple[list[int], ...]: ...


class VllmBlock(Protocol):
    """``KVCacheBlock``."""

    @property
    def block_id(self) -> int: ...
    @property
    def ref_cnt(self) -> int: ...
    @property
    def is_null(self) -> bool: ...
    @property
    def block_hash(self) -> object | None: ...


class VllmBlockPool(Protocol):
    """``BlockPool``: the references on blocks."""

    @property
    def blocks(self) -> Sequence[VllmBlock]: ...
    def touch(self, blocks: Sequence[VllmBlock]) -> None: ...
    def free_blocks(self, ordered_blocks: Iterable[VllmBlock]) -> None: ...
    def get_num_free_blocks(self) -> int: ...


class VllmTables(Protocol):
    """``SingleTypeKVCacheManager``: the blocks of each request."""

    @property
    def req_to_blocks(self) -> Mapping[str, Sequence[VllmBlock]]: ...


class VllmCoordinator(Protocol):
    """``KVCacheCoordinator``."""

    @property
    def single_type_managers(self) -> Sequence[VllmTables]: ...


class VllmCacheManager(Protocol):
    """``KVCacheManager``."""

    @property
    def block_pool(self) -> VllmBlockPool: ...
    @property
    def coordinator(self) -> VllmCoordinator: ...


class CacheWriter(Protocol):
    """The attention implementation of a layer, as far as it writes K and V into pages."""

    def do_kv_cache_update(
        self,
        layer: object,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None: ...


class VllmLayer(Protocol):
    """``Attention``: one layer."""

    @property
    def impl(self) -> CacheWriter: ...
