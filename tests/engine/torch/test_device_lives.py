"""A whole engine on simulated streams: the tokens of one process in every legal order.

Steps, the copies of loads and saves, and the host run beside each other. Each mistake in the order,
a line or two of the product, must be seen under some seed; the seeds are printed.
"""

from __future__ import annotations

import re
import types
from collections.abc import Sequence

import pytest
import torch

from kvrelay.engine import engine, runner
from kvrelay.engine.attention import copies as block_copiers
from kvrelay.engine.attention import flash_backend
from kvrelay.engine.core import legs, scheduler
from kvrelay.engine.core.updates import Foresee, Sampled, Work
from kvrelay.engine.cuda import copies, upload
from kvrelay.engine.runner import Computed, Runner
from kvrelay.engine.sampling import device
from kvrelay.engine.sampling.masks import GrammarMasks
from kvrelay.engine.stepping import DeviceLost
from tests.engine.torch.device_world import (
    BLOCKS,
    GREEDY,
    SIZE,
    Life,
    Seen,
    chain_model,
    install_backend,
    use_backend,
)
from tests.engine.torch.streams import Memory, Runtime
from tests.mutants import Mistake, module_of

SEEDS = 40
MOST_SEEDS = 300  # for a mistake: most need three, one upload behind another some dozens


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    install_backend(monkeypatch)
    return monkeypatch


def life(seed: int, runner_type: type[Runner] = Runner, may_fail: bool = False) -> Seen:
    Memory.runtime = Runtime(seed)
    return Life(seed, runner_type, may_fail).run()


def test_lives_in_every_order(simulated: pytest.MonkeyPatch) -> None:
    seen = [life(seed) for seed in range(SEEDS)]
    print(f"seeds 0 to {SEEDS - 1}")
    wrong = [f"seed {seed}: {one.wrong}" for seed, one in enumerate(seen) if one.wrong]
    assert not wrong, wrong[0]
    for what in ("planned", "unread", "loaded"):
        total = sum(getattr(one, what) for one in seen)
        print(what, total)
        assert total > SEEDS, f"{what}: {total} in {SEEDS} lives"


def failing(base: type[Runner]) -> type[Runner]:
    """Runners for whose sampling memory is sometimes too small: the step has been launched."""

    class Failing(base):  # type: ignore[misc,valid-type]
        def _choose(
            self,
            computed: Computed,
            works: Sequence[Work],
            masks: GrammarMasks | None,
            foresee: Foresee = lambda: (),
        ) -> list[Sampled]:
            if Memory.runtime.rng.random() < 0.2:
                raise torch.OutOfMemoryError("no memory is left")
            made: list[Sampled] = super()._choose(computed, works, masks, foresee)
            return made

    return Failing


def test_blocks_of_a_failed_step_are_filled_after_it(simulated: pytest.MonkeyPatch) -> None:
    """Its kernels may still write them. Without the end of such a step a load comes too early."""
    seen = [life(seed, failing(Runner), True) for seed in range(SEEDS)]
    assert [one.wrong for one in seen if one.wrong] == []
    assert sum(one.failed for one in seen) > SEEDS
    end = "        finally:  # a step that fails may have launched kernels that write its blocks\n"
    mark = "            self.pool.computed()\n"
    mistake = [(end + mark, "        finally:\n            pass\n        self.pool.computed()\n")]
    made = module_of(runner, mistake)
    use(simulated, runner, made)
    found = (life(seed, failing(made.Runner), True).wrong for seed in range(MOST_SEEDS))
    assert any(found)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        torch.AcceleratorError("CUDA error: out of memory"),  # of the driver, not of torch's pool
    ],
)
def test_the_device_is_asked_whether_it_repeats_an_error(
    simulated: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    """Triton and cuBLAS raise a ``RuntimeError``, CUDA also errors that it does not repeat."""
    answers = [None, torch.AcceleratorError("CUDA error: an illegal memory access")]

    def choose(self: Runner, *given: object) -> list[Sampled]:
        raise error

    def synchronize(device: torch.device) -> None:
        if (answer := answers.pop(0)) is not None:
            raise answer

    simulated.setattr(Runner, "_choose", choose)
    simulated.setattr(torch.cuda, "synchronize", synchronize)
    Memory.runtime = Runtime(1)
    made = Runner(chain_model(), BLOCKS, SIZE, "varlen")
    for kind in (type(error), DeviceLost):
        with pytest.raises(kind, match=re.escape(str(error))) as caught:
            made.execute([Work([1, 2], 0, 2, [0], 2, GREEDY)])
        assert type(caught.value) is kind
    assert not answers


MISTAKES: dict[str, tuple[types.ModuleType, Mistake]] = {
    "a batch of copies does not wait for the step": (
        copies,
        [("                self._stream.wait_event(self._copies.step_ended)\n", "")],
    ),
    "a batch of copies ends before its event": (
        copies,
        [("            self._ended.synchronize()\n", "")],
    ),
    "the event of a batch is recorded before its copies": (
        copies,
        [
            (
                "                self._stream.wait_event(self._copies.step_ended)\n",
                "                self._stream.wait_event(self._copies.step_ended)\n"
                "                self._ended.record(self._stream)\n",
            ),
            (
                "            self._ended.record(self._stream)\n            self._ended.syn",
                "            self._ended.syn",
            ),
        ],
    ),
    "pinned memory is given to another batch before the event": (
        copies,
        [
            (
                "        self.settle()\n        self.recycle()\n",
                "        if self._slab is not None:\n"
                "            self._copies.give_slab(self._slab)\n"
                "            self._slab = None\n"
                "        self.settle()\n        self.recycle()\n",
            ),
        ],
    ),
    "the end of a step is recorded before the step": (
        runner,
        [
            ("            self.pool.computed()\n", "            pass\n"),
            (
                "                computed = self.compute(works)\n",
                "                self.pool.computed()\n"
                "                computed = self.compute(works)\n",
            ),
        ],
    ),
    "the end of a step is recorded only if it samples": (
        runner,
        [
            (
                "            self.pool.computed()\n",
                "            if chosen:\n                self.pool.computed()\n",
            )
        ],
    ),
    "the tokens are read before the device has them": (
        device,
        [("joined.cpu()", 'joined.to("cpu", non_blocking=True)')],
    ),
    "the next upload does not wait for the last one of its buffer": (
        upload,
        [("            self._sent.synchronize()", "            pass")],
    ),
    "the event of an upload is recorded before the upload": (
        upload,
        [
            ("        if self._sent is not None:\n            self._sent.record()\n", ""),
            (
                "        target.copy_(source, non_blocking=True)\n",
                "        if self._sent is not None:\n            self._sent.record()\n"
                "        target.copy_(source, non_blocking=True)\n",
            ),
        ],
    ),
    "an upload runs on a stream of its own": (
        upload,
        [
            (
                "        target.copy_(source, non_blocking=True)\n",
                "        with torch.cuda.stream(torch.cuda.Stream()):\n"
                "            target.copy_(source, non_blocking=True)\n",
            ),
        ],
    ),
    "the next step takes its tokens before they are read back": (
        legs,
        [("            tokens=request.tokens,\n", "            tokens=(*request.tokens, 0),\n")],
    ),
    "the blocks of a save are free before it ends": (
        scheduler,
        [
            ("        self.pool.hold(save.blocks)\n", ""),
            ("            self.pool.drop(blocks)\n", "            pass\n"),
        ],
    ),
    "the blocks of a load that cannot stop are free at once": (
        scheduler,
        [
            (
                "        if key in self.loads and self._cancel(*key):\n",
                "        if key in self.loads and (self._cancel(*key) or True):\n",
            )
        ],
    ),
}


def use(patch: pytest.MonkeyPatch, source: types.ModuleType, made: types.ModuleType) -> None:
    """Put what has the mistake in the place of what the engine calls."""
    if source is runner:
        use_backend(patch, made)
    elif source is copies:
        patch.setattr(block_copiers, "BlockCopies", made.BlockCopies)
    elif source is upload:
        patch.setattr(flash_backend, "StepUpload", made.StepUpload)
    elif source is device:
        patch.setattr(runner, "DeviceSampler", made.DeviceSampler)
    elif source is legs:
        patch.setattr(engine, "Legs", made.Legs)
        patch.setattr(engine, "Leg", made.Leg)
    elif source is scheduler:
        patch.setattr(engine, "Scheduler", made.Scheduler)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_order_is_seen(simulated: pytest.MonkeyPatch, name: str) -> None:
    source, mistake = MISTAKES[name]
    made = module_of(source, mistake)
    use(simulated, source, made)
    found = None
    for seed in range(MOST_SEEDS):
        try:
            found = life(seed, made.Runner if source is runner else Runner).wrong
        except (AssertionError, IndexError, RuntimeError) as error:
            found = str(error) or type(error).__name__
        if found is not None:
            print(f"seed {seed}: {found}")
            break
    assert found is not None
