"""Tenants of a store: a block is found under a key that follows from the caller's credential.

A key is a prefix made of the tenant's salt, then the name. So no request of a tenant can read,
probe, list or overwrite another tenant's blocks. Services, and every caller of a store without
credentials, act for the tenant without a name. It has no prefix: its keys are the names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvrelay.block.name import FAMILY_BITS, FAMILY_MASK
from kvrelay.config.values import show_size
from kvrelay.errors import NotFound, Rejected
from kvrelay.rpc.security.identity import Caller, Tenant
from kvstore.base import Tail
from kvstore.claims import Claim, prefix_of

PREFIX_BYTES = 16
_PERSON = b"kvrelay.store.v1"


@dataclass(frozen=True, slots=True)
class TenantScope:
    """Translates what a caller of one tenant names into keys of the store."""

    prefix: bytes = b""

    def key(self, name: bytes) -> bytes:
        """The key of one block."""
        return self.prefix + name

    def keys(self, names: Sequence[bytes]) -> Sequence[bytes]:
        """The keys of many blocks."""
        return [self.prefix + name for name in names] if self.prefix else names

    def tails(self, tails: Sequence[Tail]) -> Sequence[Tail]:
        """The same tails by keys."""
        return [Tail(tail.after, self.key(tail.name)) for tail in tails] if self.prefix else tails

    def claims(self, claims: Sequence[Claim]) -> Sequence[Claim]:
        """The same claims by keys."""
        if not self.prefix:
            return claims
        return [
            c._replace(
                name=self.key(c.name),
                first_block_hash=self._mixed_hash(c.first_block_hash),
                parent=None if c.parent is None else self.key(c.parent),
            )
            for c in claims
        ]

    def first_block_hashes(self, hashes: Iterable[int]) -> list[int]:
        """Hashes of first blocks, mixed so that they reveal nothing of other tenants' prompts.

        The bits that stand for the model stay.
        """
        return [self._mixed(number) if self.prefix else number for number in hashes]

    def _mixed_hash(self, number: int | None) -> int | None:
        return None if number is None else self._mixed(number)

    def _mixed(self, number: int) -> int:
        data = (number >> FAMILY_BITS).to_bytes(8, "little")
        mixed = hashlib.blake2b(data, key=self.prefix, digest_size=8).digest()
        return int.from_bytes(mixed) & ~FAMILY_MASK | number & FAMILY_MASK


OPEN_SCOPE = TenantScope()


@dataclass(frozen=True, slots=True)
class TenantQuota:
    """A tenant's key prefix and quota in bytes of memory."""

    name: str
    prefix: bytes
    quota: int


@dataclass(frozen=True, slots=True)
class TenantTable:
    """The tenants with a quota in this store, by prefix. Without any, all blocks share one."""

    owners: Mapping[bytes, TenantQuota] = field(default_factory=dict)

    @classmethod
    def of(cls, tenants: Iterable[Tenant], budget: int) -> TenantTable:
        """The tenants with ``store_bytes``; ``Rejected`` if their sum exceeds the budget."""
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
        """The scope of a caller."""
        return TenantScope(_prefix(caller.tenant)) if caller.tenant.name else OPEN_SCOPE

    def named(self, name: str) -> TenantScope:
        """The scope of the tenant ``name``, for admins; ``NotFound`` if it is unknown."""
        if not name:
            return OPEN_SCOPE
        for owner in self.owners.values():
            if owner.name == name:
                return TenantScope(owner.prefix)
        raise NotFound(f"there is no tenant {name!r} in this store")

    def title(self, key: bytes) -> str:
        """The name of a key's tenant; the prefix in hex if the tenant is unknown."""
        prefix = prefix_of(key)
        owner = self.owners.get(prefix)
        return owner.name if owner is not None else prefix.hex()


def _prefix(tenant: Tenant) -> bytes:
    return hashlib.blake2b(tenant.salt, digest_size=PREFIX_BYTES, person=_PERSON).digest()
