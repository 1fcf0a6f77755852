"""What one step is: the frozen values that pass between the scheduler and the engine."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.engine.core.external import Load, Save
from kvrelay.engine.core.request import Finish, Order, Request
from kvrelay.errors import Rejected
from kvrelay.sampling import stored_positions


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The bounds of one worker. ``headroom`` blocks stay free for each resident request.

    At most ``names_per_step`` blocks of waiting requests are named (hashed) in one step.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    headroom: int = 1
    names_per_step: int = 1024

    def check(self, order: Order) -> None:
        """D5. Raises ``Rejected`` for an order that can never be served within these bounds."""
        so_far = len(order.tokens) - order.prompt_len
        if not 1 <= order.prompt_len <= len(order.tokens):
            raise Rejected("prompt", "must have at least one token")
        if order.max_tokens <= so_far:
            reason = f"must be more than the {so_far} tokens so far, got {order.max_tokens}"
            raise Rejected("max_tokens", reason)
        positions = stored_positions(order.prompt_len, order.max_tokens)
        capacity = self.num_blocks * self.block_size
        if positions > min(self.max_model_len, capacity):
            advice = "shorten the prompt or lower max_tokens"
            if positions <= self.max_model_len:
                advice = "its operator must raise --kv-memory (or --num-blocks)"
            raise Rejected(
                "max_tokens",
                f"{order.prompt_len} prompt tokens and max_tokens {order.max_tokens} need "
                f"{positions} positions; this worker has max_model_len {self.max_model_len} "
                f"and room for {capacity}: {advice}",
            )


NO_TOKEN = -1
"""In place of a sampled token: none is possible. The caller of ``commit`` aborts the request."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Compute positions ``[start, start + count)`` of a request; ``samples`` at its end (D2)."""

    request: Request
    epoch: int
    start: int
    count: int
    samples: bool

    @classmethod
    def of(cls, request: Request, budget: int) -> Entry:
        """The next entry of a running request, of ``budget`` positions at most."""
        work, resident = request.work, request.resident
        count = min(work, budget)
        return cls(request, resident.admission.epoch, resident.computed, count, count == work)


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: the entries to compute, the loads and saves to start, the preempted requests.

    ``named`` blocks of waiting requests were named. ``unnamed``: a request could not be considered
    yet, since its blocks are not all named.
    """

    entries: tuple[Entry, ...]
    loads: tuple[Load, ...]
    saves: tuple[Save, ...]
    preempted: tuple[Request, ...]
    named: int = 0
    unnamed: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """The result of one sampling entry: a token; with ``finish`` it is the request's last one."""

    request: Request
    token: int
    finish: Finish | None


@dataclass(frozen=True, slots=True)
class Committed:
    """The outcome of a step: new tokens, and the saves of the blocks it filled.

    It computed ``executed`` positions; their requests had computed ``recomputed`` of them before.
    """

    outputs: tuple[Output, ...]
    saves: tuple[Save, ...]
    executed: int
    recomputed: int
