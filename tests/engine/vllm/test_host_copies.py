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


@pytest.fixture
def service() -> Iterator[tuple[subprocess.Popen[str], str]]:
    process, url = start_service("--budget=16MiB")
    yield process, url
    stop(process)


@pytest.fixture
def engine(service: tuple[subprocess.Popen[str], str]) -> Iterator[Callable[[str], Engine]]:
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
