"""The self-test's blocks to shared memory and back, on simulated streams and a simulated driver."""

from __future__ import annotations

import types

import pytest
import torch

from kvrelay.engine import self_test
from kvrelay.engine.attention import copies as block_copiers
from kvrelay.engine.cuda import copies, round_trip
from kvrelay.engine.runner import Runner
from tests.engine.torch.device_world import chain_model, install_backend
from tests.engine.torch.streams import Memory, Runtime
from tests.mutants import Mistake, module_of

SEEDS = 20
DMA = "3 of 3 came back through registered memory"
REFUSED = "the driver does not register the {}: not supported"


class Driver:
    """``torch.cuda.cudart()``: refuses mappings whose flags have one of ``refused``."""

    def __init__(self, refused: int) -> None:
        self._refused = refused

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if flags & self._refused:
            return 801
        Memory.runtime.registered[address] = (size, not flags & 8)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del Memory.runtime.registered[address]
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return "not supported"


def checked(patch: pytest.MonkeyPatch, seed: int, refused: int = 0) -> tuple[bool, str]:
    """What the self-test finds in one order of the streams."""
    Memory.runtime = Runtime(seed)
    patch.setattr(torch.cuda, "cudart", lambda: Driver(refused))
    runner = Runner(chain_model(), self_test.BLOCKS, self_test.SIZE, "varlen")
    with torch.inference_mode():
        found = self_test.same_blocks(runner)
    assert not Memory.runtime.registered, "memory stays registered"
    return found


@pytest.mark.parametrize(
    ("refused", "way"),
    [
        (0, DMA),
        (8, f"3 of 3 came back through pinned memory ({REFUSED.format('arena')})"),
        (
            1,
            "3 of 3 came back through pinned memory"
            f" ({REFUSED.format('window')}; {REFUSED.format('arena')})",
        ),
    ],
)
def test_blocks_in_every_order(monkeypatch: pytest.MonkeyPatch, refused: int, way: str) -> None:
    """Also where the driver refuses what the worker can only read (8), or everything (1)."""
    install_backend(monkeypatch)
    for seed in range(SEEDS):
        assert checked(monkeypatch, seed, refused) == (True, way), seed


def test_copies_of_the_self_test_are_dma(monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy a block each way, one event a batch beside those of steps, nothing pinned for it."""
    install_backend(monkeypatch)
    Memory.runtime = Runtime(1)
    patch_driver = Driver(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: patch_driver)
    pool = Runner(chain_model(), self_test.BLOCKS, self_test.SIZE, "varlen").pool
    assert pool.copies is not None
    Memory.runtime.counts.clear()
    with round_trip.RoundTrip(pool.copies, 3) as trip:
        assert trip.refusals() == {}
        trip.save([0, 1, 2], lambda: None)
        trip.load([5, 6, 7], lambda: None)
    counts = Memory.runtime.counts
    assert (counts["copies"], counts["records"], counts["pinned"]) == (6, 2, 0)


MISTAKES: dict[str, tuple[types.ModuleType, Mistake]] = {
    "copies do not arrive": (
        copies,
        [("            target.copy_(source, non_blocking=True)\n", "            pass\n")],
    ),
    "copies do not wait for the step": (
        copies,
        [("                self._stream.wait_event(self._copies.step_ended)\n", "")],
    ),
    "a save is read before its event": (
        round_trip,
        [("            batch.settle()\n            for", "            for")],
    ),
    "a load is not waited for": (
        copies,
        [("            self._ended.synchronize()\n", "")],
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    install_backend(monkeypatch)
    source, mistake = MISTAKES[name]
    made = module_of(source, mistake)
    if source is copies:
        monkeypatch.setattr(block_copiers, "BlockCopies", made.BlockCopies)
    else:
        monkeypatch.setattr(self_test, "RoundTrip", made.RoundTrip)
    found = [checked(monkeypatch, seed) for seed in range(SEEDS)]
    print(f"seeds 0 to {SEEDS - 1}: {sum(not holds for holds, _ in found)} found it")
    assert not all(holds for holds, _ in found)
