"""How the next token is chosen: one frozen value, checked once where a request enters.

The meaning of each field is that of vLLM's ``SamplingParams``. A request can be continued on any
worker from (prompt, tokens so far, sampling).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvrelay.errors import Rejected
from kvrelay.structured import StructuredOutput

DEFAULT_MAX_TOKENS = 16  # this and the temperature are vLLM's defaults
DEFAULT_TEMPERATURE = 1.0
SEEDS = 1 << 64
MAX_SAMPLES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIASES = 1024  # these bounds, and those of bad words in tokens, are vLLM's
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
MAX_BAD_WORD_SEQUENCES = 2 * MAX_BAD_WORDS
MAX_BAD_WORD_TOKENS = 1024
COUNTS: Mapping[str, tuple[int, str]] = {
    "stop": (MAX_STOP_STRINGS, ""),
    "stop_token_ids": (MAX_STOP_TOKEN_IDS, " ids"),
    "logit_bias": (MAX_LOGIT_BIASES, " tokens"),
    "bad_words": (MAX_BAD_WORDS, ""),
}
"""How many entries these fields may have, and what an error calls them."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off.

    A sampled token of ``stop_token_ids`` ends the request, one of ``eos_token_ids`` does unless
    ``ignore_eos``; neither can be sampled before ``min_tokens`` tokens were. ``logprobs`` is
    ``None`` for no log probabilities, else the number of likeliest tokens to report besides the
    chosen one. ``seed`` is an unsigned 64-bit number; the router draws one
    for ``None``, an engine that is given ``None`` uses 0.

    ``logit_bias`` is added to the logits of its token ids before penalties. A token that would
    complete one of ``bad_words`` in the output is never sampled; ``bad_word_ids`` are the same as
    token ids, and all that an engine looks at.

    With ``structured_output`` an end-of-sequence token ends the request even so, once no other
    token can continue the text.
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
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    bad_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    structured_output: StructuredOutput | None = None

    @property
    def ending_token_ids(self) -> tuple[int, ...]:
        """The tokens that end the request when sampled."""
        if self.ignore_eos and self.structured_output is None:
            return self.stop_token_ids
        return self.stop_token_ids + self.eos_token_ids

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
        if self.seed is not None and not 0 <= self.seed < SEEDS:
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
        self._check_bias(vocab_size)
        self._check_bad_words(vocab_size)
        if self.structured_output is not None:
            self.structured_output.check()

    def _check_bias(self, vocab_size: int) -> None:
        check_count("logit_bias", len(self.logit_bias))
        for token, bias in sorted(self.logit_bias.items()):
            _in_vocabulary(f"logit_bias[{token}]", token, vocab_size)
            _within(f"logit_bias[{token}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)

    def _check_bad_words(self, vocab_size: int) -> None:
        check_bad_words(self.bad_words)
        sequences = self.bad_word_ids
        if len(sequences) > MAX_BAD_WORD_SEQUENCES:
            raise Rejected(
                "sampling.bad_word_ids",
                f"at most {MAX_BAD_WORD_SEQUENCES} sequences, got {len(sequences)}",
            )
        if (total := sum(map(len, sequences))) > MAX_BAD_WORD_TOKENS:
            raise Rejected(
                "sampling.bad_word_ids", f"at most {MAX_BAD_WORD_TOKENS} ids in all, got {total}"
            )
        for index, sequence in enumerate(sequences):
            if not sequence:
                raise Rejected(f"sampling.bad_word_ids[{index}]", "is empty")
            for position, token in enumerate(sequence):
                _in_vocabulary(f"bad_word_ids[{index}][{position}]", token, vocab_size)

    def _check_stops(self, vocab_size: int) -> None:
        check_count("stop_token_ids", len(self.stop_token_ids))
        for index, token in enumerate(self.stop_token_ids):
            _in_vocabulary(f"stop_token_ids[{index}]", token, vocab_size)
        check_count("stop", len(self.stop))
        _check_texts("stop", self.stop, MAX_STOP_STRING_CHARS)


def check_count(name: str, count: int) -> None:
    """Raise ``Rejected`` for more entries than a field of ``COUNTS`` may have."""
    most, unit = COUNTS[name]
    if count > most:
        raise Rejected(f"sampling.{name}", f"at most {most}{unit}, got {count}")


def check_bad_words(words: Sequence[str]) -> None:
    """Raise ``Rejected`` for too many bad words, or naming the first one of a wrong length."""
    check_count("bad_words", len(words))
    _check_texts("bad_words", words, MAX_BAD_WORD_CHARS)


def stored_positions(prompt_tokens: int, max_tokens: int) -> int:
    """Positions whose KV a request stores at most (D5): that of its last token is never stored."""
    return prompt_tokens + max_tokens - 1


def _check_texts(field: str, texts: Iterable[str], most: int) -> None:
    for index, text in enumerate(texts):
        if not 1 <= len(text) <= most:
            raise Rejected(
                f"sampling.{field}[{index}]", f"must have 1 to {most} characters, got {len(text)}"
            )


def _in_vocabulary(field: str, token: int, vocab_size: int) -> None:
    if not 0 <= token < vocab_size:
        raise Rejected(f"sampling.{field}", f"{token} is outside the vocabulary of {vocab_size}")


def _within(
    field: str, value: float, low: float, high: float, *, low_included: bool = True
) -> None:
    above = value >= low if low_included else value > low
    if not (above and value <= high and math.isfinite(value)):  # a NaN fails every comparison
        left, right = "[" if low_included else "(", ")" if math.isinf(high) else "]"
        raise Rejected(
            f"sampling.{field}", f"must lie in {left}{low:g}, {high:g}{right}, got {value}"
        )
