"""``kvrelay load``: sends requests to a server, measures the answers and checks every token."""

from __future__ import annotations

import asyncio
import csv
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

from kvrelay.cli.load.output import as_json, claim, given, write
from kvrelay.cli.load.screen import LoadScreen, closing_lines
from kvrelay.cli.router_options import RouterOptions
from kvrelay.cli.screen import print_out
from kvrelay.config.reader import load, option
from kvrelay.errors import KvrelayError, Rejected
from kvrelay.installation import require
from kvrelay.load import report
from kvrelay.load.check import AnswerCheck
from kvrelay.load.draws import LENGTHS, Arrivals, LengthDraw
from kvrelay.load.driver import LoadLevel, in_background
from kvrelay.load.figures import LevelFigures, Objectives
from kvrelay.load.grpc_door import GrpcDoor
from kvrelay.load.http_door import DoorOptions, HttpDoor
from kvrelay.load.openai_server import Json
from kvrelay.load.request import LoadDoor
from kvrelay.load.run import LoadPlan, LoadRun
from kvrelay.load.workload import Workload, check_trace, read_tenants
from kvrelay.process.sigint import INTERRUPTED_STATUS
from kvrelay.rpc.security.tls import https_client
from kvrelay.version import VERSION

FIRST_RUN = "first-run"
TRANSFORMERS = "transformers:"
DESCRIPTION = """\
Sends requests to a server, measures its answers, and checks every token. The
server is an OpenAI URL, or kvrelay's router by gRPC (--router, --endpoints).

--concurrency is a closed loop: so many users, each asks again when it has its
answer. --rate is an open loop: requests are due at random moments, whether
earlier ones were answered or not. --trace replays a file. Several numbers,
as in --rate 2,4,8, are a sweep. Ctrl-C ends with the report so far. Status 1:
a token or a usage is wrong, or nothing was answered."""
EPILOG = f"""\
LENGTH is {LENGTHS}.

examples:
  kvrelay load --concurrency 1,4,16 --seconds 20 --check first-run
  kvrelay load http://127.0.0.1:8000 --rate 2,4,8 --slo ttft=0.5,itl=0.05
  kvrelay load --overload 0.5,1,2,3,5 --concurrency 8 --timeout 20
  kvrelay load --concurrency 8 --turns 4 --think 1 --prefix 256 --html load.html
  kvrelay load --trace trace.jsonl --speed 20 --trace-block 32 --seconds 60
  kvrelay load http://127.0.0.1:8000 --requests 64 --check transformers:MODEL
"""
ARRIVALS, LENGTH, CLIENTS, REPORT = "arrivals", "lengths", "clients", "report"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig(RouterOptions):
    """Where to send what, when, and what to make of the answers."""

    url: str | None = option(
        None,
        "an OpenAI server; without it a kvrelay router by gRPC",
        metavar="URL",
        positional=True,
    )
    model: str = option("", "the model's name; default the server's first", environ=False)
    chat: bool = option(False, "send chats; prompts are then words")
    plain: bool = option(False, "only fields of OpenAI's own API; prompts are then words")
    check: str | None = option(
        None,
        "compare every answer: with the first-run of its request, with another server, or with"
        " transformers:PATH",
        metavar="first-run|URL|...",
    )
    check_concurrency: int = option(1, "answers to ask of the reference at once", low=1, high=1024)
    timeout: float = option(600.0, "most time of an answer", unit="seconds", low=0.001)
    seed: int = option(0, "the same seed sends the same requests", low=0)
    api_key: str | None = option(None, "the bearer token for an OpenAI URL", secret=True)

    concurrency: tuple[int, ...] = option(
        (), "closed loop with N users; default 8", low=1, high=65536, group=ARRIVALS
    )
    rate: tuple[float, ...] = option(
        (), "open loop, conversations a second", low=0.001, high=1e6, group=ARRIVALS
    )
    burstiness: float | None = option(
        None,
        "shape of the gamma distribution of gaps: 1 is Poisson (the default), less is bursty",
        low=0.01,
        high=1000,
        group=ARRIVALS,
    )
    constant: bool = option(False, "constant gaps", group=ARRIVALS)
    ramp_from: float | None = option(
        None, "let the rate change linearly from X during --seconds", low=0.001, group=ARRIVALS
    )
    overload: tuple[float, ...] = option(
        (), "rates as multiples of what --concurrency achieved", low=0.001, group=ARRIVALS
    )
    trace: str | None = option(
        None, "replay a trace in the format of Mooncake", metavar="FILE", group=ARRIVALS
    )
    speed: tuple[float, ...] = option(
        (), "times as fast as the trace; default 1", low=1e-6, group=ARRIVALS
    )
    seconds: float | None = option(
        None, "of each level; default 30 without --requests", low=0.1, group=ARRIVALS
    )
    requests: int | None = option(None, "most requests of each level", low=1, group=ARRIVALS)
    warm_up: int = option(0, "requests to send first, not measured", low=0, group=ARRIVALS)
    most_open: int = option(4096, "requests at once in an open loop", low=1, group=ARRIVALS)

    prompt: str = option("128", "tokens of a prompt", metavar="LENGTH", group=LENGTH)
    output: str = option("64", "max_tokens of an answer", metavar="LENGTH", group=LENGTH)
    prefix: int = option(0, "tokens before each prompt that others share", low=0, group=LENGTH)
    prefixes: int = option(1, "different ones of these", low=1, group=LENGTH)
    turns: str = option("1", "questions of a conversation", metavar="LENGTH", group=LENGTH)
    think: float = option(
        0.0, "mean time between answer and next question", unit="seconds", low=0, group=LENGTH
    )
    distinct: int = option(0, "repeat the conversations after N; 0: never", low=0, group=LENGTH)
    ignore_eos: bool = option(True, "let answers end at the end-of-sequence token", group=LENGTH)
    temperature: float = option(0.0, "0 takes the likeliest token", low=0, group=LENGTH)
    vocabulary: int = option(256, "token ids of prompts are below N", low=2, group=LENGTH)
    trace_block: int = option(
        512, "tokens for a block of the trace's 512; lengths shrink with it", low=1, group=LENGTH
    )

    tenants: str | None = option(
        None, "TOML: a table with share and token of each tenant", metavar="FILE", group=CLIENTS
    )
    abort: float = option(
        0.0, "share of clients that leave before the end", low=0, high=1, group=CLIENTS
    )
    slow: float = option(0.0, "share of clients that read slowly", low=0, high=1, group=CLIENTS)
    slow_rate: float = option(10.0, "tokens a second that these read", low=0.01, group=CLIENTS)

    slo: str | None = option(
        None,
        "what counts as goodput: ttft=0.5,itl=0.05,e2e=10 in seconds, from when it was due",
        metavar="LIMITS",
        group=REPORT,
    )
    json: str | None = option(None, "write all figures", metavar="FILE", group=REPORT)
    csv: str | None = option(None, "write one row a request", metavar="FILE", group=REPORT)
    html: str | None = option(None, "write a page with plots", metavar="FILE", group=REPORT)
    progress: bool = option(True, "print no live progress", group=REPORT)

    def __post_init__(self) -> None:
        RouterOptions.__post_init__(self)
        if self.url is not None and (self.router or self.endpoints):
            raise Rejected("router", "give either a URL, or --router or --endpoints")
        if sum(map(bool, (self.rate, self.overload, self.trace))) > 1:
            raise Rejected("rate", "give one of --rate, --overload and --trace")
        if self.concurrency and (self.rate or self.trace):
            raise Rejected("concurrency", "is a closed loop; --rate and --trace are open ones")
        if self.overload and len(self.concurrency) > 1:
            raise Rejected("concurrency", "--overload measures the capacity with one number")
        if self.constant and self.burstiness is not None:
            raise Rejected("burstiness", "constant gaps have none")
        if not self.rate and (self.constant or self.burstiness or self.ramp_from):
            raise Rejected("rate", "--constant, --burstiness and --ramp-from need --rate")
        if self.ramp_from is not None and self.seconds is None:
            raise Rejected("seconds", "missing: --ramp-from needs the duration")
        if self.trace and (self.turns != "1" or self.prefix):
            raise Rejected("trace", "has its own prompts: leave out --turns and --prefix")
        if self.speed and not self.trace:
            raise Rejected("speed", "needs --trace")
        reference = self.check or ""
        if reference.startswith(TRANSFORMERS) and (self.text() or self.temperature):
            raise Rejected("check", "transformers needs token ids as prompts and --temperature 0")
        known = (FIRST_RUN, TRANSFORMERS, "http://", "https://")
        if self.check is not None and not reference.startswith(known):
            raise Rejected("check", f"{reference!r}: wanted is first-run, URL or transformers:PATH")

    def text(self) -> bool:
        """Whether prompts are words."""
        return self.chat or (self.plain and self.url is not None)

    def levels(self) -> list[LoadLevel]:
        """Of a sweep, in order."""
        common = LoadLevel(
            label="",
            seconds=self.seconds if self.requests or self.trace else self.seconds or 30.0,
            requests=self.requests,
            most_open=self.most_open,
        )
        if self.trace is not None:
            return [
                replace(common, label=f"{x:g} x the trace", speed=x) for x in self.speed or (1.0,)
            ]
        if self.rate:
            return [
                replace(common, label=f"{x:g}/s", arrivals=self._arrivals(x)) for x in self.rate
            ]
        users = self.concurrency or (8,)
        return [replace(common, label=f"{n} at once", concurrency=n) for n in users]

    def _arrivals(self, rate: float) -> Arrivals:
        return Arrivals(
            rate=rate,
            burstiness=None if self.constant else self.burstiness or 1.0,
            ramp_from=self.ramp_from,
            seconds=self.seconds or 0.0,
        )

    def workload(self) -> Workload:
        return Workload(
            prompt=LengthDraw.parse("prompt", self.prompt),
            output=LengthDraw.parse("output", self.output),
            seed=self.seed,
            vocabulary=self.vocabulary,
            text=self.text(),
            prefix=self.prefix,
            prefixes=self.prefixes,
            turns=LengthDraw.parse("turns", self.turns),
            think=self.think,
            distinct=self.distinct,
            leave=self.abort,
            slow=self.slow,
            slow_rate=self.slow_rate,
            tenants=read_tenants(Path(self.tenants)) if self.tenants else (),
            trace=Path(self.trace) if self.trace else None,
            trace_block=self.trace_block,
        )

    def door_options(self, workload: Workload) -> DoorOptions:
        tokens = {one.name: one.token for one in workload.tenants if one.token is not None}
        if self.api_key:
            tokens.setdefault("", self.api_key)
        return DoorOptions(
            model=self.model,
            temperature=self.temperature,
            chat=self.chat,
            plain=self.plain,
            ignore_eos=self.ignore_eos,
            tokens=tokens,
            https=https_client(self),
        )


def main(argv: Sequence[str]) -> int:
    config = load(LoadConfig, argv, "kvrelay load", DESCRIPTION, epilog=EPILOG)
    if (config.check or "").startswith(TRANSFORMERS):
        require("worker")
    workload = config.workload()
    objectives = Objectives.parse(config.slo)
    plan = LoadPlan(
        workload=workload,
        levels=config.levels(),
        objectives=objectives,
        timeout=config.timeout,
        warm_up=config.warm_up,
        factors=config.overload,
        ids_sent=not config.text(),
        check_concurrency=config.check_concurrency,
    )
    address = config.address() if config.url is None else ""
    screen = LoadScreen(objectives, config.progress)
    check = AnswerCheck(config.check)
    head: Json = {
        "kvrelay": VERSION,
        "target": config.url or f"grpc {address}",
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "options": given(config),
    }
    claim(config.json, config.html, config.csv)
    if config.trace:
        check_trace(Path(config.trace))
    levels: list[LevelFigures] = []
    with ExitStack() as files:
        if config.csv is not None:
            screen.rows = csv.writer(files.enter_context(open(config.csv, "w", newline="")))
            screen.rows.writerow(report.COLUMNS)
        ended = _run(config, plan, address, check, screen, levels)
    if isinstance(ended, Exception) and not levels:
        raise ended
    for line in closing_lines(levels, check):
        print_out(line)
    write(config.json, as_json(report.report_json(head, levels, check)))
    write(config.html, report.html_page(head, levels, check, objectives))
    done = sum(one.ends["done"] + one.ends["left"] for one in levels)
    if isinstance(ended, Exception):
        raise ended  # what was measured before it is written
    interrupted = ended is not None
    if check.failed or (not done and not interrupted):
        return 1
    return INTERRUPTED_STATUS if interrupted else 0


def _run(
    config: LoadConfig,
    plan: LoadPlan,
    address: str,
    check: AnswerCheck,
    screen: LoadScreen,
    levels: list[LevelFigures],
) -> KeyboardInterrupt | Exception | None:
    """Fill ``levels``; what ended the run before its end."""

    async def session() -> None:
        asked = config.door_options(plan.workload)
        async with AsyncExitStack() as doors:
            door = await _door(config.url, address, asked)
            doors.push_async_callback(door.close)
            reference = await _reference(config, door, asked)
            if reference is not None and reference is not door:
                doors.push_async_callback(reference.close)
            await doors.enter_async_context(in_background(screen.watch()))
            await LoadRun(plan, door, check, screen, reference, levels).run()

    try:
        asyncio.run(session())
    except ExceptionGroup as group:  # of a task group
        return group.exceptions[0]
    except (KeyboardInterrupt, KvrelayError, OSError) as error:
        return error
    return None


async def _door(url: str | None, address: str, options: DoorOptions) -> LoadDoor:
    """The way to the server; ``Unavailable`` if nothing listens there."""
    if url is not None:
        return await HttpDoor(url, options).find_model()
    door = GrpcDoor(address, options)
    await door.probe()
    return door


async def _reference(config: LoadConfig, door: LoadDoor, options: DoorOptions) -> LoadDoor | None:
    """What answers once more after the load; ``None`` if tokens are not checked."""
    if config.check is None or config.check == FIRST_RUN:
        return None if config.check is None else door
    if config.check.startswith(TRANSFORMERS):
        module = import_module("kvrelay.load.transformers_reference")
        made: LoadDoor = module.TransformersDoor(
            config.check.removeprefix(TRANSFORMERS), config.ignore_eos
        )
        return made
    other = replace(options, model="", tokens={})
    return await HttpDoor(config.check, other, "check").find_model()
