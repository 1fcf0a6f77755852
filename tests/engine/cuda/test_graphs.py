"""Which graph a decode step replays and where that reads, beside launched steps of any size."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import ModuleType

import pytest
import torch

from kvrelay.engine import graphs
from kvrelay.engine.attention import triton_backend
from kvrelay.engine.attention.batch import pack
from kvrelay.engine.attention.pool import KVPool, PoolShape
from kvrelay.engine.core.updates import Work
from kvrelay.sampling import Sampling
from tests.engine.cuda.processes import needs_triton
from tests.mutants import Mistake, module_of

pytestmark = needs_triton
ROWS, LONGEST, BLOCKS = 8, 4096, 5000
MISTAKES: dict[str, tuple[ModuleType, Mistake, type[Exception]]] = {
    "a graph of one key fewer is long enough": (
        graphs,
        [("k[1] >= longest)", "k[1] >= longest - 1)")],
        AssertionError,
    ),
    "a graph of one row fewer is large enough": (
        graphs,
        [("k[0] >= rows and", "k[0] >= rows - 1 and")],
        ValueError,
    ),
    "graphs have no room for long tables": (
        triton_backend,
        [("rows * (_ROW_WORDS + blocks))", "1)")],
        ValueError,
    ),
    "graphs read what launched steps read": (
        triton_backend,
        [("return (fixed or self._upload).send(", "return self._upload.send(")],
        AssertionError,
    ),
}


class Captured:
    """The graphs, and a forward pass whose logits are what it reads.

    A row has its token and the block of its last position. A replay reads the memory of its
    capture; where a table begins there is all that a kernel knows of the length of tables.
    """

    def __init__(self) -> None:
        self.computed: list[tuple[int, int]] = []  # rows, and the longest context

    def capture(self, function: Callable[[], object]) -> graphs.Graph:
        function()
        return _Again(function)

    def forward(self, step: triton_backend.TritonStep) -> torch.Tensor:
        entries = step.entries
        self.computed.append((entries.decodes, entries.longest))
        buffer = torch.empty(0, dtype=torch.int32).set_(entries.blocks.untyped_storage())
        made = torch.zeros(entries.decodes, 2, dtype=torch.int64)
        for row, (_, start, count, table) in enumerate(entries.spans.tolist()):
            if count:
                made[row, 0] = step.inputs.tokens[0, row]
                made[row, 1] = buffer[entries.blocks.storage_offset() + table + start]
        return made


class _Again:
    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def replay(self) -> None:
        self._function()


def works_of(rng: random.Random, lengths: Sequence[int], count: int) -> list[Work]:
    """The last ``count`` positions of contexts, with blocks of one position."""
    return [
        Work(
            [rng.randrange(100) for _ in range(length)],
            length - count,
            count,
            [rng.randrange(BLOCKS) for _ in range(length)],
            length,
            Sampling(),
        )
        for length in lengths
    ]


def check(ours: ModuleType, backends: ModuleType) -> None:
    """Decode steps of every size between launched ones that are larger than all before."""
    rng = random.Random(5)
    captured = Captured()
    backend = backends.TritonBackend(KVPool(PoolShape(BLOCKS, 1, 1, 1, 16, "float32")))
    limits = ours.GraphLimits(ROWS, LONGEST)
    made = ours.DecodeGraphs(backend, captured.forward, limits, captured)
    for rows, longest, key in (
        (1, 2, (1, 512)),
        (1, 512, (1, 512)),
        (2, 513, (2, 2048)),
        (3, 512, (4, 512)),
        (4, 2048, (4, 2048)),
        (5, 2049, (8, LONGEST)),
        (8, LONGEST, (8, LONGEST)),
        (1, 9, (1, 512)),
    ):
        works = works_of(rng, [longest] * rows, 1)
        step = made.step(pack(works, 1))
        assert step is not None
        assert captured.computed[-1] == key
        assert step[0].tolist() == [[one.tokens[-1], one.blocks[-1]] for one in works]
        backend.step(pack(works_of(rng, [LONGEST] * (2 * rows), 2), 1))
    for lengths in ([LONGEST + 1], [9] * (ROWS + 1)):
        assert made.step(pack(works_of(rng, lengths, 1), 1)) is None


def test_the_smallest_graph_that_fits_reads_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "unusable", lambda device: None)
    check(graphs, triton_backend)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    source, mistake, error = MISTAKES[name]
    wrong = module_of(source, mistake)
    backends = wrong if source is triton_backend else triton_backend
    monkeypatch.setattr(backends, "unusable", lambda device: None)
    with pytest.raises(error):
        check(wrong if source is graphs else graphs, backends)
