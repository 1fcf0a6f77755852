"""The spans of a leg in its worker: queue, lookup, load, compute and save."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager

from kvrelay.engine.core.updates import Ended, Token
from kvrelay.rpc import tracing
from kvrelay.rpc.protocol import Role
from kvrelay.rpc.tracing import NONE, Span
from kvrelay.v1 import types_pb2
from kvrelay.worker.streams import LegUpdates


class LegSpans:
    """A ``LegTrace``. The phases are children of ``span``, recorded when the leg ends."""

    def __init__(self, span: Span, role: Role) -> None:
        self._span = span
        self._prefill = role == types_pb2.ROLE_PREFILL

    def calling(self) -> AbstractContextManager[None]:
        return tracing.under(self._span)

    def dropped(self, account: Ended, now: float) -> None:
        """A leg that was aborted or failed; called by the engine's thread."""
        timing = account.timing
        first_token = timing.submitted + timing.queue + timing.load + timing.run
        self._record(account, first_token if self._prefill else now, now)

    async def watch(self, batches: AsyncGenerator[LegUpdates]) -> AsyncGenerator[LegUpdates]:
        """Pass the updates on, and record the phases of a leg that ends with its account."""
        last_token = 0.0
        async for batch in batches:
            now = time.monotonic()
            for update in batch:
                if isinstance(update, Token):
                    last_token = now
                elif isinstance(update, Ended):
                    self._record(update, last_token, now)
                    self._span.complete()
            yield batch

    def _record(self, ended: Ended, computed: float, now: float) -> None:
        """``computed``: when the last token was."""
        span, timing, tokens = self._span, ended.timing, ended.tokens
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
            span.record("load", admitted, running, loaded if running < now else NONE)
        if running >= now:  # dropped before its first step
            return
        work = {
            "kvrelay.tokens.computed": tokens.computed,
            "kvrelay.tokens.recomputed": tokens.recomputed,
            "kvrelay.tokens.generated": tokens.generated,
        }
        span.record("compute", running, computed, work)
        if self._prefill and (ended.saved or computed < now):
            span.record("save", computed, now, {"kvrelay.tokens.saved": ended.saved})
