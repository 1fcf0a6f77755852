"""Puts the two sides together from vLLM's configuration: facts, checks, names, stores."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kvrelay.block.mac import BlockKey
from kvrelay.block.name import Namer
from kvrelay.block.namespace import Namespace
from kvrelay.config.reader import read
from kvrelay.connector.context import ConnectorOptions
from kvrelay.connector.store import StoreConnector
from kvrelay.engine.vllm.kv.border import VllmLayer
from kvrelay.engine.vllm.kv.checks import EngineFacts, check_engine
from kvrelay.engine.vllm.kv.host_copies import HostCopies
from kvrelay.engine.vllm.kv.layout import learn_layout
from kvrelay.engine.vllm.kv.namespace import ModelFacts, namespace_of
from kvrelay.engine.vllm.kv.pages import (
    HostPages,
    NoPages,
    PageMemory,
    PageShape,
    check_pages,
    open_pages,
)
from kvrelay.engine.vllm.kv.scheduler_side import SchedulerSide, Shard, SideOptions
from kvrelay.engine.vllm.kv.shards import HeadShards
from kvrelay.engine.vllm.kv.worker_side import WorkerSide
from kvrelay.errors import Rejected, Unservable
from kvrelay.rpc.security.options import SecurityOptions
from kvrelay.rpc.security.policy import INSECURE, Security, install, installed
from kvstore.client.connect import connect

NO_STORE = "none"
HELD_SHARE = 4
"""Saves that wait, if more than one does, hold at most one block of vLLM's pool in so many."""
PATIENCE_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """``kv_connector_extra_config``: the store's URL, or ``none`` for accounts alone.

    ``namespace`` sets fields of the namespace. ``audit`` checks the accounting before each step.
    ``patience``: seconds that a step may wait for the store.
    """

    store: str
    namespace: Mapping[str, object]
    audit: bool
    patience: float

    @classmethod
    def of(cls, given: Mapping[str, object]) -> ConnectorConfig:
        """Raises ``Rejected`` with the name of the first field that is wrong."""
        known = {"store", "namespace", "audit", "patience"}
        for name in given:
            if name not in known:
                raise Rejected(name, f"unknown, choose of {', '.join(sorted(known))}")
        store = given.get("store")
        if not isinstance(store, str) or not store:
            raise Rejected(
                "store", 'missing: "kv_connector_extra_config": {"store": "kvrelay://HOST:PORT"}'
            )
        namespace = given.get("namespace", {})
        if not isinstance(namespace, Mapping):
            raise Rejected("namespace", f"must be an object, got {namespace!r}")
        patience = given.get("patience", PATIENCE_SECONDS)
        if not isinstance(patience, int | float) or not 0 <= patience <= 1:
            raise Rejected("patience", f"must lie in [0, 1] seconds, got {patience!r}")
        audit = given.get("audit", False)
        if not isinstance(audit, bool):
            raise Rejected("audit", f"must be true or false, got {audit!r}")
        return cls(store, namespace, audit, float(patience))


@dataclass(frozen=True, slots=True)
class EngineView:
    """What the connector reads of vLLM's configuration once.

    ``overlapping``: vLLM plans a step before the last one has ended. ``numerics`` computes the
    numeric profile.
    """

    facts: EngineFacts
    model: ModelFacts
    numerics: Callable[[], str]
    heads: int
    ranks: int
    num_blocks: int
    layer_names: tuple[str, ...]
    extra: Mapping[str, object]
    overlapping: bool = False


class Setup:
    """Checks an engine, and opens a side of the connector for it."""

    def __init__(self, view: EngineView) -> None:
        self.config = ConnectorConfig.of(view.extra)
        check_engine(view.facts)
        if self.config.audit and view.overlapping:
            raise Rejected(
                "audit",
                "needs --no-async-scheduling: while steps overlap, vLLM keeps the blocks of ended"
                " requests for a step",
            )
        self._view = view
        (group,) = view.facts.groups
        self._shards = HeadShards(view.heads, view.ranks)
        if self._shards.width != group.heads:
            raise Unservable(
                f"a rank holds {group.heads} KV heads, kvrelay expects {self._shards.width}"
            )
        self._shape = PageShape(
            view.num_blocks,
            group.layers,
            group.block_size,
            group.heads,
            group.head_dim,
            group.dtype,
        )
        self._security = security()
        key_id = self._security.credentials.fleet_key_id
        given = self.config.namespace
        self._namespace = namespace_of(view.model, view.numerics, given, key_id)

    @property
    def layer_names(self) -> Sequence[str]:
        """The layers of a block, in order."""
        return self._view.layer_names

    def scheduler_side(self) -> SchedulerSide:
        """The connector's part in vLLM's scheduler."""
        options = SideOptions(
            block_size=self._shape.block_size,
            ranks=self._view.ranks,
            patience=self.config.patience,
            audits=self.config.audit,
        )
        count = 0 if self.config.store == NO_STORE else self._shards.count
        shards = []
        for number in range(count):
            namespace = self._shards.namespace(self._namespace, number)
            namer = Namer(namespace)
            store = self._store(namespace, namer, NoPages(self._shape))
            shards.append(Shard(namer, store))
        return SchedulerSide(Namer(self._namespace), shards, options)

    def worker_side(
        self, layers: Sequence[VllmLayer], caches: Sequence[torch.Tensor], rank: int
    ) -> WorkerSide | None:
        """The part in a rank's model runner; checks its pages. ``None`` without a store."""
        if self.config.store == NO_STORE:
            return None
        shape = self._shape
        _check_caches(caches, shape)
        layout = learn_layout(layers[0], caches[0], shape.head_dim)
        pages = open_pages(shape, caches, layout)
        check_pages(pages, layers, caches)
        shard = self._shards.of_rank(rank)
        namespace = self._shards.namespace(self._namespace, shard)
        store = self._store(namespace, Namer(namespace), pages)
        return WorkerSide(store, pages, shard, self.config.patience)

    def _store(
        self, namespace: Namespace, namer: Namer, pages: PageMemory | NoPages
    ) -> StoreConnector:
        key = BlockKey.of(self._security.credentials.fleet_key)
        pool = pages.shape.num_blocks * pages.nbytes(pages.shape.block_size)
        options = ConnectorOptions(key=key)
        pending = min(options.max_pending_save_bytes, pool // HELD_SHARE)
        options = replace(options, max_pending_save_bytes=pending)
        store = connect(self.config.store)
        copies = HostCopies(pages) if isinstance(pages, HostPages) else None
        return StoreConnector(store, namer, namespace, pages, options, copies=copies)


def _check_caches(caches: Sequence[torch.Tensor], shape: PageShape) -> None:
    first = caches[0]
    for cache in caches:
        if cache.dtype != shape.torch_dtype:
            raise Unservable(f"a layer's KV cache holds {cache.dtype}, not {shape.dtype}")
        if cache.shape != first.shape or cache.stride() != first.stride():
            raise Unservable("the layers' KV caches have different shapes")
        if cache.dim() != 4 or cache.shape[0] % shape.num_blocks:
            raise Unservable(
                f"the KV cache of a layer is {list(cache.shape)}: no pages of"
                f" {shape.num_blocks} blocks"
            )
        pages = cache.shape[0] // shape.num_blocks
        if cache.shape[1] != shape.num_kv_heads or pages * cache.shape[2] != shape.block_size:
            raise Unservable(
                f"the KV cache of a layer is {list(cache.shape)}: its pages are not"
                f" {shape.num_kv_heads} heads of {shape.block_size // pages} positions"
            )


def security() -> Security:
    """The security of this process: set by a worker, in plain vLLM read from ``KVRELAY_*``."""
    found = installed()
    if found is not INSECURE or not any(name.startswith("KVRELAY_") for name in os.environ):
        return found
    return install(read(SecurityOptions, [], "kvrelay", "the connector of vLLM"))
