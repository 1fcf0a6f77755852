"""The processes of a local cluster: one configuration becomes a ``ProcessSpec`` for each.

Store and workers run on this machine; a store given by URL is used and not started.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.ports import WantedPort, free_ports
from kvrelay.cluster.process import ProcessSpec
from kvrelay.config.option import PREFIX, options
from kvrelay.installation import import_path
from kvrelay.process.cores import available_cores, model_threads
from kvrelay.process.memory import HostMemory, host_memory
from kvrelay.rpc.address import LOOPBACK, Address
from kvrelay.rpc.security.options import SecurityOptions
from kvrelay.worker.config import WorkerConfig
from kvstore.config import StoreConfig
from router.config import RouterConfig

ROOT = Path(__file__).resolve().parents[2]
FLUSH_SECONDS = 8.0  # for the store to write its memory to disk; see supervisor.STOP_SECONDS
HOST_SHARE = 0.5  # of the memory that is left for the pools of all workers on the CPU
DEVICE_SHARE = 0.8  # of a GPU's
LEAST_POOL = 64 << 20
WORKERS = ("prefill", "decode")
JOURNAL = PREFIX + "JOURNAL"
NVIDIA = Path("/dev/nvidiactl")
MODULES = {
    "store": "kvstore",
    "prefill": "prefill_service",
    "decode": "decode_service",
    "router": "router",
}
CONFIGS: Mapping[str, type[SecurityOptions]] = {
    "store": StoreConfig,
    "prefill": WorkerConfig,
    "decode": WorkerConfig,
    "router": RouterConfig,
}


def process_specs(config: ClusterConfig) -> tuple[ProcessSpec, ...]:
    """Every process, in display order. A process keeps its port when it is restarted."""
    config = replace(config, kv_memory=pool_bytes(config, host_memory()))
    count = config.prefill + config.decode
    given = {config.port, config.http_port, config.store_port}
    if config.metrics_port is not None:
        given.update(range(config.metrics_port, config.metrics_port + count + 2))
    ports = iter(free_ports(count + 4, without=given))
    router_port, store_port = next(ports), config.store_port or next(ports)
    if config.http_port == 0:
        config = replace(config, http_port=next(ports))
    url = config.store or f"kvrelay://{Address(LOOPBACK, store_port)}"
    own_store = () if config.store else (_store(config, store_port, next(ports)),)
    prefill = tuple(_worker(config, "prefill", i, next(ports), url) for i in range(config.prefill))
    decode = tuple(_worker(config, "decode", i, next(ports), url) for i in range(config.decode))
    router = _router(config, config.port or router_port, url, prefill, decode)
    return (*own_store, *prefill, *decode, router)


def worker_threads(config: ClusterConfig) -> int:
    """Threads of one worker: its share of the cores; one, if the model is small."""
    workers = config.prefill + config.decode
    return config.threads or model_threads(_weight_bytes(config), available_cores(), workers)


def shares_cores(config: ClusterConfig) -> bool:
    """Whether a worker may use cores of idle ones; ``--threads`` gives each its own."""
    workers = config.prefill + config.decode
    return config.threads is None and workers > 1 and _forks_workers(config)


def _weight_bytes(config: ClusterConfig) -> int:
    """Of the weights in a worker's memory, as far as the files tell."""
    files = sum(path.stat().st_size for path in Path(config.model_path).glob("*.safetensors"))
    return files * (2 if config.dtype == "float32" else 1)  # the files may hold bfloat16


def pool_bytes(config: ClusterConfig, memory: HostMemory | None) -> int | None:
    """The pool of each worker on the CPU: its part of what is free for all of them.

    The store's memory and every worker's weights are set aside. ``None`` leaves the size to the
    worker: on a GPU, or if the free memory is not known.
    """
    if config.kv_memory is not None or memory is None or not _can_fork(config):
        return config.kv_memory
    workers = config.prefill + config.decode
    weights = _weight_bytes(config)
    store = config.store_budget if config.store is None else 0
    return max(int(HOST_SHARE * (memory.free - store) / workers - HOST_SHARE * weights), LEAST_POOL)


def _store(config: ClusterConfig, port: int, socket_port: int) -> ProcessSpec:
    metrics = config.metrics_port
    if metrics is not None:
        metrics += 1 + config.prefill + config.decode
    given = {
        "host": LOOPBACK,
        "port": port,
        "socket-port": socket_port,
        "budget": config.store_budget,
        "eviction": config.eviction,
        "metrics-port": metrics,
        "log-level": config.log_level,
        "log-format": config.log_format,
        **_tracing(config),
    }
    args = [*_flags(given)]
    if config.store_disk is not None:
        args += ["--disk", config.store_disk, "--disk-budget", str(config.store_disk_budget)]
        args += ["--flush-seconds", str(FLUSH_SECONDS)]
        args += ["--restore"] if config.restore else []
    blocks = WantedPort(LOOPBACK, socket_port, "socket_port")
    return _spec(config, "store", 0, port, (*args, *_security(config)), metrics, blocks)


def _worker(config: ClusterConfig, role: str, index: int, port: int, url: str) -> ProcessSpec:
    workers = config.prefill + config.decode
    metrics = config.metrics_port
    if metrics is not None:
        metrics += 1 + index + (config.prefill if role == "decode" else 0)
    given = {
        "engine": config.engine,
        "model": config.model_path,
        "served-model": config.model_name,
        "store": None if _is_secret(url) else url,
        "host": LOOPBACK,
        "port": port,
        "threads": worker_threads(config) if workers > 1 else config.threads,
        "block-size": config.block_size,
        "num-blocks": config.num_blocks,
        "kv-memory": config.kv_memory,
        "kv-share": DEVICE_SHARE / -(workers // -max(len(config.gpus), 1)),
        "dtype": config.dtype,
        "device": config.device or ("cuda" if config.gpus else None),
        "max-num-seqs": config.max_num_seqs,
        "max-num-batched-tokens": config.max_num_batched_tokens,
        "max-model-len": config.max_model_len,
        "attention-backend": config.attention_backend,
        "metrics-port": metrics,
        "grace": config.grace,
        "log-level": config.log_level,
        "log-format": config.log_format,
        "numerics": config.numerics,
        **_tracing(config),
    }
    args = [*_flags(given), *_security(config)]
    for text in config.vllm_option:
        args += ["--vllm-option", text]
    return _spec(config, role, index, port, tuple(args), metrics)


def _router(
    config: ClusterConfig,
    port: int,
    url: str,
    prefill: tuple[ProcessSpec, ...],
    decode: tuple[ProcessSpec, ...],
) -> ProcessSpec:
    given = {
        "model": config.model_path,
        "served-model": config.model_name,
        "host": config.host,
        "port": port,
        "http-port": config.http_port,
        "store": None if _is_secret(url) else url,
        "tool-format": config.tool_format,
        "reasoning-format": config.reasoning_format,
        "disaggregate": config.disaggregate,
        "queue-tokens": config.queue_tokens,
        "queue-seconds": config.queue_seconds,
        "metrics-port": config.metrics_port,
        "grace": config.grace,
        "log-level": config.log_level,
        "log-format": config.log_format,
        **_tracing(config),
    }
    args = [*_flags(given)]
    for worker in (*prefill, *decode):
        args += [f"--{worker.role}", worker.address]
    for origin in config.cors_origin:
        args += ["--cors-origin", origin]
    if config.strict_fields:
        args.append("--strict-fields")
    if config.access_log:
        args.append("--access-log")
    if not config.tls_mutual:
        args.append("--no-tls-mutual")  # only the router's clients may lack a certificate
    args += _security(config)
    return _spec(config, "router", 0, port, tuple(args), config.metrics_port)


def _tracing(config: ClusterConfig) -> dict[str, object]:
    """Tracing flags of every process."""
    endpoint = config.otlp_endpoint
    ratio = None if endpoint is None else config.trace_ratio
    return {"otlp-endpoint": endpoint, "trace-ratio": ratio}


def _security(config: ClusterConfig) -> tuple[str, ...]:
    """Flags with file names only: secrets go through the environment."""
    names = ("tls-cert", "tls-key", "tls-ca", "tls-name", "credentials")
    allowed = ("--allow-insecure",) if config.allow_insecure else ()
    return (*_flags({name: getattr(config, name.replace("-", "_")) for name in names}), *allowed)


def _flags(given: Mapping[str, object]) -> tuple[str, ...]:
    """``--name value`` for every value that is not ``None``."""
    words = [(f"--{name}", str(value)) for name, value in given.items() if value is not None]
    return tuple(word for pair in words for word in pair)


def _spec(
    config: ClusterConfig,
    role: str,
    index: int,
    port: int,
    args: tuple[str, ...],
    metrics: int | None,
    *others: WantedPort,
) -> ProcessSpec:
    if metrics is not None:
        others += (WantedPort(LOOPBACK, metrics, "metrics_port"),)
    worker = role in WORKERS
    spec = ProcessSpec(
        role=role,
        index=index,
        module=MODULES[role],
        args=args,
        host=config.host if role == "router" else LOOPBACK,
        port=port,
        http_port=config.http_port if role == "router" else None,
        other_ports=others,
        forked=worker and _forks_workers(config),
        python=config.vllm_python if worker else None,
    )
    return replace(spec, environ=environ_of(config, spec, os.environ))


def _is_secret(url: str) -> bool:
    """Whether a URL may hold a password: every user can read a command line."""
    return "@" in url


def _forks_workers(config: ClusterConfig) -> bool:
    """Whether workers are forked: those of the native engine on the CPU."""
    return config.engine != "vllm" and _can_fork(config)


def _can_fork(config: ClusterConfig) -> bool:
    """Whether workers use the CPU: CUDA does not survive a fork."""
    if config.gpus:
        return False
    return config.device == "cpu" or (sys.platform == "linux" and not NVIDIA.exists())


def environ_of(
    config: ClusterConfig, spec: ProcessSpec, outer: Mapping[str, str]
) -> dict[str, str]:
    """The environment of a child.

    Of kvrelay's variables it gets those of its own options. It does not get those of the cluster,
    which reach it as flags, those of other services, nor KVRELAY_ROUTER, which is for clients.
    KVRELAY_DECODE_1_AUDIT is KVRELAY_AUDIT for the child decode-1 alone.
    """
    variables = {role: {item.variable for item in options(kind)} for role, kind in CONFIGS.items()}
    own = variables[spec.role]
    foreign = {item.variable for item in options(type(config))}
    foreign |= {PREFIX + "CONFIG", PREFIX + "ROUTER"}
    foreign |= set().union(*variables.values()) - own
    kept = {name: value for name, value in outer.items() if name not in foreign}
    if JOURNAL in kept and config.prefill + config.decode > 1:
        kept[JOURNAL] += f".{spec.name}"  # each worker writes a file of its own
    return {
        **kept,
        **_addressed(spec, own, outer),
        **import_path(outer),
        **_own_gpu(config, spec),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(worker_threads(config)),
        "TOKENIZERS_PARALLELISM": "false",
        **({"KVRELAY_CLUSTER_TOKEN": config.cluster_token} if config.cluster_token else {}),
        **({"KVRELAY_FLEET_KEY": config.fleet_key} if config.fleet_key else {}),
        **({"KVRELAY_STORE": config.store} if config.store and _is_secret(config.store) else {}),
    }


def _own_gpu(config: ClusterConfig, spec: ProcessSpec) -> dict[str, str]:
    """The one GPU that a worker sees: prefill workers come first, then decode workers."""
    if not config.gpus or spec.role not in WORKERS:
        return {}
    number = spec.index + (config.prefill if spec.role == "decode" else 0)
    return {"CUDA_VISIBLE_DEVICES": config.gpus[number % len(config.gpus)]}


def _addressed(spec: ProcessSpec, own: set[str], outer: Mapping[str, str]) -> dict[str, str]:
    """The variables that name this child, without its name."""
    before = f"{PREFIX}{spec.name.upper().replace('-', '_')}_"
    found = {PREFIX + key.removeprefix(before): key for key in outer if key.startswith(before)}
    return {variable: outer[key] for variable, key in found.items() if variable in own}
