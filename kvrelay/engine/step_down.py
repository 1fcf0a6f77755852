"""Chooses how a worker on a GPU computes, by a self-test at its start.

The candidates, best first: CUDA graphs of Triton kernels, single launches of them, another
library's attention, SDPA. The first whose checks hold is taken, with the reasons against the better
ones. No check measures time, so workers on equal devices choose alike and share a numeric profile.
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
    ROWS,
    DeviceCheck,
    attempt,
    runner_for_tests,
    same_as_sdpa,
    same_blocks,
    same_cuts,
    same_graphs,
    same_model,
    same_rows,
)
from kvrelay.engine.stepping import DeviceLost
from kvrelay.errors import Unservable

ORDER = ("triton", *ALTERNATIVES, "sdpa")
_FEW = 6  # rows whose bits are compared if a block has 256 positions


@dataclass(frozen=True, slots=True)
class Way:
    """The attention backend, whether decode steps are CUDA graphs, and why it is not a better one.

    ``facts`` are for the numeric profile: whether the bits of a row depend on the number of rows,
    and on where its prompt is cut.
    """

    backend: str
    graphs: bool = False
    reasons: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The way in words, for the log."""
        return "triton with CUDA graphs" if self.graphs else self.backend


class Examiner(Protocol):
    """Checks a device. Every call may raise ``DeviceLost``."""

    def backend(self, name: str) -> Iterator[DeviceCheck]:
        """Run the checks of a backend in order."""

    def graphs(self) -> DeviceCheck:
        """Whether CUDA graphs compute what launches of the Triton kernels compute."""

    def facts(self, name: str) -> tuple[str, ...]:
        """See ``Way``."""

    def blocks(self, name: str) -> DeviceCheck:
        """Whether blocks that are copied out and back, during steps, are as they were."""


def choose_way(asked: str, examiner: Examiner) -> Way:
    """The way for a value of ``--attention-backend``; "auto" takes the first in ``ORDER`` to hold.

    ``Unservable`` if a check of the backend that was asked for fails, if copied blocks differ, or
    if the device is lost.
    """
    reasons: list[str] = []
    for name in ORDER if asked == "auto" else (asked,):
        try:
            way = _checked(name, examiner, reasons)
            if way is not None:
                _check_copies(examiner.blocks(name))
        except DeviceLost as error:
            raise Unservable(_lost(asked, name, error)) from error
        if way is not None:
            return way
    raise Unservable(f"--attention-backend {asked} cannot be used here: {'; '.join(reasons)}")


def _checked(name: str, examiner: Examiner, reasons: list[str]) -> Way | None:
    """Check one backend; if it fails, add the reason and return ``None``."""
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


def _check_copies(check: DeviceCheck) -> None:
    if not check.holds:
        raise Unservable(
            f"this GPU does not copy KV blocks to host memory and back: {check.found};"
            " its driver or hardware is faulty"
        )


def _lost(asked: str, name: str, error: DeviceLost) -> str:
    """The error: no other backend can be checked, since every later CUDA call would fail too."""
    told = f"the self-test of {name} lost the device: {error}"
    rest = ORDER[ORDER.index(name) + 1 :] if asked == "auto" else ()
    way_out = f"; start the worker with --attention-backend {' or '.join(rest)}"
    return told + way_out if rest else told


class DeviceExaminer:
    """Checks the device of a loaded model, in the shapes that a worker will use."""

    def __init__(
        self,
        model: LoadedModel,
        block_size: int,
        runtime: Callable[[], GraphRuntime] = CudaGraphs,
    ) -> None:
        self._model = model
        self._shape = model.pool_shape(BLOCKS, block_size)
        self._runtime = runtime
        self._runner: Runner | None = None  # of the backend that is checked

    def backend(self, name: str) -> Iterator[DeviceCheck]:
        """Attention of two layers, then the whole model, compared with SDPA; SDPA has no checks."""
        if name in ("sdpa", "native"):
            return
        yield self._attempt("attention", lambda: self._attention(name))
        yield self._attempt("model", lambda: same_model(self._model, self._opened(name)))

    def graphs(self) -> DeviceCheck:
        """Fails for a model with transformers' forward pass, which has no graphs."""
        launched = self._opened("triton")
        if not isinstance(launched.forward, FusedDecoder):
            return DeviceCheck("graphs", False, "the model's forward pass is that of transformers")
        return self._attempt("graphs", lambda: same_graphs(self._model, launched, self._runtime))

    def facts(self, name: str) -> tuple[str, ...]:
        found = self._attempt("facts", lambda: self._facts(name))
        if found.holds is False:
            raise Unservable(f"the self-test of {name} failed: {found.found}")
        return tuple(found.found.split())

    def blocks(self, name: str) -> DeviceCheck:
        return self._attempt("blocks", lambda: same_blocks(self._opened(name)))

    def _facts(self, name: str) -> tuple[None, str]:
        counts = [rows for rows in ROWS if name not in ALTERNATIVES or rows <= _FEW]
        runner = self._opened(name)
        rows = same_rows(runner, counts) == counts
        return None, f"rows-{_word(rows)} cuts-{_word(same_cuts(self._model, runner))}"

    def _attention(self, name: str) -> tuple[bool, str]:
        heads = self._model.info.num_heads
        layers = min(self._shape.num_layers, 2)
        shape = replace(self._shape, num_layers=layers)
        return same_as_sdpa(self._model.device, shape, heads, name)

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
