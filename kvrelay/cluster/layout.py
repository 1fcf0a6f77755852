"""The processes of a local cluster: one configuration becomes a ``ProcessSpec`` for each.

Store and workers run on this machine; a store given by URL is used and not started.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvrelay.cluster.ports import free_ports
from kvrelay.cluster.process import ProcessSpec
from kvrelay.config.option import PREFIX, option, options
from kvrelay.config.reader import check
from kvrelay.errors import Rejected
from kvrelay.rpc.address import ROUTER_PORT
from kvrelay.rpc.security.options import SecurityOptions
from kvrelay.worker.config import ATTENTION_BACKENDS, DEVICES, DTYPES, LARGEST_BLOCK
from kvstore.limits import BUDGET, DISK_BUDGET
from kvstore.urls import split_urls
from router.config import DISAGGREGATE

ROOT = Path(__file__).resolve().parents[2]
SHIPPED_MODEL = Path(__file__).resolve().parents[1] / "recall" / "model"
LOCAL = "127.0.0.1"
FLUSH_SECONDS = 8.0  # for the store to write its memory to disk; see supervisor.STOP_SECONDS
NVIDIA = Path("/dev/nvidiactl")
MODULES = {
    "store": "kvstore",
    "prefill": "prefill_service",
    "decode": "decode_service",
    "router": "router",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig(SecurityOptions):
    """A cluster on this machine. A field that is ``None`` has the worker's own default."""

    model: str = option("recall", "model directory; 'recall' is the shipped one", metavar="DIR")
    prefill: int = option(1, "prefill workers; with 0 the decode workers do it", low=0, high=64)
    decode: int = option(1, "decode workers", low=1, high=64)
    store: str | None = option(None, "URL of a running store; default: start one", metavar="URL")
    store_budget: int = option(BUDGET, "memory of the store", unit="bytes", low=2**20)
    store_disk: str | None = option(
        None, "directory for blocks evicted from the store's memory", metavar="DIR"
    )
    store_disk_budget: int = option(DISK_BUDGET, "bytes of it to use", unit="bytes", low=2**20)
    restore: bool = option(True, "start without the blocks that are in --store-disk")
    host: str = option("127.0.0.1", "address that the router listens on", metavar="HOST")
    port: int = option(ROUTER_PORT, "port of the router; 0 picks a free one", low=0, high=65535)
    block_size: int | None = option(None, "token positions in a block", low=1, high=LARGEST_BLOCK)
    num_blocks: int | None = option(None, "blocks in each worker's pool", low=1)
    dtype: str | None = option(None, "number format of weights and KV", choices=DTYPES)
    device: str | None = option(None, "device of the workers", choices=DEVICES)
    max_num_seqs: int | None = option(None, "requests that a worker runs at once", low=1)
    max_num_batched_tokens: int | None = option(None, "token positions in one step", low=1)
    max_model_len: int | None = option(None, "longest prompt and answer together", low=1)
    attention_backend: str | None = option(
        None, "attention backend of the workers", choices=ATTENTION_BACKENDS
    )
    disaggregate: str | None = option(
        None,
        "which prompts go to prefill workers; default: the router's own",
        choices=DISAGGREGATE,
    )
    threads: int | None = option(None, "threads of a worker; default: cores / workers", low=1)

    def __post_init__(self) -> None:
        check(self)
        if any(url.startswith("memory:") for url in split_urls(self.store or "")):
            raise Rejected("store", "memory:// belongs to one process and cannot be shared")
        if self.store is not None and self.store_disk is not None:
            raise Rejected(
                "store_disk", "applies to the store that is started here, not to --store"
            )

    @property
    def model_path(self) -> str:
        return str(SHIPPED_MODEL) if self.model == "recall" else self.model


def process_specs(config: ClusterConfig) -> tuple[ProcessSpec, ...]:
    """Every process, in display order. A process keeps its port when it is restarted."""
    count = config.prefill + config.decode
    ports = iter(free_ports(count + 2))
    router_port, store_port = next(ports), next(ports)
    url = config.store or f"kvrelay://{LOCAL}:{store_port}"
    own_store = () if config.store else (_store(config, store_port),)
    prefill = tuple(_worker(config, "prefill", i, next(ports), url) for i in range(config.prefill))
    decode = tuple(_worker(config, "decode", i, next(ports), url) for i in range(config.decode))
    router = _router(config, config.port or router_port, prefill, decode)
    return (*own_store, *prefill, *decode, router)


def cores() -> int:
    """The number of cores that this process may use."""
    known = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return known or 1


def worker_threads(config: ClusterConfig) -> int:
    """Threads of one worker: an equal share of the cores, at least one."""
    return config.threads or max(1, cores() // (config.prefill + config.decode))


def _store(config: ClusterConfig, port: int) -> ProcessSpec:
    args = ["--host", LOCAL, "--port", str(port), "--budget", str(config.store_budget)]
    if config.store_disk is not None:
        args += ["--disk", config.store_disk, "--disk-budget", str(config.store_disk_budget)]
        args += ["--flush-seconds", str(FLUSH_SECONDS)]
        args += ["--restore"] if config.restore else []
    return _spec(config, "store", 0, port, (*args, *_security(config)))


def _worker(config: ClusterConfig, role: str, index: int, port: int, url: str) -> ProcessSpec:
    given = {
        "model": config.model_path,
        "store": None if _is_secret(url) else url,
        "host": LOCAL,
        "port": port,
        "threads": worker_threads(config),
        "block-size": config.block_size,
        "num-blocks": config.num_blocks,
        "dtype": config.dtype,
        "device": config.device,
        "max-num-seqs": config.max_num_seqs,
        "max-num-batched-tokens": config.max_num_batched_tokens,
        "max-model-len": config.max_model_len,
        "attention-backend": config.attention_backend,
    }
    return _spec(config, role, index, port, (*_flags(given), *_security(config)))


def _router(
    config: ClusterConfig,
    port: int,
    prefill: tuple[ProcessSpec, ...],
    decode: tuple[ProcessSpec, ...],
) -> ProcessSpec:
    args = ["--model", config.model_path, "--host", config.host, "--port", str(port)]
    for worker in (*prefill, *decode):
        args += [f"--{worker.role}", worker.address]
    if config.disaggregate is not None:
        args += ["--disaggregate", config.disaggregate]
    if not config.tls_mutual:
        args.append("--no-tls-mutual")  # only the router's clients may lack a certificate
    return _spec(config, "router", 0, port, (*args, *_security(config)))


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
    config: ClusterConfig, role: str, index: int, port: int, args: tuple[str, ...]
) -> ProcessSpec:
    return ProcessSpec(
        role=role,
        index=index,
        module=MODULES[role],
        args=args,
        host=config.host if role == "router" else LOCAL,
        port=port,
        environ=_environ(config, os.environ),
        forked=role in ("prefill", "decode") and _can_fork(config),
    )


def import_path(outer: Mapping[str, str]) -> dict[str, str]:
    """``PYTHONPATH`` for a child started with ``python -P``, so that it finds this kvrelay.

    An installed kvrelay needs none: site-packages ahead of the standard library shadows modules.
    """
    if ROOT.name in ("site-packages", "dist-packages"):
        return {}
    path = os.pathsep.join(filter(None, (str(ROOT), outer.get("PYTHONPATH"))))
    return {"PYTHONPATH": path}


def _is_secret(url: str) -> bool:
    """Whether a URL may hold a password: every user can read a command line."""
    return "@" in url


def _can_fork(config: ClusterConfig) -> bool:
    """Whether workers use the CPU: CUDA does not survive a fork."""
    return config.device == "cpu" or (sys.platform == "linux" and not NVIDIA.exists())


def _environ(config: ClusterConfig, outer: Mapping[str, str]) -> dict[str, str]:
    """The environment of children: without the variables that are meant for this process."""
    own = {item.variable for item in options(type(config))}
    own |= {PREFIX + "CONFIG", PREFIX + "ROUTER"}  # KVRELAY_ROUTER is for clients
    return {
        **{name: value for name, value in outer.items() if name not in own},
        **import_path(outer),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(worker_threads(config)),
        "TOKENIZERS_PARALLELISM": "false",
        **({"KVRELAY_FLEET_KEY": config.fleet_key} if config.fleet_key else {}),
        **({"KVRELAY_STORE": config.store} if config.store and _is_secret(config.store) else {}),
    }
