"""Philox4x32-10 in int64 tensors: the numbers of ``sampling.philox``, many at a time."""

from __future__ import annotations

import torch

from kvrelay.engine.sampling.philox import BUMP, MASK, MULTIPLY, ROUNDS


class TensorPhilox:
    """Draws on one device. Its constants are there from the start: a draw copies nothing."""

    def __init__(self, device: torch.device) -> None:
        self._multiply = torch.tensor(MULTIPLY, device=device)[:, None]
        self._bump = torch.tensor(BUMP, device=device)[:, None]

    def uniforms(self, words: torch.Tensor) -> torch.Tensor:
        """Float64 [R] in [0, 1) for int32 [R, 4]: seed and position, low words first."""
        seeds, positions = (words.long() & MASK).T.reshape(2, 2, -1).unbind()
        even = torch.stack((positions[0], torch.zeros_like(positions[0])))
        odd = torch.stack((positions[1], torch.zeros_like(positions[1])))
        keys = seeds
        for _ in range(ROUNDS):
            low, high = self._products(even)
            even = high.flip(0) ^ odd ^ keys
            odd = low.flip(0)
            keys = (keys + self._bump) & MASK
        return ((even[0] << 21) | (odd[0] >> 11)).double() * 2.0**-53

    def _products(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The low and the high word of 32-bit words [2, R] times the constants."""
        lower = (words & 0xFFFF) * self._multiply
        upper = (words >> 16) * self._multiply + (lower >> 16)
        return (words * self._multiply) & MASK, upper >> 16
