"""What the store should know: which prompts wait, and what clients expect after an answer.

Pure: time is passed in. A hint is advice that may be lost. Messages are bounded in hints and names;
what finds no room waits for the next message, and an old one is dropped for a new one.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvrelay.v1 import router_pb2, store_pb2

MIN_WAIT = 0.1
"""Seconds after which a request without a token is said to wait."""

RENEW = 4.0
"""Seconds between two hints for a request that waits; a hint holds for twice as long."""

SETTLE = 1.0
"""Seconds from the end of an answer to its hint: its last blocks are stored in this time."""

TOOL_LIFE = 60.0
"""Seconds that a tool may run."""

TURN_LIFE = 86_400.0
"""Long: a conversation that ended early would else count for more than one that ended now."""

MAX_HINTS = 256
MAX_NAMES = 1 << 14
"""Blocks named in one message, half a MiB."""

MAX_ENDED = 1 << 17
"""Blocks of complete answers that wait to be sent, 4 MiB of names."""

LIVES = {
    router_pb2.RETENTION_TURN_ENDS: (store_pb2.REUSE_LATE, TURN_LIFE),
    router_pb2.RETENTION_TOOL_CALL: (store_pb2.REUSE_SOON, TOOL_LIFE),
}


@dataclass(slots=True)
class _Waiting:
    names: Sequence[bytes]
    tenant: str
    due: float


@dataclass(frozen=True, slots=True)
class _Ended:
    hint: store_pb2.BlockHint
    due: float


class HintQueue:
    """The hints of a router. Disabled, it notes nothing."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._keys = itertools.count()
        self._waiting: dict[int, _Waiting] = {}
        self._ended: deque[_Ended] = deque()
        self._ended_names = 0
        self.counts = Counter[str]()  # hints: sent, dropped

    @contextmanager
    def waiting(
        self, names: Sequence[bytes], tenant: str, now: float
    ) -> Iterator[Callable[[], None]]:
        """A request whose prompt has these blocks waits inside, until what is given is called."""
        key = next(self._keys)
        if self.enabled and names:
            self._waiting[key] = _Waiting(names, tenant, now + MIN_WAIT)
        try:
            yield lambda: self._stop_waiting(key)
        finally:
            self._stop_waiting(key)

    def ended(
        self,
        names: Sequence[bytes],
        retention: router_pb2.Retention.ValueType,
        tenant: str,
        now: float,
    ) -> None:
        """An answer is complete. ``names`` are the blocks of its prompt and of itself."""
        if not self.enabled or retention not in LIVES or not names:
            return
        hint = _hint(names, *LIVES[retention], tenant)
        self._ended_names += len(hint.names)
        self._ended.append(_Ended(hint, now + SETTLE))
        while self._ended_names > MAX_ENDED:
            self._pop()
            self.counts["dropped"] += 1

    def due(self, now: float) -> store_pb2.HintRequest | None:
        """The message to send now, if there is anything to say."""
        message = store_pb2.HintRequest()
        room = MAX_NAMES
        while self._ended and self._ended[0].due <= now:
            size = len(self._ended[0].hint.names)
            if size > room or len(message.hints) == MAX_HINTS:
                break
            room -= size
            message.hints.append(self._pop())
        for request in self._waiting.values():
            size = min(len(request.names), MAX_NAMES)
            if request.due > now or size > room:
                continue
            if len(message.hints) == MAX_HINTS:
                break
            room -= size
            request.due = now + RENEW
            message.hints.append(
                _hint(request.names, store_pb2.REUSE_SOON, 2 * RENEW, request.tenant)
            )
        return message if message.hints else None

    def _pop(self) -> store_pb2.BlockHint:
        hint = self._ended.popleft().hint
        self._ended_names -= len(hint.names)
        return hint

    def _stop_waiting(self, key: int) -> None:
        self._waiting.pop(key, None)


def _hint(
    names: Sequence[bytes], reuse: store_pb2.Reuse.ValueType, life: float, tenant: str
) -> store_pb2.BlockHint:
    return store_pb2.BlockHint(
        names=names[:MAX_NAMES], reuse=reuse, life_ms=round(life * 1000), tenant=tenant
    )
