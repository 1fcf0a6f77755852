"""Opens the vLLM engine of a worker: vLLM's scheduler and kernels behind our services."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvrelay.block.name import Namer
from kvrelay.block.namespace import Namespace
from kvrelay.connector.script import PREFIX
from kvrelay.engine.core.plan import EngineLimits
from kvrelay.engine.engine import Deliver, EngineOptions
from kvrelay.engine.vllm.kv import profile
from kvrelay.engine.vllm.kv.facts import model_facts
from kvrelay.engine.vllm.kv.namespace import revision_of
from kvrelay.engine.vllm.serving import core
from kvrelay.engine.vllm.serving.engine import SteppedCore, VllmEngine
from kvrelay.errors import Rejected
from kvrelay.process.cores import available_cores
from kvrelay.process.memory import host_memory
from kvrelay.rpc.security.credentials import Credentials
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.engines.opened import OpenedEngine, ServedModel, namespace_of

NAMED = ("model", "revision", "dtype", "layout", "block_size", "numerics")
if TYPE_CHECKING:
    from vllm.config import VllmConfig

UNSERVED = {
    "attention_backend": ("auto", "vLLM has its own: give --vllm-option attention_backend=NAME"),
    "journal": (None, "only the native engine's scheduler has a journal"),
    "shared_cores": (None, "vLLM sets its threads at start: give --threads"),
}


def open_vllm(
    config: WorkerConfig, credentials: Credentials, deliver: Deliver, options: EngineOptions
) -> OpenedEngine:
    """Load the model in vLLM; no leg runs yet. ``Unservable``, ``Rejected``."""
    _check(config)
    named = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # it may have nested levels
    threads = config.threads or (int(named) if named.isdigit() else available_cores())
    os.environ["OMP_NUM_THREADS"] = str(threads)
    configured = core.configure(core_options(config), config.store, config.audit)
    own = configured.device_config.device_type
    if config.device not in ("auto", own):
        raise Rejected("device", f"{config.device} is not the device of this vLLM: give {own}")
    attention = profile.attention_of(configured)
    numerics = profile.numeric_profile(configured, attention)
    model = served_model(configured)
    namespace = namespace_of(
        config, model, configured.cache_config.block_size, numerics, credentials
    )
    engine = VllmEngine(deliver, options)
    opened: list[core.VllmCore] = []

    def open_core() -> tuple[SteppedCore, EngineLimits]:
        torch.set_num_threads(threads)  # of this thread: it runs the model
        made = core.open_core(configured, _as_fields(namespace))
        opened.append(made)
        return made, made.limits

    engine.open(open_core)
    return OpenedEngine(
        engine=engine,
        model=model,
        limits=opened[0].limits,
        namespace=namespace,
        namer=Namer(namespace),
        numeric_profile=numerics,
        attention=attention,
        threads=str(threads),
        store_counters=None if config.store is None else opened[0].counters,
    )


def check_vllm(config: WorkerConfig) -> None:
    """Whether vLLM accepts the configuration; reads no weights. ``Unservable``, ``Rejected``."""
    _check(config)
    core.configure(core_options(config), config.store, config.audit)


def core_options(config: WorkerConfig) -> core.CoreOptions:
    """What the worker's options set of vLLM's; by default a share of the free memory is the pool.

    On a GPU the default is vLLM's own, ``gpu_memory_utilization``.
    """
    memory = config.kv_memory
    extra = extra_options(config.vllm_option)
    if memory is None and config.num_blocks is None and not torch.cuda.is_available():
        host = host_memory()
        memory = None if host is None else int(config.kv_share * host.free)
    return core.CoreOptions(
        model=config.model,
        dtype=config.dtype,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        kv_memory=memory,
        max_model_len=config.max_model_len,
        max_num_seqs=min(config.max_num_seqs, config.max_num_batched_tokens),
        max_num_batched_tokens=config.max_num_batched_tokens,
        extra=extra,
    )


def extra_options(texts: Sequence[str]) -> Mapping[str, object]:
    """``NAME=VALUE`` by name; a value is JSON where it can be read as that, else text."""
    found: dict[str, object] = {}
    for text in filter(None, texts):
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise Rejected("vllm_option", f"must be NAME=VALUE, got {text!r}")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def served_model(config: VllmConfig) -> ServedModel:
    """The model of vLLM's configuration."""
    model = config.model_config
    folder = Path(model.model)
    dtype = str(model.dtype).removeprefix("torch.")
    return ServedModel(
        name=folder.resolve().name,
        revision=revision_of(model_facts(config, dtype, config.cache_config.block_size)),
        dtype=dtype,
        device=config.device_config.device_type,
        vocab_size=model.get_vocab_size(),
        max_model_len=model.max_model_len - 1,
        eos_token_ids=_eos(config),
    )


def _eos(config: VllmConfig) -> tuple[int, ...]:
    generation = config.model_config.try_get_generation_config()
    found = generation.get("eos_token_id")
    if found is None:
        found = getattr(config.model_config.hf_text_config, "eos_token_id", None)
    if found is None:
        return ()
    return (found,) if isinstance(found, int) else tuple(found)


def _check(config: WorkerConfig) -> None:
    if find_spec("vllm") is None:
        raise Rejected("engine", "vllm is not installed here: start the worker with its Python")
    for name, (default, reason) in UNSERVED.items():
        if getattr(config, name) != default:
            raise Rejected(name, f"is not for --engine vllm: {reason}")
    if config.store is not None and config.store.startswith(PREFIX):
        raise Rejected("store", "a script of the mock is for the native engine")


def _as_fields(namespace: Namespace) -> Mapping[str, object]:
    return {
        each.name: getattr(namespace, each.name) for each in fields(namespace) if each.name in NAMED
    }
