"""What a GPU computes, beside what is known: for ``kvrelay doctor --device``.

Each check is small and says what it saw. Some are promises (the kernels compute attention, a graph
computes what launches compute, blocks come back as they went), and one that fails names the step
down. Whether a row has the same bits beside other rows is no promise on a GPU: it is reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kvrelay.engine.attention.batch import pack
from kvrelay.engine.attention.pool import KVPool, PoolShape
from kvrelay.engine.attention.sdpa import SdpaBackend
from kvrelay.engine.attention.triton_backend import NoTriton, TritonBackend
from kvrelay.engine.core.updates import Work
from kvrelay.engine.graphs import CudaGraphs, GraphLimits, GraphRuntime
from kvrelay.engine.model.loading import LoadedModel
from kvrelay.engine.runner import GraphOptions, Runner
from kvrelay.errors import KvrelayError
from kvrelay.sampling import Sampling

SIZE, BLOCKS = 16, 24
_LIMITS = {"float32": 1e-4, "bfloat16": 0.03}  # of attention, numbers of about 1
_ROUNDS = 8
_BYTES = 64 << 20  # of one copy that is timed
_GREEDY = Sampling(temperature=0.0)
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class DeviceCheck:
    """One check: whether it holds, ``None`` if it is only a fact, and what was seen."""

    name: str
    holds: bool | None
    found: str


@dataclass(frozen=True, slots=True)
class SelfTest:
    """All checks, and the best way of computing that they allow."""

    checks: tuple[DeviceCheck, ...]

    @property
    def way(self) -> str:
        """``graphs``, ``triton`` (kernel by kernel) or ``sdpa``."""
        failed = {check.name for check in self.checks if check.holds is False}
        if failed & {"triton", "attention float32", "attention bfloat16", "model"}:
            return "sdpa"
        return "triton" if "graphs" in failed else "graphs"

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is not a better one."""
        return tuple(f"{c.name}: {c.found}" for c in self.checks if c.holds is False)


def self_test(
    model: LoadedModel,
    runtime: Callable[[], GraphRuntime] = CudaGraphs,
    clock: Clock = time.perf_counter,
) -> SelfTest:
    """DeviceCheck the device of a small loaded model whose forward pass is ours."""
    checks: list[DeviceCheck] = []
    with torch.inference_mode():
        for check in _checks(model, runtime, clock):
            checks.append(check)
            if check.name == "triton" and not check.holds:
                break
    return SelfTest(tuple(checks))


def _checks(
    model: LoadedModel, runtime: Callable[[], GraphRuntime], clock: Clock
) -> Iterator[DeviceCheck]:
    try:
        TritonBackend(KVPool(PoolShape(1, 1, SIZE, 1, 16, "float32"), model.device))
    except NoTriton as error:
        yield DeviceCheck("triton", False, str(error))
        return
    yield DeviceCheck("triton", True, "its kernels can be launched")
    for dtype in _LIMITS:
        yield _attempt(f"attention {dtype}", lambda kind=dtype: _attention(model.device, kind))  # type: ignore[misc]
    launched = Runner(model, BLOCKS, SIZE, "triton")
    yield _attempt("model", lambda: _model(model, launched))
    yield _attempt("rows", lambda: _rows(launched))
    yield _attempt("graphs", lambda: _graphs(model, launched, runtime))
    yield _attempt("blocks", lambda: _blocks(launched))
    yield _attempt("copies", lambda: _bandwidths(model.device, clock))


def _attempt(name: str, check: Callable[[], tuple[bool | None, str]]) -> DeviceCheck:
    """A check that raises does not hold."""
    try:
        return DeviceCheck(name, *check())
    except (RuntimeError, KvrelayError) as error:  # torch's and Triton's errors are of the first
        return DeviceCheck(
            name, False, f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
        )


def _attention(device: torch.device, dtype: str) -> tuple[bool, str]:
    """Prefill, a chunk and decode rows over scattered blocks, beside SDPA."""
    shape = PoolShape(BLOCKS, 2, SIZE, 2, 64, dtype)
    pools = [KVPool(shape, device) for _ in range(2)]
    backends = TritonBackend(pools[0]), SdpaBackend(pools[1])
    generator = torch.Generator().manual_seed(1)
    tables = ([3, 9, 1, 22], [4, 8, 2, 17], [6, 0, 12, 5])
    worst = 0.0
    for spans in (((0, 40), (0, 17), (0, 1)), ((40, 9), (17, 1), (1, 1))):
        works = [
            Work([0] * (start + count), start, count, table, 1, None)
            for table, (start, count) in zip(tables, spans, strict=True)
        ]
        batch = pack(works, SIZE)
        query = torch.randn(len(batch.tokens), 4, 64, generator=generator)
        key, value = torch.randn(2, len(batch.tokens), 2, 64, generator=generator)
        given = [each.to(device, pools[0].tensor.dtype) for each in (query, key, value)]
        steps = [backend.step(batch) for backend in backends]
        for layer in range(shape.num_layers):
            got, want = (step.attend(layer, given[0], given[1], given[2], None) for step in steps)
            worst = max(worst, (got.float() - want.float()).abs().max().item())
    if not torch.equal(pools[0].tensor, pools[1].tensor):
        return False, "K and V were stored elsewhere, or other ones"
    return worst < _LIMITS[dtype], f"differs from SDPA by {worst:.1e} at most"


def _model(model: LoadedModel, launched: Runner) -> tuple[bool, str]:
    """The tokens of the kernels' runner and of SDPA's: a wrong kernel changes logits by far."""
    other = Runner(model, BLOCKS, SIZE, "sdpa")
    work = Work(_tokens(model, 50), 0, 50, [7, 1, 19, 4], 50, _GREEDY)
    mine, theirs = (runner.compute([work]).logits.float() for runner in (launched, other))
    share = ((mine - theirs).abs().max() / theirs.abs().max()).item()
    return share < 0.05, f"logits differ from SDPA's by {share:.1e} of the largest"


def _rows(launched: Runner) -> tuple[None, str]:
    """Whether the logits of a decode row depend on the number of rows beside it."""
    alone = _decode(launched, 1)[:1]
    alike = [str(rows) for rows in (2, 5, 8, 16) if torch.equal(_decode(launched, rows)[:1], alone)]
    return None, f"equal to the bit alone and among {', '.join(alike) or 'no'} rows, of 2, 5, 8, 16"


def _graphs(
    model: LoadedModel, launched: Runner, runtime: Callable[[], GraphRuntime]
) -> tuple[bool, str]:
    """A padded graph beside launches of as many rows, and what it leaves alone."""
    options = GraphOptions(GraphLimits(8, BLOCKS * SIZE), runtime)
    replayed = Runner(model, BLOCKS, SIZE, "triton", graphs=options)
    if replayed.graphs_reason:
        return False, replayed.graphs_reason
    padded, exact = _decode(replayed, 5), _decode(launched, 5)
    whole = torch.equal(_decode(replayed, 8), _decode(launched, 8))
    if not whole:
        return False, "8 rows have other bits than the same launches"
    share = ((padded - exact).abs().max() / exact.abs().max()).item()
    same = "the same bits" if share == 0 else f"within {share:.1e}"
    untouched = not replayed.pool.tensor[8:].any()
    if not untouched:
        return False, "padding was written to blocks of no row"
    return share < 0.05, f"8 rows: the same bits; 5 rows padded to 8: {same}"


def _decode(runner: Runner, rows: int) -> torch.Tensor:
    """Logits of one decode step of rows, each of its own block, after the same prompts."""
    runner.pool.tensor.zero_()
    prompts = [[(7 * row + i) % 100 for i in range(6)] for row in range(rows)]
    first = [Work(p, 0, 6, [row], 6, _GREEDY) for row, p in enumerate(prompts)]
    for work in first:
        runner.compute([work])
    works = [Work([*p, 3], 6, 1, [row], 6, _GREEDY) for row, p in enumerate(prompts)]
    computed = runner.compute(works)
    order = torch.tensor(computed.batch.samples, device=computed.logits.device).argsort()
    return computed.logits.float()[order].clone()


def _blocks(launched: Runner) -> tuple[bool, str]:
    """Blocks to host memory and back, beside a step that computes others."""
    pool = launched.pool
    pool.tensor.zero_()
    work = Work([1] * 64, 0, 64, [0, 1, 2, 3], 64, _GREEDY)
    launched.compute([work])
    pool.computed()
    kept = bytes(pool.read(1, SIZE))
    numbers = range(BLOCKS - _ROUNDS, BLOCKS)
    work = Work([1] * 49, 48, 1, [0, 1, 2, 3], 49, _GREEDY)
    for number in numbers:
        launched.compute([work])
        pool.computed()
        pool.write(number, SIZE, memoryview(kept))
    alike = [number for number in numbers if bytes(pool.read(number, SIZE)) == kept]
    return len(alike) == _ROUNDS and any(kept), f"{len(alike)} of {_ROUNDS} blocks came back"


def _bandwidths(device: torch.device, clock: Clock) -> tuple[None, str]:
    """Copies out of and into pinned memory."""
    if device.type != "cuda":
        return None, f"not measured on {device}"
    host = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_BYTES, dtype=torch.uint8, device=device)
    rates = []
    for target, source in ((there, host), (host, there)):
        target.copy_(source)
        torch.cuda.synchronize()
        begun = clock()
        for _ in range(_ROUNDS):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(_ROUNDS * _BYTES / (clock() - begun) / 1e9)
    return None, f"{rates[0]:.1f} GB/s to the device, {rates[1]:.1f} GB/s back"


def _tokens(model: LoadedModel, count: int) -> list[int]:
    return [(7 * i * i + 3 * i) % model.info.vocab_size for i in range(count)]
