"""What each tenant may have: requests at once, and tokens a minute. Pure; time is passed in.

A request is charged all the tokens it can come to when it begins, and given back at its end what
it did not use. A full minute's tokens may be had at once; after that they come back evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from common.errors import Exhausted, Rejected
from rpc.identity import Tenant

RETRY_SECONDS = 1.0
MINUTE = 60.0


@dataclass(slots=True)
class _Account:
    requests: int = 0
    spent: float = 0.0  # tokens that have not come back yet
    at: float = 0.0


@dataclass(slots=True)
class Place:
    """One request of a tenant. ``used`` counts the tokens of its prompt and its output."""

    tenant: Tenant
    quotas: Quotas
    charged: int = 0
    used: int = 0

    def charge(self, tokens: int) -> None:
        """For all it can come to; ``Exhausted`` says when there is enough again."""
        self.quotas.charge(self.tenant, tokens)
        self.charged += tokens


class Quotas:
    """The accounts of all tenants; there are no more of them than credentials."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    @contextmanager
    def place(self, tenant: Tenant) -> Iterator[Place]:
        """Count a request while it lasts; ``Exhausted`` when there are as many as may be."""
        account = self._accounts.setdefault(tenant.name, _Account(at=self._clock()))
        if tenant.max_requests is not None and account.requests >= tenant.max_requests:
            raise Exhausted(
                f"tenant {tenant.name!r} has {account.requests} requests under way, its limit",
                RETRY_SECONDS,
            )
        account.requests += 1
        place = Place(tenant, self)
        try:
            yield place
        finally:
            account.requests -= 1
            account.spent = max(0.0, account.spent - max(0, place.charged - place.used))

    def charge(self, tenant: Tenant, tokens: int) -> None:
        """For ``Place`` alone."""
        allowed = tenant.tokens_per_minute
        if allowed is None:
            return
        if tokens > allowed:
            raise Rejected(
                "max_tokens",
                f"prompt and output can come to {tokens} tokens, and tenant {tenant.name!r} may"
                f" have {allowed} a minute",
            )
        account, now, rate = self._accounts[tenant.name], self._clock(), allowed / MINUTE
        account.spent = max(0.0, account.spent - (now - account.at) * rate)
        account.at = now
        if (over := account.spent + tokens - allowed) > 0:
            raise Exhausted(
                f"tenant {tenant.name!r} has had its {allowed} tokens of this minute", over / rate
            )
        account.spent += tokens

    def requests(self, tenant: Tenant) -> int:
        """How many are under way."""
        account = self._accounts.get(tenant.name)
        return 0 if account is None else account.requests
