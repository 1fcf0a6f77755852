"""The spans of a leg in its worker: queue, lookup, load, compute and save."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

from kvrelay.engine.core.updates import Ended, Token
from kvrelay.rpc.protocol import Role
from kvrelay.rpc.tracing import Span
from kvrelay.v1 import types_pb2
from kvrelay.worker.streams import LegUpdates


async def traced(
    batches: AsyncGenerator[LegUpdates], span: Span, role: Role
) -> AsyncGenerator[LegUpdates]:
    """Pass the updates on; at the leg's end, record its phases as children of ``span``."""
    last_token = 0.0
    async for batch in batches:
        now = time.monotonic()
        for update in batch:
            if isinstance(update, Token):
                last_token = now
            elif isinstance(update, Ended):
                _record(span, update, last_token)
                if role == types_pb2.ROLE_PREFILL and update.saved:
                    span.record("save", last_token, now, {"kvrelay.tokens.saved": update.saved})
        yield batch


def _record(span: Span, ended: Ended, last_token: float) -> None:
    timing, tokens = ended.timing, ended.tokens
    admitted = timing.submitted + timing.queue
    running = admitted + timing.load
    span.record("queue", timing.submitted, admitted)
    if timing.lookup is not None:
        found: dict[str, int | str] = {"kvrelay.tokens.found": tokens.external + tokens.failed}
        if ended.missed is not None:
            found["kvrelay.missed.reason"] = ended.missed.reason.value
            found["kvrelay.missed.blocks"] = ended.missed.blocks
        span.record("lookup", *timing.lookup, found)
    if timing.load:
        loaded = {
            "kvrelay.tokens.external": tokens.external,
            "kvrelay.tokens.failed": tokens.failed,
        }
        span.record("load", admitted, running, loaded)
    computed = {
        "kvrelay.tokens.computed": tokens.computed,
        "kvrelay.tokens.recomputed": tokens.recomputed,
        "kvrelay.tokens.generated": tokens.generated,
    }
    span.record("compute", running, last_token, computed)
