"""vLLM's pages and a real store without a buffer between them: shared memory, and other ways."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvrelay.block import Namer, Namespace
from kvrelay.connector.store import StoreConnector
from kvrelay.engine.core.external import BlockContent, Load, Loaded, Save, Saved, TransferEvent
from kvrelay.engine.vllm.kv import host_copies
from kvrelay.engine.vllm.kv.host_copies import HostBatch, HostCopies
from kvrelay.engine.vllm.kv.layout import learn_layout
from kvrelay.engine.vllm.kv.pages import HostPages, PageShape
from kvrelay.rpc.deadline import Deadline
from kvrelay.usage import Miss
from kvstore.client.remote import RemoteStore
from tests.engine.vllm.rig import FakeLayer, TilesWriter, caches
from tests.kvstore.conftest import start_service, stop
from tests.kvstore.rig import TIMEOUT, address_of, arena_in

SIZE, COUNT = 8, 6
SHAPE = PageShape(2 * COUNT + 1, 12, SIZE, 2, 128, "bfloat16")
SPACE = Namespace("m", "r", SHAPE.dtype, "block,head,layer,k|v,position,dim", SIZE)
TAIL = 3
TOKENS = list(range(1, (COUNT - 1) * SIZE + TAIL + 1))
COUNTS = [SIZE] * (COUNT - 1) + [TAIL]


class Engine:
    """Pages in tiles; blocks 1 to ``COUNT`` are computed, those after them are for loads."""

    def __init__(self, url: str, transport: str) -> None:
        self.caches = caches(SHAPE)
        layout = learn_layout(FakeLayer(TilesWriter()), self.caches[0], SHAPE.head_dim)
        self.pages = HostPages(SHAPE, self.caches, layout)
        self.namer = Namer(SPACE)
        self.store = RemoteStore(address_of(url), transport)
        self.news = threading.Event()
        copies = HostCopies(self.pages)
        self.connector = StoreConnector(self.store, self.namer, SPACE, self.pages, copies=copies)
        self.connector.start(self.news.set)
        self.names = self.namer.chain(TOKENS, SIZE)
        drawn = np.random.default_rng(7)
        self.payloads = [drawn.bytes(self.pages.nbytes(count)) for count in COUNTS]

    def event(self) -> TransferEvent:
        """The next transfer that ends."""
        while not (events := self.connector.poll()):
            assert self.news.wait(TIMEOUT)
            self.news.clear()
        (event,) = events
        return event

    def save(self) -> int:
        """Compute and save the blocks; how many of them are in the store."""
        contents = []
        for number, (count, payload) in enumerate(zip(COUNTS, self.payloads, strict=True)):
            tokens = tuple(TOKENS[number * SIZE : number * SIZE + count])
            parent = self.names[number - 1] if number else self.namer.root
            name = self.names[number] if count == SIZE else self.namer.child(parent, tokens)
            contents.append(BlockContent(1 + number, name, parent, tokens))
            self.pages.write(1 + number, count, memoryview(payload))
        self.connector.save(Save("saves", 1, 1, tuple(contents)))
        event = self.event()
        assert isinstance(event, Saved)
        return event.stored

    def load(self) -> Loaded:
        """Load the prompt into the blocks after those that were computed."""
        blocks = tuple(range(COUNT + 1, 2 * COUNT + 1))
        names = tuple(self.names)
        self.connector.load(Load("loads", 2, 0, len(TOKENS), tuple(TOKENS), names, blocks))
        event = self.event()
        assert isinstance(event, Loaded)
        return event

    def loaded(self, number: int) -> bytes:
        """What is in the block that was loaded as the ``number``-th."""
        return bytes(self.pages.read(COUNT + 1 + number, COUNTS[number]))


@pytest.fixture(params=["alone", "helped"])
def helpers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether other threads copy: they do for large blocks on more than one core."""
    helped: bool = request.param == "helped"
    monkeypatch.setattr(host_copies, "available_cores", lambda: 4 if helped else 1)
    monkeypatch.setattr(host_copies, "LARGE", 1)
    return helped


@pytest.fixture
def service() -> Iterator[tuple[subprocess.Popen[str], str]]:
    process, url = start_service("--budget=16MiB")
    yield process, url
    stop(process)


@pytest.fixture
def engine(
    service: tuple[subprocess.Popen[str], str], helpers: bool
) -> Iterator[Callable[[str], Engine]]:
    made: list[Engine] = []

    def make(transport: str) -> Engine:
        made.append(Engine(service[1], transport))
        return made[-1]

    yield make
    for one in made:
        one.connector.close()


def written_straight(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The blocks that a batch saves into a target which the store's client gave."""
    blocks: list[int] = []
    usual = HostBatch.save

    def save(self: HostBatch, block: int, count: int, target: memoryview | None) -> object:
        if target is not None:
            blocks.append(block)
        return usual(self, block, count, target)

    monkeypatch.setattr(HostBatch, "save", save)
    return blocks


@pytest.mark.cluster
@pytest.mark.parametrize("transport", ["shm", "socket", "grpc"])
def test_what_was_saved_is_loaded(
    engine: Callable[[str], Engine], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = written_straight(monkeypatch)
    one = engine(transport)
    assert one.save() == COUNT
    assert straight == (list(range(1, COUNT + 1)) if transport == "shm" else [])
    assert one.load().valid == len(TOKENS)
    assert [one.loaded(number) for number in range(COUNT)] == one.payloads
    whole = np.frombuffer(one.pages.read(2 * COUNT, SIZE), np.uint16)
    behind = whole.reshape(SHAPE.num_kv_heads, SHAPE.num_layers, 2, SIZE, -1)[:, :, :, TAIL:]
    assert not behind.any()


@pytest.mark.cluster
def test_no_byte_of_a_wrong_block_reaches_the_pages(
    engine: Callable[[str], Engine], service: tuple[subprocess.Popen[str], str]
) -> None:
    one = engine("shm")
    assert one.save() == COUNT
    place = RemoteStore(address_of(service[1]), "grpc")
    found = place._calls.locate([one.names[2]], 60_000, Deadline.after(TIMEOUT))
    place.close()
    with open(f"/proc/{service[0].pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(arena_in(service[0]) + found.offsets[0] + found.lengths[0] - 1)
        memory.write(bytes([one.payloads[2][-1] ^ 64]))
    event = one.load()
    assert (event.valid, event.missed) == (2 * SIZE, Miss.FAILED_VERIFICATION)
    assert [one.loaded(number) for number in range(2)] == one.payloads[:2]
    assert not any(one.loaded(2))


@pytest.mark.cluster
@pytest.mark.parametrize("transport", ["shm", "socket", "grpc"])
def test_a_store_killed_in_the_middle_of_a_load(
    engine: Callable[[str], Engine],
    service: tuple[subprocess.Popen[str], str],
    transport: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The load ends, and what it counts is right."""
    one = engine(transport)
    assert one.save() == COUNT
    usual = HostPages.write

    def write(self: HostPages, block: int, count: int, payload: memoryview) -> None:
        if block == COUNT + 2:
            stop(service[0])
        usual(self, block, count, payload)

    monkeypatch.setattr(HostPages, "write", write)
    event = one.load()
    assert service[0].poll() is not None, "the store was not killed"
    whole = event.valid // SIZE
    assert event.missed is None or event.valid < len(TOKENS)
    assert [one.loaded(number) for number in range(whole)] == one.payloads[:whole]


class HeldPages(HostPages):
    """Pages whose first write waits; ``writers`` are the threads of all writes."""

    def __init__(self) -> None:
        tensors = caches(SHAPE)
        super().__init__(
            SHAPE, tensors, learn_layout(FakeLayer(TilesWriter()), tensors[0], SHAPE.head_dim)
        )
        self.begun = threading.Event()
        self.go = threading.Event()
        self.writers: list[str] = []

    def write(self, block: int, count: int, payload: memoryview) -> None:
        self.writers.append(threading.current_thread().name)
        if block == 1:
            self.begun.set()
            assert self.go.wait(TIMEOUT)
        super().write(block, count, payload)


@pytest.mark.parametrize("helpers", ["helped"], indirect=True)
def test_a_batch_ends_after_its_last_copy(helpers: bool) -> None:
    """``settle`` returns only after a copy that a helper has begun."""
    pages = HeldPages()
    pages.go.set()
    copies = HostCopies(pages)
    payload = memoryview(np.random.default_rng(3).bytes(pages.nbytes(SIZE)))
    with copies.loading() as batch:
        assert all(batch.load(block, SIZE, payload) for block in range(2, 5))
    assert all(pages.read(block, SIZE) == payload for block in range(2, 5))

    pages.go.clear()
    batch = copies.loading()
    batch.load(1, SIZE, payload)
    assert pages.begun.wait(TIMEOUT)
    settling = threading.Thread(target=batch.settle, daemon=True)
    settling.start()
    settling.join(0.2)
    assert settling.is_alive()
    assert pages.read(1, SIZE) != payload
    pages.go.set()
    settling.join(TIMEOUT)
    assert pages.read(1, SIZE) == payload
    assert pages.writers[-1].startswith("page-copy")


@pytest.mark.parametrize("helpers", ["helped"], indirect=True)
def test_an_error_of_a_copy_is_that_of_its_batch(helpers: bool) -> None:
    batch = HostCopies(HeldPages()).loading()
    batch.load(2, SIZE, memoryview(b"short"))
    with pytest.raises(ValueError, match="payload"):
        batch.settle()
