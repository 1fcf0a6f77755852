"""A whole engine over a simulated device: its runner, pool and copies are the product's.

The model's KV says which tokens it was computed from: a position's is a digest of all tokens up to
it, and the next token follows from the KV of the whole context as the device finds it in the pool.
So a step that runs before its numbers, a copy that runs before its step, or a block that is filled
again too early becomes a wrong token, or wrong bytes in the store.
"""

from __future__ import annotations

import hashlib
import random
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvrelay.engine import runner
from kvrelay.engine.attention.backend import AttentionStep
from kvrelay.engine.attention.choice import ChosenAttention
from kvrelay.engine.attention.flash_backend import FlashBackend, FlashStep
from kvrelay.engine.attention.flash_calls import FlashEntries, VarlenCalls
from kvrelay.engine.attention.pool import KVPool
from kvrelay.engine.core.external import BlockContent, Load, Loaded, Query, Save, Saved
from kvrelay.engine.core.external import TransferEvent as Event
from kvrelay.engine.core.plan import EngineLimits
from kvrelay.engine.core.request import Order
from kvrelay.engine.core.updates import Failed, Foresee, Sampled, Token, Update, Work
from kvrelay.engine.cuda.copies import BlockCopies
from kvrelay.engine.engine import Engine
from kvrelay.engine.model.loading import LoadedModel, ModelInfo
from kvrelay.engine.runner import Runner
from kvrelay.sampling import Sampling
from kvrelay.usage import Miss
from tests.engine.fakes import naming
from tests.engine.torch.streams import Memory, install

VOCABULARY, SIZE, BLOCKS = 89, 4, 14
LIMITS = EngineLimits(
    num_blocks=BLOCKS, block_size=SIZE, max_model_len=40, max_num_seqs=4, max_num_batched_tokens=7
)
GREEDY = Sampling(temperature=0.0)
_KV = 8  # bytes of K, and of V, of a position: two numbers of float32


def kv_of(before: bytes, token: int) -> bytes:
    """K of a position after one whose K is ``before``."""
    return hashlib.blake2b(before + repr(token).encode(), digest_size=_KV).digest()


def chain(tokens: Sequence[int], before: bytes = b"") -> list[bytes]:
    """K of every position."""
    made: list[bytes] = []
    for token in tokens:
        made.append(kv_of(made[-1] if made else before, token))
    return made


def token_after(keys: Sequence[bytes], values: Sequence[bytes]) -> int:
    """The token that follows a context."""
    whole = hashlib.blake2b(b"".join((*keys, *values)), digest_size=_KV).digest()
    return int.from_bytes(whole, "little") % VOCABULARY


def answer(prompt: Sequence[int], count: int) -> list[int]:
    """What one process alone makes of a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        keys = chain(tokens)
        tokens.append(token_after(keys, [key[::-1] for key in keys]))
    return tokens[len(prompt) :]


class ChainModel:
    """A forward pass of several kernels over the tables that ``FlashBackend`` has uploaded."""

    def logits(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        step: AttentionStep,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """See ``CausalModel``."""
        assert isinstance(step, FlashStep)
        pool = _bytes(step.pool.tensor)
        made = torch.empty((rows.shape[0], VOCABULARY), device="cuda")
        given: list[int] = []
        found: dict[int, int] = {}
        launch(lambda: given.extend(_numbers(tokens)[0]))
        groups = [(step.decode, 0), (step.prefill, step.decodes)]
        for entries, first in groups:
            if entries is not None:
                launch(lambda e=entries, f=first: _store(pool, given, _numbers(step.places), e, f))  # type: ignore[misc]
        for entries, first in groups:
            if entries is not None:
                launch(lambda e=entries, f=first: _attend(pool, e, f, found))  # type: ignore[misc]
        launch(lambda: _head(_array(made), _numbers(rows), found))
        return made


def launch(kernel: Callable[[], object]) -> None:
    """Enqueue a kernel on the current stream."""
    runtime = Memory.runtime
    runtime.enqueue(runtime.current[-1], kernel)


def _numbers(there: torch.Tensor) -> NDArray[np.int64]:
    """What lies there when the kernel runs."""
    return _array(there).astype(np.int64)


def _array(there: torch.Tensor) -> NDArray[np.generic]:
    return there.as_subclass(torch.Tensor).numpy()


def _bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """[block, k|v, position, bytes] of a pool of one layer and one head."""
    plain = tensor.as_subclass(torch.Tensor).view(torch.uint8)
    return plain.view(tensor.shape[0], 2, tensor.shape[4], _KV).numpy()


def _rows(entries: FlashEntries, first: int) -> Iterator[tuple[int, int, list[int]]]:
    """Each row of the entries with its position and its table."""
    ends, lengths, tables = (
        _numbers(part) for part in (entries.rows, entries.lengths, entries.table)
    )
    for number, table in enumerate(tables.tolist()):
        count = int(ends[number + 1] - ends[number])
        for place in range(count):
            position = int(lengths[number]) - count + place
            yield first + int(ends[number]) + place, position, table


def _store(
    pool: NDArray[np.uint8],
    tokens: Sequence[int],
    places: NDArray[np.int64],
    entries: FlashEntries,
    first: int,
) -> None:
    """K and V of each row, in its place, after K of the position before as the pool has it."""
    there = pool.reshape(-1, _KV)
    where = places.reshape(2, -1)
    for row, position, table in _rows(entries, first):
        block, offset = divmod(position - 1, pool.shape[2])
        before = pool[table[block], 0, offset].tobytes() if position else b""
        key = kv_of(before, int(tokens[row]))
        there[where[0, row]] = np.frombuffer(key, np.uint8)
        there[where[1, row]] = np.frombuffer(key[::-1], np.uint8)


def _attend(
    pool: NDArray[np.uint8], entries: FlashEntries, first: int, found: dict[int, int]
) -> None:
    for row, position, table in _rows(entries, first):
        seen = [divmod(each, pool.shape[2]) for each in range(position + 1)]
        keys, values = (
            [pool[table[block], which, offset].tobytes() for block, offset in seen]
            for which in range(2)
        )
        found[row] = token_after(keys, values)


def _head(made: NDArray[np.generic], rows: NDArray[np.int64], found: Mapping[int, int]) -> None:
    made[...] = 0
    for place, row in enumerate(rows.tolist()):
        made[place, found[row]] = 1


def install_backend(patch: pytest.MonkeyPatch) -> None:
    """The simulated device, where the backend ``varlen`` uploads what the model's kernels read."""
    install(patch)
    use_backend(patch, runner)


def use_backend(patch: pytest.MonkeyPatch, module: types.ModuleType) -> None:
    """In a module that makes runners."""
    calls = VarlenCalls(_never)
    patch.setattr(module, "choose_attention", lambda name, pool: _chosen(pool, calls))


def _chosen(pool: KVPool, calls: VarlenCalls) -> ChosenAttention:
    return ChosenAttention(FlashBackend(pool, calls))


def _never(*given: object, **named: object) -> torch.Tensor:
    raise AssertionError("the model attends by itself")


class BlockTransfers:
    """A connector whose jobs copy blocks by ``BlockCopies``, each a little at a time.

    ``advance`` is what its threads do meanwhile. The store is a dictionary.
    """

    def __init__(self, copies: BlockCopies, rng: random.Random) -> None:
        self.wrong: list[str] = []
        self.loaded = 0  # blocks
        self._copies = copies
        self._rng = rng
        self._stored: dict[bytes, tuple[BlockContent, bytes]] = {}
        self._tails: dict[bytes, list[bytes]] = {}  # names of partial blocks by their parent
        self._truth: dict[bytes, list[bytes]] = {}  # K of the positions of a block, by its name
        self._jobs: dict[tuple[str, int, int], Iterator[None]] = {}
        self._begun: set[tuple[str, int, int]] = set()
        self._running: set[tuple[str, int, int]] = set()
        self._events: list[Event] = []

    def expect(self, tokens: Sequence[int]) -> None:
        """Blocks of this sequence, full ones and partial ones, may be saved."""
        keys, parent = chain(tokens), naming().root
        for start in range(0, len(tokens), SIZE):
            name = parent
            for stop in range(start + 1, min(start + SIZE, len(tokens)) + 1):
                name = naming().child(parent, tokens[start:stop])
                self._truth[name] = keys[start:stop]
            parent = name

    def start(self, notify: Callable[[], None]) -> None:
        pass

    def lookup(self, query: Query) -> int:
        end = len(query.tokens) // SIZE * SIZE
        at = query.local
        while at < end and query.names[at // SIZE] in self._stored:
            at += SIZE
        parent = query.names[at // SIZE - 1] if at else naming().root
        for name in self._tails.get(parent, ()):
            kept = self._stored[name][0].tokens
            if kept == tuple(query.tokens[at : at + len(kept)]):
                at += len(kept)
                break
        return min(at, len(query.tokens) - 1) - query.local

    def why(self, request_id: str) -> Miss | None:
        return None

    def load(self, load: Load) -> None:
        self._jobs[load.request_id, load.epoch, 0] = self._loading(load)

    def cancel(self, request_id: str, epoch: int) -> bool:
        key = (request_id, epoch, 0)
        if key not in self._jobs or key in self._begun:
            return key not in self._jobs
        del self._jobs[key]
        self._events.append(Loaded(request_id, epoch, 0, Miss.UNREACHABLE))
        return True

    def save(self, save: Save) -> None:
        self._jobs[save.request_id, save.epoch, save.serial] = self._saving(save)

    def release(self, request_id: str) -> None:
        pass

    def poll(self) -> list[Event]:
        self.advance()
        events = self._events
        self._events = []
        return events

    def close(self) -> None:
        pass

    def advance(self) -> None:
        """A few steps of the open jobs; a job that waits for the device lets others go on."""
        while self._rng.random() < 0.5:
            ready = [key for key in self._jobs if key not in self._running]
            if not ready:
                return
            key = self._rng.choice(ready)
            self._begun.add(key)
            self._running.add(key)
            try:
                ended = next(self._jobs[key], self) is self
            except Exception as error:  # noqa: BLE001 - what the device does in a wait, too
                self.wrong.append(f"{type(error).__name__} in a copy: {error}")
                ended = True
            self._running.discard(key)
            if ended:
                del self._jobs[key]

    def _loading(self, load: Load) -> Iterator[None]:
        contents = list(self._found(load))
        with self._copies.loading() as batch:
            for block, (content, payload) in contents:
                slot = batch.slot()
                assert slot is not None
                slot[: len(payload)] = payload
                assert batch.load(block, len(content.tokens), slot[: len(payload)])
                yield
        self.loaded += len(contents)
        self._events.append(Loaded(load.request_id, load.epoch, load.external))

    def _found(self, load: Load) -> Iterator[tuple[int, tuple[BlockContent, bytes]]]:
        """The blocks of a load, and what the store has for each."""
        for number, block in enumerate(load.blocks):
            index = load.local // SIZE + number
            if index < len(load.names) and load.names[index] in self._stored:
                yield block, self._stored[load.names[index]]
                continue
            parent = load.names[index - 1] if index else naming().root
            wanted = load.tokens[index * SIZE : load.local + load.external]
            tails = (self._stored[name] for name in self._tails[parent])
            yield block, next(tail for tail in tails if tail[0].tokens[: len(wanted)] == wanted)

    def _saving(self, save: Save) -> Iterator[None]:
        """One batch in groups: the slots of a group are used again for the next."""
        left = list(save.contents)
        with self._copies.saving() as batch:
            while left:
                count = self._rng.randint(1, 3)
                group, left = left[:count], left[count:]
                copied = [batch.save(one.block, len(one.tokens), None) for one in group]
                yield
                batch.settle()
                for content, one in zip(group, copied, strict=True):
                    assert one is not None
                    self._keep(content, bytes(one.payload))
                batch.recycle()
        self._events.append(Saved(save.request_id, save.epoch, save.serial, len(save.contents)))

    def _keep(self, content: BlockContent, payload: bytes) -> None:
        """Store a block, whose bytes must be those of its tokens."""
        keys = self._truth.get(content.name, [])
        if payload != b"".join((*keys, *(key[::-1] for key in keys))):
            self.wrong.append(f"block {content.block} was stored with other bytes")
        self._stored[content.name] = content, payload
        if len(content.tokens) < SIZE:
            self._tails.setdefault(content.parent, []).append(content.name)


@dataclass
class Seen:
    """What happened in a life: tokens by request, and how often the hard cases did."""

    wrong: str | None = None
    planned: int = 0  # steps while the device computed the one before
    unread: int = 0  # steps that ended without a read-back, with work of theirs left
    loaded: int = 0
    failed: int = 0  # requests of steps that failed, where they may
    tokens: dict[str, list[int]] = field(default_factory=dict)


class Life:
    """Random requests, some aborted, on one engine; every order of the streams is drawn."""

    def __init__(
        self, seed: int, runner_type: type[Runner] = Runner, may_fail: bool = False
    ) -> None:
        self._may_fail = may_fail
        self.rng = random.Random(seed)
        self.seen = Seen()
        self._failed: list[str] = []
        self._ended: set[str] = set()  # by an abort or by a step that failed
        self.runner = runner_type(chain_model(), BLOCKS, SIZE, "varlen")
        copies = self.runner.pool.copies
        assert copies is not None
        self.transfers = BlockTransfers(copies, self.rng)
        Memory.runtime.meanwhile = self.transfers.advance
        self.engine = Engine(self, LIMITS, naming(), self.transfers, self._deliver)

    @property
    def executed_positions(self) -> int:
        """See ``ModelRunner``."""
        return self.runner.executed_positions

    def execute(self, works: Sequence[Work], foresee: Foresee) -> Sequence[Sampled | None]:
        """See ``ModelRunner``: the product's, and what the device has left to do."""

        def counted() -> Sequence[Work]:
            self.seen.planned += bool(Memory.runtime.queues.get(0))
            return foresee()

        sampled = self.runner.execute(works, counted)
        self.seen.unread += bool(Memory.runtime.queues.get(0))
        return sampled

    def run(self) -> Seen:
        """Submit, abort, step; then drain, and compare every answer with that of one process."""
        asked: dict[str, tuple[tuple[int, ...], int]] = {}
        for number in range(20):
            name = f"r{number}"
            known = self.rng.choice([(), *(prompt for prompt, _ in asked.values())])
            own = (self.rng.randrange(2) for _ in range(self.rng.randint(1, 26)))
            prompt = (*known[: self.rng.randint(0, 24)], *own)[: self.rng.randint(1, 26)]
            only = self.rng.random() < 0.3
            count = self.rng.randint(1, 8)
            asked[name] = prompt, 1 if only else count
            self.transfers.expect([*prompt, *answer(prompt, count)])
            save = only or self.rng.random() < 0.8
            order = Order(name, prompt, len(prompt), count, prefill_only=only, save=save)
            self.engine.submit(order, GREEDY)
            for _ in range(self.rng.randint(0, 5)):
                self.engine.turn()
                loading = self.engine.load().loading > 0
                if self.rng.random() < (0.4 if loading else 0.06):
                    gone = self.rng.choice(list(asked)[-2:])
                    self._ended.add(gone)
                    self.engine.abort(gone)
        for _ in range(2000):
            busy, load = self.engine.turn(), self.engine.load()
            if not (busy or load.waiting or load.running or load.loading or load.saving):
                break
        self.seen.loaded = self.transfers.loaded
        self.seen.wrong = next(self._mistakes(asked), None)
        return self.seen

    def _mistakes(self, asked: Mapping[str, tuple[tuple[int, ...], int]]) -> Iterator[str]:
        yield from self._failed
        yield from self.transfers.wrong
        for name, (prompt, count) in asked.items():
            wanted, got = answer(prompt, count), self.seen.tokens.get(name, [])
            if got != wanted and not (name in self._ended and got == wanted[: len(got)]):
                yield f"{name} got {got} in place of {wanted}"
        findings = self.engine.audit()
        self.engine.turn()
        yield from (str(finding) for finding in findings.result())

    def _deliver(self, updates: Sequence[tuple[str, Update]]) -> None:
        for name, update in updates:
            if (
                isinstance(update, Failed)
                and self._may_fail
                and "a step failed" in str(update.error)
            ):
                self._ended.add(name)
                self.seen.failed += 1
            elif isinstance(update, Failed):
                self._failed.append(f"{name}: {update.error}")
            elif isinstance(update, Token):
                self.seen.tokens.setdefault(name, []).append(update.sampled.token)


def chain_model() -> LoadedModel:
    """The model, as a runner takes it."""
    info = ModelInfo(
        name="chain",
        revision="",
        architecture="",
        dtype="float32",
        device="cuda",
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        vocab_size=VOCABULARY,
        max_model_len=LIMITS.max_model_len,
        position_limit=None,
        eos_token_ids=(),
        num_parameters=0,
        logit_error=0.0,
    )
    return LoadedModel(info, ChainModel(), torch.device("cuda"))
