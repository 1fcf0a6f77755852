"""What generations share: all of a router, and the samples of one request."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from kvrelay.text.tokenizer import Tokenizer
from router.generate.retry import RetryControl, Trials
from router.placement.placer import Placer, StreamBinding
from router.queue.prompts import TextThreads
from router.workers.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParts:
    """What all generations of a router share. ``handoff_wait`` is in seconds."""

    registry: Registry
    placer: Placer
    retry: RetryControl
    threads: TextThreads
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    handoff_wait: float


@dataclass(slots=True, eq=False)
class SharedPrompt:
    """What the samples of one request share: the sample ``leader`` computes their prompt.

    ``computed`` is set once its blocks can be found, by workers of ``bound``: on ``worker`` (a boot
    token), or in the store if that is empty.
    """

    leader: int
    bound: StreamBinding
    computed: asyncio.Event = field(default_factory=asyncio.Event)
    worker: str = ""
    trials: Trials = field(default_factory=Trials)

    def note(self, bound: StreamBinding, worker: str) -> None:
        """The prompt has been computed."""
        if not self.computed.is_set():
            self.bound = bound
            self.worker = worker
            self.computed.set()
