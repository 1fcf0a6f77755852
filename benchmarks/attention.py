"""Attention of one layer in the Qwen3-0.6B shape: the native kernel against SDPA, in turns.

    python -m benchmarks.attention [--rounds 5] [--threads 1] [--dtype bfloat16]

Times are processor seconds with one thread, which other programs on the machine disturb less than
wall time, and wall time with more. The indices of a step are measured apart from its layers. Each
round asks both backends; the ratio is that of a round's medians.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from statistics import median

import torch

from kvrelay.engine.attention.backend import AttentionBackend
from kvrelay.engine.attention.batch import pack
from kvrelay.engine.attention.native.backend import NativeBackend
from kvrelay.engine.attention.pool import DTYPES, KVPool, PoolShape
from kvrelay.engine.attention.sdpa import SdpaBackend
from kvrelay.engine.core.updates import Work

KV_HEADS, GROUP, WIDTH, BLOCK = 8, 2, 128, 16
LAYERS = 2
# Name -> start and count of every work of the step.
STEPS = {
    "decode 1 x 128": [(127, 1)],
    "decode 1 x 1,024": [(1023, 1)],
    "decode 1 x 4,096": [(4095, 1)],
    "decode 16 x 192": [(191, 1)] * 16,
    "decode 16 x 1,024": [(1023, 1)] * 16,
    "prefill 512": [(0, 512)],
    "prefill 512 after 512": [(512, 512)],
    "prefill 1,024": [(0, 1024)],
}


def timed(run: Callable[[], object], least: float, clock: Callable[[], float]) -> float:
    """The median of calls that take ``least`` seconds together, in microseconds."""
    run()
    taken: list[float] = []
    while sum(taken) < least or len(taken) < 3:
        before = clock()
        run()
        taken.append(clock() - before)
    return median(taken) * 1e6


def measure(name: str, dtype: str, rounds: int, clock: Callable[[], float]) -> None:
    """Print one line: the medians of both backends, and the spread of their ratio."""
    spans = STEPS[name]
    needed = [-(-(start + count) // BLOCK) for start, count in spans]
    pool = KVPool(PoolShape(sum(needed), LAYERS, BLOCK, KV_HEADS, WIDTH, dtype))
    pool.tensor.normal_()
    order = torch.randperm(sum(needed)).tolist()
    works = []
    for (start, count), blocks in zip(spans, needed, strict=True):
        table, order = order[:blocks], order[blocks:]
        works.append(Work([0] * (start + count), start, count, table, start + count, None))
    rows = sum(count for _, count in spans)
    query = torch.randn(rows, KV_HEADS * GROUP, WIDTH).to(DTYPES[dtype])
    key, value = torch.randn(2, rows, KV_HEADS, WIDTH).to(DTYPES[dtype])
    batch = pack(works, pool.shape.block_size)
    backends: list[AttentionBackend] = [NativeBackend(pool), SdpaBackend(pool)]
    layers: list[list[float]] = [[], []]
    indices: list[list[float]] = [[], []]
    for _ in range(rounds):
        for number, backend in enumerate(backends):
            step = backend.step(batch)
            layers[number].append(
                timed(lambda s=step: s.attend(1, query, key, value, None), 0.3, clock)  # type: ignore[misc]
            )
            indices[number].append(timed(lambda b=backend: b.step(batch), 0.05, clock))  # type: ignore[misc]
    ratios = sorted(sdpa / native for native, sdpa in zip(*layers, strict=True))
    print(
        f"{name:22} native {median(layers[0]):9,.0f} us, SDPA {median(layers[1]):9,.0f} us,"
        f" {median(ratios):5.2f} x ({ratios[0]:.2f} to {ratios[-1]:.2f});"
        f" indices {median(indices[0]):5,.0f} and {median(indices[1]):6,.0f} us",
        flush=True,
    )


def overhead(clock: Callable[[], float]) -> None:
    """What a call costs beyond its work: one row of one key, one head."""
    pool = KVPool(PoolShape(1, 1, 1, 1, 16, "float32"))
    step = NativeBackend(pool).step(pack([Work([0], 0, 1, [0], 1, None)], pool.shape.block_size))
    query, key, value = torch.randn(3, 1, 1, 16)

    def calls() -> None:
        for _ in range(1000):
            step.attend(0, query, key, value, None)

    print(f"a call of the native kernel with one key: {timed(calls, 0.3, clock) / 1000:.2f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--steps", help="only those whose name begins so", default="")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    load = ", ".join(f"{part:.1f}" for part in os.getloadavg())
    print(f"{options.dtype}, {options.threads} threads, load {load}")
    with torch.inference_mode():
        overhead(clock)
        for name in STEPS:
            if name.startswith(options.steps):
                measure(name, options.dtype, options.rounds, clock)


if __name__ == "__main__":
    main()
