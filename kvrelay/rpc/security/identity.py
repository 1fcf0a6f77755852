"""Who calls: what a credential says of its holder. Frozen values; secrets are in none of them."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum


class CallerKind(Enum):
    """What a caller is to us."""

    CLIENT = "client"  # asks the router, for one tenant
    SERVICE = "service"  # router, workers and store among themselves
    ADMIN = "admin"  # may do everything


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose requests are told apart; ``None`` is no limit.

    ``salt`` enters the names of all blocks of this tenant, so that none is found by another. It is
    secret: it comes from the credentials of this server and never from a request.
    """

    name: str = ""
    salt: bytes = field(default=b"", repr=False)
    max_requests: int | None = None  # at once
    tokens_per_minute: int | None = None  # prompt and output
    store_bytes: int | None = None  # of a store's memory; without it, no store is for it
    weight: float = 1.0  # share beside other tenants where they queue


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller. Services and admins act for the tenant without a name, or for all of them."""

    kind: CallerKind
    tenant: Tenant = Tenant()


LOCAL = Caller(CallerKind.ADMIN)
"""Everybody, where no credentials are configured."""

ANONYMOUS = Caller(CallerKind.CLIENT)
"""Who shows no token; what is open to strangers asks nothing of them."""

_caller: ContextVar[Caller] = ContextVar("kvrelay.caller", default=LOCAL)


def caller() -> Caller:
    """Who made the call that is being served here; in a handler of one of our servers."""
    return _caller.get()


def enter(identity: Caller) -> None:
    """From now on this task serves a call of ``identity``."""
    _caller.set(identity)
