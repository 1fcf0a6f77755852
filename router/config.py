"""The configuration of the router."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kvrelay.config.option import check_unset
from kvrelay.config.reader import check, option, required
from kvrelay.errors import DeadlineExceeded, Rejected
from kvrelay.process.logs import FORMATS, LEVELS
from kvrelay.rpc.address import LOOPBACK, ROUTER_PORT
from kvrelay.rpc.tracing import TracingOptions
from kvrelay.text.tokenizer import MAX_PROMPT_BYTES

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([\w.-]+|\[[0-9a-f:]+\])(:\d{1,5})?", re.ASCII)
DISAGGREGATE = ("always", "auto", "never")
TOOL_FORMATS = ("auto", "hermes", "llama")
OF_HTTP = ("cors_origin", "strict_fields")
REASONING_FORMATS = ("auto", "think", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(TracingOptions):
    """Flags, environment and file of the router. Times in seconds."""

    model: str = required(str, "directory of the model, for its tokenizer", metavar="DIR")
    served_model: str | None = option(
        None, "name of the model, as workers call it; default: its directory's name"
    )
    host: str = option(LOOPBACK, "address to listen on", metavar="HOST")
    port: int = option(ROUTER_PORT, "port to listen on; 0 picks a free one", low=0, high=65535)
    http_port: int | None = option(
        None,
        "port of the HTTP API, OpenAI's, on --host; 0 picks a free one; default: no HTTP",
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
    tool_format: str = option(
        "auto",
        "how the model writes calls of functions; auto: as its chat template says",
        choices=TOOL_FORMATS,
    )
    reasoning_format: str = option(
        "auto",
        "how the model writes its reasoning; auto: think (<think>...</think>) if its chat template"
        " has these tags",
        choices=REASONING_FORMATS,
    )
    prefill: tuple[str, ...] = option(
        (),
        "a prefill worker, or with dns:///NAME:PORT every address of a name",
        metavar="HOST:PORT",
    )
    decode: tuple[str, ...] = option(
        (),
        "a decode worker; dns:///NAME:PORT as in --prefill; http://HOST:PORT is an unmodified"
        " `vllm serve` 0.32",
        metavar="HOST:PORT",
    )
    stock_seeds: bool = option(
        False,
        "unmodified vLLM servers draw by seed and position (model runner V2), so sampled answers"
        " continue on another one",
    )
    workers_file: str | None = option(
        None, "JSON or TOML with lists `prefill` and `decode`, read again when it changes"
    )
    dns_interval: float = option(5.0, "seconds between two look-ups of a name", low=0.1)
    announce: bool = option(False, "list workers that announce themselves with their --router")
    max_workers: int = option(512, "workers listed at once; others are left out", low=1)
    store: str | None = option(
        None,
        "URL of the workers' store, for hints: which prompts wait and what clients expect; it then"
        " keeps their blocks; default: no hints",
        metavar="URL",
    )
    disaggregate: str = option(
        "auto",
        "send prompts to prefill workers: all, none, or those worth the handoff",
        choices=DISAGGREGATE,
    )
    health_interval: float = option(
        0.15, "seconds between two checks of a worker; 0.05 for fast detection", low=0.01
    )
    health_timeout: float = option(
        0.35, "seconds of silence that make a worker suspect; 0.15 for fast detection", low=0.01
    )
    unreachable_after: float = option(
        10.0, "seconds of silence that make a worker unreachable", low=0.01
    )
    worker_wait: float = option(5.0, "seconds to wait for a usable worker", low=0.0)
    resume_wait: float = option(
        30.0, "--worker-wait of a request whose client already has tokens", low=0.0
    )
    handoff_wait: float = option(
        1.0, "seconds from first token to handoff; then decoding begins without it", low=0.0
    )
    default_timeout: float = option(600.0, "seconds for a request without a deadline", low=0.001)
    max_timeout: float = option(3600.0, "seconds that a request may take", low=0.001)
    queue_tokens: int = option(
        262_144, "tokens of waiting requests; further requests are refused", low=1
    )
    queue_seconds: float = option(
        120.0, "estimated seconds of waiting above which a request is refused", low=0.0
    )
    max_requests: int = option(
        1024, "open requests, three quarters of them running; others are refused", low=1
    )
    max_failures: int = option(8, "legs of one request that may fail", low=0)
    max_deaths: int = option(
        2, "workers that die while serving a request before it is refused", low=1
    )
    poison_seconds: float = option(
        60.0, "seconds for which a request that killed workers is refused", low=0.0
    )
    migration_rate: float = option(
        100.0, "legs a second that may migrate to other workers; others wait", low=0.1
    )
    migration_burst: int = option(256, "legs that may migrate at once", low=1)
    stuck_after: float = option(30.0, "seconds that a client may leave a message unread", low=0.1)
    max_prompt: int = option(MAX_PROMPT_BYTES, "largest prompt", unit="bytes", low=1)
    max_message: int | None = option(
        None,
        "largest message; default: twice --max-prompt (prompt and output so far) and 64 KiB",
        unit="bytes",
        low=1 << 16,
    )
    metrics_port: int | None = option(
        None, "port for Prometheus; default: no metrics", low=1, high=65535
    )
    metrics_host: str = option(
        LOOPBACK,
        "address of the metrics: plain HTTP without a token on 127.0.0.1, else secured as others",
        metavar="HOST",
    )
    grace: float = option(10.0, "seconds that running requests get after SIGTERM", low=0.0)
    log_level: str = option("info", "how much to log", choices=LEVELS)
    log_format: str = option(
        "text", "json: one object a line, with date and request id", choices=FORMATS
    )
    access_log: bool = option(False, "log a line at the end of each request, without its text")

    def __post_init__(self) -> None:
        check(self)
        for origin in self.cors_origin:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise Rejected(
                    "cors_origin", f"must be like https://host or http://host:port, got {origin!r}"
                )
        for name, addresses in (("prefill", self.prefill), ("decode", self.decode)):
            for address in addresses:
                if "," in address:
                    raise Rejected(
                        name, f"{address!r} has a comma: repeat --{name} for each worker"
                    )
        if self.http_port is None:
            check_unset(self, OF_HTTP, "needs the HTTP API: give --http-port")
        if not (self.decode or self.workers_file or self.announce):
            raise Rejected(
                "decode",
                "name a decode worker, a --workers-file that does, or let workers --announce"
                " themselves",
            )

    @property
    def timeout(self) -> float:
        """Seconds for a request whose client sets no deadline."""
        return min(self.default_timeout, self.max_timeout)

    @property
    def message_bytes(self) -> int:
        """The largest message: a prompt, and as many bytes of output so far."""
        return self.max_message or 2 * self.max_prompt + (64 << 10)

    @property
    def model_name(self) -> str:
        """What requests call the model and workers must call it."""
        return self.served_model or Path(self.model).resolve().name


def out_of_time(when: str) -> DeadlineExceeded:
    """The error of a request whose time limit passed ``when``; it names what sets the limit."""
    return DeadlineExceeded(
        f"the time limit passed {when}: it is the router's --default-timeout, or a gRPC call's own"
        " of at most --max-timeout"
    )
