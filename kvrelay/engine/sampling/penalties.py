"""Changes logits before temperature: biases, penalties, then the tokens that are forbidden.

All are computed from the sequence's token list, so no state passes from step to step: the host
finds the places, the device changes the logits. vLLM forbids first; an infinite logit stays what it
is under biases and penalties, so the order is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.core.updates import Work
from kvrelay.sampling import Sampling

_REPETITIONS = (1e-20, 1e20)

Row = tuple[int, Work, Sampling]  # its number in the batch
MOST_CACHED = 1024  # requests whose biases are kept as arrays


def penalised(sampling: Sampling) -> bool:
    """Whether any penalty is in use."""
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


def too_short(work: Work, sampling: Sampling) -> bool:
    """Whether an ending token is still forbidden: fewer than ``min_tokens`` were sampled."""
    return work.grammar is None and before_minimum(work, sampling)


def before_minimum(work: Work, sampling: Sampling) -> bool:
    """Whether the output has fewer than ``min_tokens``."""
    return work.start + work.count - work.prompt_len < sampling.min_tokens


@dataclass(frozen=True, slots=True)
class Adjustments:
    """What changes in R rows of logits, in host memory.

    Places are ``row * vocab + token``; none occurs twice in one field. ``biased`` places get
    ``biases``, ``repeated`` ones are divided by (or multiplied with) ``factors``, ``amounts`` are
    taken from ``counted`` ones, and ``forbidden`` ones become impossible, in this order.
    """

    biased: NDArray[np.int64]
    biases: NDArray[np.float32]
    repeated: NDArray[np.int64]
    factors: NDArray[np.float32]
    counted: NDArray[np.int64]
    amounts: NDArray[np.float32]
    forbidden: NDArray[np.int64]

    @property
    def words(self) -> tuple[NDArray[np.int32], ...]:
        """All as 32-bit words, for ``adjust``: a place is two of them."""
        parts = (
            *(self.biased, self.biases),
            *(self.repeated, self.factors),
            *(self.counted, self.amounts),
            self.forbidden,
        )
        return tuple(part.view(np.int32) for part in parts)


def adjust(logits: torch.Tensor, words: Sequence[torch.Tensor]) -> None:
    """Change contiguous float32 logits [R, vocab] in place, by ``words`` on the same device."""
    biased, biases, repeated, factors, counted, amounts, forbidden = words
    flat = logits.view(-1)
    if biased.numel():
        at = biased.view(torch.int64)
        flat[at] = flat[at] + biases.view(torch.float32)
    if repeated.numel():
        at, factor = repeated.view(torch.int64), factors.view(torch.float32)
        picked = flat[at]
        flat[at] = torch.where(picked > 0, picked / factor, picked * factor)
    if counted.numel():
        at = counted.view(torch.int64)
        flat[at] = flat[at] - amounts.view(torch.float32)
    if forbidden.numel():
        flat.index_fill_(0, forbidden.view(torch.int64), -torch.inf)


def repetition_of(sampling: Sampling) -> float:
    """A repetition penalty that leaves float32 logits finite."""
    low, high = _REPETITIONS
    return min(max(sampling.repetition_penalty, low), high)


def adjustments(rows: Sequence[Row], size: int) -> Adjustments:
    """Those of rows of ``size`` logits.

    Repetition (the CTRL paper's, as in vLLM and `transformers`) counts prompt and output; presence
    and frequency (OpenAI's) count the output alone.
    """
    biased, repeated, counted = _Places(size), _Places(size), _Places(size)
    forbidden: list[int] = []
    for row, work, sampling in rows:
        length = work.start + work.count
        if sampling.logit_bias:
            biased.add(row, *_biases(sampling))
        if sampling.repetition_penalty != 1.0:
            seen = np.unique(_tokens(work, 0, length))
            repeated.add(row, seen, np.full(seen.size, repetition_of(sampling), np.float32))
        if sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0:
            made, counts = np.unique(_tokens(work, work.prompt_len, length), return_counts=True)
            each = np.float32(sampling.frequency_penalty) * counts.astype(np.float32)
            counted.add(row, made, each + np.float32(sampling.presence_penalty))
        forbidden += [row * size + token for token in _forbidden(work, sampling) if token < size]
    return Adjustments(
        *biased.joined(), *repeated.joined(), *counted.joined(), np.array(forbidden, np.int64)
    )


class _Places:
    """Places and numbers of many rows, joined at the end."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._places: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
        self._numbers: list[NDArray[np.float32]] = [np.empty(0, np.float32)]

    def add(self, row: int, tokens: NDArray[np.int64], numbers: NDArray[np.float32]) -> None:
        self._places.append(row * self._size + tokens)
        self._numbers.append(numbers)

    def joined(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        return np.concatenate(self._places), np.concatenate(self._numbers)


@lru_cache(maxsize=MOST_CACHED)
def _biases(sampling: Sampling) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The token ids and the biases, made once for a request rather than in each step."""
    bias = sampling.logit_bias
    return np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)


def _forbidden(work: Work, sampling: Sampling) -> Iterator[int]:
    """The last token of each bad word whose others the output ends with; early endings."""
    if sampling.bad_word_ids:
        yield from _completing(work, sampling.bad_word_ids)
    if too_short(work, sampling):
        yield from sampling.ending_token_ids


def _completing(work: Work, sequences: Sequence[tuple[int, ...]]) -> Iterator[int]:
    tokens, length = work.tokens, work.start + work.count
    made = length - work.prompt_len
    last = tokens[length - 1] if made else None
    for sequence in sequences:
        before = len(sequence) - 1
        if before and (sequence[-2] != last or before > made):
            continue  # usually: no slice of the output is compared
        if tuple(tokens[length - before : length]) == sequence[:-1]:
            yield sequence[-1]


def _tokens(work: Work, first: int, last: int) -> NDArray[np.int64]:
    return np.array(work.tokens[first:last], np.int64)
