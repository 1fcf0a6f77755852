"""Draws one token from each row of logits: temperature, top-k, top-p, min-p, inverse CDF.

A filter is a threshold on the logit: every token at least as likely as the last one needed is kept,
so ties do not depend on a sort, nor any row on another. The remaining distribution is summed in
vocabulary order in float64 and cut at one uniform number; the most likely token always remains.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvrelay.sampling import Sampling

_TEMPERATURES = (1e-30, 1e30)  # what float32 can divide by; greedy and uniform long before
_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}  # filtered at once: what fits a cache, or memory
_HEAD = 256  # most likely tokens looked at first for top-p; four times as many until they suffice


def draw(
    logits: torch.Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]
) -> list[int]:
    """The token of each row of float32 logits [R, vocab], one uniform in [0, 1) each."""
    tokens: list[int] = []
    size = max(1, _ELEMENTS[logits.device.type] // logits.shape[1])
    for first in range(0, len(samplings), size):
        rows = slice(first, first + size)
        tokens += _draw(logits[rows], samplings[rows], uniforms[rows])
    return tokens


def _draw(
    logits: torch.Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]
) -> list[int]:
    scaled = _scale(logits, samplings)
    _keep_top_k(scaled, samplings)
    weights = _keep_top_p(scaled, samplings)
    if any(sampling.min_p > 0 for sampling in samplings):  # the largest weight of a row is 1
        floors = _column([sampling.min_p for sampling in samplings], weights)
        weights.masked_fill_(weights < floors, 0.0)
    sums = weights.cumsum(-1, dtype=torch.float64)
    total = sums[:, -1:].contiguous()
    target = total * torch.tensor(uniforms, dtype=torch.float64, device=sums.device)[:, None]
    chosen = torch.searchsorted(sums, target, right=True)
    last = torch.searchsorted(sums, total)  # where rounding took the target up to the total
    bound = torch.full_like(last, logits.shape[1] - 1)  # in range for a row of NaN too
    result: list[int] = chosen.minimum(last).minimum(bound)[:, 0].tolist()
    return result


def _scale(logits: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """(logit - largest logit) / temperature: at most 0, so nothing can overflow."""
    low, high = _TEMPERATURES
    temperatures = [min(max(sampling.temperature, low), high) for sampling in samplings]
    scaled = logits - logits.amax(-1, keepdim=True)
    return scaled.div_(_column(temperatures, logits))


def _keep_top_k(scaled: torch.Tensor, samplings: Sequence[Sampling]) -> None:
    size = scaled.shape[1]
    limits = [s.top_k if 0 < s.top_k < size else size for s in samplings]
    rows = [row for row, limit in enumerate(limits) if limit < size]
    if not rows:
        return
    most = max(limits[row] for row in rows)
    best = scaled[rows].topk(most, -1).values
    index = torch.tensor([limits[row] - 1 for row in rows], device=scaled.device)
    thresholds = torch.full((len(limits), 1), -torch.inf, device=scaled.device)
    thresholds[rows] = best.gather(1, index[:, None])
    scaled.masked_fill_(scaled < thresholds, -torch.inf)


def _keep_top_p(scaled: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """The weights exp(scaled) of the tokens that top-p keeps; consumes ``scaled``."""
    rows = [row for row, sampling in enumerate(samplings) if sampling.top_p < 1.0]
    if not rows:
        return scaled.exp_()
    weights = scaled.exp()
    wanted = weights[rows].cumsum(-1, dtype=torch.float64)[:, -1].contiguous()
    wanted *= torch.tensor([samplings[row].top_p for row in rows], device=wanted.device)
    thresholds = torch.zeros((len(samplings), 1), device=weights.device)
    thresholds[rows] = _last_needed(weights[rows], wanted[:, None])
    return weights.masked_fill_(weights < thresholds, 0.0)


def _last_needed(weights: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """For each row, the weight at which the sum of the largest first reaches ``wanted``."""
    size = weights.shape[1]
    head = min(_HEAD, size)
    while True:
        best = weights.topk(head, -1).values
        place = torch.searchsorted(best.cumsum(-1, dtype=torch.float64), wanted)
        if head == size or bool((place < head).all()):
            return best.gather(1, place.clamp_max_(head - 1))
        head = min(4 * head, size)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]
