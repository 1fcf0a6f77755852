"""How the next token is chosen: one frozen value, checked once where a request enters.

The meaning of each field is that of vLLM's ``SamplingParams``. A request can be continued on any
worker from (prompt, tokens so far, sampling).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvrelay.errors import Rejected

DEFAULT_MAX_TOKENS = 16  # this and the temperature are vLLM's defaults
DEFAULT_TEMPERATURE = 1.0
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Sampling:
    """``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off.

    A sampled token of ``stop_token_ids`` ends the request, one of ``eos_token_ids`` does unless
    ``ignore_eos``; neither can be sampled before ``min_tokens`` tokens were. ``logprobs`` is
    ``None`` for no log probabilities, else the number of likeliest tokens to report beside the
    chosen one. ``seed`` is an unsigned 64-bit number; the router draws one
    for ``None``, an engine that is given ``None`` uses 0.
    """

    temperature: float = DEFAULT_TEMPERATURE
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None

    @property
    def ending_token_ids(self) -> tuple[int, ...]:
        """The tokens that end the request when sampled."""
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids + self.eos_token_ids

    def check(self, vocab_size: int) -> None:
        """Raise ``Rejected`` naming the first field (``sampling.<field>``) that is out of range."""
        _within("temperature", self.temperature, 0.0, math.inf)
        if self.top_k < 0:
            raise Rejected("sampling.top_k", f"must be 0 (off) or more, got {self.top_k}")
        _within("top_p", self.top_p, 0.0, 1.0, low_included=False)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, 0.0, math.inf, low_included=False)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None and not 0 <= self.seed < 1 << 64:
            raise Rejected("sampling.seed", f"must fit in 64 unsigned bits, got {self.seed}")
        if self.min_tokens < 0:
            raise Rejected("sampling.min_tokens", f"must be 0 or more, got {self.min_tokens}")
        self._check_stops(vocab_size)
        if self.logprobs is not None and not 0 <= self.logprobs <= min(
            MAX_TOP_LOGPROBS, vocab_size
        ):
            raise Rejected(
                "sampling.logprobs", f"must lie in [0, {MAX_TOP_LOGPROBS}], got {self.logprobs}"
            )

    def _check_stops(self, vocab_size: int) -> None:
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise Rejected(
                "sampling.stop_token_ids",
                f"at most {MAX_STOP_TOKEN_IDS} ids, got {len(self.stop_token_ids)}",
            )
        for index, token in enumerate(self.stop_token_ids):
            if not 0 <= token < vocab_size:
                raise Rejected(
                    f"sampling.stop_token_ids[{index}]",
                    f"{token} is outside the vocabulary of {vocab_size}",
                )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise Rejected("sampling.stop", f"at most {MAX_STOP_STRINGS}, got {len(self.stop)}")
        for index, text in enumerate(self.stop):
            if not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
                raise Rejected(
                    f"sampling.stop[{index}]",
                    f"must have 1 to {MAX_STOP_STRING_CHARS} characters, got {len(text)}",
                )


def stored_positions(prompt_tokens: int, max_tokens: int) -> int:
    """Positions whose KV a request stores at most (D5): that of its last token is never stored."""
    return prompt_tokens + max_tokens - 1


def _within(
    field: str, value: float, low: float, high: float, *, low_included: bool = True
) -> None:
    above = value >= low if low_included else value > low
    if not (above and value <= high and math.isfinite(value)):  # a NaN fails every comparison
        left, right = "[" if low_included else "(", ")" if math.isinf(high) else "]"
        raise Rejected(
            f"sampling.{field}", f"must lie in {left}{low:g}, {high:g}{right}, got {value}"
        )
