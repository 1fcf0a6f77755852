"""A weighted semaphore that is fair to tenants: it bounds memory before a request is queued."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections import Counter
from collections.abc import Callable

from kvrelay.errors import Exhausted
from kvrelay.rpc.security.identity import Tenant
from router.queue.fair import FairQueue, QueuedRequest


class FairSemaphore:
    """``limit`` units in all, of which one tenant holds at most ``share``.

    More than a share is given to a tenant that holds nothing, and more than the limit if no tenant
    holds anything. The unnamed tenant (services, or a caller whose network is unknown) has no share
    of its own, and evicts no request. ``FairQueue`` says in which order waiting tenants are served.
    """

    def __init__(self, limit: int, share: int) -> None:
        self._limit = limit
        self._share = share
        self._held = Counter[str]()  # units by tenant
        self._queue = FairQueue(sys.maxsize)
        self._waiting: dict[int, tuple[asyncio.Future[None], Tenant]] = {}
        self._keys = itertools.count()

    def held(self, tenant: Tenant) -> int:
        """Units that a tenant holds."""
        return self._held[tenant.name]

    @property
    def waiting(self) -> int:
        """Number of waiting tasks."""
        return len(self._queue)

    @property
    def max_load(self) -> float:
        """Waiting tasks of the most loaded tenant, divided by its weight."""
        return self._queue.max_load

    async def acquire(self, tenant: Tenant, units: int) -> None:
        """Wait for ``units``, to be released; ``Exhausted`` if this task is evicted."""
        request = QueuedRequest(next(self._keys), units, tenant.name, tenant.weight)
        granted = asyncio.get_running_loop().create_future()
        self._waiting[request.key] = granted, tenant
        if not self._held:
            self._queue.reset()
        self._queue.push(request)
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled() and granted.exception() is None:  # granted just before
                self.release(tenant, units)
            raise
        finally:
            del self._waiting[request.key]
            self._queue.remove(request.key)
            self._grant()  # the next task may need less

    def release(self, tenant: Tenant, units: int) -> None:
        """Give back ``units``."""
        self._held[tenant.name] -= units
        if not self._held[tenant.name]:
            del self._held[tenant.name]
        self._grant()

    def evict_for(self, tenant: Tenant, error: Callable[[Tenant], Exhausted]) -> bool:
        """Evict the newest waiter of the most loaded tenant if ``tenant`` would still have fewer.

        Returns whether one was evicted.
        """
        last = self._queue.evictable(tenant.name, tenant.weight) if tenant.name else None
        if last is None:
            return False
        granted, owner = self._waiting[last.key]
        self._queue.remove(last.key)
        granted.set_exception(error(owner))
        return True

    def _grant(self) -> None:
        while (request := self._queue.first(self._within_share)) is not None:
            total = self._held.total()
            if total and total + request.tokens > self._limit:
                return  # it is next: a smaller one must not overtake it for ever
            self._queue.pop(self._within_share)
            granted, _ = self._waiting[request.key]
            if not granted.done():  # else its task was cancelled
                self._held[request.tenant] += request.tokens
                granted.set_result(None)

    def _within_share(self, request: QueuedRequest) -> bool:
        held = self._held[request.tenant]
        share = self._share if request.tenant else self._limit
        return not held or held + request.tokens <= share
