"""The token ids of a request's input. Long inputs are tokenized in threads, not on the event loop.

This happens before the queue, so each tenant has a few slots for it and its other requests wait. A
thread keeps its slot until it is done, also if its client leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvrelay.errors import Exhausted
from kvrelay.rpc.security.identity import Tenant
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.v1 import router_pb2

LONG_CHARS = 2048  # from here on tokenizing takes too long for the event loop
LONG_CHAT = 32  # messages
SLOTS = 4  # of each tenant

T = TypeVar("T")


class PromptTokenizer:
    """The tokenizer of a router, shared by all tenants."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.slots = TokenizeSlots(SLOTS)

    async def tokenize(
        self, message: router_pb2.GenerateRequest, tenant: Tenant
    ) -> tuple[int, ...]:
        """The ids; ``Rejected`` for an input that is too long or that no template takes.

        ``Exhausted`` if the request was evicted while it waited for a slot.
        """
        if message.HasField("token_ids"):
            return tuple(message.token_ids.ids)
        if message.HasField("chat"):
            turns = [{"role": m.role, "content": m.content} for m in message.chat.messages]
            chars = sum(len(turn["role"]) + len(turn["content"]) for turn in turns)
            long = chars > LONG_CHARS or len(turns) > LONG_CHAT
            return await self._encode(lambda: self._tokenizer.encode_chat(turns), long, tenant)
        prompt = message.prompt
        self._tokenizer.check_size(prompt, "prompt")
        long = len(prompt) > LONG_CHARS
        return await self._encode(lambda: self._tokenizer.encode(prompt), long, tenant)

    async def _encode(
        self, encode: Callable[[], Sequence[int]], long: bool, tenant: Tenant
    ) -> tuple[int, ...]:
        return tuple(await self.slots.run(tenant, encode) if long else encode())


@dataclass(slots=True)
class _TenantSlots:
    """A tenant's slots, and its tasks that wait for one, oldest first.

    ``evicted`` tasks were cancelled here and raise the error kept for them.
    """

    tenant: Tenant
    free: asyncio.Semaphore
    waiting: dict[asyncio.Task[object], None] = field(default_factory=dict)
    evicted: dict[asyncio.Task[object], Exhausted] = field(default_factory=dict)

    @property
    def load(self) -> float:
        return len(self.waiting) / self.tenant.weight


class TokenizeSlots:
    """Of all tenants; there are no more of them than credentials."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._tenants: dict[str, _TenantSlots] = {}

    @property
    def max_load(self) -> float:
        """Waiting requests of the most loaded tenant, divided by its weight."""
        return max((slots.load for slots in self._tenants.values()), default=0.0)

    async def run(self, tenant: Tenant, work: Callable[[], T]) -> T:
        """The result of ``work``, called in a thread; ``Exhausted`` for an evicted request."""
        await self.acquire(tenant)
        running = asyncio.ensure_future(asyncio.to_thread(work))
        running.add_done_callback(lambda done: self._finished(tenant, done))
        return await asyncio.shield(running)

    async def acquire(self, tenant: Tenant) -> None:
        """Wait for a slot, to be released; ``Exhausted`` for an evicted request."""
        slots = self._of(tenant)
        task = asyncio.current_task()
        assert task is not None
        slots.waiting[task] = None
        try:
            await slots.free.acquire()
        except asyncio.CancelledError:
            error = slots.evicted.pop(task, None)
            if error is None or task.uncancel():
                raise
            raise error from None
        finally:
            slots.waiting.pop(task, None)

    def release(self, tenant: Tenant) -> None:
        """The oldest waiter of the tenant is next."""
        self._of(tenant).free.release()

    def evict_for(self, tenant: Tenant, error: Callable[[Tenant], Exhausted]) -> bool:
        """Evict the newest waiter of the most loaded tenant if ``tenant`` would still have fewer.

        Returns whether one was evicted.
        """
        most = max(self._tenants.values(), key=lambda slots: slots.load, default=None)
        own = self._tenants.get(tenant.name)
        load = (len(own.waiting) + 1 if own else 1) / tenant.weight
        while most is not None and most.load > load:
            task, _ = most.waiting.popitem()
            if not task.cancelling():  # else it is leaving already
                most.evicted[task] = error(most.tenant)
                task.cancel()
                return True
        return False

    def _of(self, tenant: Tenant) -> _TenantSlots:
        new = _TenantSlots(tenant, asyncio.Semaphore(self._slots))
        return self._tenants.setdefault(tenant.name, new)

    def _finished(self, tenant: Tenant, done: asyncio.Future[T]) -> None:
        self.release(tenant)
        if not done.cancelled():
            done.exception()  # retrieved, also if no request waits for it any more
