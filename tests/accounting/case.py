"""One small universe for the exhaustive check: limits, orders, and what the store may answer.

Tokens are below 256, and a block's name is the bytes of all tokens up to its end, so a name says
what the block holds. The KV of position ``p`` is the bytes of tokens ``[0, p]``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from kvrelay.engine.core.blocks import Naming
from kvrelay.engine.core.plan import EngineLimits
from kvrelay.engine.core.request import Order
from tests.engine.fakes import answer

RUBBISH = b"rubbish"
NAMING = Naming(b"", lambda parent, tokens: parent + bytes(tokens))


def contents(name: bytes, count: int) -> list[bytes]:
    """What the ``count`` positions of a block with this name hold."""
    return [name[:end] for end in range(len(name) - count + 1, len(name) + 1)]


@dataclass(frozen=True)
class Case:
    """``lives``: how often each order may be submitted, always under the same id.

    ``answers`` are what a lookup may say, ``shorts`` how many tokens a load may deliver; both
    hold lies. Orders of other ``salts`` sample otherwise. A path has at most ``depth`` events, and
    an exploration that is bounded goes on to ``most`` states at least.
    """

    name: str
    limits: EngineLimits
    orders: tuple[Order, ...]
    answers: tuple[int | None, ...] = (-3, 1, 99, None)
    shorts: tuple[int, ...] = (-1, 1, 99)
    lives: int = 1
    salts: tuple[int, ...] = (0, 0, 0)
    depth: int = 99
    most: int = 0
    indexes: dict[str, int] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "indexes", {order.request_id: i for i, order in enumerate(self.orders)}
        )

    @cached_property
    def truth(self) -> tuple[bytes, ...]:
        """Prompt and full answer of every order, as one process would make it."""
        made = []
        for order, salt in zip(self.orders, self.salts, strict=False):
            prompt = list(order.tokens[: order.prompt_len])
            made.append(bytes(prompt + answer(prompt, order.max_tokens, salt)))
        return tuple(made)

    @cached_property
    def blocks(self) -> tuple[list[list[bytes]], ...]:
        """The contents of every block of every order's sequence, the last one perhaps short."""
        size = self.limits.block_size
        return tuple(
            [
                contents(tokens[: start + size], len(tokens[start : start + size]))
                for start in range(0, len(tokens), size)
            ]
            for tokens in self.truth
        )


def order(
    request_id: str,
    prompt: bytes,
    new: int,
    *,
    made: int = 0,
    prefill_only: bool = False,
    save: bool = False,
    stop_after: int | None = None,
) -> Order:
    """An order; ``made`` output tokens exist already, the ``stop_after``-th one ends it."""
    tokens = answer(prompt, new)
    ending = frozenset() if stop_after is None else frozenset({tokens[stop_after - 1]})
    so_far = tuple(prompt) + tuple(tokens[:made])
    return Order(request_id, so_far, len(prompt), new, ending, prefill_only, save)
