"""Streams through an HTTP door with a time for every event, and what they cost a process."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from urllib.parse import urlsplit

from benchmarks.cluster.config import RandomPrompts
from benchmarks.cluster.router_cost import PROMPT_TOKENS, processor_seconds
from benchmarks.cluster.streams import Burst, Timeline

NEW_TOKENS = 64
VOCABULARY = 256
BURSTS = 4
EVENT = b"data: {"
DONE = b"data: [DONE]"
Run = Callable[[Sequence[Sequence[int]], int], Burst]


def run_http(url: str, prompts: Sequence[Sequence[int]], count: int) -> Burst:
    """The events of our door that have tokens: the last one has the finish reason only."""
    lines = run_events(url, prompts, count).lines
    return Burst(tuple(replace(line, stamps=line.stamps[:-1]) for line in lines))


def run_events(url: str, prompts: Sequence[Sequence[int]], count: int) -> Burst:
    """Send all prompts at once, each on a connection that is open already; stamp each event."""
    return asyncio.run(_burst(url, prompts, count))


async def _burst(url: str, prompts: Sequence[Sequence[int]], count: int) -> Burst:
    split = urlsplit(url)
    opened = [await asyncio.open_connection(split.hostname, split.port) for _ in prompts]
    pairs = zip(opened, prompts, strict=True)
    lines = await asyncio.gather(*(_one(*ends, prompt, count) for ends, prompt in pairs))
    return Burst(tuple(lines))


async def _one(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    prompt: Sequence[int],
    count: int,
) -> Timeline:
    asked = {"prompt": list(prompt), "max_tokens": count, "temperature": 0, "stream": True}
    body = json.dumps({**asked, "ignore_eos": True, "return_token_ids": True}).encode()
    sent = time.perf_counter()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    stamps: list[float] = []
    before = b""
    while DONE not in before:
        data = await reader.read(1 << 16)
        if not data:
            raise SystemExit(f"the stream ended early: {before[-500:]!r}")
        stamps += [time.perf_counter()] * data.count(EVENT)
        before = before[-len(DONE) :] + data
    writer.close()
    return Timeline(sent, tuple(stamps), (), ())


def first(burst: Burst) -> float:
    """The median time to the first token, in seconds."""
    return median(line.first for line in burst.lines)


def token(burst: Burst) -> float:
    """The median time of a later token."""
    return median((line.whole - line.first) / max(1, len(line.gaps)) for line in burst.lines)


def spent(run: Run, prompts: RandomPrompts, streams: int, count: int, pid: int) -> float:
    """Milliseconds a stream."""
    before = processor_seconds(pid)
    for _ in range(BURSTS):
        run(prompts.many(streams, PROMPT_TOKENS), count)
    return (processor_seconds(pid) - before) * 1e3 / (BURSTS * streams)
