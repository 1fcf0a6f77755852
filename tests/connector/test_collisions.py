"""Names of 8 bits, through engines, connectors and a store: many collisions and no wrong token.

The model of these tests says of every position it reads whether its KV is that of these tokens.
"""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import pytest

from kvrelay.block import Namer, Namespace
from kvrelay.connector.counters import ConnectorCounters
from kvrelay.connector.store import StoreConnector
from kvrelay.engine.core.blocks import Naming
from kvrelay.engine.core.request import Order
from kvrelay.engine.core.updates import Ended, Failed, Token, Update
from kvrelay.engine.engine import Engine, EngineOptions
from kvrelay.sampling import Sampling
from kvstore import Store, connect
from kvstore.client.memory import MemoryStore, forget
from tests.accounting.bench import limits
from tests.connector.rig import PATIENT
from tests.engine.fakes import ChainRunner, answer
from tests.kvstore.conftest import ready, stop

B, BLOCKS, TIMEOUT = 4, 8, 60.0
REQUESTS = 150
SERVICE = """
import hashlib, sys
from kvstore import claims
from kvstore.server import block_store, slot

def eight_bits(data):
    return hashlib.sha256(data).digest()[:1] * 32

slot.check_block = lambda claim, data: claims.check_block(claim, data, eight_bits)
block_store.check_block = slot.check_block  # else a recheck removes right blocks
slot.check_header = lambda name, data: claims.check_header(name, data, eight_bits)
from kvstore.main import main
sys.exit(main(sys.argv[1:]))
"""


def eight_bits(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:1] * 32


@dataclass(frozen=True)
class Shape:
    num_layers: int = 1
    block_size: int = B
    num_kv_heads: int = 1
    head_dim: int = 4  # K and V of a position together are the 8 bytes of its KV
    dtype: str = "uint8"


class ChainPool:
    """The slots of a chain runner as bytes."""

    def __init__(self, runner: ChainRunner) -> None:
        self.shape = Shape()
        self._slots = runner.slots

    def nbytes(self, count: int) -> int:
        return 8 * count

    def read(self, block: int, count: int) -> memoryview:
        return memoryview(b"".join(slot or bytes(8) for slot in self._slots[block][:count]))

    def write(self, block: int, count: int, payload: memoryview) -> None:
        for index in range(count):
            self._slots[block][index] = bytes(payload[8 * index : 8 * index + 8])

    def buffer(self, block: int) -> None:
        return None


class Kept:
    """A store that outlives the connectors that close it."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def close(self) -> None:
        pass


def served(
    store: Store, prompt: Sequence[int], new: int
) -> tuple[list[int], Ended, ConnectorCounters]:
    """A request on a worker of its own with an empty pool: what it finds is from the store."""
    namer = Namer(Namespace("m", "r", "uint8", "chain", B), eight_bits)
    runner = ChainRunner(BLOCKS, B)
    connector = StoreConnector(
        cast(Store, Kept(store)),
        namer,
        Namespace("m", "r", "uint8", "chain", B),
        ChainPool(runner),
        PATIENT,
    )
    told: list[Update] = []
    over = threading.Event()

    def deliver(updates: Sequence[tuple[str, Update]]) -> None:
        told.extend(update for _, update in updates)
        if isinstance(told[-1], Ended | Failed):
            over.set()

    engine = Engine(
        runner,
        limits(BLOCKS, B, budget=16),
        Naming(namer.root, namer.child),
        connector,
        deliver,
        EngineOptions(audit_steps=True),
    )
    engine.start()
    try:
        engine.submit(Order("r", tuple(prompt), len(prompt), new, prefill_only=True), Sampling())
        assert over.wait(TIMEOUT)
    finally:
        engine.close()
    assert isinstance(told[-1], Ended), told[-1]
    tokens = [update.sampled.token for update in told if isinstance(update, Token)]
    return tokens, told[-1], connector.counters


@pytest.fixture
def memory() -> Iterator[Store]:
    yield MemoryStore("collisions", digest=eight_bits)
    forget("collisions")


@pytest.fixture
def service() -> Iterator[Store]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVICE, "--budget=16MiB"], stdout=subprocess.PIPE, text=True
    )
    store = connect(ready(process))
    yield store
    store.close()
    stop(process)


@pytest.mark.cluster
@pytest.mark.parametrize("kind", ["memory", "service"])
def test_names_that_collide_cost_time_and_never_a_token(
    kind: str, request: pytest.FixtureRequest
) -> None:
    store: Store = request.getfixturevalue(kind)
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    prompts: list[list[int]] = []
    corrupt = external = failed = 0
    for _ in range(REQUESTS):
        if prompts and chance.random() < 0.3:
            prompt = chance.choice(prompts)  # a true hit, if its names were free
        else:
            prompt = [chance.randrange(97) for _ in range(chance.randint(5, 20))]
            prompts.append(prompt)
        tokens, ended, counters = served(store, prompt, 2)
        assert tokens == answer(prompt, 1)
        account = ended.tokens
        assert account.local + account.external + account.computed == len(prompt)
        assert account.failed == 0 or counters.loads_short
        corrupt, failed = corrupt + counters.corrupt, failed + account.failed
        external += account.external
    print(f"{corrupt} collisions, {failed} tokens refused, {external} taken")
    assert corrupt > REQUESTS / 4
    assert failed > 0
    assert external > 0
    assert store.stats(TIMEOUT).leases == 0
