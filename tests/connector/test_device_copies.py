"""Loads and saves of a pool on a simulated device, by a real store service and its transports.

Streams run in random legal orders. Each mistake in the order, a line or two of the product, must be
seen: as wrong bytes, or as a copy that uses memory the device cannot reach.
"""

from __future__ import annotations

import itertools
import random
import subprocess
import time
import tracemalloc
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch

from kvrelay.block import Namer, Namespace
from kvrelay.block.mac import BlockKey
from kvrelay.connector import loading, saving
from kvrelay.connector.context import ConnectorOptions, JobContext
from kvrelay.connector.counters import Meter
from kvrelay.connector.geometry import Geometry
from kvrelay.engine.attention.pool import KVPool, PoolShape
from kvrelay.engine.core.external import BlockContent, Load, Loaded, Save, Saved, TransferEvent
from kvrelay.errors import Unavailable
from kvrelay.rpc.deadline import Deadline
from kvrelay.usage import Miss
from kvstore import Want
from kvstore.client.remote import RemoteStore
from kvstore.client.transports import base, shared_memory, staging
from kvstore.client.transports.connection import StoreConnection
from kvstore.wire.frames import Op, RequestFrame
from tests.engine.torch.streams import Memory, Runtime, install, wait_for_registrations
from tests.kvstore.conftest import start_service, stop
from tests.kvstore.rig import TIMEOUT, address_of, arena_in
from tests.mutants import Mistake, module_of

SIZE, BLOCKS = 16, 48
SHAPE = PoolShape(BLOCKS, 3, SIZE, 2, 64, "bfloat16")  # 24 KiB a block
KEY = BlockKey.of(b"ab" * 16)
SEEDS = 6
_EPOCHS = itertools.count(1)


class Cudart:
    """``torch.cuda.cudart()`` of the simulated runtime; refuses what has one of ``refused``."""

    def __init__(self) -> None:
        self.refused = 0
        self.calls = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls += 1
        if flags & self.refused:
            return 801
        Memory.runtime.registered[address] = (size, not flags & 8)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del Memory.runtime.registered[address]
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return f"operation not supported ({code})"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    process, found = start_service("--budget=8MiB")
    yield found
    stop(process)


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    install(monkeypatch)
    made = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    Memory.runtime = Runtime(0)
    return made


class Side:
    """The jobs of a worker whose pool is on the device, run by the test's own thread."""

    def __init__(self, url: str, transport: str | None = None, key: BlockKey | None = None) -> None:
        self.pool = KVPool(SHAPE, "cuda")
        copies = self.pool.copies
        assert copies is not None
        self.mappings = copies.registered
        self.store = RemoteStore(address_of(url), transport, self.mappings)
        self.meter = Meter()
        space = Namespace("m", "r", SHAPE.dtype, "block-major", SIZE)
        self.namer = Namer(space)
        self.geometry = Geometry(self.namer, space, SHAPE)
        options = ConnectorOptions(key=key)
        self.context = JobContext(self.store, self.pool, options, self.meter, copies)
        self.events: list[TransferEvent] = []

    @property
    def raw(self) -> torch.Tensor:
        """What the device has now, as numbers."""
        return self.pool.tensor.as_subclass(torch.Tensor).view(torch.int16)

    def step(self, block: int, count: int, value: int) -> None:
        """Launch what computes the first positions of a block."""
        self.pool.tensor.view(torch.int16)[block, ..., :count, :].fill_(value)
        self.pool.computed()

    def save(self, tokens: list[int], first: int = 0, module: types.ModuleType = saving) -> Saved:
        """Save the blocks from ``first`` on as those of a prompt."""
        contents, parent = [], self.namer.root
        for number, start in enumerate(range(0, len(tokens), SIZE)):
            held = tuple(tokens[start : start + SIZE])
            name = self.namer.child(parent, held)
            contents.append(BlockContent(first + number, name, parent, held))
            parent = name
        save = Save("r", next(_EPOCHS), 0, tuple(contents))
        module.SaveJob(
            self.context, save, self.geometry, lambda save: None, self.events.append
        ).run()
        event = self.events.pop()
        assert isinstance(event, Saved)
        return event

    def load(self, tokens: list[int], first: int = 0, module: types.ModuleType = loading) -> Loaded:
        """Load all of a prompt into the blocks from ``first`` on."""
        count = -(-len(tokens) // SIZE)
        blocks = tuple(range(first, first + count))
        names = tuple(self.namer.chain(tokens, SIZE))
        load = Load("r", next(_EPOCHS), 0, len(tokens), tuple(tokens), names, blocks)
        targets = module.load_targets(load, None, self.geometry)

        def end(event: TransferEvent, suspect: object) -> None:
            self.events.append(event)

        module.LoadJob(self.context, load, targets, end).run()
        event = self.events.pop()
        assert isinstance(event, Loaded)
        return event

    def warm(self) -> None:
        """Open the transport, and wait until what it maps is registered."""
        tokens = fresh(12 * SIZE)
        self.save(tokens)
        wait_for_registrations()
        self.load(tokens)

    def close(self) -> None:
        self.store.close()


_TOKENS = itertools.count(1)


def fresh(count: int) -> list[int]:
    start = next(_TOKENS) * 10_000
    return list(range(start, start + count))


def values_of(tokens: list[int], seed: int) -> list[int]:
    return [seed * 100 + 1 + number for number in range(-(-len(tokens) // SIZE))]


def one_life(side: Side, rng: random.Random, modules: dict[str, types.ModuleType]) -> str | None:
    """A prompt is computed, saved, its blocks reused; then it is loaded; what is wrong then."""
    tokens = fresh(rng.choice([SIZE * 12, SIZE * 11 + 5, 3, SIZE * 2 - 1]))
    values = values_of(tokens, rng.randrange(300))
    counts = [min(SIZE, len(tokens) - start) for start in range(0, len(tokens), SIZE)]
    for block, (value, count) in enumerate(zip(values, counts, strict=True)):
        side.step(block, count, value)
    stored = side.save(tokens, 0, modules.get("saving", saving)).stored
    for block in range(len(values)):
        side.step(block, SIZE, -1)  # they are free now
    if stored != len(values):
        return f"{stored} of {len(values)} blocks were stored"
    event = side.load(tokens, 12, modules.get("loading", loading))
    if event.valid != len(tokens):
        return f"{event.valid} of {len(tokens)} tokens were loaded: {event.missed}"
    seen: list[torch.Tensor] = []
    Memory.runtime.enqueue(0, lambda: seen.append(side.raw[12:24].clone()))
    Memory.runtime.wait(lambda: bool(seen))
    for number, (value, count) in enumerate(zip(values, counts, strict=True)):
        there = seen[0][number]
        found = set(there[..., :count, :].flatten().tolist())
        if found != {value} or there[..., count:, :].any():
            return f"block {number}: {found} in place of {value}"
    return None


def lives(url: str, transport: str, modules: dict[str, types.ModuleType]) -> str | None:
    """Several, under several orders of the streams."""
    for seed in range(SEEDS):
        Memory.runtime = Runtime(seed)
        rng = random.Random(seed)
        side = Side(url, transport, KEY if seed % 3 == 0 else None)
        try:
            side.warm()
            wrong = next((w for _ in range(4) if (w := one_life(side, rng, modules))), None)
        except AssertionError as error:
            wrong = str(error)
        finally:
            side.close()
        if wrong is not None:
            return f"seed {seed}: {wrong}"
        assert not Memory.runtime.registered, "memory stays registered"
    return None


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("transport", "refused"), [("shm", 0), ("shm", 8), ("shm", 1), ("socket", 0), ("grpc", 0)]
)
def test_lives_in_every_order(url: str, cudart: Cudart, transport: str, refused: int) -> None:
    """Also where the driver refuses a read-only mapping (8), or every mapping (1)."""
    cudart.refused = refused
    assert lives(url, transport, {}) is None


class Clock:
    """``time`` of a transport, whose lease ends when a test says so."""

    def __init__(self) -> None:
        self.late = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.late


def prompt_on(side: Side, blocks: int) -> list[int]:
    """A prompt whose blocks have the values 50, 51 and so on."""
    tokens = fresh(blocks * SIZE)
    for block in range(blocks):
        side.step(block, SIZE, 50 + block)
    return tokens


def usual(stage: Stage) -> str | None:
    return lives(stage.url, "shm", stage.modules)


def lease_that_ends(stage: Stage) -> str | None:
    """While the device copies, the lease on the places ends: no block of them counts."""
    clock = Clock()
    stage.patch.setattr(stage.modules.get("shared_memory", shared_memory), "time", clock)
    side = stage.side("shm")
    tokens = prompt_on(side, 6)
    side.save(tokens)

    def meanwhile() -> None:
        clock.late = 1000.0

    Memory.runtime.meanwhile = meanwhile
    event = side.load(tokens, 12)
    Memory.runtime.meanwhile = lambda: None
    return None if (event.valid, event.missed) == (0, Miss.TOO_LATE) else f"it counts: {event}"


def lease_that_is_released(stage: Stage) -> str | None:
    """The places are held as long as the device copies."""
    wrong: list[str] = []
    own = StoreConnection.release

    def release(connection: StoreConnection, lease: int, proof: bytes) -> None:
        if any(Memory.runtime.queues.values()):
            wrong.append("the lease is released while the device copies")
        own(connection, lease, proof)

    stage.patch.setattr(StoreConnection, "release", release)
    for seed in range(SEEDS):
        Memory.runtime = Runtime(seed)
        side = stage.side("shm")
        tokens = prompt_on(side, 6)
        side.save(tokens)
        assert side.load(tokens, 12).valid == len(tokens)
        side.close()
    return wrong[0] if wrong else None


def staged_twice(stage: Stage) -> str | None:
    """The first request of a save is lost and the second one fails: gRPC reads every block again,
    and by then another block lies in the pinned memory of each.
    """
    stage.cudart.refused = 1
    side = stage.side()
    tokens = prompt_on(side, 20)
    own = StoreConnection.send
    asked = itertools.count()

    def send(connection: StoreConnection, request: RequestFrame, *bodies: bytes) -> None:
        if request.op is not Op.STAGE:
            own(connection, request, *bodies)
        elif next(asked):
            raise Unavailable("hung up")

    stage.patch.setattr(StoreConnection, "send", send)
    assert side.save(tokens, 0, stage.modules.get("saving", saving)).stored == 20
    assert next(asked) == 2
    event = side.load(tokens, 24)
    Memory.runtime.wait(lambda: not any(Memory.runtime.queues.values()))
    found = [set(side.raw[24 + number].flatten().tolist()) for number in range(20)]
    right = event.valid == len(tokens) and found == [{50 + number} for number in range(20)]
    return None if right else f"{event.valid} tokens, {found}"


def wrong_block(stage: Stage) -> str | None:
    """A byte of the third block flips in the arena: two count."""
    side = stage.side("shm")
    tokens = prompt_on(side, 6)
    side.save(tokens)
    name = side.namer.chain(tokens, SIZE)[2]
    place = RemoteStore(address_of(stage.url), "grpc")
    found = place._calls.locate([name], 60_000, Deadline.after(TIMEOUT))
    place.close()
    with open(f"/proc/{stage.process.pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(arena_in(stage.process) + found.offsets[0] + found.lengths[0] - 5)
        byte = memory.read(1)[0]
        memory.seek(-1, 1)
        memory.write(bytes([byte ^ 4]))
    event = side.load(tokens, 12, stage.modules.get("loading", loading))
    right = (event.valid, event.missed) == (2 * SIZE, Miss.FAILED_VERIFICATION)
    return None if right else f"it counts: {event}"


@dataclass
class Stage:
    """A store without TCP sockets, the patches of one test, and modules with a mistake by name."""

    url: str
    process: subprocess.Popen[str]
    cudart: Cudart
    patch: pytest.MonkeyPatch
    modules: dict[str, types.ModuleType] = field(default_factory=dict)
    sides: list[Side] = field(default_factory=list)

    def side(self, transport: str | None = None) -> Side:
        """A worker whose transport is open and registered."""
        made = Side(self.url, transport)
        self.sides.append(made)
        made.warm()
        return made

    def use(self, source: types.ModuleType, mistake: Mistake) -> None:
        """The module with the mistake, wherever its functions are called."""
        made = module_of(source, mistake)
        self.modules[source.__name__.rpartition(".")[2]] = made
        if source is shared_memory:
            for name in ("get", "_fetch_batch"):
                own = made.SharedMemoryTransport.__dict__[name]
                self.patch.setattr(shared_memory.SharedMemoryTransport, name, own)
        if source is base:
            self.patch.setattr(staging, "read_blocks", made.read_blocks)


@pytest.fixture
def stage(cudart: Cudart, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    process, url = start_service("--budget=16MiB", "--no-socket")
    made = Stage(url, process, cudart, monkeypatch)
    yield made
    for side in made.sides:
        side.close()
    stop(made.process)


TRIALS = (usual, lease_that_ends, lease_that_is_released, staged_twice, wrong_block)
SETTLE = "            device.settle()\n"
MISTAKES: dict[str, tuple[Callable[[Stage], str | None], types.ModuleType, Mistake]] = {
    "the lease is released before the event": (
        lease_that_is_released,
        shared_memory,
        [(SETTLE, "            pass\n")],
    ),
    "the lease is checked before the event": (
        lease_that_ends,
        shared_memory,
        [
            (SETTLE, "            late = time.monotonic() >= until\n" + SETTLE),
            ("        if time.monotonic() >= until:  # their", "        if late:  # their"),
        ],
    ),
    "a window is sent before the event": (
        usual,
        base,
        [("        device.settle()\n", "        pass\n")],
    ),
    "an old copy is read again": (
        staged_twice,
        saving,
        [
            ("        self._copied = None\n        return", "        return"),
            (" and copied.turn == self._batch.turn", ""),
        ],
    ),
    "a block that the device took is not verified": (
        wrong_block,
        loading,
        [("            return error\n", "            pass\n")],
    ),
}


@pytest.mark.cluster
@pytest.mark.parametrize("trial", TRIALS)
def test_what_happens_beside_copies(stage: Stage, trial: Callable[[Stage], str | None]) -> None:
    assert trial(stage) is None


@pytest.mark.cluster
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_seen(stage: Stage, name: str) -> None:
    trial, source, mistake = MISTAKES[name]
    stage.use(source, mistake)
    found = trial(stage)
    print(found)
    assert found is not None


@pytest.mark.cluster
def test_copies_and_allocations_of_a_batch(stage: Stage) -> None:
    """One DMA a block, one event a batch, and no memory for a block."""
    side = stage.side("shm")
    tokens = prompt_on(side, 12)
    Memory.runtime.counts.clear()
    assert side.save(tokens).stored == 12
    counts = Memory.runtime.counts
    assert (counts["copies"], counts["records"], counts["pinned"]) == (12, 1, 0)
    counts.clear()
    tracemalloc.start()
    assert side.load(tokens, 12).valid == len(tokens)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (counts["copies"], counts["records"], counts["pinned"]) == (12, 1, 0)
    assert most < 6 * side.pool.shape.block_bytes  # of twelve


@pytest.mark.cluster
def test_a_refusal_is_said_once_and_blocks_go_through_pinned_memory(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.cudart.refused = 8
    side = stage.side("shm")
    again = RemoteStore(address_of(stage.url), "shm", side.mappings)
    calls = stage.cudart.calls
    absent = Want(bytes(32), memoryview(bytearray(9)))
    assert [got.header for got in again.get([absent], TIMEOUT)] == [None]
    wait_for_registrations()
    assert stage.cudart.calls > calls, "it was asked again"
    tokens = prompt_on(side, 12)
    Memory.runtime.counts.clear()
    side.save(tokens)
    assert side.load(tokens, 12).valid == len(tokens)
    counts = Memory.runtime.counts
    assert (counts["copies"], counts["records"], counts["pinned"]) == (24, 2, 0)
    said = [r.getMessage() for r in caplog.records if "does not register" in r.getMessage()]
    assert len(said) == 1
    assert "operation not supported" in said[0]
    assert Memory.runtime.registered, "windows are registered all the same"
    again.close()


@pytest.mark.cluster
def test_what_is_mapped_is_unregistered_when_it_is_closed(stage: Stage) -> None:
    side = stage.side("shm")
    assert len(Memory.runtime.registered) == 2  # the arena, and one window
    stop(stage.process)
    again, url = start_service("--budget=4MiB")
    stage.process = again
    side.save(fresh(12 * SIZE))  # the connection breaks, and with it goes the window
    side.store.close()
    assert not Memory.runtime.registered
    stage.url = url
