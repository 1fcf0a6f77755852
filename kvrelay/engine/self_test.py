"""Checks of what a GPU computes, for ``kvrelay doctor --device`` and the start of a worker.

Each check is small and reports what it found. Some must hold (the kernels compute attention, a
graph computes what separate launches compute, copied blocks are unchanged); a failure excludes a
backend or graphs. Others only report, such as whether the bits of a row depend on other rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from kvrelay.engine.attention.batch import pack
from kvrelay.engine.attention.choice import choose_attention, least_block_size
from kvrelay.engine.attention.pool import KVPool, PoolShape
from kvrelay.engine.attention.sdpa import SdpaBackend
from kvrelay.engine.attention.triton_backend import NoTriton, TritonBackend
from kvrelay.engine.core.updates import Work
from kvrelay.engine.cuda.arguments import SEGMENT
from kvrelay.engine.cuda.round_trip import RoundTrip
from kvrelay.engine.graphs import CudaGraphs, GraphLimits, GraphRuntime
from kvrelay.engine.model.loading import LoadedModel
from kvrelay.engine.runner import GraphOptions, Runner
from kvrelay.engine.stepping import DeviceLost
from kvrelay.errors import KvrelayError, Rejected
from kvrelay.sampling import Sampling

SIZE, BLOCKS = 16, 24
ALTERNATIVES = ("varlen", "flash_attn")
"""Backends to use, in this order, if Triton's kernels fail a check."""

ROWS = (2, 5, 8, 16)
"""Numbers of decode rows among which a row is compared with the same row alone."""

_LIMITS = {"float32": 1e-4, "float16": 0.01, "bfloat16": 0.03}  # of attention, of a row's largest
_ROUNDS = 8
_BYTES = 64 << 20  # of one copy that is timed
_GREEDY = Sampling(temperature=0.0)
_PROMPT = 50  # tokens
_LONG_CONTEXT = 2 * SEGMENT + 16  # positions: three segments
_DECODED = SEGMENT + 188  # positions: two segments
# Of torch and of our launches, and of an attention library whose arguments have changed.
_ERRORS = (
    RuntimeError,
    KvrelayError,
    OSError,
    AssertionError,
    ImportError,
    TypeError,
    ValueError,
    IndexError,
)
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class DeviceCheck:
    """One check: whether it holds (``None``: it only reports), and what it found."""

    name: str
    holds: bool | None
    found: str


@dataclass(frozen=True, slots=True)
class SelfTest:
    """All checks, and the best way of computing for which they hold."""

    checks: tuple[DeviceCheck, ...]

    @property
    def way(self) -> str:
        """``graphs``, ``triton`` (kernel by kernel), ``varlen``, ``flash_attn`` or ``sdpa``."""
        failed = {check.name for check in self.checks if check.holds is False}
        if not failed & {"triton", "attention float32", "attention bfloat16", "model"}:
            return "triton" if "graphs" in failed else "graphs"
        holds = {check.name for check in self.checks if check.holds}
        return next((name for name in ALTERNATIVES if name in holds), "sdpa")

    @property
    def reasons(self) -> tuple[str, ...]:
        """Each failed check, and why no better library can be used."""
        better = ALTERNATIVES if self.way == "sdpa" else ALTERNATIVES[: self._place]
        return tuple(
            f"{check.name}: {check.found}"
            for check in self.checks
            if check.holds is False or check.name in better
        )

    @property
    def _place(self) -> int:
        return ALTERNATIVES.index(self.way) if self.way in ALTERNATIVES else 0


def self_test(
    model: LoadedModel,
    runtime: Callable[[], GraphRuntime] = CudaGraphs,
    clock: Clock = time.perf_counter,
) -> SelfTest:
    """Check the device of a small loaded model whose forward pass is ours."""
    with torch.inference_mode():
        return SelfTest(tuple(_until_lost(_checks(model, runtime, clock))))


def _until_lost(checks: Iterator[DeviceCheck]) -> Iterator[DeviceCheck]:
    try:
        yield from checks
    except DeviceLost as error:
        yield DeviceCheck("model", False, f"nothing can be computed any more: {error}")
    except _ERRORS as error:  # between two checks: no memory for a pool
        yield DeviceCheck("model", False, _words(error))


def _checks(
    model: LoadedModel, runtime: Callable[[], GraphRuntime], clock: Clock
) -> Iterator[DeviceCheck]:
    device = model.device
    try:
        TritonBackend(KVPool(PoolShape(1, 1, SIZE, 1, 16, "float32"), device))
    except NoTriton as error:
        yield DeviceCheck("triton", False, str(error))
    else:
        yield DeviceCheck("triton", True, "its kernels can be launched")
        yield from _kernels(model, runtime, clock)
    for name in ALTERNATIVES:
        yield attempt(device, name, lambda kind=name: _alternative(device, kind))  # type: ignore[misc]


def _kernels(
    model: LoadedModel, runtime: Callable[[], GraphRuntime], clock: Clock
) -> Iterator[DeviceCheck]:
    """Triton's kernels, graphs of them, and copies."""
    device = model.device
    for dtype in ("float32", "bfloat16"):
        shape = PoolShape(BLOCKS, 2, SIZE, 2, 64, dtype)
        yield attempt(
            device,
            f"attention {dtype}",
            lambda shape=shape: same_as_sdpa(device, shape, 4, "triton"),  # type: ignore[misc]
        )
    launched = Runner(model, BLOCKS, SIZE, "triton")
    yield attempt(device, "model", lambda: same_model(model, launched))
    yield attempt(device, "rows", lambda: _rows(model, launched))
    yield attempt(device, "graphs", lambda: same_graphs(model, launched, runtime))
    yield attempt(device, "blocks", lambda: same_blocks(launched))
    yield attempt(device, "copies", lambda: _bandwidths(device, clock))


def attempt(
    device: torch.device, name: str, check: Callable[[], tuple[bool | None, str]]
) -> DeviceCheck:
    """Run a check; one that raises does not hold. ``DeviceLost`` if the device then fails too."""
    try:
        return DeviceCheck(name, *check())
    except Rejected as error:  # before anything was computed
        return DeviceCheck(name, False, error.message)
    except _ERRORS as error:
        found = _words(error)
        try:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except RuntimeError as lost:
            raise DeviceLost(f"{name}: {found}") from lost
        return DeviceCheck(name, False, found)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()):.200}"


def _alternative(device: torch.device, name: str) -> tuple[bool | None, str]:
    """Attention of a library; one that cannot be used only reports why."""
    shape = PoolShape(BLOCKS, 2, least_block_size(name), 2, 64, "bfloat16")
    try:
        return same_as_sdpa(device, shape, 4, name)
    except Rejected as error:
        return None, error.message.removeprefix(f"{name} ")


def same_as_sdpa(
    device: torch.device, shape: PoolShape, heads: int, backend: str
) -> tuple[bool, str]:
    """Prefill, chunks and decode rows over scattered blocks, with NaN in every unused position.

    One context has three segments of keys, whose sums are merged. Results must equal SDPA's up to
    rounding, and stored K and V to the bit.
    """
    size, worst = shape.block_size, 0.0
    kept = -(_LONG_CONTEXT // -size)
    shape = replace(shape, num_blocks=BLOCKS + kept + 3)
    pools = [KVPool(shape, device) for _ in range(2)]
    pools[0].tensor.fill_(torch.nan)
    generator = torch.Generator().manual_seed(1)
    last = list(range(BLOCKS, BLOCKS + kept + 2))[::-1]
    context = torch.randn(kept, *pools[0].tensor.shape[1:], generator=generator)
    for pool in pools:
        pool.tensor[last[:kept]] = context.to(device, pool.tensor.dtype)
    backends = choose_attention(backend, pools[0]).backend, SdpaBackend(pools[1])
    tables = ([3, 9, 1, 22], [4, 8, 2, 17], [6, 0, 12, 5], last)
    long, end, chunk = 5 * size // 2, kept * size, min(size, 9)
    for spans in (
        ((0, long), (0, size + 1), (0, 1), (end, 1)),
        ((long, chunk), (size + 1, 1), (1, 1), (end + 1, chunk)),
    ):
        works = [
            Work([0] * (start + count), start, count, table, 1, None)
            for table, (start, count) in zip(tables, spans, strict=True)
        ]
        batch = pack(works, size)
        rows, width, kv_heads = len(batch.tokens), shape.head_dim, shape.num_kv_heads
        query = torch.randn(rows, heads, width, generator=generator)
        key, value = torch.randn(2, rows, kv_heads, width, generator=generator)
        given = [each.to(device, pools[0].tensor.dtype) for each in (query, key, value)]
        steps = [backend.step(batch) for backend in backends]
        for layer in range(shape.num_layers):
            got, want = (step.attend(layer, given[0], given[1], given[2], None) for step in steps)
            scale = want.float().abs().amax((1, 2))  # of each row: many keys average to little
            error = ((got.float() - want.float()).abs().amax((1, 2)) / scale).max().item()
            worst = error if error > worst or error != error else worst
    mine, theirs = (pool.tensor for pool in pools)
    written = ~mine.isnan()
    if not torch.equal(mine[written], theirs[written]) or theirs[~written].any():
        return False, "wrong K and V were stored, or in the wrong place"
    return worst < _LIMITS[
        shape.dtype
    ], f"differs from SDPA by {worst:.1e} of a row's largest at most"


def runner_for_tests(model: LoadedModel, backend: str, rows: int = BLOCKS) -> Runner:
    """A runner over ``rows`` blocks of the smallest size that the backend supports."""
    return Runner(model, rows, max(SIZE, least_block_size(backend)), backend)


def same_model(model: LoadedModel, launched: Runner) -> tuple[bool, str]:
    """The model's logits must differ from SDPA's by at most 5 % of the largest one."""
    other = Runner(model, BLOCKS, SIZE, "sdpa")
    mine, theirs = (_last_logits(model, runner, (_PROMPT,)) for runner in (launched, other))
    share = ((mine - theirs).abs().max() / theirs.abs().max()).item()
    return share < 0.05, f"logits differ from SDPA's by {share:.1e} of the largest"


def _last_logits(model: LoadedModel, runner: Runner, cuts: Sequence[int]) -> torch.Tensor:
    """The logits after a prompt whose chunks end at ``cuts``."""
    tokens, start = _tokens(model, _PROMPT), 0
    count = -(_PROMPT // -runner.pool.shape.block_size)
    table = [number for number in (7, 1, 19, 4) if number < runner.pool.shape.num_blocks][:count]
    logits = torch.empty(0)
    for end in cuts:
        logits = runner.compute([Work(tokens, start, end - start, table, _PROMPT, _GREEDY)]).logits
        start = end
    return logits.float()[0].clone()


def same_cuts(model: LoadedModel, runner: Runner) -> bool:
    """Whether a prompt's logits have the same bits wherever it is cut into chunks."""
    whole = _last_logits(model, runner, (_PROMPT,))
    cuts = ((7, _PROMPT), (33, _PROMPT - 1, _PROMPT))
    return all(torch.equal(_last_logits(model, runner, each), whole) for each in cuts)


def same_rows(runner: Runner, counts: Sequence[int]) -> list[int]:
    """The numbers of decode rows, of ``counts``, among which a row has the same bits as alone."""
    alone = _decode(runner, 1)[:1]
    return [rows for rows in counts if torch.equal(_decode(runner, rows)[:1], alone)]


def _rows(model: LoadedModel, launched: Runner) -> tuple[None, str]:
    alike = ", ".join(map(str, same_rows(launched, ROWS))) or "no"
    cuts = "equal" if same_cuts(model, launched) else "different"
    among = f"equal to the bit alone and among {alike} rows, of {', '.join(map(str, ROWS))}"
    return None, f"{among}; {cuts} where prompts are cut elsewhere"


def same_graphs(
    model: LoadedModel, launched: Runner, runtime: Callable[[], GraphRuntime]
) -> tuple[bool, str]:
    """Graphs must compute what launches do, and padding must not write to the pool."""
    options = GraphOptions(GraphLimits(16, 2 * SEGMENT), runtime)
    replayed = Runner(model, BLOCKS, SIZE, "triton", graphs=options)
    if replayed.graphs_reason:
        return False, replayed.graphs_reason
    if not torch.equal(*(_decode(each, 16, _DECODED) for each in (replayed, launched))):
        return False, "the bits of 16 rows differ from those of launches"
    padded, exact = (_decode(each, 5) for each in (replayed, launched))
    if not torch.equal(*(each.pool.tensor[5:] for each in (replayed, launched))):
        return False, "padding wrote to blocks that no row has"
    if replayed.graph_replays != 2:
        return False, f"{replayed.graph_replays} of 2 steps were graphs"
    share = ((padded - exact).abs().max() / exact.abs().max()).item()
    same = "the same bits" if share == 0 else f"within {share:.1e}"
    return share < 0.05, f"16 rows: the same bits; 5 rows padded to 8: {same}"


def _decode(runner: Runner, rows: int, longest: int = 6) -> torch.Tensor:
    """Logits [rows, vocab] of a decode step over random K and V.

    Each row has 6 positions in a block of its own; the first has ``longest``, over all blocks.
    """
    pool = runner.pool
    pool.tensor.normal_(generator=torch.Generator(pool.device).manual_seed(2))
    blocks = pool.shape.num_blocks
    spread = [index % blocks for index in range(longest // pool.shape.block_size + 1)]
    works = [
        Work([(7 * row + 3) % 100] * (start + 1), start, 1, table, start, _GREEDY)
        for row, (start, table) in enumerate(
            [(longest, spread), *((6, [n]) for n in range(1, rows))]
        )
    ]
    computed = runner.compute(works)
    order = torch.tensor(computed.batch.samples, device=computed.logits.device).argsort()
    return computed.logits.float()[order].clone()


def same_blocks(launched: Runner) -> tuple[bool, str]:
    """Blocks to a store's shared memory and back, during steps over other blocks."""
    pool = launched.pool
    size, blocks = pool.shape.block_size, pool.shape.num_blocks
    used = -(_PROMPT // -size)
    pool.tensor.zero_()
    launched.compute([Work([1] * _PROMPT, 0, _PROMPT, range(used), _PROMPT, _GREEDY)])
    pool.computed()
    work = Work([1], 0, 1, [used], 1, _GREEDY)
    sources = range(max(_PROMPT // size, 1))
    targets = range(blocks - len(sources), blocks)

    def step() -> None:
        launched.compute([work])
        pool.computed()

    way = _through_memory(pool, sources, targets, step)
    pairs = list(zip(sources, targets, strict=True))
    bits = pool.tensor.view(torch.uint8)
    alike = sum(torch.equal(bits[source], bits[target]) for source, target in pairs)
    written = bool(bits[list(sources), ..., : min(size, _PROMPT), :].any(dim=-1).all())
    return alike == len(pairs) and written, f"{alike} of {len(pairs)} came back {way}"


def _through_memory(
    pool: KVPool, sources: Sequence[int], targets: Sequence[int], step: Callable[[], None]
) -> str:
    """Copy blocks out and in; says through which memory."""
    if (copies := pool.copies) is None:
        for source, target in zip(sources, targets, strict=True):
            step()
            size = pool.shape.block_size
            pool.write(target, size, memoryview(bytes(pool.read(source, size))))
        return "through host memory"
    with RoundTrip(copies, len(sources)) as trip:
        refusals = trip.refusals()
        trip.save(sources, step)
        trip.load(targets, step)
    refused = "; ".join(
        f"the driver does not register the {name}: {why}" for name, why in refusals.items()
    )
    return f"through pinned memory ({refused})" if refused else "through registered memory"


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
