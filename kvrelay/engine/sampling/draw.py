"""Draws one token from each row of logits: temperature, top-k, top-p, min-p, inverse CDF.

A filter is a threshold on the logit: every token at least as likely as the last one needed is kept,
so ties do not depend on a sort, nor any row on another. The weights that remain are whole numbers,
so that no sum depends on an order (``torch.cumsum`` of floats does on CUDA); they are summed in
vocabulary order and cut at one uniform number. The most likely token always remains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from kvrelay.sampling import Sampling

_TEMPERATURES = (1e-30, 1e30)  # what float32 can divide by; greedy and uniform long before
_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}  # filtered at once: what fits a cache, or memory
_HEAD = 256  # most likely tokens looked at first for top-p; four times as many until they suffice
_SUM_BITS = 62  # of the sum of all weights of a row
_ONE = 0x3F800000  # the bits of 1.0, the largest weight


@dataclass(frozen=True, slots=True)
class Filters:
    """What is asked of R rows, on their device.

    ``temperatures``, ``top_p`` (1 is off) and ``min_p`` (0 is off) are float32 [R, 1], ``top_k`` is
    int64 [R, 1], the size of the vocabulary if it is off, and ``uniforms`` is float64 [R, 1], in
    [0, 1). ``largest_k`` is the largest top-k in use, 0 without any; ``cuts`` and ``floors`` say
    whether top-p and min-p are in use.
    """

    temperatures: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniforms: torch.Tensor
    largest_k: int
    cuts: bool
    floors: bool

    def part(self, rows: slice | torch.Tensor) -> Filters:
        """Those of some rows."""
        return self._each(lambda column: column[rows])

    def to(self, device: torch.device) -> Filters:
        """The same on a device."""
        return self._each(lambda column: column.to(device))

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Filters:
        return replace(
            self,
            temperatures=change(self.temperatures),
            top_k=change(self.top_k),
            top_p=change(self.top_p),
            min_p=change(self.min_p),
            uniforms=change(self.uniforms),
        )


def temperature_of(sampling: Sampling) -> float:
    """A temperature that float32 can divide by."""
    low, high = _TEMPERATURES
    return min(max(sampling.temperature, low), high)


def top_k_of(sampling: Sampling, size: int) -> int:
    """The number of tokens that top-k keeps of ``size``."""
    return sampling.top_k if 0 < sampling.top_k < size else size


def filters_of(samplings: Sequence[Sampling], uniforms: Sequence[float], size: int) -> Filters:
    """The filters of rows [``size``] in host memory."""
    limits = [top_k_of(sampling, size) for sampling in samplings]
    return Filters(
        temperatures=_column([temperature_of(sampling) for sampling in samplings]),
        top_k=torch.tensor(limits)[:, None],
        top_p=_column([sampling.top_p for sampling in samplings]),
        min_p=_column([sampling.min_p for sampling in samplings]),
        uniforms=torch.tensor(uniforms, dtype=torch.float64)[:, None],
        largest_k=max((limit for limit in limits if limit < size), default=0),
        cuts=any(sampling.top_p < 1.0 for sampling in samplings),
        floors=any(sampling.min_p > 0.0 for sampling in samplings),
    )


def draw(logits: torch.Tensor, filters: Filters, waits: bool = True) -> torch.Tensor:
    """The token of each row of float32 logits [R, vocab]: int64 [R].

    Without ``waits`` nothing is read back from the device on the way. The tokens are the same.
    """
    size = max(1, _ELEMENTS[logits.device.type] // logits.shape[1])
    places = [slice(first, first + size) for first in range(0, logits.shape[0], size)]
    return torch.cat([_draw(logits[rows], filters.part(rows), waits) for rows in places])


def _draw(logits: torch.Tensor, filters: Filters, waits: bool) -> torch.Tensor:
    # (logit - largest logit) / temperature: at most 0, so nothing can overflow.
    scaled = (logits - logits.amax(-1, keepdim=True)).div_(filters.temperatures)
    if filters.largest_k:
        _keep_top_k(scaled, filters, waits)
    weights = scaled.exp_()  # the largest of a row is 1
    if filters.cuts:
        _keep_top_p(weights, filters, waits)
    if filters.floors:
        weights.masked_fill_(weights < filters.min_p, 0.0)
    sums = _whole(weights, logits.shape[1]).cumsum(-1)
    total = sums[:, -1:].contiguous()
    target = total.double().mul_(filters.uniforms).long()
    chosen = torch.searchsorted(sums, target, right=True)
    last = torch.searchsorted(sums, total)  # where rounding took the target up to the total
    bound = torch.full_like(last, logits.shape[1] - 1)  # in range for a row of NaN too
    return chosen.minimum(last).minimum(bound)[:, 0]


def _whole(weights: torch.Tensor, size: int) -> torch.Tensor:
    """Weights in [0, 1] as whole numbers: their sum over ``size`` is exact in any order."""
    return (weights * 2.0 ** (_SUM_BITS - (size - 1).bit_length())).long()


def _keep_top_k(scaled: torch.Tensor, filters: Filters, waits: bool) -> None:
    size = scaled.shape[1]
    limited = (filters.top_k < size)[:, 0]
    if waits and not bool(limited.all()):  # only the rows that ask for it
        rows = limited.nonzero()[:, 0]
        kept = scaled[rows]
        _keep_top_k(kept, filters.part(rows), waits)
        scaled[rows] = kept
        return
    best = scaled.topk(filters.largest_k, -1).values
    thresholds = best.gather(1, filters.top_k.clamp(max=filters.largest_k) - 1)
    scaled.masked_fill_((scaled < thresholds) & limited[:, None], -torch.inf)


def _keep_top_p(weights: torch.Tensor, filters: Filters, waits: bool) -> None:
    """Remove what is less likely than the last token that top-p needs."""
    cut = (filters.top_p < 1.0)[:, 0]
    if waits and not bool(cut.all()):
        rows = cut.nonzero()[:, 0]
        kept = weights[rows]
        _keep_top_p(kept, filters.part(rows), waits)
        weights[rows] = kept
        return
    whole = _whole(weights, weights.shape[1])
    wanted = whole.sum(-1, keepdim=True).double().mul_(filters.top_p).long()
    search = _last_of_sorted if waits else _last_of_halves
    thresholds = search(weights, wanted)
    weights.masked_fill_((weights < thresholds) & cut[:, None], 0.0)


def _last_of_sorted(weights: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """For each row, the weight at which the sum of the largest first reaches ``wanted``."""
    size = weights.shape[1]
    head = min(_HEAD, size)
    while True:
        best = weights.topk(head, -1).values
        place = torch.searchsorted(_whole(best, size).cumsum(-1), wanted)
        if head == size or bool((place < head).all()):
            return best.gather(1, place.clamp_max_(head - 1))
        head = min(4 * head, size)


def _last_of_halves(weights: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The same without a sort, and without waiting: halve the range of the weight's bits."""
    bits, whole = weights.view(torch.int32), _whole(weights, weights.shape[1])
    low = torch.zeros_like(wanted, dtype=torch.int32)
    high = torch.full_like(low, _ONE + 1)  # no weight is as large
    nothing = torch.zeros_like(whole[:1, :1])
    for _ in range((_ONE + 1).bit_length()):
        middle = (low + high) >> 1
        reached = torch.where(bits >= middle, whole, nothing).sum(-1, keepdim=True) >= wanted
        low = torch.where(reached, middle, low)
        high = torch.where(reached, high, middle)
    return low.view(torch.float32)


def _column(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None]
