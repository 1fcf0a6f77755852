"""Decode steps as CUDA graphs: one launch in place of ten a layer.

A graph is captured for a number of rows and a length of context, reads its numbers where the step's
upload puts them, and is replayed for every step that fits. Rows that are not there have no
positions, so nothing is read for them, and the slot -1, so nothing is written. All graphs leave
their logits in one place: a step reads them before the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from kvrelay.engine.attention.batch import Batch, no_works
from kvrelay.engine.attention.triton_backend import TritonBackend, TritonStep

MOST_ROWS = 256
"""More rows are computed by launches: the device is busy for longer than the host takes."""

_SHORTEST = 512  # positions of context of the first graphs; the next have up to four times as many

Forward = Callable[[TritonStep], torch.Tensor]
"""Logits of all rows of a step."""


class Graph(Protocol):
    """Work of the device that was captured."""

    def replay(self) -> None:
        """Launch all of it again, with the same addresses."""


class GraphRuntime(Protocol):
    """Captures work on the current device."""

    def capture(self, function: Callable[[], object]) -> Graph:
        """The graph of what a function launches."""


class CudaGraphs:
    """CUDA's own, all in one pool of memory: only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[], object]) -> Graph:
        """See ``GraphRuntime``. The first call compiles kernels, which no capture allows.

        Other threads copy blocks and register memory during a capture. In torch's default mode
        these calls would fail, and so would the capture.
        """
        function()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # torch 2.13 stays on the stream of a capture that fails (torch.cuda.graph.__exit__).
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            function()
        return graph


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """The most rows and positions of context that a decode step has."""

    rows: int
    positions: int

    def sizes(self) -> list[int]:
        """Rows of the graphs: powers of two."""
        most = min(self.rows, MOST_ROWS)
        return [1 << exponent for exponent in range((most - 1).bit_length() + 1)]

    def contexts(self) -> list[int]:
        """Positions of context of the graphs."""
        made = [_SHORTEST]
        while made[-1] < self.positions:
            made.append(min(4 * made[-1], self.positions))
        return made


class DecodeGraphs:
    """The graphs of one model over one pool; captured at the start, the largest first."""

    def __init__(
        self, backend: TritonBackend, forward: Forward, limits: GraphLimits, runtime: GraphRuntime
    ) -> None:
        self.replays = 0
        self._backend = backend
        self._forward = forward
        self._logits = torch.empty(0)  # of the largest graph
        backend.reserve(limits.rows, limits.positions)
        self._graphs: dict[tuple[int, int], Graph] = {}
        for rows in reversed(limits.sizes()):
            for longest in reversed(limits.contexts()):
                self._graphs[rows, longest] = self._capture(rows, longest, runtime)

    def step(self, batch: Batch) -> tuple[torch.Tensor, TritonStep] | None:
        """The logits of a batch, and its step; ``None`` if it fits no graph."""
        rows = len(batch.tokens)
        if batch.decodes < rows or len(batch.logit_rows) < rows:
            return None
        longest = int(batch.lengths.max())
        key = next((k for k in reversed(self._graphs) if k[0] >= rows and k[1] >= longest), None)
        if key is None:
            return None
        step = self._backend.step(batch.padded(key[0]), key[1])
        self._graphs[key].replay()
        self.replays += 1
        return self._logits[:rows], step

    def _capture(self, rows: int, longest: int, runtime: GraphRuntime) -> Graph:
        step = self._backend.step(no_works().padded(rows), longest)
        return runtime.capture(lambda: self._compute(step))

    def _compute(self, step: TritonStep) -> None:
        made = self._forward(step)
        if len(made) > len(self._logits):  # never in a capture: it is run before, the largest first
            self._logits = torch.empty_like(made)
        self._logits[: len(made)].copy_(made)
