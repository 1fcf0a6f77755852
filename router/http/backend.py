"""What the HTTP door needs of the router behind it; ``router.service`` implements it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager
from typing import Protocol

from kvrelay.rpc.security.identity import Tenant
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.v1 import router_pb2
from router.config import RouterConfig
from router.generate.record import Door, RequestRecord
from router.generate.request import InboundCall
from router.placement.placer import Placer
from router.queue.gate import HeldRequest
from router.queue.prompts import TextThreads
from router.queue.quotas import QuotaHold
from router.workers.registry import Registry

Responses = AsyncGenerator[router_pb2.GenerateResponse]


class Backend(Protocol):
    """One router, shared by its doors."""

    config: RouterConfig
    tokenizer: Tokenizer
    registry: Registry
    placer: Placer
    bodies: TextThreads

    def counted(
        self, tenant: Tenant, door: Door, peer: str
    ) -> AbstractContextManager[RequestRecord]: ...

    def held(
        self, tenant: Tenant, group: list[QuotaHold]
    ) -> AbstractContextManager[HeldRequest]: ...

    def serve(self, call: InboundCall, record: RequestRecord, held: HeldRequest) -> Responses: ...

    async def tokenize(
        self, call: InboundCall, named: Callable[[], bool]
    ) -> tuple[tuple[int, ...], list[str | None] | None]: ...

    async def detokenize(self, call: InboundCall) -> str: ...

    @property
    def draining(self) -> bool: ...
