"""Graphs that are replayed under Triton's interpreter: ``.. replays KIND DTYPE SEED``.

A stand-in for CUDA graphs records every operation of torch and every launch of a kernel, with the
tensors themselves, and repeats exactly those: what a step computed in Python is as it was at the
capture, as on a device. A runner with such graphs is compared, bit by bit, with one that launches.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.cuda import interpreter  # isort: skip (it comes before every kernel)

from kvrelay.engine.attention.native.library import FORCED_PRODUCTS, ONEDNN
from kvrelay.engine.attention.triton_backend import TritonBackend
from kvrelay.engine.core.updates import Work
from kvrelay.engine.graphs import DecodeGraphs, Graph, GraphLimits
from kvrelay.engine.largest_step import StepBounds, free_in_largest_step
from kvrelay.engine.model.loading import LoadedModel, load_model
from kvrelay.engine.runner import GraphOptions, Runner
from kvrelay.sampling import Sampling
from tests.engine.torch.drive import prompts
from tests.models import VOCAB, tiny_model

BLOCKS, SIZE, ROWS = 60, 7, 5
# Our own products are no operations of torch: the stand-in could not record them.
os.environ[FORCED_PRODUCTS] = ONEDNN
WAITING = ("_local_scalar_dense", "item", "nonzero", "_unique2", "equal")


class Refused(RuntimeError):
    """What CUDA refuses to capture."""


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operations as functions that do them again, into the tensors that they made."""

    def __init__(self, notes: list[Callable[[], None]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._notes = notes

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        name = str(func.overloadpacket.__name__)  # type: ignore[attr-defined]
        if name in WAITING:
            raise Refused(f"{name} waits for the device")
        made = func(*args, **(kwargs or {}))
        given = {_memory(value) for value in args} - {0}
        results = made if isinstance(made, (list, tuple)) else (made,)
        fresh = [
            isinstance(result, torch.Tensor) and _memory(result) not in given for result in results
        ]
        writes = name.endswith("_") or "out" in (kwargs or {})
        if any(fresh) or writes:

            def again() -> None:
                new = func(*args, **(kwargs or {}))
                many = new if isinstance(new, (list, tuple)) else (new,)
                for old, other, own in zip(results, many, fresh, strict=True):
                    if own and not name.startswith("empty"):
                        old.copy_(other)

            self._notes.append(again)
        return made


def _memory(value: object) -> int:
    """Where a tensor's memory begins; 0 if it has none of its own, as oneDNN's packed weights."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return 0
    return value.untyped_storage().data_ptr()


class Recorded:
    """The stand-in for ``CudaGraphs``; counts replays."""

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0

    def capture(self, function: Callable[[], object]) -> Graph:
        function()
        notes: list[Callable[[], None]] = []
        interpreter.LAUNCHES = notes
        try:
            with _Recorder(notes):
                function()
        finally:
            interpreter.LAUNCHES = None
        self.captured += 1
        return _Notes(notes, self)


class _Notes:
    """One graph: what was noted, in its order."""

    def __init__(self, notes: list[Callable[[], None]], owner: Recorded) -> None:
        self._notes = notes
        self._owner = owner

    def replay(self) -> None:
        self._owner.replayed += 1
        for again in self._notes:
            again()


def run(kind: str, dtype: str, seed: int) -> str:
    """Compare; returns what was seen."""
    interpreter.ORDER.seed(seed)
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_model(kind, Path(folder) / kind, kinds[dtype], seed)
        loaded = load_model(path, dtype, "cpu")
        _measure(loaded)
        recorded = Recorded()
        options = GraphOptions(GraphLimits(ROWS, BLOCKS * SIZE), lambda: recorded)
        ours = Runner(loaded, BLOCKS, SIZE, "triton", graphs=options)
        real = Runner(loaded, BLOCKS, SIZE, "triton")
        assert ours.graphs_reason == "", ours.graphs_reason
        assert recorded.captured == 4, recorded.captured  # one length of context holds them all
        for runner in (ours, real):
            runner.pool.tensor.fill_(torch.nan)
        steps = _compare(ours, real, random.Random(seed))
        _keep_words_out(ours)
        steps += _compare(ours, real, random.Random(seed))
        assert recorded.replayed == steps, f"{recorded.replayed} of {steps} steps were replayed"
        assert ours.graph_replays == steps
        return f"{steps} steps replayed"


class _Memory:
    """A device's memory; its largest growth is the number of graphs at that moment."""

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded

    def free(self) -> int:
        assert not [one for one in gc.get_objects() if isinstance(one, DecodeGraphs)]
        return 1 << 20

    def begin(self) -> None:
        assert self._recorded.captured == 0

    def peak(self) -> int:
        return self._recorded.captured


def _measure(loaded: LoadedModel) -> None:
    """The pool leaves room for the graphs too."""
    recorded = Recorded()
    options = GraphOptions(GraphLimits(ROWS, BLOCKS * SIZE), lambda: recorded)
    memory, bounds = _Memory(recorded), StepBounds(2 * ROWS, ROWS, BLOCKS * SIZE, SIZE)
    free = free_in_largest_step(loaded, bounds, memory, "triton", graphs=options)
    assert free == (1 << 20) - 4, free
    assert recorded.replayed == 1, recorded.replayed  # the others compute prompts too


def _keep_words_out(runner: Runner) -> None:
    """What graphs read has no room for what sampling reads, as with penalties of many tokens."""
    backend = runner._backend
    assert isinstance(backend, TritonBackend)
    fixed = backend._for_graphs
    assert fixed is not None
    of_graphs = 6  # spans, tokens, positions, rows of logits, slots, blocks
    fixed.holds = lambda parts: len(parts) == of_graphs  # type: ignore[method-assign]


def _compare(ours: Runner, real: Runner, rng: random.Random) -> int:
    """Prefills and decode steps of up to ``ROWS`` sequences; the number of decode steps."""
    texts = prompts(rng.randrange(1000), [9, 3, 12, 2, 6], VOCAB)
    free = rng.sample(range(BLOCKS), BLOCKS)
    tables = [[free.pop() for _ in range(10)] for _ in texts]
    sampling = [Sampling(temperature=0.8, seed=n, logprobs=2) for n in range(len(texts))]
    steps = 0
    for number, text in enumerate(texts):
        _step(ours, real, [Work(text, 0, len(text), tables[number], 1, sampling[number])])
        text.append(5)
    for _ in range(6):
        chosen = rng.sample(range(len(texts)), rng.randint(1, len(texts)))
        works = [Work(texts[n], len(texts[n]) - 1, 1, tables[n], 1, sampling[n]) for n in chosen]
        for number, token in zip(chosen, _step(ours, real, works), strict=True):
            texts[number].append(token)
        steps += 1
    return steps


def _step(ours: Runner, real: Runner, works: list[Work]) -> list[int]:
    """The tokens of one step, the same by both; so is every byte of the pools."""
    with torch.inference_mode():
        mine, theirs = (runner.compute(works) for runner in (ours, real))
        assert torch.equal(mine.logits, theirs.logits), (mine.logits - theirs.logits).abs().max()
        bits = [runner.pool.tensor.view(torch.uint8) for runner in (ours, real)]
        assert torch.equal(*bits), "another slot was written"
        asked = [works[n] for n in mine.batch.samples]
        results = [
            runner._choose(each, asked, None) for runner, each in ((ours, mine), (real, theirs))
        ]
    assert results[0] == results[1]
    tokens = {n: one.token for n, one in zip(mine.batch.samples, results[0], strict=True)}
    return [tokens[n] for n in range(len(works))]


if __name__ == "__main__":
    name, precision, number = sys.argv[1:]
    print(f"{name} {precision} (seed {number}): {run(name, precision, int(number))}")
