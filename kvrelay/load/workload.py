"""What is sent: conversations made from a seed, or the requests of a trace.

Conversation ``number`` has the same content whenever and at whatever load it is sent.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

from kvrelay.errors import Rejected
from kvrelay.load.draws import LengthDraw
from kvrelay.load.request import LoadRequest, Part
from kvstore.trace.requests import BLOCK_TOKENS, TraceRequest, read_trace

MOST_TENANTS = 256
WORDS = tuple(a + b for a in "bdfgjklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "or"))
SEEDS = 1 << 32


@dataclass(frozen=True, slots=True)
class LoadTenant:
    """``share``: weight of its requests among all tenants. ``token``: bearer token."""

    name: str
    share: float = 1.0
    token: str | None = None


def read_tenants(path: Path) -> tuple[LoadTenant, ...]:
    """The tenants of a TOML file: a table for each, with ``share`` and ``token``."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Rejected("tenants", f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise Rejected("tenants", f"cannot read {path}: {error}") from error
    found = []
    for name, table in tables.items():
        if not isinstance(table, dict) or set(table) - {"share", "token"}:
            raise Rejected("tenants", f"{path}: {name}: wanted is a table of share and token")
        share, token = table.get("share", 1), table.get("token")
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share < 1e9:
            raise Rejected("tenants", f"{path}: {name}.share: must be a number above 0")
        if token is not None and not isinstance(token, str):
            raise Rejected("tenants", f"{path}: {name}.token: must be text")
        found.append(LoadTenant(name, share, token))
    if not 0 < len(found) <= MOST_TENANTS:
        raise Rejected("tenants", f"{path}: has {len(found)} tables, wanted are 1 to 256")
    return tuple(found)


def check_trace(path: Path) -> None:
    """Raises ``Rejected`` for a trace that cannot be opened."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise Rejected("trace", f"cannot read {path}: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class LoadTurn:
    """What the user adds to the conversation. ``think``: seconds after the answer before it."""

    said: Part
    max_tokens: int
    think: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """One conversation. ``at``: when a trace has it, in seconds from the trace's start."""

    number: int
    turns: tuple[LoadTurn, ...]
    seed: int
    tenant: str = ""
    leave_after: int | None = None
    read_rate: float | None = None
    at: float | None = None

    def request(self, turn: int, history: Sequence[Part]) -> LoadRequest:
        """The request of a turn after ``history``, which has what was said and answered before."""
        spoken = self.turns[turn]
        return LoadRequest(
            number=self.number,
            parts=(*history, spoken.said),
            max_tokens=spoken.max_tokens,
            seed=(self.seed + turn) % SEEDS,
            tenant=self.tenant,
            turn=turn,
            leave_after=self.leave_after,
            read_rate=self.read_rate,
        )


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What to draw conversations from. ``vocabulary``: token ids are below it.

    ``prefixes`` prompts of ``prefix`` tokens are the beginnings of all conversations. With
    ``distinct`` their contents repeat after so many. ``leave`` and ``slow`` are shares of them.
    """

    prompt: LengthDraw
    output: LengthDraw
    seed: int = 0
    vocabulary: int = 256
    text: bool = False
    prefix: int = 0
    prefixes: int = 1
    turns: LengthDraw = field(default_factory=lambda: LengthDraw("fixed", (1,)))
    think: float = 0.0
    distinct: int = 0
    leave: float = 0.0
    slow: float = 0.0
    slow_rate: float = 10.0
    tenants: tuple[LoadTenant, ...] = ()
    trace: Path | None = None
    trace_block: int = BLOCK_TOKENS

    def dialogues(self, begin: int = 0) -> Iterator[Dialogue]:
        """Conversations from number ``begin`` on; those of a trace end with it.

        Those of another ``begin`` have other contents, unless ``distinct`` is given.
        """
        if self.trace is None:
            number = begin
            while True:
                yield self._drawn(number)
                number += 1
        for number, traced in enumerate(read_trace(self.trace)):
            yield self._traced(f"{self.seed}:{0 if self.distinct else begin}", number, traced)

    def _drawn(self, number: int) -> Dialogue:
        content = number % self.distinct if self.distinct else number
        chance = random.Random(f"{self.seed}:{content}")
        turns = []
        for turn in range(self.turns.draw(chance)):
            length, output = self.prompt.draw(chance), self.output.draw(chance)
            said = self._tokens(f"{self.seed}:{content}:{turn}", length)
            if turn == 0 and self.prefix:
                shared = f"{self.seed}:prefix:{chance.randrange(self.prefixes)}"
                said = (*_ids(shared, self.prefix, self.vocabulary), *said)
            think = chance.expovariate(1 / self.think) if self.think and turn else 0.0
            turns.append(LoadTurn(self._part(said), output, think))
        return self._dialogue(number, tuple(turns), chance.randrange(SEEDS))

    def _traced(self, name: str, number: int, traced: TraceRequest) -> Dialogue:
        """A block of the trace becomes ``trace_block`` tokens; lengths shrink with it."""
        block = self.trace_block
        length = max(1, traced.tokens * block // BLOCK_TOKENS)
        said: list[int] = []
        for one in traced.names:
            said += _ids(f"{name}:{one.hex()}", block, self.vocabulary)
        said += self._tokens(f"{name}:{number}:rest", max(0, length - len(said)))
        output = max(1, traced.output * block // BLOCK_TOKENS)
        turn = LoadTurn(self._part(tuple(said[:length])), output)
        return self._dialogue(number, (turn,), self.seed % SEEDS, traced.at)

    def _dialogue(
        self, number: int, turns: tuple[LoadTurn, ...], seed: int, at: float | None = None
    ) -> Dialogue:
        """With the tenant and the behaviour of this client: not a part of the content."""
        chance = random.Random(f"{self.seed}:client:{number}")
        leaves, slow = chance.random() < self.leave, chance.random() < self.slow
        tenant = chance.choices(self.tenants, self._shares)[0].name if self.tenants else ""
        return Dialogue(
            number=number,
            turns=turns,
            seed=seed,
            tenant=tenant,
            leave_after=chance.randint(0, turns[-1].max_tokens) if leaves else None,
            read_rate=self.slow_rate if slow else None,
            at=at,
        )

    @cached_property
    def _shares(self) -> list[float]:
        return [tenant.share for tenant in self.tenants]

    def _tokens(self, name: str, count: int) -> tuple[int, ...]:
        return _drawn_ids(name, count, self.vocabulary)

    def _part(self, ids: tuple[int, ...]) -> Part:
        """The ids, or as many words."""
        return " ".join(WORDS[one % len(WORDS)] for one in ids) if self.text else ids


def _drawn_ids(name: str, count: int, vocabulary: int) -> tuple[int, ...]:
    values = memoryview(random.Random(name).randbytes(4 * count)).cast("I")
    return tuple(value % vocabulary for value in values)


@lru_cache(4096)
def _ids(name: str, count: int, vocabulary: int) -> tuple[int, ...]:
    """Of blocks and prefixes, which return."""
    return _drawn_ids(name, count, vocabulary)
