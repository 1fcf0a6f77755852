"""Quotas: requests at once and tokens a minute of each tenant. Pure; time is passed in.

A request is charged when it begins with all the tokens that it can need, and gets back at its end
what it did not use. A full minute's tokens may be used at once. Then they are restored
evenly, to the oldest request first, and restored tokens are not given back once more at its end.

A refused request pays for its text, which was read and tokenized: all its tokens if it can never be
served, and a sixteenth if it may be sent again later. (With more, the retries of a tenant that is
at its limit would use up the tokens that each of them waits for.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvrelay.errors import Exhausted, Rejected, Unservable
from kvrelay.rpc.security.identity import Tenant

RETRY_SECONDS = 1.0
RETRIED = 16
MINUTE = 60.0


@dataclass(slots=True)
class _Account:
    spent: float = 0.0  # tokens that are not restored yet
    at: float = 0.0
    open: list[QuotaHold] = field(default_factory=list)  # oldest first
    places: int = 0  # of the open holds

    def advance(self, now: float, rate: float) -> None:
        """Restore tokens: the open holds together may give back no more than is still spent."""
        self.spent = max(0.0, self.spent - (now - self.at) * rate)
        self.at = now
        over = sum(hold.held for hold in self.open) - self.spent
        for hold in self.open:
            if over <= 0:
                break
            restored = min(hold.held, over)
            hold.held -= restored
            over -= restored


@dataclass(slots=True, eq=False)
class QuotaHold:
    """What one request holds of its tenant's quota.

    ``used`` counts the tokens of its prompt and its output; ``held`` those charged and not yet
    restored; ``text`` those of a prompt that came as text. It counts as ``places`` requests.
    ``group``: the open holds of all prompts that came with its own.
    """

    tenant: Tenant
    quotas: Quotas
    group: list[QuotaHold] = field(default_factory=list)
    charged: int = 0
    used: int = 0
    held: float = 0.0
    text: int = 0
    places: int = 1

    def widen(self, places: int) -> None:
        """Count as so many requests from now on; ``Exhausted`` if the tenant has not as many left.

        ``Rejected`` for the field ``n`` if it may never have as many.
        """
        if places > self.places:
            self.quotas.widen(self, places)

    def tokenized(self, tokens: int) -> None:
        """Note the tokens of its text, or fewer for a text that was refused as too long."""
        self.text = tokens
        self.used = max(self.used, -(tokens // -RETRIED))

    def charge(self, tokens: int) -> None:
        """Charge all tokens that the prompt can need.

        ``Exhausted`` has the time until there are enough; ``Rejected`` if its group needs more than
        a minute's tokens.
        """
        others = sum(hold.charged for hold in self.group if hold is not self)
        self.quotas.charge(self.tenant, tokens, others)
        self.charged += tokens
        self.held += tokens

    @property
    def unused(self) -> float:
        """Tokens to give back now; negative if more were used than charged."""
        return min(self.held, self.charged - self.used)


class Quotas:
    """The accounts of all tenants; there are no more of them than credentials."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}
        self.refused = Counter[str]()  # by reason

    @contextmanager
    def hold(self, tenant: Tenant, group: list[QuotaHold] | None = None) -> Iterator[QuotaHold]:
        """Count a request inside; ``Exhausted`` if the tenant has as many as it may.

        ``group``: open holds of the same request's prompts; this one is added inside.
        """
        account = self._accounts.setdefault(tenant.name, _Account(at=self._clock()))
        if tenant.max_requests is not None and account.places >= tenant.max_requests:
            self.refused["tenant_requests"] += 1
            raise Exhausted(
                f"tenant {tenant.name!r} has {account.places} requests open, its limit",
                RETRY_SECONDS,
            )
        hold = QuotaHold(tenant, self, [] if group is None else group)
        hold.group.append(hold)
        account.open.append(hold)
        account.places += 1
        try:
            yield hold
        except (Rejected, Unservable):
            hold.used = max(hold.used, hold.text)
            raise
        finally:
            if tenant.tokens_per_minute is not None and hold.unused < 0:
                account.advance(self._clock(), tenant.tokens_per_minute / MINUTE)
            account.open.remove(hold)
            hold.group.remove(hold)
            account.places -= hold.places
            account.spent = max(0.0, account.spent - hold.unused)

    def widen(self, hold: QuotaHold, places: int) -> None:
        """For ``QuotaHold`` alone."""
        account, most = self._accounts[hold.tenant.name], hold.tenant.max_requests
        if most is not None and places > most:
            raise Rejected(
                "n",
                f"{places} samples count as {places} requests, and tenant {hold.tenant.name!r} may"
                f" have {most} open",
            )
        others = account.places - hold.places
        if most is not None and others + places > most:
            self.refused["tenant_requests"] += 1
            raise Exhausted(
                f"tenant {hold.tenant.name!r} has {others} other requests open and may have {most}"
                f" in all: there is no room for {places} samples",
                RETRY_SECONDS,
            )
        account.places += places - hold.places
        hold.places = places

    def charge(self, tenant: Tenant, tokens: int, others: int) -> None:
        """For ``QuotaHold`` alone. ``others``: what the rest of its group was charged."""
        allowed = tenant.tokens_per_minute
        if allowed is None:
            return
        if (needed := others + tokens) > allowed:
            raise Rejected(
                "max_tokens",
                f"prompt and output may need {needed} tokens, and tenant {tenant.name!r} may"
                f" use {allowed} a minute",
            )
        account, now, rate = self._accounts[tenant.name], self._clock(), allowed / MINUTE
        account.advance(now, rate)
        if (over := account.spent + tokens - allowed) > 0:
            self.refused["tenant_tokens"] += 1
            raise Exhausted(
                f"tenant {tenant.name!r} has used its {allowed} tokens of this minute", over / rate
            )
        account.spent += tokens

    def requests(self, tenant: Tenant) -> int:
        """Number of its open requests."""
        account = self._accounts.get(tenant.name)
        return 0 if account is None else account.places
