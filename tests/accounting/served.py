"""An engine with its real thread, a chain runner for a model and a scripted store."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

from kvrelay.connector.mock import MockConnector, Script
from kvrelay.engine.core.plan import EngineLimits
from kvrelay.engine.core.request import Order
from kvrelay.engine.core.updates import Ended, Failed, Token, Update
from kvrelay.engine.engine import Engine, EngineOptions
from kvrelay.sampling import Sampling
from tests.engine.fakes import ChainRunner, answer, naming

DEADLINE = 60.0
AUDITED = EngineOptions(audit_steps=True)


class Served:
    """Collects what the engine tells. As a context it starts and closes the engine.

    With ``journal`` its scheduler writes down every call.
    """

    def __init__(
        self,
        bounds: EngineLimits,
        script: Script,
        journal: list[str] | None = None,
        options: EngineOptions = AUDITED,
    ) -> None:
        self.bounds = bounds
        self.runner = ChainRunner(bounds.num_blocks, bounds.block_size)
        self.connector = MockConnector(script, fill=self.runner.fill)
        self.orders: dict[str, Order] = {}
        self.told: defaultdict[str, list[Update]] = defaultdict(list)
        self._news = threading.Condition()
        if journal is not None:
            options = replace(options, journal=journal.append)
        self.engine = Engine(self.runner, bounds, naming(), self.connector, self._deliver, options)

    def __enter__(self) -> Served:
        self.engine.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.engine.close()

    def submit(self, request_id: str, prompt: Sequence[int], new: int, made: int = 0) -> None:
        """A request; with ``made`` tokens of its answer it is a decode leg."""
        tokens = (*prompt, *answer(prompt, made))
        self._submit(Order(request_id, tokens, len(prompt), new))

    def prefill(self, request_id: str, prompt: Sequence[int]) -> None:
        self._submit(Order(request_id, tuple(prompt), len(prompt), 8, prefill_only=True))

    def _submit(self, order: Order) -> None:
        self.orders[order.request_id] = order
        self.engine.submit(order, Sampling())

    def wait(self, *request_ids: str) -> None:
        """Until each has had its last update."""
        with self._news:
            done = self._news.wait_for(lambda: all(map(self._over, request_ids)), DEADLINE)
        assert done, f"not over: {[name for name in request_ids if not self._over(name)]}"

    def tokens(self, request_id: str) -> list[int]:
        updates = self.told[request_id]
        return [update.sampled.token for update in updates if isinstance(update, Token)]

    def ended(self, request_id: str) -> Ended:
        last = self.told[request_id][-1]
        assert isinstance(last, Ended), last
        return last

    def check(self, request_id: str) -> Ended:
        """The tokens are those of one process and every token of the leg has one source."""
        order, ended = self.orders[request_id], self.ended(request_id)
        prompt, made = order.tokens[: order.prompt_len], len(order.tokens) - order.prompt_len
        new = 1 if order.prefill_only else order.max_tokens - made
        assert self.tokens(request_id) == answer(prompt, made + new)[made:]
        account = ended.tokens
        assert account.local + account.external + account.computed == account.length
        assert min(account.computed, account.recomputed, account.failed) >= 0
        assert account.generated == new
        assert sum(ended.sources.values()) == account.external
        return ended

    def settle(self) -> None:
        """Nothing is held in the end, and the books are right."""
        for _ in range(1000):
            assert self.engine.audit().result(DEADLINE) == []
            totals = self.engine.load().totals
            assert sum(totals.sources.values()) == totals.external
            if self.engine.load().held_blocks == 0:
                return
        raise AssertionError(f"blocks are still held: {self.engine.load()}")

    def executed(self) -> int:
        """Positions in the accounts of those that have ended."""
        return sum(self.ended(request_id).tokens.executed for request_id in self.orders)

    def _over(self, request_id: str) -> bool:
        updates = self.told.get(request_id, [])
        return bool(updates) and isinstance(updates[-1], Ended | Failed)

    def _deliver(self, updates: Sequence[tuple[str, Update]]) -> None:
        with self._news:
            for request_id, update in updates:
                self.told[request_id].append(update)
            self._news.notify_all()
