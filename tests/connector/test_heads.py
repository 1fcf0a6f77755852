"""Blocks of one to 128 heads between real pools: the same bytes, or a miss that names the head."""

from __future__ import annotations

import random
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from kvrelay.block import HeadRange, Namer, Namespace
from kvrelay.block.header import header_bytes
from kvrelay.block.mac import BlockKey
from kvrelay.block.verify import verify_block
from kvrelay.connector.geometry import Geometry
from kvrelay.connector.store import StoreConnector
from kvrelay.engine.attention.pool import KVPool, PoolShape
from kvrelay.engine.core.external import BlockContent, Load, Loaded, Save, Saved
from kvrelay.errors import Corrupt, Rejected
from kvrelay.usage import Miss
from kvstore import GetResult, Want, connect
from kvstore.client.memory import MemoryStore, forget
from tests.connector.rig import PATIENT, WAIT
from tests.kvstore.conftest import start_service, stop

KEYS = {"plain": None, "signed": BlockKey(b"f" * 32)}
SHAPES = [
    PoolShape(8, 2, 1, 1, 8, "float32"),  # blocks of one position, one head
    PoolShape(8, 2, 4, 3, 5, "float16"),  # heads of an odd number of bytes
    PoolShape(8, 1, 16, 8, 64, "bfloat16"),
    PoolShape(8, 2, 3, 128, 2, "bfloat16"),
    PoolShape(8, 40, 16, 8, 128, "float32"),  # 5 MiB: a head is longer than a chunk of a copy
    PoolShape(8, 1, 16, 3, 256, "float32"),
]


class Side:
    """A pool of random numbers and its connector."""

    def __init__(self, store: MemoryStore | str, shape: PoolShape, key: BlockKey | None) -> None:
        self.pool = KVPool(shape)
        self.space = Namespace("m", "r", shape.dtype, "head-major", shape.block_size)
        self.namer = Namer(self.space)
        self._news = threading.Event()
        reached = connect(store) if isinstance(store, str) else store
        options = replace(PATIENT, key=key)
        self.connector = StoreConnector(reached, self.namer, self.space, self.pool, options)
        self.connector.start(self._news.set)

    def save(self, tokens: Sequence[int], seed: int) -> list[BlockContent]:
        """Blocks 0, 1, .. with random numbers are the KV of ``tokens``."""
        numbers = torch.Generator().manual_seed(seed)
        self.pool.tensor.copy_(torch.randn(self.pool.tensor.shape, generator=numbers))
        contents, parent, size = [], self.namer.root, self.pool.shape.block_size
        for block, start in enumerate(range(0, len(tokens), size)):
            held = tuple(tokens[start : start + size])
            name = self.namer.child(parent, held)
            contents.append(BlockContent(block, name, parent, held))
            parent = name
        self.connector.save(Save("s", 1, seed, tuple(contents)))
        assert self._event() == Saved("s", 1, seed, len(contents))
        return contents

    def load(self, tokens: Sequence[int], to: Sequence[int]) -> Loaded:
        whole = (*tokens, 7)
        names = tuple(self.namer.chain(whole, self.pool.shape.block_size))
        self.connector.load(Load("r", 1, 0, len(tokens), whole, names, tuple(to)))
        event = self._event()
        assert isinstance(event, Loaded)
        return event

    def _event(self) -> object:
        while not (events := self.connector.poll()):
            assert self._news.wait(WAIT)
            self._news.clear()
        (event,) = events
        return event


class Flipping(MemoryStore):
    """Changes one bit of what a reader gets, where it is told to."""

    header: int | None = None
    payload: int | None = None

    def get(self, wants: Sequence[Want], timeout: float) -> Generator[GetResult, None, None]:
        for got in super().get(wants, timeout):
            raw = bytearray(got.header or b"")
            if self.header is not None:
                raw[self.header] ^= 1 << self.header % 8
            if self.payload is not None:
                wants[got.index].buffer[self.payload] ^= 1 << self.payload % 8
            yield replace(got, header=bytes(raw))


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    process, url = start_service("--budget=128MiB", "--max-block=8MiB")
    yield url
    stop(process)


@pytest.mark.cluster
@pytest.mark.parametrize("transport", ["shm", "socket", "grpc"])
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_head_of_full_and_partial_blocks_comes_back(
    shape: PoolShape, key: str, transport: str, service: str
) -> None:
    url = f"{service}?transport={transport}"
    one, two = Side(url, shape, KEYS[key]), Side(url, shape, KEYS[key])
    size = shape.block_size
    try:
        for prompt in sorted({1, max(size - 1, 1), size, size + 1, 3 * size - 1}):
            start = random.randrange(1 << 30)
            tokens = range(start, start + prompt)
            contents = one.save(tokens, prompt)
            to = [7 - content.block for content in contents]
            two.pool.tensor.fill_(torch.nan)
            assert two.load(tokens, to).valid == prompt
            for content, block in zip(contents, to, strict=True):
                count = len(content.tokens)
                want, got = one.pool.tensor[content.block], two.pool.tensor[block]
                assert torch.equal(got[..., :count, :], want[..., :count, :])
                assert not got[..., count:, :].any()
    finally:
        one.connector.close()
        two.connector.close()


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_a_flipped_bit_in_any_head_or_header_byte_is_a_miss(shape: PoolShape, key: str) -> None:
    store = Flipping(f"flips-{shape}-{key}", 64 << 20)
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    one, two = Side(store, shape, KEYS[key]), Side(store, shape, KEYS[key])
    tokens = tuple(range(shape.block_size))
    try:
        one.save(tokens, 1)
        assert two.load(tokens, [3]).valid == len(tokens)
        head = shape.block_bytes // shape.num_kv_heads
        header = header_bytes(shape.block_size, shape.num_kv_heads)
        places = [("payload", n * head + chance.randrange(head)) for n in range(shape.num_kv_heads)]
        places += [("header", at) for at in range(0, header, 1 if header < 1000 else 7)]
        for part, at in places:
            setattr(store, part, at)
            event = two.load(tokens, [3])
            setattr(store, part, None)
            assert (event.valid, event.missed) in (
                (0, Miss.FAILED_VERIFICATION),
                (0, Miss.OTHER_NAMESPACE),
            ), (part, at)
            one.save(tokens, 1)  # the store may have taken it for a wrong one
        assert two.connector.counters.corrupt == len(places)
        assert two.load(tokens, [3]).valid == len(tokens)
    finally:
        one.connector.close()
        two.connector.close()
        forget(store.url.removeprefix("memory://"))


@dataclass
class Read:
    """A block as a reader without a connector gets it."""

    header: bytes
    payload: memoryview


def read(store: MemoryStore, name: bytes, size: int) -> Read:
    want = Want(name, memoryview(bytearray(size)))
    (got,) = store.get([want], WAIT)
    assert got.header is not None
    return Read(got.header, want.buffer)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[3]], ids=str)
def test_ranks_read_their_heads_of_what_a_worker_saved(shape: PoolShape, key: str) -> None:
    """Each rank's bytes are those heads of the pool; a bit of another rank's is not its concern."""
    name = f"ranks-{shape}-{key}"
    store = MemoryStore(name, 64 << 20)
    side = Side(store, shape, KEYS[key])
    try:
        tokens = tuple(range(shape.block_size + 1))
        for content in side.save(tokens, 3):
            count = len(content.tokens)
            geometry = Geometry(side.namer, side.space, shape)
            block = geometry.block(content.parent, content.name, content.tokens)
            got = read(store, content.name, side.pool.nbytes(count))
            verify_block(got.header, block, got.payload, None, KEYS[key])
            stored = got.header + got.payload
            for ranks in (1, 2, 4):
                share = shape.num_kv_heads // ranks
                for rank in range(ranks):
                    heads = HeadRange(block, rank * share, (rank + 1) * share)
                    part = stored[heads.offset : heads.offset + heads.length]
                    heads.verify(got.header, part, KEYS[key])
                    own = side.pool.tensor[content.block, heads.first : heads.last]
                    own = own[..., :count, :].contiguous()
                    numbers = torch.frombuffer(bytearray(part), dtype=own.dtype)
                    assert torch.equal(numbers, own.view(-1))
                    wrong = bytearray(part)
                    wrong[-1] ^= 1
                    with pytest.raises(Corrupt, match=f"head {heads.last - 1}:"):
                        heads.verify(got.header, wrong, KEYS[key])
    finally:
        side.connector.close()
        forget(name)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("cut", [1, 100, 128, 4000])
def test_a_truncated_block_is_refused_by_field(key: str, cut: int) -> None:
    shape = SHAPES[2]
    store = MemoryStore(name := f"cut-{key}-{cut}", 64 << 20)
    side = Side(store, shape, KEYS[key])
    try:
        ((content),) = side.save(tuple(range(16)), 3)
        block = Geometry(side.namer, side.space, shape).block(
            content.parent, content.name, content.tokens
        )
        got = read(store, content.name, shape.block_bytes)
        with pytest.raises(Corrupt, match="payload_bytes"):
            verify_block(got.header, block, got.payload[:-cut], None, KEYS[key])
        shorter = got.header[: max(len(got.header) - cut, 0)]
        with pytest.raises(Corrupt, match="header"):
            verify_block(shorter, block, got.payload, None, KEYS[key])
    finally:
        side.connector.close()
        forget(name)


def test_a_model_of_too_many_heads_is_refused_by_name() -> None:
    shape = PoolShape(1, 1, 1, 257, 1, "float32")
    space = Namespace("m", "r", shape.dtype, "head-major", 1)
    with pytest.raises(Rejected, match="num_kv_heads: 257 are more than 256"):
        Geometry(Namer(space), space, shape)
