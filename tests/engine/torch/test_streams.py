"""Copies beside steps on simulated streams: the right bytes in every order that is legal.

Each mistake in the order, one line of the product, must be seen under some seed.
"""

from __future__ import annotations

import random
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from kvrelay.engine.attention import copies
from kvrelay.engine.cuda import upload
from tests.engine.torch.streams import Memory, Runtime, install

SEEDS = 60
BLOCKS, SIZE = 6, 4
SHAPE = (BLOCKS, 1, 2, 2, SIZE, 4)  # heads, layers, k and v, positions, width
MISTAKES = {
    "a read does not wait for the step": (
        "            self._stream.wait_event(self._event)\n            staging = self._staging"
        ".view(-1)[: source",
        "            staging = self._staging.view(-1)[: source",
    ),
    "a write does not wait for the step": (
        "            self._stream.wait_event(self._event)\n            staging = self._staging"
        ".view(-1)[: target",
        "            staging = self._staging.view(-1)[: target",
    ),
    "a read returns before it has ended": (
        "            self._stream.synchronize()\n            return memoryview",
        "            return memoryview",
    ),
    "a write returns before it has ended": (
        "            self._bytes[block, :, count:] = 0\n            self._stream.synchronize()",
        "            self._bytes[block, :, count:] = 0",
    ),
    "the end of a step is that of the copies": (
        "self._event.record(torch.cuda.current_stream(self._bytes.device))",
        "self._event.record(self._stream)",
    ),
    "copies run on the stream of the steps": (
        "with self._lock, torch.cuda.stream(self._stream):",
        "with self._lock:",
    ),
}


def module_of(source: types.ModuleType, mistake: tuple[str, str] | None) -> types.ModuleType:
    """A module of the product, or the same with a mistake."""
    text = Path(str(source.__file__)).read_text(encoding="utf-8")
    if mistake is not None:
        before, after = mistake
        assert before in text, f"the line has changed: {before}"
        text = text.replace(before, after)
    made = types.ModuleType(source.__name__)
    exec(compile(text, str(source.__file__), "exec"), made.__dict__)
    return made


def copies_of(module: types.ModuleType, seed: int) -> str | None:
    """What goes wrong in steps that fill blocks, beside reads and writes of others."""
    rng = random.Random(seed)
    Memory.runtime = runtime = Runtime(seed)
    raw = torch.zeros(SHAPE, dtype=torch.int16)
    pool = raw.as_subclass(Memory)
    copier = module.DeviceBlockCopier(pool)
    copier.computed()
    for number in range(1, 25):
        computed, loaded = rng.sample(range(BLOCKS), 2)
        pool[computed].fill_(number)  # a step: launched, not run
        copier.computed()
        if rng.random() < 0.6:  # saved after the commit of the step
            count = rng.randint(1, SIZE)
            found = np.frombuffer(copier.read(computed, count), np.int16)
            if set(found.tolist()) != {number}:
                return f"step {number}: saved {sorted(set(found.tolist()))}"
        if rng.random() < 0.6:  # loaded into a free block that earlier steps have used
            payload = np.full((1 * 2 * 2, SIZE, 4), -number, np.int16)
            copier.write(loaded, SIZE, payload.reshape(-1).view(np.uint8).data)
            seen: list[torch.Tensor] = []
            runtime.enqueue(0, lambda at=loaded, to=seen: to.append(raw[at].clone()))  # type: ignore[misc]
            runtime.wait(lambda to=seen: bool(to))  # type: ignore[misc]
            if set(seen[0].flatten().tolist()) != {-number}:
                return f"step {number}: computed over {sorted(set(seen[0].flatten().tolist()))}"
    return None


def uploads_of(module: types.ModuleType, seed: int) -> str | None:
    """What goes wrong in steps that are launched one behind another, without a read-back."""
    rng = random.Random(seed)
    Memory.runtime = runtime = Runtime(seed)
    sender = module.StepUpload(torch.device("cuda"))
    seen: list[tuple[int, set[int]]] = []
    for number in range(1, 30):
        (there,) = sender.send([np.full(rng.randint(1, 90), number, np.int32)])
        plain = there.as_subclass(torch.Tensor)
        runtime.enqueue(0, lambda n=number, t=plain: seen.append((n, set(t.tolist()))))  # type: ignore[misc]
    runtime.wait(lambda: len(seen) == 29)
    wrong = [(number, found) for number, found in seen if found != {number}]
    return f"step, numbers: {wrong[0]}" if wrong else None


def first_wrong(
    trial: object, source: types.ModuleType, mistake: tuple[str, str] | None
) -> str | None:
    module = module_of(source, mistake)
    assert callable(trial)
    for seed in range(SEEDS):
        try:
            found = trial(module, seed)
        except AssertionError as error:
            found = str(error)
        if found is not None:
            return f"seed {seed}: {found}"
    return None


def test_copies_in_every_order(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert first_wrong(copies_of, copies, None) is None


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_order_of_copies(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    install(monkeypatch)
    assert first_wrong(copies_of, copies, MISTAKES[name]) is not None


def test_uploads_in_every_order(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert first_wrong(uploads_of, upload, None) is None


@pytest.mark.parametrize(
    "mistake",
    [
        ("            self._sent.synchronize()", "            pass"),
        ("            self._sent.record()", "            pass"),
    ],
)
def test_a_pinned_buffer_that_is_filled_too_early(
    monkeypatch: pytest.MonkeyPatch, mistake: tuple[str, str]
) -> None:
    install(monkeypatch)
    assert first_wrong(uploads_of, upload, mistake) is not None
