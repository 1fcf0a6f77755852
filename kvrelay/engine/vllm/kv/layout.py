"""Where vLLM's attention backend keeps K and V in a page: learned from it at start, then checked.

Backends differ: some keep K and V of a position together, some keep K transposed in its own half,
some in the tiles of matrix units such as AMX. So numbers that name their place are written through
the backend's own cache update and looked for in the page. A page whose places no nest of even steps
describes, or whose contents are not what was written, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvrelay.engine.vllm.kv.border import VllmLayer
from kvrelay.errors import Unservable

BASE = 128
"""Numbers up to this are exact in every element type."""

Write = Callable[[torch.Tensor, torch.Tensor], None]


Steps = tuple[tuple[int, int], ...]
"""Sizes and strides of nested steps, the outermost first; the product of the sizes is the count."""


@dataclass(frozen=True, slots=True)
class Place:
    """Element (position, dim) of K or V of one head: an offset in elements, and two nests."""

    offset: int
    position: Steps
    dim: Steps


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The places of K and V in the pages of one cache; every layer has the same."""

    positions: int
    head_dim: int
    places: tuple[Place, Place]

    def rows(self, cache: torch.Tensor, which: int) -> torch.Tensor:
        """A view of K (0) or V (1) of one layer's cache: ``[page, head, positions..., dims...]``.

        Positions and dims have one axis for each of their nested steps.
        """
        place = self.places[which]
        outer = tuple(zip(cache.shape[:2], cache.stride()[:2], strict=True))
        sizes, strides = zip(*outer, *place.position, *place.dim, strict=True)
        return torch.as_strided(cache, sizes, strides, cache.storage_offset() + place.offset)


def learn_layout(layer: VllmLayer, cache: torch.Tensor, head_dim: int) -> PageLayout:
    """The layout of a cache ``[page, head, position, content]``; uses page 0, which nobody holds.

    Raises ``Unservable`` with the reason if kvrelay cannot carry it.
    """
    if cache.dim() != 4 or cache.shape[3] != 2 * head_dim:
        raise Unservable(
            f"the KV cache of a layer is {list(cache.shape)}, not [pages, heads, positions,"
            f" {2 * head_dim}]: it holds something else than K and V of {head_dim} numbers"
        )
    heads, positions = cache.shape[1], cache.shape[2]
    writer = cache_writer(layer, cache, positions)
    found = [_plane(cache, writer, values) for values in _planes(positions, heads, head_dim)]
    places = (
        _place(cache, found, 1, positions, head_dim),
        _place(cache, found, 2, positions, head_dim),
    )
    cache[0].zero_()
    return PageLayout(positions, head_dim, places)


def cache_writer(layer: VllmLayer, cache: torch.Tensor, positions: int) -> Write:
    """Writes K and V of ``positions`` positions through the backend's own cache update."""
    update = getattr(layer.impl, "do_kv_cache_update", None)
    if update is None:
        raise Unservable(
            f"{type(layer.impl).__name__} writes its KV cache inside attention: kvrelay cannot"
            " check its layout (choose another --attention-backend)"
        )
    slots = torch.arange(positions, dtype=torch.int64, device=cache.device)
    return lambda key, value: update(layer, key, value, cache, slots)


def _planes(positions: int, heads: int, head_dim: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V whose numbers say which of the two they are, their position and their dim.

    Positions and dims are written as two digits, each plus one: zero means untouched.
    """
    position = torch.arange(positions).view(-1, 1, 1).expand(positions, heads, head_dim)
    dim = torch.arange(head_dim).view(1, 1, -1).expand(positions, heads, head_dim)
    ones = torch.ones_like(position)
    digits = [one for number in (position, dim) for one in (number % BASE, number // BASE)]
    return [(ones, 2 * ones), *((digit + 1, digit + 1) for digit in digits)]


def _plane(
    cache: torch.Tensor, write: Write, values: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Page 0 of the first head after these K and V were written: ``[position, content]``."""
    key, value = (one.to(cache.dtype).contiguous().to(cache.device) for one in values)
    cache[0].zero_()
    write(key, value)
    return cache[0, 0].cpu().to(torch.float32).round().to(torch.int64)


def _place(
    cache: torch.Tensor, found: Sequence[torch.Tensor], which: int, positions: int, head_dim: int
) -> Place:
    kinds, *digits = found
    mine = kinds == which
    low, high, dim_low, dim_high = ((plane - 1)[mine] for plane in digits)
    position, dim = low + BASE * high, dim_low + BASE * dim_high
    row, column = mine.nonzero(as_tuple=True)
    offsets = row * cache.stride(2) + column * cache.stride(3)
    table = torch.full((positions, head_dim), -1, dtype=torch.int64)
    whole = offsets.numel() == positions * head_dim
    if whole and bool((position < positions).all()) and bool((dim < head_dim).all()):
        table[position, dim] = offsets
    first = int(table[0, 0])
    by_position, by_dim = table[:, 0] - first, table[0] - first
    steps = _steps(by_position.tolist()), _steps(by_dim.tolist())
    expected = first + by_position.view(-1, 1) + by_dim
    if steps[0] is None or steps[1] is None or first < 0 or not torch.equal(table, expected):
        raise Unservable(
            f"the attention backend keeps {'K' if which == 1 else 'V'} in an order that kvrelay"
            " does not know"
        )
    return Place(first, steps[0], steps[1])


def _steps(offsets: Sequence[int]) -> Steps | None:
    """The nest of even steps that goes through ``offsets``, which begin with 0, if there is one."""
    count = len(offsets)
    if count == 1:
        return ((1, 0),)
    step = offsets[1]
    run = next((at for at, offset in enumerate(offsets) if offset != at * step), count)
    if count % run:
        return None
    starts = offsets[::run]
    if any(offset != starts[at // run] + at % run * step for at, offset in enumerate(offsets)):
        return None
    if run == count:
        return ((count, step),)
    outer = _steps(starts)
    return None if outer is None else (*outer, (run, step))
