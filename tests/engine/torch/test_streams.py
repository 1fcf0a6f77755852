"""Batches of copies beside steps on simulated streams: the right bytes in every legal order.

Each mistake in the order, a line or two of the product, must be seen under some seed.
"""

from __future__ import annotations

import mmap
import random
import threading
import types
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from kvrelay.engine.cuda import copies, registration, upload
from tests.engine.torch.streams import Memory, Runtime, install, wait_for_registrations
from tests.mutants import Mistake, module_of

SEEDS = 60
BLOCKS, SIZE = 6, 4
SHAPE = (BLOCKS, 1, 2, 2, SIZE, 4)  # heads, layers, k and v, positions, width
RUNS, WIDTH = 4, 4
PLACES = 4  # of blocks in a mapping
BLOCK_BYTES = RUNS * SIZE * WIDTH * 2

WAIT = "                self._stream.wait_event(self._copies.step_ended)\n"
RELEASE = """        for used in self._used:
            self._copies.registered.release(used)
        self._used.clear()
"""
GIVE = """        if self._slab is not None:
            self._copies.give_slab(self._slab)
            self._slab = None
"""
SETTLE = "        self.settle()\n        self.recycle()\n"
MISTAKES: dict[str, Mistake] = {
    "a batch does not wait for the step": [(WAIT, "")],
    "only the first copies of a batch wait for the step": [
        ("            self._running = False\n", ""),
    ],
    "the event is recorded before the copies": [
        (WAIT, WAIT + "                self._ended.record(self._stream)\n"),
        (
            "            self._ended.record(self._stream)\n            self._ended.syn",
            "            self._ended.syn",
        ),
    ],
    "the event is that of the steps' stream": [
        ("self._ended.record(self._stream)", "self._ended.record(torch.cuda.current_stream())"),
    ],
    "a batch ends before its event": [("            self._ended.synchronize()\n", "")],
    "the end of a step is that of the copies": [
        ("record(torch.cuda.current_stream(self.blocks.device))", "record(self._loads)"),
    ],
    "copies run on the stream of the steps": [
        ("torch.cuda.stream(self._stream)", "torch.cuda.stream(torch.cuda.current_stream())"),
    ],
    "pinned memory is given back before the event": [(SETTLE, GIVE + "        self.settle()\n")],
    "registered memory is given back before the event": [
        (RELEASE, ""),
        (
            "        if self._running:\n            self._ended",
            RELEASE + "        if self._running:\n            self._ended",
        ),
    ],
    "a block is cut before its event": [
        (
            "self._after.append(_cut(self._rows(payload), self._rows(whole), count))",
            "_cut(self._rows(payload), self._rows(whole), count)()",
        ),
    ],
}
OF_REGISTRATION: dict[str, Mistake] = {
    "a window is unregistered while a copy runs": [
        ("not made.wanted and not made.users", "not made.wanted"),
    ],
    "copies are not counted": [("                    made.users += 1\n", "")],
}


OF_CLOSING: dict[str, Mistake] = {
    "what was given up before the answer stays registered": [
        (
            "        made.answered.set()\n        self._close_unused(made)\n",
            "        made.answered.set()\n",
        ),
    ],
    "a mapping is unregistered twice": [
        ("            if ends:\n                made.registered = False\n", ""),
    ],
}


class Driver:
    """Registers what it is asked to."""

    def register(self, address: int, size: int, writable: bool) -> str | None:
        Memory.runtime.registered[address] = (size, writable)
        return None

    def unregister(self, address: int) -> None:
        del Memory.runtime.registered[address]


def payload_of(value: int, count: int) -> bytes:
    return np.full((RUNS, count, WIDTH), value, np.int16).tobytes()


class World:
    """Steps, loads and saves of one pool, in an order that a seed draws; ``wrong`` if it is."""

    def __init__(
        self, seed: int, copies_module: types.ModuleType, registering: types.ModuleType
    ) -> None:
        self.rng = random.Random(seed)
        Memory.runtime = self.runtime = Runtime(seed)
        self.raw = torch.zeros(SHAPE, dtype=torch.int16)
        self.pool = self.raw.as_subclass(Memory)
        self.mappings = registering.RegisteredMemory(Driver())
        self.copies = copies_module.BlockCopies(self.pool, self.mappings)
        self.held = np.zeros((BLOCKS, SIZE), np.int16)  # what the steps and loads have made
        self.number = 0
        self.window = self._mapping(True)
        self.arena = self._mapping(False)
        self.wrong: str | None = None

    def run(self) -> None:
        for _ in range(24):
            saved, loaded, *others = self.rng.sample(range(BLOCKS), BLOCKS)
            self.step([saved])
            if self.rng.random() < 0.6:
                self.save(saved, others)
            if self.rng.random() < 0.6:
                self.load(loaded)
            self.runtime.meanwhile = lambda: None

    def step(self, blocks: Sequence[int], first: int = 0) -> None:
        """Launched, not run."""
        self.number += 1
        for block in blocks:
            self.pool[block][..., first:, :].fill_(self.number)
            self.held[block, first:] = self.number
        self.copies.computed()

    def save(self, block: int, others: Sequence[int]) -> None:
        """Two groups of one batch; between them a step, and the window may be closed."""
        taken: list[tuple[memoryview, bytes]] = []
        with self.copies.saving() as batch:
            for each in (block, others[0]):
                self.step([each])
                count = self.rng.randint(1, SIZE)
                size = BLOCK_BYTES // SIZE * count
                place = memoryview(self.window)[BLOCK_BYTES * len(taken) :][:size]
                made = batch.save(each, count, self.rng.choice([None, place]))
                wanted = payload_of(self.number, count)
                if count < SIZE:
                    self.step([each], count)  # decode goes on behind what is saved
                self.step(others[1:3])
                self._others_do()
                batch.settle()
                self._expect("saved", bytes(made.payload), wanted)
                taken.append((made.payload, wanted))
            for payload, wanted in taken:
                self._expect("still saved", bytes(payload), wanted)
        self.step([block, others[0]])  # the blocks are free now
        self._renew()

    def load(self, block: int) -> None:
        count = self.rng.randint(1, SIZE)
        self.number += 1
        payload = payload_of(self.number, count)
        with self.copies.loading() as batch:
            pinned = batch.slot()[: len(payload)]
            pinned[:] = payload
            place = memoryview(self.arena)[self.rng.randrange(PLACES) * BLOCK_BYTES :]
            place[: len(payload)] = payload
            started = self.rng.choice([True, False]) and batch.load(
                block, count, place[: len(payload)]
            )
            if not started:
                assert batch.load(block, count, pinned)
            self._others_do()
        place[: len(payload)] = bytes(len(payload))  # the lease has ended
        self.held[block] = 0
        self.held[block, :count] = self.number
        self._renew()
        seen: list[torch.Tensor] = []
        self.runtime.enqueue(0, lambda: seen.append(self.raw[block].clone()))
        self.runtime.wait(lambda: bool(seen))
        for position in range(SIZE):
            there = set(seen[0][..., position, :].flatten().tolist())
            if there != {int(self.held[block, position])}:
                self.wrong = self.wrong or f"loaded {there}, not {self.held[block]}"

    def _others_do(self) -> None:
        """While the host waits, another batch fills pinned memory, and mappings are closed."""
        self.runtime.meanwhile = self._meanwhile

    def _meanwhile(self) -> None:
        self.runtime.meanwhile = lambda: None
        with self.copies.loading() as other:
            for _ in range(6):
                slot = other.slot()
                slot[:] = b"\x55" * len(slot)
        if self.rng.random() < 0.5:
            self.mappings.unregister(self.window)
        if self.rng.random() < 0.5:
            self.mappings.unregister(self.arena)

    def _renew(self) -> None:
        for mapping in (self.window, self.arena):
            self.mappings.unregister(mapping)
        assert not self.runtime.registered, "memory stays registered"
        self.window = self._mapping(True)
        self.arena = self._mapping(False)

    def _mapping(self, writable: bool) -> mmap.mmap:
        made = mmap.mmap(-1, PLACES * BLOCK_BYTES)
        self.mappings.register(made, writable)
        wait_for_registrations()
        return made

    def _expect(self, what: str, found: bytes, wanted: bytes) -> None:
        if found != wanted and self.wrong is None:
            values = set(np.frombuffer(found, np.int16).tolist())
            self.wrong = f"{what} {values}, not {np.frombuffer(wanted, np.int16)[0]}"


def batches_of(copying: Mistake = (), registering: Mistake = ()) -> Callable[[int], str | None]:
    def trial(seed: int) -> str | None:
        world = World(seed, module_of(copies, copying), module_of(registration, registering))
        world.run()
        return world.wrong

    return trial


def unregistrations(mistake: Mistake, moment: str) -> int:
    """How often a mapping is unregistered that is given up when the driver is, or was, asked."""
    module = module_of(registration, mistake)
    memory, seen = mmap.mmap(-1, BLOCK_BYTES), Counter[str]()

    def at(reached: str) -> None:
        seen[reached] += 1
        if reached == moment:
            mappings.unregister(memory)

    class Asked:
        def register(self, address: int, size: int, writable: bool) -> str | None:
            at("asked")
            return None

        def unregister(self, address: int) -> None:
            at("unregistered")

    class Answered(threading.Event):
        def set(self) -> None:
            super().set()
            at("answered")

    kept = {"Lock": threading.Lock, "Thread": threading.Thread}
    vars(module)["threading"] = types.SimpleNamespace(**kept, Event=Answered)
    mappings = module.RegisteredMemory(Asked())
    mappings.register(memory, True)
    wait_for_registrations()
    mappings.unregister(memory)
    assert seen["asked"] == seen["answered"] == 1
    return seen["unregistered"]


def turns_of(mistake: Mistake) -> bool:
    """Whether a copy tells, by its turn, if its slot was given to others since."""
    Memory.runtime = Runtime(1)
    pool = torch.zeros(SHAPE, dtype=torch.int16).as_subclass(Memory)
    with module_of(copies, mistake).BlockCopies(pool).saving() as batch:
        first = batch.save(0, SIZE, None)
        batch.settle()
        still = first.turn == batch.turn
        batch.recycle()
        second = batch.save(1, SIZE, None)
        return bool(still and first.turn != batch.turn == second.turn)


def uploads_of(mistake: Mistake = ()) -> Callable[[int], str | None]:
    """Steps that are launched one behind another, without a read-back."""

    def trial(seed: int) -> str | None:
        rng = random.Random(seed)
        Memory.runtime = runtime = Runtime(seed)
        sender = module_of(upload, mistake).StepUpload(torch.device("cuda"))
        seen: list[tuple[int, set[int]]] = []
        for number in range(1, 30):
            (there,) = sender.send([np.full(rng.randint(1, 90), number, np.int32)])
            plain = there.as_subclass(torch.Tensor)
            runtime.enqueue(0, lambda n=number, t=plain: seen.append((n, set(t.tolist()))))  # type: ignore[misc]
        runtime.wait(lambda: len(seen) == 29)
        wrong = [(number, found) for number, found in seen if found != {number}]
        return f"step, numbers: {wrong[0]}" if wrong else None

    return trial


def first_wrong(trial: Callable[[int], str | None]) -> str | None:
    for seed in range(SEEDS):
        try:
            found = trial(seed)
        except AssertionError as error:
            found = str(error)
        if found is not None:
            return f"seed {seed}: {found}"
    return None


def test_batches_in_every_order(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert first_wrong(batches_of()) is None


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_order_of_copies(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    install(monkeypatch)
    found = first_wrong(batches_of(MISTAKES[name]))
    print(found)
    assert found is not None


@pytest.mark.parametrize("name", OF_REGISTRATION)
def test_a_mistake_of_registration(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    install(monkeypatch)
    found = first_wrong(batches_of(registering=OF_REGISTRATION[name]))
    print(found)
    assert found is not None


@pytest.mark.parametrize("moment", ["asked", "answered", "later"])
def test_a_mapping_is_unregistered_once(moment: str) -> None:
    assert unregistrations([], moment) == 1


@pytest.mark.parametrize("name", OF_CLOSING)
def test_a_mistake_of_closing(name: str) -> None:
    found = [unregistrations(OF_CLOSING[name], moment) for moment in ("asked", "answered")]
    print(found)
    assert found != [1, 1]


def test_a_copy_knows_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert turns_of([])
    assert not turns_of([("        self.turn += 1\n", "")])


def test_uploads_in_every_order(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert first_wrong(uploads_of()) is None


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
    assert first_wrong(uploads_of([mistake])) is not None
