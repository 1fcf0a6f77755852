"""Whose blocks are whose: what a caller names is found under a key that only its credential gives.

A key is a prefix made of the tenant's salt, and the name. So a tenant can neither read, probe, list
nor overwrite what another has, whatever it writes into a request. The tenant without a name, whom
services and a store without credentials act for, has no prefix: its keys are the names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvrelay.config.values import show_size
from kvrelay.errors import NotFound, Rejected
from kvrelay.rpc.security.identity import Caller, Tenant
from kvstore.base import Tail
from kvstore.claims import Claim, prefix_of

PREFIX_BYTES = 16
_PERSON = b"kvrelay.store.v1"


@dataclass(frozen=True, slots=True)
class TenantScope:
    """From what a caller says to what the store knows."""

    prefix: bytes = b""

    def key(self, name: bytes) -> bytes:
        """Of one block."""
        return self.prefix + name

    def keys(self, names: Sequence[bytes]) -> Sequence[bytes]:
        """Of many."""
        return [self.prefix + name for name in names] if self.prefix else names

    def tails(self, tails: Sequence[Tail]) -> Sequence[Tail]:
        """Likewise."""
        return [Tail(tail.after, self.key(tail.name)) for tail in tails] if self.prefix else tails

    def claims(self, claims: Sequence[Claim]) -> Sequence[Claim]:
        """Likewise."""
        if not self.prefix:
            return claims
        return [
            Claim(self.key(c.name), c.size, c.partial, self._opening(c.opening)) for c in claims
        ]

    def openings(self, openings: Iterable[int]) -> list[int]:
        """Of another tenant's prompts nothing is said either."""
        return [self._mixed(opening) if self.prefix else opening for opening in openings]

    def _opening(self, opening: int | None) -> int | None:
        return None if opening is None else self._mixed(opening)

    def _mixed(self, opening: int) -> int:
        data = opening.to_bytes(8, "little")
        return int.from_bytes(hashlib.blake2b(data, key=self.prefix, digest_size=8).digest())


OPEN_SCOPE = TenantScope()


@dataclass(frozen=True, slots=True)
class TenantQuota:
    """A tenant as the store sees it; ``quota`` is in bytes of memory."""

    name: str
    prefix: bytes
    quota: int


@dataclass(frozen=True, slots=True)
class TenantTable:
    """Those that have a place in this store, by prefix. Without any, all is one tenant's."""

    owners: Mapping[bytes, TenantQuota] = field(default_factory=dict)

    @classmethod
    def of(cls, tenants: Iterable[Tenant], budget: int) -> TenantTable:
        """Those with ``store_bytes``; ``Rejected`` if they have more together than there is."""
        owners: dict[bytes, TenantQuota] = {}
        for tenant in tenants:
            if tenant.store_bytes is not None:
                prefix = _prefix(tenant)
                if prefix in owners:
                    both = f"{tenant.name} and {owners[prefix].name}"
                    raise Rejected("credentials", f"{both} have the same salt: give each its own")
                owners[prefix] = TenantQuota(tenant.name, prefix, tenant.store_bytes)
        if not owners:
            return cls()
        total = sum(owner.quota for owner in owners.values())
        if total > budget:
            raise Rejected(
                "credentials",
                f"store-bytes of all tenants are {show_size(total)} and the store's --budget is"
                f" {show_size(budget)}: give less, or a larger budget",
            )
        return cls({b"": TenantQuota("", b"", budget - total), **owners})

    def scope(self, caller: Caller) -> TenantScope:
        """What a caller may name."""
        return TenantScope(_prefix(caller.tenant)) if caller.tenant.name else OPEN_SCOPE

    def named(self, name: str) -> TenantScope:
        """That of a tenant, for admins; ``NotFound`` if there is none."""
        if not name:
            return OPEN_SCOPE
        for owner in self.owners.values():
            if owner.name == name:
                return TenantScope(owner.prefix)
        raise NotFound(f"there is no tenant {name!r} in this store")

    def title(self, key: bytes) -> str:
        """Name of the tenant whose key it is; of one that is not known here, its prefix."""
        prefix = prefix_of(key)
        owner = self.owners.get(prefix)
        return owner.name if owner is not None else prefix.hex()


def _prefix(tenant: Tenant) -> bytes:
    return hashlib.blake2b(tenant.salt, digest_size=PREFIX_BYTES, person=_PERSON).digest()
