"""What each tenant may have: requests at once, and tokens a minute. Pure; time is passed in.

A request is charged all the tokens it can come to when it begins, and given back at its end what
it did not use. A full minute's tokens may be had at once; after that they come back evenly, first
those of the oldest request, and what has come back in this way is not given back once more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvrelay.errors import Exhausted, Rejected
from kvrelay.rpc.security.identity import Tenant

RETRY_SECONDS = 1.0
MINUTE = 60.0


@dataclass(slots=True)
class _Account:
    spent: float = 0.0  # tokens that have not come back yet
    at: float = 0.0
    places: list[QuotaHold] = field(default_factory=list)  # under way, the first that came first

    def pass_time(self, now: float, rate: float) -> None:
        """Tokens come back: not more of those under way may be given back than are still spent."""
        self.spent = max(0.0, self.spent - (now - self.at) * rate)
        self.at = now
        over = sum(place.held for place in self.places) - self.spent
        for place in self.places:
            if over <= 0:
                break
            came = min(place.held, over)
            place.held -= came
            over -= came


@dataclass(slots=True, eq=False)
class QuotaHold:
    """One request of a tenant. ``used`` counts the tokens of its prompt and its output, ``held``
    those charged that have not come back."""

    tenant: Tenant
    quotas: Quotas
    charged: int = 0
    used: int = 0
    held: float = 0.0

    def charge(self, tokens: int) -> None:
        """For all it can come to; ``Exhausted`` says when there is enough again."""
        self.quotas.charge(self.tenant, tokens)
        self.charged += tokens
        self.held += tokens

    @property
    def unused(self) -> float:
        """What is to be given back now."""
        return max(0.0, min(self.held, self.charged - self.used))


class Quotas:
    """The accounts of all tenants; there are no more of them than credentials."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}
        self.refused = Counter[str]()  # by reason

    @contextmanager
    def place(self, tenant: Tenant) -> Iterator[QuotaHold]:
        """Count a request while it lasts; ``Exhausted`` when there are as many as may be."""
        account = self._accounts.setdefault(tenant.name, _Account(at=self._clock()))
        if tenant.max_requests is not None and len(account.places) >= tenant.max_requests:
            self.refused["tenant_requests"] += 1
            raise Exhausted(
                f"tenant {tenant.name!r} has {len(account.places)} requests under way, its limit",
                RETRY_SECONDS,
            )
        place = QuotaHold(tenant, self)
        account.places.append(place)
        try:
            yield place
        finally:
            account.places.remove(place)
            account.spent = max(0.0, account.spent - place.unused)

    def charge(self, tenant: Tenant, tokens: int) -> None:
        """For ``QuotaHold`` alone."""
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
        account.pass_time(now, rate)
        if (over := account.spent + tokens - allowed) > 0:
            self.refused["tenant_tokens"] += 1
            raise Exhausted(
                f"tenant {tenant.name!r} has had its {allowed} tokens of this minute", over / rate
            )
        account.spent += tokens

    def requests(self, tenant: Tenant) -> int:
        """How many are under way."""
        account = self._accounts.get(tenant.name)
        return 0 if account is None else len(account.places)
