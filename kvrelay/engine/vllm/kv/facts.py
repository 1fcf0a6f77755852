"""Reads vLLM's configuration objects into the connector's own values.

The protocols name every attribute that is read, so that a vLLM that lacks one fails at start with
its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from kvrelay.engine.vllm.kv.checks import EngineFacts, GroupFacts
from kvrelay.engine.vllm.kv.namespace import ModelFacts, rotated_for
from kvrelay.engine.vllm.kv.setup import EngineView
from kvrelay.engine.vllm.versions import refusal

OF_SAFETENSORS = (
    *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer"),
    *("mistral", "bitsandbytes"),
    "dummy",  # weights that depend on the configuration alone
)
"""Values of ``load_format`` with which the ``*.safetensors`` of a model decide its weights."""

OF_COMMIT = (*OF_SAFETENSORS, "pt", "npcache")
"""With which the files of a commit do."""


class VllmParallel(Protocol):
    """``ParallelConfig``."""

    @property
    def tensor_parallel_size(self) -> int: ...
    @property
    def pipeline_parallel_size(self) -> int: ...
    @property
    def decode_context_parallel_size(self) -> int: ...
    @property
    def prefill_context_parallel_size(self) -> int: ...


class VllmModel(Protocol):
    """``ModelConfig``."""

    @property
    def model(self) -> str: ...
    @property
    def quantization(self) -> str | None: ...
    @property
    def quantization_config(self) -> object: ...
    @property
    def model_class_overrides(self) -> Mapping[str, str]: ...
    @property
    def code_revision(self) -> str | None: ...
    @property
    def config_format(self) -> str: ...
    @property
    def disable_sliding_window(self) -> bool: ...
    @property
    def hf_overrides(self) -> object: ...
    @property
    def hf_config_path(self) -> str | None: ...
    @property
    def hf_config(self) -> object: ...
    @property
    def hf_text_config(self) -> object: ...
    @property
    def max_model_len(self) -> int: ...
    def get_total_num_kv_heads(self) -> int: ...


class VllmTransfer(Protocol):
    """``KVTransferConfig``."""

    @property
    def kv_role(self) -> str | None: ...
    @property
    def kv_load_failure_policy(self) -> str: ...
    @property
    def kv_connector_extra_config(self) -> Mapping[str, object]: ...


class VllmLoad(Protocol):
    """``LoadConfig``."""

    @property
    def load_format(self) -> str: ...
    @property
    def model_loader_extra_config(self) -> object: ...


class VllmEngineConfig(Protocol):
    """``VllmConfig``."""

    @property
    def parallel_config(self) -> VllmParallel: ...
    @property
    def model_config(self) -> VllmModel: ...
    @property
    def kv_transfer_config(self) -> VllmTransfer: ...
    @property
    def load_config(self) -> VllmLoad: ...
    @property
    def speculative_config(self) -> object | None: ...
    @property
    def additional_config(self) -> object: ...
    @property
    def max_concurrent_batches(self) -> int: ...


class VllmGroup(Protocol):
    """``KVCacheGroupSpec``."""

    @property
    def layer_names(self) -> Sequence[str]: ...
    @property
    def kv_cache_spec(self) -> object: ...


class VllmCacheConfig(Protocol):
    """``KVCacheConfig``: the caches as the engine has laid them out."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def kv_cache_groups(self) -> Sequence[VllmGroup]: ...


def view_of(
    config: VllmEngineConfig, caches: VllmCacheConfig, version: str, numerics: Callable[[], str]
) -> EngineView:
    """What the connector needs to know of an engine; ``numerics`` computes its profile."""
    parallel, model, transfer = (
        config.parallel_config,
        config.model_config,
        config.kv_transfer_config,
    )
    groups = tuple(group_of(group) for group in caches.kv_cache_groups)
    facts = EngineFacts(
        role=transfer.kv_role or "",
        load_failure_policy=transfer.kv_load_failure_policy,
        groups=groups,
        pipeline_ranks=parallel.pipeline_parallel_size,
        context_ranks=parallel.decode_context_parallel_size,
        prefill_context_ranks=parallel.prefill_context_parallel_size,
        speculative=config.speculative_config is not None,
        version_refusal=refusal(version, config),
    )
    first = groups[0] if groups else None
    return EngineView(
        facts=facts,
        model=model_facts(config, first.dtype if first else "", first.block_size if first else 0),
        numerics=numerics,
        heads=model.get_total_num_kv_heads(),
        ranks=parallel.tensor_parallel_size,
        num_blocks=caches.num_blocks,
        layer_names=tuple(caches.kv_cache_groups[0].layer_names) if groups else (),
        extra=transfer.kv_connector_extra_config,
        overlapping=config.max_concurrent_batches > 1,
    )


def model_facts(config: VllmEngineConfig, dtype: str, block_size: int) -> ModelFacts:
    """What vLLM was told about its model; ``dtype`` and ``block_size`` are those of the KV."""
    model, load = config.model_config, config.load_config
    overrides = model.hf_overrides
    return ModelFacts(
        model=model.model,
        dtype=dtype,
        block_size=block_size,
        commit=getattr(model.hf_config, "_commit_hash", None),
        told={
            "quantization": model.quantization,
            "quantization_config": model.quantization_config,
            "hf_overrides": overrides if isinstance(overrides, Mapping) else None,
            "model_class_overrides": model.model_class_overrides,
            "code_revision": model.code_revision,
            "disable_sliding_window": model.disable_sliding_window,
            "config_format": "" if model.config_format == "auto" else str(model.config_format),
            "load_format": "" if load.load_format == "auto" else str(load.load_format),
            "adapter": load.load_format == "bitsandbytes" and load.model_loader_extra_config,
            "rotated_for": rotated_for(model.hf_text_config, model.max_model_len),
        },
        unnamed=_unnamed(model, load),
    )


def _unnamed(model: VllmModel, load: VllmLoad) -> str:
    if callable(model.hf_overrides):
        return "hf_overrides is a function"
    if model.hf_config_path and Path(model.hf_config_path) != Path(model.model):
        return f"hf_config_path is {model.hf_config_path!r}, not the model's own"
    own = OF_SAFETENSORS if Path(model.model).is_dir() else OF_COMMIT
    if load.load_format not in own:
        return f"load_format is {load.load_format!r}, which reads other weights"
    return ""


def group_of(group: VllmGroup) -> GroupFacts:
    """One cache group; attributes that only some kinds of attention have may be missing."""
    spec = group.kv_cache_spec
    heads = _number(spec, "num_kv_heads")
    slots = getattr(spec, "num_head_slots", None)
    content = getattr(spec, "state_content_bytes", None)
    return GroupFacts(
        kind=type(spec).__name__,
        layers=len(group.layer_names),
        block_size=_number(spec, "block_size"),
        heads=heads,
        head_dim=_number(spec, "head_size"),
        value_dim=_number(spec, "head_size_v"),
        dtype=str(getattr(spec, "dtype", "")).removeprefix("torch."),
        sliding_window=getattr(spec, "sliding_window", None),
        chunked=getattr(spec, "attention_chunk_size", None) is not None,
        quantised=int(getattr(spec, "kv_quant_mode", 0)) != 0,
        non_causal=bool(getattr(spec, "non_causal", False)),
        packed=slots not in (None, heads) or content is not None,
    )


def _number(spec: object, name: str) -> int:
    return int(getattr(spec, name, 0) or 0)
