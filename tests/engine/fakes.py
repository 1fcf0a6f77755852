"""A model whose KV says which tokens it was computed from, so that every wrong slot is seen.

The KV of position ``p`` is a hash of tokens ``[0, p]``. The runner checks, for every position it
attends to, that the slot holds just that, and its next token is a function of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvrelay.engine.core.blocks import Naming
from kvrelay.engine.core.external import Load
from kvrelay.engine.core.plan import EngineLimits, Entry, Plan
from kvrelay.engine.core.updates import Ended, Foresee, Sampled, Work

VOCABULARY = 97
LIMITS = EngineLimits(
    num_blocks=16, block_size=4, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32
)


def digest(parent: bytes, token: int) -> bytes:
    return hashlib.blake2b(parent + token.to_bytes(4, "little"), digest_size=8).digest()


def chain(tokens: Sequence[int]) -> list[bytes]:
    """The KV of every position."""
    made: list[bytes] = []
    for token in tokens:
        made.append(digest(made[-1] if made else b"", token))
    return made


def next_token(tokens: Sequence[int], salt: int = 0) -> int:
    """What the model answers after ``tokens``; requests of another ``salt`` sample otherwise."""
    return (int.from_bytes(chain(tokens)[-1], "little") + salt) % VOCABULARY


def answer(prompt: Sequence[int], count: int, salt: int = 0) -> list[int]:
    """What one process alone would make of a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, salt))
    return tokens[len(prompt) :]


def naming() -> Naming:
    def child(parent: bytes, tokens: Sequence[int]) -> bytes:
        return hashlib.sha256(parent + repr(list(tokens)).encode()).digest()

    return Naming(b"root", child)


class Traced:
    """Keeps the account of a dropped leg, and the calls to the store that were made for it."""

    def __init__(self) -> None:
        self.accounts: list[tuple[Ended, float]] = []
        self.depth = 0

    @contextmanager
    def calling(self) -> Iterator[None]:
        self.depth += 1
        yield
        self.depth -= 1

    def dropped(self, account: Ended, now: float) -> None:
        self.accounts.append((account, now))

    @property
    def phases(self) -> tuple[float, float, float, float]:
        """Seconds of queue, load, first token, and the rest; they add up to the leg's life."""
        ((account, now),) = self.accounts
        timing = account.timing
        parts = timing.queue, timing.load, timing.run
        return *parts, now - timing.submitted - sum(parts)


class ChainRunner:
    """``slots[block][offset]`` is the KV; ``executed_positions`` counts what was computed."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.size = block_size
        self.slots: list[list[bytes | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.executed_positions = 0

    def execute(self, works: Sequence[Work], foresee: Foresee = lambda: ()) -> list[Sampled | None]:
        return [self._one(work) for work in works]

    def plan(self, plan: Plan) -> list[int | None]:
        """A plan of the scheduler, without an engine around it."""
        return [self._entry(entry) for entry in plan.entries]

    def fill(self, load: Load, valid: int) -> None:
        """Write what a true load would: ``valid`` tokens right, the rest rubbish."""
        truth = chain(load.tokens)
        for offset in range(load.external):
            position = load.local + offset
            block = load.blocks[offset // self.size]
            right = offset < valid
            self.slots[block][position % self.size] = truth[position] if right else b"rubbish"

    def _entry(self, entry: Entry) -> int | None:
        request, blocks = entry.request, entry.request.resident.blocks
        if entry.samples:
            return self._token(request.tokens, entry.start, entry.count, blocks)
        self._compute(request.tokens, entry.start, entry.count, blocks)
        return None

    def _one(self, work: Work) -> Sampled | None:
        if work.sampling is None:
            self._compute(work.tokens, work.start, work.count, work.blocks)
            return None
        return Sampled(self._token(work.tokens, work.start, work.count, work.blocks))

    def _token(self, tokens: Sequence[int], start: int, count: int, blocks: Sequence[int]) -> int:
        self._compute(tokens, start, count, blocks)
        return next_token(tokens[: start + count])

    def _compute(
        self, tokens: Sequence[int], start: int, count: int, blocks: Sequence[int]
    ) -> None:
        truth = chain(tokens[: start + count])
        for position in range(start):
            seen = self.slots[blocks[position // self.size]][position % self.size]
            if seen != truth[position]:
                raise AssertionError(f"position {position} of {tokens} reads {seen!r}")
        for position in range(start, start + count):
            self.slots[blocks[position // self.size]][position % self.size] = truth[position]
        self.executed_positions += count
