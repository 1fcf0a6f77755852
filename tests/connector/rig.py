"""What the tests of the store connector are built of: a pool, a store that obeys, a worker."""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from kvrelay.block import Namer, Namespace
from kvrelay.block.name import Digest, sha256
from kvrelay.connector.context import ConnectorOptions
from kvrelay.connector.counters import ConnectorCounters
from kvrelay.connector.store import StoreConnector
from kvrelay.engine.core.external import BlockContent, Load, Query, Save, TransferEvent
from kvrelay.errors import KvrelayError, Unavailable
from kvstore import GetResult, Lease, LookupResult, Offer, Outcome, Store, SurveyResult, Want
from kvstore.base import NameQuery
from kvstore.client.memory import MemoryStore, forget

B = 4
WAIT = 10.0
PATIENT = ConnectorOptions(lookup_seconds=20, load_seconds=20, save_seconds=20)
"""A slow machine is not what is tested."""

SPACE = Namespace("m", "r", "float32", "block-major", B)
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Shape:
    num_blocks: int = 64
    num_layers: int = 2
    block_size: int = B
    num_kv_heads: int = 1
    head_dim: int = 2
    dtype: str = "float32"


class FakePool:
    """A pool in a bytearray; with ``host=False`` it has no buffers to receive into, as on a GPU."""

    def __init__(self, host: bool = True) -> None:
        self.shape = Shape()
        self._host = host
        self._bytes = memoryview(bytearray(self.shape.num_blocks * self.nbytes(B)))

    @property
    def row(self) -> int:
        return 4 * self.shape.num_kv_heads * self.shape.head_dim

    def nbytes(self, count: int) -> int:
        return 2 * self.shape.num_layers * count * self.row

    def read(self, block: int, count: int) -> memoryview:
        return memoryview(b"".join(self._bytes[run] for run in self._runs(block, count)))

    def write(self, block: int, count: int, payload: memoryview) -> None:
        assert payload.nbytes == self.nbytes(count)
        for i, run in enumerate(self._runs(block, count)):
            self._bytes[run] = payload[i * count * self.row : (i + 1) * count * self.row]

    def buffer(self, block: int) -> memoryview | None:
        size = self.nbytes(B)
        return self._bytes[block * size : (block + 1) * size] if self._host else None

    def _runs(self, block: int, count: int) -> list[slice]:
        start = block * self.nbytes(B)
        starts = range(start, start + self.nbytes(B), B * self.row)
        return [slice(s, s + count * self.row) for s in starts]


def kv(tokens: Sequence[int], start: int, count: int) -> memoryview:
    """KV of ``count`` positions: a function of all tokens up to each of them."""
    rows = [
        hashlib.sha256(repr((run, list(tokens[: position + 1]))).encode()).digest()[:8]
        for run in range(2 * Shape().num_layers)
        for position in range(start, start + count)
    ]
    return memoryview(b"".join(rows))


def blocks_for(tokens: int, first: int = 0) -> list[int]:
    return list(range(first, first + -(-tokens // B)))


class Stage(MemoryStore):
    """A store that can be stopped, made to fail and to lie."""

    def __init__(self) -> None:
        self.name = f"connector-{next(_NUMBERS)}"
        super().__init__(self.name)
        self.named_with(sha256)
        self.go = threading.Event()
        self.go.set()
        self.asked = threading.Semaphore(0)
        self.failing: Callable[[], bool] = lambda: False
        self.error: KvrelayError | None = None
        self.flip: Callable[[int], bool] = lambda index: False
        self.lookups: list[tuple[int, int]] = []
        self.puts: list[list[bytes]] = []

    def lookup(self, query: NameQuery, timeout: float) -> LookupResult:
        self.lookups.append((len(query.names), len(query.tails)))
        self._pass()
        return super().lookup(query, timeout)

    def survey(self, query: NameQuery, timeout: float) -> SurveyResult:
        self._pass()
        return super().survey(query, timeout)

    def get(self, wants: Sequence[Want], timeout: float) -> Generator[GetResult, None, None]:
        self._pass()
        for got in super().get(wants, timeout):
            if self.flip(got.index):
                wants[got.index].buffer[3] ^= 8
            yield got

    def put(self, offers: Sequence[Offer], timeout: float) -> list[Outcome]:
        self.puts.append([offer.name for offer in offers])
        self._pass()
        return super().put(offers, timeout)

    def release(self, leases: Sequence[Lease], timeout: float) -> None:
        self._pass()
        super().release(leases, timeout)

    def named_with(self, digest: Digest) -> None:
        """Names are made with ``digest`` by those who put."""
        self._digest = digest

    def _pass(self) -> None:
        self.asked.release()
        self.go.wait(WAIT)
        if self.failing():
            raise Unavailable("as told")
        if self.error is not None:
            raise self.error

    def stall(self) -> None:
        """Answer nothing until ``go`` is set; from now on ``asked`` counts the calls that wait."""
        self.go.clear()
        while self.asked.acquire(False):
            pass

    def restart(self) -> None:
        """Lose everything, as a store that was started anew."""
        forget(self.name)
        super().__init__(self.name, digest=self._digest)


class Worker:
    """A connector with a pool, driven as an engine would drive it."""

    def __init__(
        self,
        store: Store,
        options: ConnectorOptions | None = None,
        host: bool = True,
        digest: Digest = sha256,
        clock: Callable[[], float] = time.monotonic,
        space: Namespace = SPACE,
    ) -> None:
        self.pool = FakePool(host)
        self.namer = Namer(space, digest)
        options = options or PATIENT
        self.connector = StoreConnector(store, self.namer, space, self.pool, options, clock)
        self.news = threading.Condition()
        self.events: list[TransferEvent] = []
        self.epochs = itertools.count(1)
        self.connector.start(self._notified)

    @property
    def counters(self) -> ConnectorCounters:
        return self.connector.counters

    @property
    def idle(self) -> bool:
        names = [name for name in ConnectorCounters.__slots__ if name.startswith("open_")]
        return not any(getattr(self.counters, name) for name in names)

    def until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT
        with self.news:
            while not true():
                assert time.monotonic() < deadline, "waited in vain"
                self.news.wait(0.005)  # not every change is told

    def query(self, name: str, tokens: Sequence[int], local: int = 0, space: bytes = b"") -> Query:
        return Query(name, tokens, self.named(space).chain(tokens, B), local, space)

    def named(self, space: bytes) -> Namer:
        """The names of a tenant's blocks."""
        return self.namer.within(space) if space else self.namer

    def ask(self, name: str, tokens: Sequence[int], local: int = 0, space: bytes = b"") -> int:
        """Look up until there is an answer."""
        query = self.query(name, tokens, local, space)
        answers: list[int] = []

        def known() -> bool:
            answer = self.connector.lookup(query)
            answers.extend([] if answer is None else [answer])
            return answer is not None

        self.until(known)
        return answers[0]

    def event(self) -> TransferEvent:
        def came() -> bool:
            self.events += self.connector.poll()
            return bool(self.events)

        self.until(came)
        return self.events.pop(0)

    def fill(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        for index, block in enumerate(blocks):
            count = min(B, len(tokens) - index * B)
            self.pool.write(block, count, kv(tokens, index * B, count))

    def save(
        self, name: str, tokens: Sequence[int], blocks: Sequence[int], space: bytes = b""
    ) -> Save:
        namer = self.named(space)
        contents, parent = [], namer.root
        for index, block in enumerate(blocks):
            held = tuple(tokens[index * B : (index + 1) * B])
            child = namer.child(parent, held)
            contents.append(BlockContent(block, child, parent, held))
            parent = child
        save = Save(name, next(self.epochs), 0, tuple(contents), space)
        self.connector.save(save)
        return save

    def load(
        self,
        name: str,
        tokens: Sequence[int],
        local: int,
        external: int,
        blocks: Sequence[int],
        space: bytes = b"",
    ) -> Load:
        names = tuple(self.named(space).chain(tokens, B))
        epoch = next(self.epochs)
        load = Load(name, epoch, local, external, tuple(tokens), names, tuple(blocks), space)
        self.connector.load(load)
        return load

    def holds(self, tokens: Sequence[int], start: int, end: int, blocks: Sequence[int]) -> bool:
        """Whether positions ``[start, end)`` are right; ``blocks`` begin at ``start``."""
        for first, block in zip(range(start, end, B), blocks, strict=True):
            count = min(B, end - first)
            if self.pool.read(block, count) != kv(tokens, first, count):
                return False
        return True

    def _notified(self) -> None:
        with self.news:
            self.news.notify_all()
