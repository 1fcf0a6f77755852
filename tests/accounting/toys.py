"""Two toys with the founding bugs in them: what the core is proved not to do.

``NanoToy`` plans a step as nano-vllm did before its pull request 211; ``BoundaryToy`` opens the
next block when ``len % B`` has a given value. Both write KV through the same chain runner as ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrelay.engine.core.updates import Work
from kvrelay.sampling import Sampling
from tests.engine.fakes import ChainRunner, chain


@dataclass(eq=False)
class NanoRequest:
    tokens: list[int]
    goal: int
    blocks: list[int] = field(default_factory=list)
    cached: int = 0


class NanoToy:
    """Two requests, blocks found by content; the count of a step is read before allocation."""

    def __init__(self, num_blocks: int, size: int) -> None:
        self.size = size
        self.runner = ChainRunner(num_blocks, size)
        self.free = list(range(num_blocks))
        self.by_content: dict[tuple[int, ...], int] = {}
        self.waiting: list[NanoRequest] = []
        self.running: list[NanoRequest] = []

    def run(self) -> None:
        while self.waiting or self.running:
            if not self._admit():
                self._decode()

    def _admit(self) -> bool:
        admitted = False
        while self.waiting:
            request = self.waiting[0]
            count = len(request.tokens) - request.cached  # the bug: what follows may find a hit
            if -(-len(request.tokens) // self.size) > len(self.free):
                break
            self._allocate(request)
            self.running.append(self.waiting.pop(0))
            self._compute(request, request.cached, count)
            admitted = True
        return admitted

    def _allocate(self, request: NanoRequest) -> None:
        for end in range(self.size, len(request.tokens) + self.size, self.size):
            block = self.by_content.get(tuple(request.tokens[:end]))
            if block is None or block not in self.free or end > len(request.tokens):
                block = self.free[0]
            else:
                request.cached += self.size
            self.free.remove(block)
            request.blocks.append(block)

    def _decode(self) -> None:
        index = 0
        while index < len(self.running):
            request = self.running[index]
            if len(request.tokens) % self.size == 1 and not self.free:
                self._preempt(self.running.pop())
                continue
            if len(request.tokens) % self.size == 1:
                request.blocks.append(self.free.pop(0))
            index += 1
        for request in list(self.running):
            self._compute(request, len(request.tokens) - 1, 1)

    def _preempt(self, request: NanoRequest) -> None:
        self._free(request)
        self.waiting.insert(0, request)

    def _free(self, request: NanoRequest) -> None:
        self.free += reversed(request.blocks)
        request.blocks = []
        request.cached = 0

    def _compute(self, request: NanoRequest, start: int, count: int) -> None:
        work = Work(request.tokens, start, count, request.blocks, 1, Sampling())
        sampled = self.runner.execute([work])[0]
        for end in range(self.size, len(request.tokens) + 1, self.size):
            self.by_content[tuple(request.tokens[:end])] = request.blocks[end // self.size - 1]
        assert sampled is not None
        request.tokens.append(sampled.token)
        if len(request.tokens) >= request.goal:
            self.running.remove(request)
            self._free(request)


class BoundaryToy:
    """One request whose table grows when ``len % B == rule``; the last block takes the token.

    ``appended``: the rule is asked after the sampled token was appended (``K = L - 1``), as in
    nano-vllm; otherwise before (``K = L``).
    """

    def __init__(self, rule: int, size: int, prompt: Sequence[int], appended: bool = True) -> None:
        self.rule = rule
        self.size = size
        self.appended = appended
        self.tokens = list(prompt)
        self.table = [[b""] * size for _ in range(-(-len(prompt) // size))]
        for position, value in enumerate(chain(prompt)):
            self.table[position // size][position % size] = value

    def decode(self, token: int) -> None:
        """One token more, its KV where a kernel writes it: last block, offset of the length."""
        asked = len(self.tokens) + (1 if self.appended else 0)
        self.tokens.append(token)
        if asked % self.size == self.rule % self.size:
            self.table.append([b""] * self.size)
        self.table[-1][(len(self.tokens) - 1) % self.size] = chain(self.tokens)[-1]

    def wrong(self) -> list[int]:
        """Positions that a kernel reads wrong: overwritten, never written, or outside the table."""
        slots = [slot for block in self.table for slot in block]
        slots += [b"outside"] * len(self.tokens)
        truth = chain(self.tokens)
        return [position for position, value in enumerate(truth) if slots[position] != value]
