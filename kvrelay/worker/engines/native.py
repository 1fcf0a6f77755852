"""Opens the native engine of a worker: our scheduler and our model runner."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache

import torch

from kvrelay.block.mac import BlockKey
from kvrelay.block.name import Namer
from kvrelay.block.namespace import Namespace
from kvrelay.connector.context import ConnectorOptions
from kvrelay.connector.counters import ConnectorCounters
from kvrelay.connector.mock import MockConnector
from kvrelay.connector.none import NoConnector
from kvrelay.connector.script import PREFIX, read_script
from kvrelay.connector.store import StoreConnector
from kvrelay.engine.attention.native.library import check_openmp
from kvrelay.engine.attention.native.products import Products
from kvrelay.engine.core.blocks import Naming
from kvrelay.engine.core.external import Connector
from kvrelay.engine.core.plan import EngineLimits
from kvrelay.engine.engine import Deliver, Engine, EngineOptions
from kvrelay.engine.graphs import GraphLimits
from kvrelay.engine.largest_step import (
    CudaAllocator,
    DeviceMemory,
    StepBounds,
    free_in_largest_step,
)
from kvrelay.engine.model.forward import TransformersModel
from kvrelay.engine.model.loading import LoadedModel, load_model
from kvrelay.engine.numerics import numeric_profile
from kvrelay.engine.runner import GraphOptions, Runner
from kvrelay.engine.step_down import DeviceExaminer, Way, choose_way
from kvrelay.errors import Rejected
from kvrelay.process.cores import (
    MOST_THREADS,
    available_cores,
    in_passing_thread,
    model_threads,
)
from kvrelay.process.memory import host_memory
from kvrelay.process.shared_cores import SharedCores
from kvrelay.rpc.security.credentials import Credentials
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.engines.opened import OpenedEngine, ServedModel, namespace_of
from kvstore.client.connect import connect

log = logging.getLogger(__name__)
TENANTS = 1024
UNKNOWN_MEMORY = 1 << 30
DEFAULT_WAY = Way("auto")


def open_native(
    config: WorkerConfig, credentials: Credentials, deliver: Deliver, options: EngineOptions
) -> OpenedEngine:
    """Load the model and build the parts; nothing runs yet. ``Unservable``, ``Rejected``."""
    return in_passing_thread(lambda: _open(config, credentials, deliver, options))


def _open(
    config: WorkerConfig, credentials: Credentials, deliver: Deliver, options: EngineOptions
) -> OpenedEngine:
    asked = config.attention_backend
    model = load_model(config.model, config.dtype, config.device, config.max_model_len, asked)
    info = model.info
    served = ServedModel(
        name=info.name,
        revision=info.revision,
        dtype=info.dtype,
        device=info.device,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        eos_token_ids=info.eos_token_ids,
    )
    cores, on_cpu = available_cores(), model.device.type == "cpu"
    if on_cpu:
        check_openmp(config.threads or model_threads(model.weight_bytes, cores))
    way = way_of(config, model)
    profile_of = cache(lambda threads: numeric_profile(model, way.backend, threads, way.facts))
    threads, most = threads_of(config, model, cores, profile_of)
    on_device = CudaAllocator(model.device) if model.device.type == "cuda" else None
    limits = limits_of(config, model, on_device, way)
    runner = open_runner(model, limits, way, threads)
    profile = profile_of(threads)
    if most > threads:
        weights = model.weight_bytes
        runner.widen(lambda positions: model_threads(weights, cores, positions=positions))
    if on_cpu and config.shared_cores is not None:
        shared = SharedCores(config.shared_cores, threads, cores)
        runner.share(shared)
        options = replace(options, on_rest=shared.rest)
    namespace = namespace_of(config, served, config.block_size, profile, credentials)
    namer = Namer(namespace)
    key = BlockKey.of(credentials.fleet_key)
    connector = open_connector(config.store, runner, namespace, namer, key)
    return OpenedEngine(
        engine=Engine(runner, limits, naming_of(namer), connector, deliver, options),
        model=served,
        limits=limits,
        namespace=namespace,
        namer=namer,
        numeric_profile=profile,
        attention=runner.attention_profile,
        threads=str(threads) if most == threads else f"{threads} to {most}",
        store_counters=counters_of(connector),
    )


def way_of(config: WorkerConfig, model: LoadedModel) -> Way:
    """How this worker computes: on the CPU as configured, on a GPU as its self-test decides.

    Logs the way, and the reasons against better ones. ``Unservable`` as in ``choose_way``.
    """
    if model.device.type != "cuda":
        return Way(config.attention_backend)
    begun = time.monotonic()
    way = choose_way(config.attention_backend, DeviceExaminer(model, config.block_size))
    gc.collect()
    torch.cuda.empty_cache()  # frees the self-test's memory for the pool
    for reason in way.reasons:
        log.warning("the self-test: %s", reason)
    seconds = time.monotonic() - begun
    log.info("this GPU computes with %s (the self-test took %.1f s)", way.name, seconds)
    return way


def threads_of(
    config: WorkerConfig, model: LoadedModel, cores: int, profile_of: Callable[[int], str]
) -> tuple[int, int]:
    """The threads of every step of a worker, and the most that a step may have.

    By default as many as are useful for a step of one position; one, with shared cores. A step may
    have more if that changes no bit, and if ``--threads`` is not given alone. Logs why not.
    """
    useful, shares = model_threads(model.weight_bytes, cores), config.shared_cores is not None
    own, most = config.threads or (1 if shares else useful), min(cores, MOST_THREADS)
    fixed = config.threads or useful
    if most <= own or model.device.type != "cpu" or not (shares or config.threads is None):
        return fixed, fixed
    if against := against_more(model, own, most, profile_of):
        log.info("every step has %d of %d threads: %s", fixed, most, against)
        return fixed, fixed
    return own, most


def against_more(model: LoadedModel, own: int, most: int, profile_of: Callable[[int], str]) -> str:
    """Why no step may have ``most`` threads instead of its ``own``; empty if it may.

    Only a dense decoder on the CPU computes the same bits on any number of threads.
    """
    if isinstance(model.forward, TransformersModel):
        return f"the results of {model.info.name} may depend on their number"
    try:
        check_openmp(most)
    except Rejected as error:
        return str(error)
    return "" if profile_of(most) == profile_of(own) else "with more it has other bits"


def open_runner(model: LoadedModel, limits: EngineLimits, way: Way, threads: int) -> Runner:
    """The runner of a worker; logs each reason why it is slower than it could be."""
    graphs = graphs_of(way, limits.max_num_seqs, limits.max_model_len)
    runner = Runner(model, limits.num_blocks, limits.block_size, way.backend, threads, graphs)
    if runner.attention_reason:
        log.warning("attention is %s: %s", runner.attention_profile, runner.attention_reason)
    if isinstance(model.products, Products):
        level = logging.WARNING if model.products.passed_over else logging.INFO
        log.log(level, "matrix products are %s", model.products.summary)
    elif model.products.notable:
        log.warning("matrix products are those of torch: %s", model.products.reason)
    if runner.graphs_reason:
        log.warning("decode steps run without CUDA graphs: %s", runner.graphs_reason)
    return runner


def graphs_of(way: Way, sequences: int, length: int) -> GraphOptions | None:
    """The CUDA graphs of steps of so many sequences of such a length; ``None``: no graphs."""
    return GraphOptions(GraphLimits(sequences, length)) if way.graphs else None


def open_connector(
    url: str | None,
    runner: Runner,
    namespace: Namespace,
    namer: Namer,
    key: BlockKey | None = None,
) -> Connector:
    """External KV at ``url``: none, a store, or a script that distorts one (``mock:FILE``).

    Blocks are signed with ``key``, and others are not accepted.
    """
    if url is None:
        return NoConnector()
    if not url.startswith(PREFIX):
        options = ConnectorOptions(key=key)
        copies = runner.pool.copies
        store = connect(url, None if copies is None else copies.registered)
        return StoreConnector(store, namer, namespace, runner.pool, options, copies=copies)
    mock = read_script(url)
    return MockConnector(mock.script, open_connector(mock.store, runner, namespace, namer, key))


def counters_of(connector: Connector) -> Callable[[], ConnectorCounters] | None:
    """Reads the counters of the store connector; ``None`` without one."""
    if isinstance(connector, MockConnector) and connector.inner is not None:
        return counters_of(connector.inner)
    return (lambda: connector.counters) if isinstance(connector, StoreConnector) else None


def naming_of(namer: Namer) -> Naming:
    """The engine's block names: of this worker's namespace, and of recent tenants' namespaces."""

    @lru_cache(maxsize=TENANTS)
    def within(space: bytes) -> Naming:
        tenant = namer.within(space)
        return Naming(tenant.root, tenant.child)

    return Naming(namer.root, namer.child, within)


def limits_of(
    config: WorkerConfig,
    model: LoadedModel,
    device: DeviceMemory | None = None,
    way: Way = DEFAULT_WAY,
) -> EngineLimits:
    """The bounds of this worker; by default as many blocks as memory holds and requests can use.

    For a ``device``, the largest step runs once in the worker's ``way``, and the pool leaves room
    for it; ``Unservable`` if the step alone does not fit.
    """
    size, length = config.block_size, model.info.max_model_len
    blocks = config.num_blocks
    if blocks is None:
        block_bytes = model.pool_shape(1, size).block_bytes
        useful = -(length // -size) * config.max_num_seqs
        memory = config.kv_memory or int(config.kv_share * _free(config, model, device, way))
        blocks = max(min(memory // block_bytes, useful), 1)
    if blocks * size < length:
        log.warning(
            "the KV pool holds %d positions, fewer than one request may have (max_model_len %d):"
            " longer requests are refused; raise --kv-memory or --num-blocks, or lower"
            " --max-model-len",
            blocks * size,
            length,
        )
    return EngineLimits(
        num_blocks=blocks,
        block_size=size,
        max_model_len=length,
        # Every running request gets a position in each step, so that none waits behind others.
        max_num_seqs=min(config.max_num_seqs, config.max_num_batched_tokens),
        max_num_batched_tokens=config.max_num_batched_tokens,
    )


def _free(config: WorkerConfig, model: LoadedModel, device: DeviceMemory | None, way: Way) -> int:
    """Free bytes on the device, or on this host; the pool gets a share of them."""
    if device is None:
        memory = host_memory()
        return UNKNOWN_MEMORY if memory is None else memory.free
    bounds = StepBounds(
        positions=config.max_num_batched_tokens,
        requests=config.max_num_seqs,
        length=model.info.max_model_len,
        block_size=config.block_size,
    )
    graphs = graphs_of(way, min(bounds.requests, bounds.positions), bounds.length)
    free = free_in_largest_step(model, bounds, device, way.backend, config.threads, graphs)
    log.info("%.2f GiB of device memory stay free in the largest step", free / (1 << 30))
    return free
