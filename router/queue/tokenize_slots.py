"""Turns at work that is done before any queue: a few at once for each tenant, the others wait.

What is under way goes on when its client leaves, and keeps its place until it is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from kvrelay.errors import Exhausted
from kvrelay.rpc.security.identity import Tenant

T = TypeVar("T")


@dataclass(slots=True)
class _Line:
    """Of a tenant: turns that are free, and who waits for one, the first that came first."""

    tenant: Tenant
    free: int
    waiting: dict[asyncio.Future[None], None] = field(default_factory=dict)

    @property
    def crowd(self) -> float:
        return len(self.waiting) / self.tenant.weight


class TokenizeSlots:
    """Of all tenants; there are no more of them than credentials."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._lines: dict[str, _Line] = {}

    @property
    def crowd(self) -> float:
        """The most that any tenant has waiting, for its weight."""
        return max((line.crowd for line in self._lines.values()), default=0.0)

    async def beside(self, tenant: Tenant, work: Callable[[], T]) -> T:
        """What ``work`` returns, done in a thread; ``Exhausted`` for who was pushed out."""
        await self.take(tenant)
        under_way = asyncio.ensure_future(asyncio.to_thread(work))
        under_way.add_done_callback(lambda done: self._over(tenant, done))
        return await asyncio.shield(under_way)

    async def take(self, tenant: Tenant) -> None:
        """Wait for a turn, to be given back. ``Exhausted`` for who was pushed out."""
        line = self._lines.setdefault(tenant.name, _Line(tenant, self._at_once))
        if line.free:
            line.free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        line.waiting[turn] = None
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled() and turn.exception() is None:
                self.give(tenant)  # it came as its client left
            raise
        finally:
            line.waiting.pop(turn, None)

    def give(self, tenant: Tenant) -> None:
        """Whoever waits for longest is next."""
        line = self._lines[tenant.name]
        while line.waiting:
            turn = next(iter(line.waiting))
            del line.waiting[turn]
            if not turn.done():
                turn.set_result(None)
                return
        line.free += 1

    def _over(self, tenant: Tenant, done: asyncio.Future[T]) -> None:
        self.give(tenant)
        if not done.cancelled():
            done.exception()  # seen, whether or not somebody still waits for it

    def crowd_out(self, tenant: Tenant, error: Callable[[Tenant], Exhausted]) -> bool:
        """Push out the last of whoever has most, if ``tenant`` would have fewer; whether it did."""
        most = max(self._lines.values(), key=lambda line: line.crowd, default=None)
        own = self._lines.get(tenant.name)
        mine = (len(own.waiting) + 1 if own else 1) / tenant.weight
        while most is not None and most.crowd > mine:
            turn, _ = most.waiting.popitem()
            if not turn.done():
                turn.set_exception(error(most.tenant))
                return True
        return False
