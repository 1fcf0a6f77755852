"""How a worker on a GPU computes: decided at its start by what the device gets right.

Graphs of Triton's kernels, the kernels one by one, the attention of another library, SDPA: the
first way whose checks hold, and why not a better one. Clocks have no part in it: workers on equal
devices decide alike, so their numeric profiles are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from kvrelay.engine.graphs import CudaGraphs, GraphRuntime
from kvrelay.engine.model.fused_decoder import FusedDecoder
from kvrelay.engine.model.loading import LoadedModel
from kvrelay.engine.runner import Runner
from kvrelay.engine.self_test import (
    ALTERNATIVES,
    BLOCKS,
    DeviceCheck,
    attempt,
    beside_sdpa,
    runner_for_tests,
    same_cuts,
    same_graphs,
    same_model,
    same_rows,
)
from kvrelay.engine.stepping import DeviceLost
from kvrelay.errors import Unservable

ORDER = ("triton", *ALTERNATIVES, "sdpa")
_FEW = 6  # rows whose bits are compared where a block has 256 positions
_ROWS = (2, 5, 8, 16)


@dataclass(frozen=True, slots=True)
class Way:
    """The attention backend, whether decode steps are to be graphs, and why it is not better.

    ``facts`` go into the numeric profile: whether a row has the same bits beside others, and
    wherever its prompt is cut.
    """

    backend: str
    graphs: bool = False
    reasons: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For people."""
        return "graphs of triton" if self.graphs else self.backend


class Examiner(Protocol):
    """Tries a device. Every call may raise ``DeviceLost``."""

    def backend(self, name: str) -> Iterator[DeviceCheck]:
        """The checks of a backend, one after the other."""

    def graphs(self) -> DeviceCheck:
        """Whether graphs of Triton's kernels compute what the kernels do."""

    def facts(self, name: str) -> tuple[str, ...]:
        """See ``Way``."""


def choose_way(asked: str, examiner: Examiner) -> Way:
    """The best way of a device for ``--attention-backend``; "auto" steps down through ``ORDER``.

    ``Unservable`` if another backend was asked for and does not hold, or if the device is lost.
    """
    reasons: list[str] = []
    for name in ORDER if asked == "auto" else (asked,):
        try:
            way = _way(name, examiner, reasons)
        except DeviceLost as error:
            raise Unservable(_lost(asked, name, error)) from error
        if way is not None:
            return way
    raise Unservable(f"--attention-backend {asked} cannot be used here: {'; '.join(reasons)}")


def _way(name: str, examiner: Examiner, reasons: list[str]) -> Way | None:
    """The way of one backend; ``None``, with one more reason, if it does not hold."""
    for check in examiner.backend(name):
        if not check.holds:
            unusable = check.found.startswith(f"{name} cannot be used")
            reasons.append(check.found if unusable else f"{name}: {check.name}: {check.found}")
            return None
    graphs = False
    if name == "triton":
        found = examiner.graphs()
        graphs = bool(found.holds)
        if not graphs:
            reasons.append(f"graphs: {found.found}")
    return Way(name, graphs, tuple(reasons), examiner.facts(name))


def _lost(asked: str, name: str, error: DeviceLost) -> str:
    """CUDA repeats such an error at every later call of the process."""
    rest = ORDER[ORDER.index(name) + 1 :] if name in ORDER else ()
    told = f"the self-test of {name} lost the device: {error}"
    if asked != "auto" or not rest:
        return told
    return f"{told}; start the worker with --attention-backend {' or '.join(rest)}"


class DeviceExaminer:
    """Tries the device of a loaded model, in the shapes that a worker will use."""

    def __init__(
        self,
        model: LoadedModel,
        block_size: int,
        runtime: Callable[[], GraphRuntime] = CudaGraphs,
    ) -> None:
        self._model = model
        self._shape = model.pool_shape(BLOCKS, block_size)
        self._runtime = runtime
        self._runner: Runner | None = None  # of the backend that is tried

    def backend(self, name: str) -> Iterator[DeviceCheck]:
        """Attention of one layer, then the whole model, beside SDPA, which is not in doubt."""
        if name in ("sdpa", "native"):
            return
        yield self._attempt("attention", lambda: self._attention(name))
        yield self._attempt("model", lambda: same_model(self._model, self._opened(name)))

    def graphs(self) -> DeviceCheck:
        """Of no use for a forward pass that is not ours."""
        launched = self._opened("triton")
        if not isinstance(launched.forward, FusedDecoder):
            return DeviceCheck("graphs", False, "the model's forward pass is that of transformers")
        return self._attempt("graphs", lambda: same_graphs(self._model, launched, self._runtime))

    def facts(self, name: str) -> tuple[str, ...]:
        counts = [rows for rows in _ROWS if name not in ALTERNATIVES or rows <= _FEW]
        runner = self._opened(name)
        with torch.inference_mode():
            rows = same_rows(runner, counts) == counts
            cuts = same_cuts(self._model, runner)
        return (f"rows-{_word(rows)}", f"cuts-{_word(cuts)}")

    def _attention(self, name: str) -> tuple[bool, str]:
        heads = self._model.info.num_heads
        layers = min(self._shape.num_layers, 2)
        shape = replace(self._shape, num_layers=layers)
        return beside_sdpa(self._model.device, shape, heads, name)

    def _attempt(self, name: str, check: Callable[[], tuple[bool | None, str]]) -> DeviceCheck:
        with torch.inference_mode():
            return attempt(self._model.device, name, check)

    def _opened(self, name: str) -> Runner:
        if self._runner is None or self._runner.backend != name:
            rows = _FEW if name in ALTERNATIVES else BLOCKS
            self._runner = runner_for_tests(self._model, name, rows)
        return self._runner


def _word(same: bool) -> str:
    return "same" if same else "differ"
