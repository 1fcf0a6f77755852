"""The self-test of a device, under Triton's interpreter: ``.. self_tests CASE``.

Each mistake is one that a device, a driver or a compiler could make.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from tests.engine.cuda import interpreter  # isort: skip (it comes before every kernel)

from kvrelay.cluster.config import SHIPPED_MODEL
from kvrelay.engine import graphs, self_test
from kvrelay.engine.attention.batch import Batch
from kvrelay.engine.attention.copies import HostBlockCopier
from kvrelay.engine.attention.triton_backend import TritonBackend, TritonStep
from kvrelay.engine.cuda.arguments import SEGMENT
from kvrelay.engine.cuda.attention import PagedPool
from kvrelay.engine.model.loading import load_model
from kvrelay.engine.step_down import DeviceExaminer, choose_way
from kvrelay.errors import Unservable
from tests.engine.cuda.replays import Recorded


class Stale(Recorded):
    """Graphs that do nothing when they are replayed."""

    def capture(self, function: Callable[[], object]) -> graphs.Graph:
        super().capture(function)
        return _Nothing()


class _Nothing:
    def replay(self) -> None:
        pass


class Refusing(Recorded):
    """A driver that captures nothing."""

    def capture(self, function: Callable[[], object]) -> graphs.Graph:
        raise RuntimeError("operation not permitted when stream is capturing")


def wrong_attention() -> None:
    """A kernel that is off by a hundredth."""
    own = PagedPool.attend
    PagedPool.attend = lambda *given: own(*given) + 0.1  # type: ignore[method-assign]


def lost_segments() -> None:
    """Decode rows that read the first segment of their keys alone."""
    own = TritonBackend.step

    def first_only(self: TritonBackend, batch: Batch, longest: int | None = None) -> TritonStep:
        return own(self, batch, SEGMENT)

    TritonBackend.step = first_only  # type: ignore[method-assign]


def lost_writes() -> None:
    """Copies to the device that do not arrive."""
    HostBlockCopier.write = lambda *given: None  # type: ignore[method-assign]


CASES: dict[str, tuple[Callable[[], graphs.GraphRuntime], Callable[[], None]]] = {
    "right": (Recorded if interpreter.interprets else graphs.CudaGraphs, lambda: None),
    "stale": (Stale, lambda: None),
    "refusing": (Refusing, lambda: None),
    "attention": (Recorded, wrong_attention),
    "segments": (Recorded, lost_segments),
    "copies": (Recorded, lost_writes),
}


if __name__ == "__main__":
    runtime, mistake = CASES[sys.argv[1]]
    interpreter.ORDER.seed(1)
    device = str(interpreter.DEVICE)  # the contexts of the checks are longer than a request may be
    model = load_model(SHIPPED_MODEL, "bfloat16", device, 64, attention_backend="sdpa")
    mistake()
    found = self_test.self_test(model, runtime)
    try:
        way = choose_way("auto", DeviceExaminer(model, self_test.SIZE, runtime))
        told = [*way.reasons, f"a worker computes with {way.name}: {' '.join(way.facts)}"]
    except Unservable as error:
        told = [f"a worker refuses: {error}"]
    for check in found.checks:
        print(f"{check.name}: {check.holds}, {check.found}")
    print(*told, sep="\n")
    print(f"way {found.way}; failed {sorted(c.name for c in found.checks if c.holds is False)}")
