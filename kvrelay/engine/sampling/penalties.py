"""Changes logits before temperature: biases, penalties, then the tokens that are forbidden.

All are computed from the sequence's token list, so no state passes from step to step. vLLM forbids
first; an infinite logit stays what it is under biases and penalties, so the order is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import numpy as np
import torch

from kvrelay.engine.core.updates import Work
from kvrelay.sampling import Sampling

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


def penalise(row: torch.Tensor, work: Work, sampling: Sampling) -> None:
    """Change one row of float32 logits [vocab] in place.

    Repetition (the CTRL paper's, as in vLLM and `transformers`) counts prompt and output; presence
    and frequency (OpenAI's) count the output alone.
    """
    length = work.start + work.count
    if sampling.repetition_penalty != 1.0:
        seen = _indices(work, 0, length, row.device)
        picked = row[seen]
        penalty = sampling.repetition_penalty
        row[seen] = torch.where(picked > 0, picked / penalty, picked * penalty)
    if sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0:
        output = _indices(work, work.prompt_len, length, row.device)
        tokens, counts = torch.unique(output, return_counts=True)
        row[tokens] -= sampling.frequency_penalty * counts + sampling.presence_penalty


def add_biases(logits: torch.Tensor, rows: Iterable[Row]) -> None:
    """Add the logit biases of all rows to float32 logits [R, vocab], in place."""
    biased = [(row, _biases(sampling)) for row, _, sampling in rows if sampling.logit_bias]
    if not biased:
        return
    at = np.repeat([row for row, _ in biased], [len(tokens) for _, (tokens, _) in biased])
    tokens = np.concatenate([tokens for _, (tokens, _) in biased])
    values = np.concatenate([values for _, (_, values) in biased])
    place = _on(at, logits.device), _on(tokens, logits.device)
    logits[place] += _on(values, logits.device)  # no place occurs twice


@lru_cache(maxsize=MOST_CACHED)
def _biases(sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """The token ids and the biases, made once for a request rather than in each step."""
    bias = sampling.logit_bias
    return np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)


def forbid(logits: torch.Tensor, rows: Iterable[Row]) -> None:
    """Make the forbidden tokens of all rows impossible, in place."""
    size = logits.shape[1]
    pairs = [
        (row, token)
        for row, work, sampling in rows
        for token in _forbidden(work, sampling)
        if token < size
    ]
    if pairs:
        at, tokens = _on(np.array(pairs, np.int64), logits.device).unbind(1)
        logits[at, tokens] = -torch.inf


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


def _on(values: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).to(device)


def _indices(work: Work, first: int, last: int, device: torch.device) -> torch.Tensor:
    return _on(np.array(work.tokens[first:last], np.int64), device)
