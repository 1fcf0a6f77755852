"""Brings the numbers of a step to the device in one copy out of pinned memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

ALIGNED = 32
"""Every part begins at a multiple of so many words: kernels load 16 bytes at once."""

_LEAST = 1 << 14  # words
_TURNS = 2  # pinned buffers: one is filled while the copy out of the other may still run


class StepUpload:
    """A buffer on the device, and pinned ones in host memory; they only grow, from ``words`` on.

    The copy is ordered before the kernels that read it, and after those of the step before, by the
    stream. A pinned buffer is not written before the copy out of it has ended.
    """

    def __init__(self, device: torch.device, words: int = 0) -> None:
        self._device = device
        self._size = max(words, _LEAST)
        self._there = torch.empty(0)
        self._turns: list[_Pinned] = []  # none before the first upload
        self._next = 0

    def holds(self, parts: Sequence[NDArray[np.int32]]) -> bool:
        """Whether these parts fit, so that the buffer stays where it is."""
        return sum(_sizes(parts)) <= self._size

    def send(self, parts: Sequence[NDArray[np.int32]]) -> list[torch.Tensor]:
        """The parts on the device, valid until the next call."""
        sizes = _sizes(parts)
        total = sum(sizes)
        if total > self._size or not self._turns:
            self._make(max(self._size, 1 << (total - 1).bit_length()))
        joined = np.zeros(total, np.int32)
        places = [0, *np.cumsum(sizes).tolist()][:-1]
        for place, part in zip(places, parts, strict=True):
            joined[place : place + part.size] = part.reshape(-1)
        turn = self._turns[self._next]
        self._next = (self._next + 1) % len(self._turns)
        turn.send(joined, self._there[:total])
        return [
            self._there[place : place + part.size].view(part.shape)
            for place, part in zip(places, parts, strict=True)
        ]

    def _make(self, words: int) -> None:
        """All or nothing: memory may run out at any of the buffers."""
        there = torch.empty(words, dtype=torch.int32, device=self._device)
        turns = [_Pinned(words, self._device) for _ in range(_TURNS)]
        self._there = there
        self._turns = turns
        self._size = words


def _sizes(parts: Sequence[NDArray[np.int32]]) -> list[int]:
    return [-(-part.size // ALIGNED) * ALIGNED for part in parts]


class _Pinned:
    """One pinned buffer and, on a device with streams, the end of the copy out of it."""

    def __init__(self, size: int, device: torch.device) -> None:
        streams = device.type == "cuda"
        self._words = torch.empty(size, dtype=torch.int32, pin_memory=streams)
        self._sent = torch.cuda.Event() if streams else None  # type: ignore[no-untyped-call]

    def send(self, words: NDArray[np.int32], target: torch.Tensor) -> None:
        if self._sent is not None:
            self._sent.synchronize()  # at once, if the event was never recorded
        source = self._words[: words.size]
        source.copy_(torch.from_numpy(words))
        target.copy_(source, non_blocking=True)
        if self._sent is not None:
            self._sent.record()
