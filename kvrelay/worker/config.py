"""The configuration of a worker, the same for both roles."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.config.reader import option, required
from kvrelay.errors import Rejected
from kvrelay.process.cores import MOST_THREADS
from kvrelay.process.logs import FORMATS, LEVELS
from kvrelay.rpc.address import LOOPBACK
from kvrelay.rpc.tracing import TracingOptions

ENGINES = ("native", "vllm")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda", "cuda:N")
ATTENTION_BACKENDS = ("auto", "sdpa", "native", "triton", "varlen", "flash_attn")
NUMERICS = ("strict", "loose")
LARGEST_BLOCK = 1024  # token positions


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(TracingOptions):
    """Flags, environment and file of a prefill or decode worker."""

    model: str = required(str, "directory of a transformers model", metavar="DIR")
    engine: str = option(
        "native", "what runs the model; vllm: in an environment that has vLLM", choices=ENGINES
    )
    vllm_option: tuple[str, ...] = option(
        (), "a field of vLLM's EngineArgs, such as tensor_parallel_size=2", metavar="NAME=VALUE"
    )
    served_model: str | None = option(
        None, "name of the model, as the router calls it; default: its directory's name"
    )
    router: tuple[str, ...] = option((), "routers to announce this worker to", metavar="HOST:PORT")
    advertise: str | None = option(
        None, "address to announce; default: the listening address", metavar="HOST:PORT"
    )
    host: str = option(LOOPBACK, "address to listen on", metavar="HOST")
    port: int = option(0, "port to listen on; 0 picks a free one", low=0, high=65535)
    store: str | None = option(
        None,
        "URL of the KV store, such as kvrelay://HOST:PORT, or several, comma-separated, nearest"
        " first; default: no store",
    )
    dtype: str = option("auto", "number format of weights and KV", choices=DTYPES)
    device: str = option(
        "auto",
        "where the model runs; cuda has not been tried on a GPU yet; auto: a GPU, else the CPU, but"
        " an error if there is a GPU that torch cannot use",
        choices=DEVICES,
    )
    attention_backend: str = option(
        "auto",
        "how attention is computed; auto on the CPU: native (our compiled kernel), or sdpa (torch)"
        " if native cannot be used; auto on a GPU: the first of triton (our kernels), varlen"
        " (torch's FlashAttention), flash_attn (the package) and sdpa that passes a self-test",
        choices=ATTENTION_BACKENDS,
    )
    numerics: str = option(
        "strict",
        "strict: share KV blocks and streams only with workers whose arithmetic is equal to the"
        " bit; loose: with all that serve these weights in this dtype, equal up to rounding",
        choices=NUMERICS,
    )
    block_size: int = option(16, "token positions in a KV block", low=1, high=LARGEST_BLOCK)
    num_blocks: int | None = option(
        None, "KV blocks in the pool; default: as many as --kv-memory holds and can be used", low=1
    )
    kv_memory: int | None = option(
        None,
        "size of the KV pool if --num-blocks is not given; default: --kv-share of the memory that"
        " is free once the weights are loaded; on a GPU, of what is free in the largest step",
        unit="bytes",
        low=1,
    )
    kv_share: float = option(0.5, "part of the free memory; see --kv-memory", low=0.001, high=0.95)
    max_model_len: int | None = option(
        None, "positions a request may have; default: the model's own limit", low=1
    )
    max_num_seqs: int = option(64, "requests that compute or load at the same time", low=1)
    max_num_batched_tokens: int = option(1024, "positions computed in one step", low=1)
    max_waiting: int = option(1024, "requests that may wait; further ones are refused", low=1)
    step_seconds: float = option(
        120.0, "a step that takes longer counts as hung: the worker exits for a restart", low=1.0
    )
    threads: int | None = option(
        None,
        "CPU threads of a step; default: by the sizes of the model and of the step, at most the"
        f" cores and {MOST_THREADS}",
        low=1,
        high=1024,
    )
    shared_cores: str | None = option(
        None,
        "workers of this machine that name the same file share its cores: --threads (default: 1)"
        " are a worker's own, and a step has those of idle workers too, if they are of use",
        metavar="FILE",
    )
    grace: float = option(10.0, "seconds that open requests get after SIGTERM", low=0.0)
    audit: bool = option(False, "check every invariant of the accounting after every step")
    metrics_port: int | None = option(
        None, "port for Prometheus; default: no metrics", low=1, high=65535
    )
    metrics_host: str = option(
        LOOPBACK,
        "address of the metrics: plain HTTP without a token on 127.0.0.1, else secured as others",
        metavar="HOST",
    )
    journal: str | None = option(
        None,
        "record every scheduler call in this file, prompts included, for replay; one file per"
        " worker; the previous journal becomes FILE.before",
        metavar="FILE",
    )
    log_level: str = option("info", "how much to log", choices=LEVELS)
    log_format: str = option(
        "text", "json: one object a line, with date and request id", choices=FORMATS
    )

    def __post_init__(self) -> None:
        if self.engine != "vllm" and any(self.vllm_option):
            raise Rejected("vllm_option", "needs --engine vllm")

    @property
    def routers(self) -> tuple[str, ...]:
        """The addresses in ``router``; an item may hold several, comma-separated."""
        named = (part.strip() for text in self.router for part in text.split(","))
        return tuple(dict.fromkeys(part for part in named if part))
