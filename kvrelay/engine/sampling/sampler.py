"""Samples the next token of each row, with log probabilities if requested.

The order is the grammar, logit biases, penalties, bad words and ``min_tokens``, temperature,
top-k, top-p, min-p; log probabilities are of the raw logits, behind the grammar as in vLLM. A token
depends on (seed, position, logits) and on no other row of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kvrelay.engine.core.updates import Logprob, Sampled, Work
from kvrelay.engine.sampling.draw import draw, filters_of
from kvrelay.engine.sampling.masks import GrammarMasks
from kvrelay.engine.sampling.penalties import (
    Row,
    adjust,
    adjustments,
    penalised,
    too_short,
)
from kvrelay.engine.sampling.philox import uniform
from kvrelay.errors import KvrelayError, Rejected
from kvrelay.sampling import Sampling
from kvrelay.structured import FIELD


def sample(
    logits: torch.Tensor, works: Sequence[Work], masks: GrammarMasks | None = None
) -> list[Sampled]:
    """One token for each row of logits [R, vocab] in any float dtype; every work has a sampling.

    Greedy (temperature 0) takes the first of equal logits. ``masks`` are those of the works with a
    grammar.
    """
    asked = [(row, work, sampling_of(work)) for row, work in enumerate(works)]
    if masks is not None:
        logits = masks.apply(logits)
    plain = not any(adjusts(work, sampling) for _, work, sampling in asked)
    # In float32 even for the argmax: in bfloat16 it takes five times as long.
    final = logits.float() if plain else _adjusted(logits, asked)
    best = _first_highest(final)
    highest = final.gather(1, best[:, None])[:, 0].tolist()
    tokens = _tokens(final, asked, best.tolist())
    errors = impossible(highest, masks)
    return [
        Sampled(token, error=errors.get(row))
        if sampling.logprobs is None or row in errors
        else _report(logits[row], token, sampling.logprobs)
        for token, (row, _, sampling) in zip(tokens, asked, strict=True)
    ]


def impossible(highest: Sequence[float], masks: GrammarMasks | None) -> dict[int, KvrelayError]:
    """Why rows have no token: no number as a logit, a grammar that failed, or no possible token.

    ``highest`` are the largest logits of the rows, NaN where one is NaN.
    """
    errors: dict[int, KvrelayError] = {
        row: KvrelayError(f"the model computed {best} as a logit: are its weights damaged?")
        for row, best in enumerate(highest)
        if math.isnan(best) or best == math.inf
    }
    if masks is None:
        return errors
    for row in masks.rows:
        if highest[row] == -math.inf:
            message = "with bad_words it leaves no token to continue the output with"
            errors[row] = Rejected(FIELD, message)
    return errors | masks.errors


def sampling_of(work: Work) -> Sampling:
    """How a work that samples does so."""
    if work.sampling is None:
        raise ValueError("a work without sampling has no row of logits")
    return work.sampling


def adjusts(work: Work, sampling: Sampling) -> bool:
    """Whether a row's logits change before its token is chosen."""
    return (
        penalised(sampling)
        or too_short(work, sampling)
        or bool(sampling.logit_bias or sampling.bad_word_ids)
    )


def _adjusted(logits: torch.Tensor, asked: Sequence[Row]) -> torch.Tensor:
    """A float32 copy with each row's biases, penalties and forbidden tokens."""
    copy = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    words = adjustments(asked, logits.shape[1]).words
    adjust(copy, [torch.from_numpy(part).to(logits.device) for part in words])
    return copy


def _tokens(logits: torch.Tensor, asked: Sequence[Row], tokens: list[int]) -> list[int]:
    """Those of the largest logits, and a draw for rows with a temperature."""
    drawn = [entry for entry in asked if entry[2].temperature > 0]
    if not drawn:
        return tokens
    rows = [row for row, _, _ in drawn]
    uniforms = [uniform(s.seed or 0, work.start + work.count) for _, work, s in drawn]
    filters = filters_of([s for _, _, s in drawn], uniforms, logits.shape[1]).to(logits.device)
    chosen = draw(logits if len(rows) == len(asked) else logits[rows], filters)
    for row, token in zip(rows, chosen.tolist(), strict=True):
        tokens[row] = token
    return tokens


def _first_highest(logits: torch.Tensor) -> torch.Tensor:
    """The first of the largest logits of each row, a NaN being the largest.

    On the CPU by NumPy, which takes a tenth of the time of torch.
    """
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def _report(row: torch.Tensor, token: int, count: int) -> Sampled:
    """The token with its log probability, and the ``count`` most likely ones that are possible."""
    logprobs = row.float().log_softmax(-1)
    best = logprobs.topk(count)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    possible = (Logprob(t, p) for t, p in pairs if p > -math.inf)
    top = sorted(possible, key=lambda one: (-one.logprob, one.token))
    return Sampled(token, float(logprobs[token]), tuple(top))
