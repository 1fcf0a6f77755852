"""The configuration of a local cluster: what ``kvrelay up`` and ``kvrelay demo`` are given."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kvrelay.config.option import check_unset, option
from kvrelay.config.reader import check
from kvrelay.errors import Rejected
from kvrelay.process.cores import MOST_THREADS
from kvrelay.process.logs import FORMATS, LEVELS
from kvrelay.rpc.address import LOOPBACK, ROUTER_PORT
from kvrelay.rpc.tracing import TracingOptions
from kvrelay.worker.config import (
    ATTENTION_BACKENDS,
    DEVICES,
    DTYPES,
    ENGINES,
    LARGEST_BLOCK,
    NUMERICS,
)
from kvstore.limits import BUDGET, DISK_BUDGET, EVICTIONS
from kvstore.urls import split_urls
from router.config import DISAGGREGATE, OF_HTTP, REASONING_FORMATS, TOOL_FORMATS

OF_DISK = ("store_disk_budget", "restore")
OF_OWN_STORE = ("store_port", "store_budget", "eviction", "store_disk", *OF_DISK)
SHIPPED_MODEL = Path(__file__).resolve().parents[1] / "recall" / "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig(TracingOptions):
    """A cluster on this machine. A field that is ``None`` has the worker's own default."""

    model: str = option("recall", "model directory; 'recall' is the shipped one", metavar="DIR")
    engine: str | None = option(None, "what runs the model in the workers", choices=ENGINES)
    vllm_python: str | None = option(
        None, "interpreter with vLLM and kvrelay[worker-vllm]; default: this one", metavar="PATH"
    )
    vllm_option: tuple[str, ...] = option(
        (), "a field of vLLM's EngineArgs, such as enforce_eager=true", metavar="NAME=VALUE"
    )
    prefill: int = option(1, "prefill workers; with 0 the decode workers do it", low=0, high=64)
    decode: int = option(1, "decode workers", low=1, high=64)
    store: str | None = option(None, "URL of a running store; default: start one", metavar="URL")
    store_port: int = option(0, "port of the store; 0 picks a free one", low=0, high=65535)
    store_budget: int = option(BUDGET, "memory of the store", unit="bytes", low=2**20)
    eviction: str | None = option(None, "eviction policy of the store", choices=EVICTIONS)
    store_disk: str | None = option(
        None, "directory to which the store writes its blocks too", metavar="DIR"
    )
    store_disk_budget: int = option(
        DISK_BUDGET, "bytes of --store-disk to use", unit="bytes", low=2**20
    )
    restore: bool = option(True, "start without the blocks that are in --store-disk")
    host: str = option(LOOPBACK, "address that the router listens on", metavar="HOST")
    port: int = option(ROUTER_PORT, "port of the router; 0 picks a free one", low=0, high=65535)
    http_port: int | None = option(
        None,
        "port of the router's HTTP API, OpenAI's; 0 picks a free one; default: no HTTP",
        low=0,
        high=65535,
    )
    cors_origin: tuple[str, ...] = option(
        (),
        "origin of web pages that may use the HTTP API from a browser, or *; default: none",
        metavar="ORIGIN",
    )
    strict_fields: bool = option(
        False, "refuse HTTP requests with unknown fields, instead of ignoring them"
    )
    tool_format: str | None = option(
        None, "how the model writes calls of functions; default: auto", choices=TOOL_FORMATS
    )
    reasoning_format: str | None = option(
        None, "how the model writes its reasoning; default: auto", choices=REASONING_FORMATS
    )
    served_model: str | None = option(
        None,
        "name of the model for clients; default: 'recall', or its directory's name",
        metavar="NAME",
    )
    block_size: int | None = option(None, "token positions in a block", low=1, high=LARGEST_BLOCK)
    num_blocks: int | None = option(None, "blocks in each worker's pool", low=1)
    kv_memory: int | None = option(
        None,
        "size of each worker's KV pool if --num-blocks is not given; default: its part of half the"
        " memory that weights and store leave on this host, or of 0.8 of a GPU's free memory",
        unit="bytes",
        low=1,
    )
    dtype: str | None = option(None, "number format of weights and KV", choices=DTYPES)
    device: str | None = option(
        None, "device of the workers; cuda has not been tried on a GPU yet", choices=DEVICES
    )
    devices: str | None = option(
        None,
        "GPUs of this machine, comma-separated: each worker sees only one, in turn;"
        " default: every worker sees all and takes the first",
        metavar="N,N",
    )
    max_num_seqs: int | None = option(None, "requests that a worker runs at once", low=1)
    max_num_batched_tokens: int | None = option(None, "token positions in one step", low=1)
    max_model_len: int | None = option(None, "longest prompt and answer together", low=1)
    attention_backend: str | None = option(
        None, "attention backend of the workers", choices=ATTENTION_BACKENDS
    )
    numerics: str | None = option(
        None,
        "strict: workers share KV and streams only if their arithmetic is equal to the bit",
        choices=NUMERICS,
    )
    disaggregate: str | None = option(
        None,
        "which prompts go to prefill workers; default: the router's own",
        choices=DISAGGREGATE,
    )
    queue_tokens: int | None = option(
        None, "tokens of waiting requests above which the router refuses more", low=1
    )
    queue_seconds: float | None = option(
        None, "estimated seconds of waiting above which the router refuses a request", low=0.0
    )
    threads: int | None = option(
        None,
        "threads of a worker; default: by the sizes of the model and of the step, at most"
        f" cores / workers and {MOST_THREADS}, and those of idle workers on Linux",
        low=1,
        high=1024,
    )
    metrics_port: int | None = option(
        None,
        "port of the router for Prometheus; the workers, then the store, have the next ones",
        low=1,
        high=65535,
    )
    grace: float | None = option(
        None, "seconds that open requests get after SIGTERM or Ctrl-C", low=0.0
    )
    log_level: str | None = option(None, "how much every process logs", choices=LEVELS)
    log_format: str | None = option(
        None, "json: one object a line, with date and request id; default: text", choices=FORMATS
    )
    access_log: bool = option(
        False, "the router logs a line at the end of each request, without its text"
    )

    def __post_init__(self) -> None:
        check(self)
        if any(url.startswith("memory:") for url in split_urls(self.store or "")):
            raise Rejected("store", "memory:// belongs to one process and cannot be shared")
        if self.store is not None:
            reason = "applies to the store that is started here, not to --store"
            check_unset(self, OF_OWN_STORE, reason)
        elif self.store_disk is None:
            check_unset(self, OF_DISK, "needs --store-disk")
        if self.http_port is None:
            reason = "needs the HTTP API: give --http-port, and leave out --no-http"
            check_unset(self, OF_HTTP, reason)
        if self.devices is not None:
            self._check_devices()
        if self.engine != "vllm" and (self.vllm_python or self.vllm_option):
            raise Rejected("engine", "--vllm-python and --vllm-option need --engine vllm")
        if self.engine == "vllm" and self.vllm_python is None and find_spec("vllm") is None:
            raise Rejected("engine", "vllm is not installed here: give --vllm-python")
        last = (self.metrics_port or 0) + self.prefill + self.decode + 1
        if last > 65535:
            raise Rejected("metrics_port", f"the last process would have port {last}")

    @property
    def gpus(self) -> tuple[str, ...]:
        """The names in ``devices``: numbers, or what else CUDA_VISIBLE_DEVICES may hold."""
        return tuple(name.strip() for name in (self.devices or "").split(",") if name.strip())

    def _check_devices(self) -> None:
        if not self.gpus:
            raise Rejected("devices", "names no GPU: give numbers, for example 0,1")
        if len(set(self.gpus)) < len(self.gpus):
            raise Rejected("devices", f"{self.devices}: names a GPU twice")
        if self.device not in (None, "auto", "cuda"):
            raise Rejected("devices", f"applies to --device cuda, not to {self.device}")

    @property
    def model_path(self) -> str:
        return str(SHIPPED_MODEL) if self.model == "recall" else self.model

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        if self.model == "recall":
            return self.served_model or self.model
        return self.served_model or Path(self.model).resolve().name
