"""The caller of a call, as its credential describes it: frozen values without any token."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum


class CallerKind(Enum):
    """What a caller may do."""

    CLIENT = "client"  # calls the router, for one tenant
    SERVICE = "service"  # router, workers and store among themselves
    ADMIN = "admin"  # may call everything
    METRICS = "metrics"  # may read metrics pages, and nothing else


@dataclass(frozen=True, slots=True)
class Tenant:
    """The party whose requests, quotas and blocks are kept apart; ``None`` is no limit.

    ``salt`` enters the names of all blocks of this tenant, so no other tenant finds them. It is
    secret: it comes from the credentials of this server and never from a request.
    """

    name: str = ""
    salt: bytes = field(default=b"", repr=False)
    max_requests: int | None = None  # at once
    tokens_per_minute: int | None = None  # prompt and output
    store_bytes: int | None = None  # of a store's memory; ``None``: it may not call the store
    weight: float = 1.0  # share of the queue, relative to other tenants


@dataclass(frozen=True, slots=True)
class Caller:
    """The author of a call. Services and admins act for the unnamed tenant, or for every tenant."""

    kind: CallerKind
    tenant: Tenant = Tenant()


LOCAL_CALLER = Caller(CallerKind.ADMIN)
"""Every caller of a server without configured credentials."""

ANONYMOUS = Caller(CallerKind.CLIENT)
"""A caller without a token; the methods open to it need no rights."""

_caller: ContextVar[Caller] = ContextVar("kvrelay.caller", default=LOCAL_CALLER)


def caller() -> Caller:
    """The author of the call that the current handler serves."""
    return _caller.get()


def set_caller(caller: Caller) -> None:
    """Let this task serve a call of ``caller`` from now on."""
    _caller.set(caller)
