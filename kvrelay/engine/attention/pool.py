"""The KV cache of one worker: one block-major tensor, and its blocks as bytes for transfers.

Layout ``[block, kv head, layer, k|v, position, head dim]``: a block is one contiguous range, and so
are a head of it (what a tensor-parallel rank owns) and a run: one layer's K or V of one head. The
engine's thread computes into some blocks while I/O threads read and write others; references
(docs/accounting.md) decide which of them may use a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvrelay.engine.attention.copies import DeviceBlockCopier, HostBlockCopier
from kvrelay.engine.cuda.copies import BlockCopies

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The shape of a pool; ``num_kv_heads`` and ``head_dim`` are those of one layer's K (and V)."""

    num_blocks: int
    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def row_bytes(self) -> int:
        """Bytes of one position in one layer's K: all its heads."""
        return self.num_kv_heads * self.head_dim * DTYPES[self.dtype].itemsize

    @property
    def head_runs(self) -> int:
        """Runs (the positions of one layer's K or V) in one head of a block."""
        return self.num_layers * 2

    @property
    def block_runs(self) -> int:
        """Runs in one block."""
        return self.num_kv_heads * self.head_runs

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.head_runs * self.block_size * self.row_bytes


class KVPool:
    """All blocks of one worker, zeroed and prefaulted at start."""

    def __init__(self, shape: PoolShape, device: torch.device | str = "cpu") -> None:
        for field in ("num_blocks", "num_layers", "block_size", "num_kv_heads", "head_dim"):
            if getattr(shape, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(shape, field)}")
        self.shape = shape
        self.device = torch.device(device)
        self.tensor = torch.empty(
            (
                shape.num_blocks,
                shape.num_kv_heads,
                shape.num_layers,
                2,
                shape.block_size,
                shape.head_dim,
            ),
            dtype=DTYPES[shape.dtype],
            device=self.device,
        ).zero_()  # not torch.zeros: the slow first touch of each page happens here
        self._rows = self.tensor.view(-1, shape.head_dim)
        self._runs = self.tensor.view(-1, shape.block_size * shape.head_dim)
        self._copier: HostBlockCopier | DeviceBlockCopier = (
            HostBlockCopier(self.tensor)
            if self.device.type == "cpu"
            else DeviceBlockCopier(self.tensor)
        )

    @property
    def copies(self) -> BlockCopies | None:
        """Copies of blocks in batches; ``None`` in host memory, where a block is its bytes."""
        return None if isinstance(self._copier, HostBlockCopier) else self._copier.batches

    @property
    def by_position(self) -> torch.Tensor:
        """A view of the tensor: ``[block, layer, k|v, position, kv head, head dim]``."""
        return self.tensor.permute(0, 2, 3, 4, 1, 5)

    def nbytes(self, count: int) -> int:
        """Bytes of the payload of a block's first ``count`` positions."""
        return self.shape.num_layers * 2 * count * self.shape.row_bytes

    def read(self, block: int, count: int) -> memoryview:
        """The first ``count`` positions: ``[kv head, layer, k|v, position, head dim]``.

        Read-only. A full block on the CPU is a view of the pool, valid while the caller has a
        reference to the block; anything else is a copy.
        """
        self._check(block, count)
        return self._copier.read(block, count)

    def write(self, block: int, count: int, payload: memoryview) -> None:
        """Fill the first ``count`` positions of a block, as ``read`` lays them out; zero the rest.

        Raises ``ValueError``, and writes nothing, if the payload has another length.
        """
        self._check(block, count)
        if payload.nbytes != self.nbytes(count):
            raise ValueError(
                f"payload of {count} positions must have {self.nbytes(count)} bytes,"
                f" got {payload.nbytes}"
            )
        self._copier.write(block, count, payload)

    def buffer(self, block: int) -> memoryview | None:
        """A whole block as writable bytes, to receive into; ``None`` outside host memory."""
        self._check(block, self.shape.block_size)
        return self._copier.buffer(block)

    def computed(self) -> None:
        """Mark the end of a step: later reads see its writes (a no-op on the CPU)."""
        self._copier.computed()

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero whole blocks that are about to be filled in part.

        Masked positions are multiplied by zero, and zero times an infinity or a NaN of a former
        request would not be zero.
        """
        for block in blocks:
            self.tensor[block].zero_()

    def store(self, layer: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write one layer's K and V of ``T`` positions with one indexed copy.

        ``rows`` [2 * T * kv heads] are the rows (one position of one head) in layer 0, first for
        K, then for V; ``key`` and ``value`` are [T, kv heads, head dim].
        """
        both = torch.stack((key, value)).view(rows.shape[0], -1)
        self._rows.index_copy_(0, rows + layer * 2 * self.shape.block_size, both)

    def gather(self, layer: int, runs: torch.Tensor, out: torch.Tensor) -> None:
        """Copy runs of one layer to ``out`` [len(runs), block size * head dim].

        ``runs`` index layer 0's K (``(block * kv heads + kv head) * layers * 2``) or V (one more).
        """
        torch.index_select(self._runs, 0, runs + layer * 2, out=out)

    def _check(self, block: int, count: int) -> None:
        if not 0 <= block < self.shape.num_blocks:
            raise IndexError(f"block {block} is outside the pool of {self.shape.num_blocks}")
        if not 1 <= count <= self.shape.block_size:
            raise ValueError(f"count must lie in [1, {self.shape.block_size}], got {count}")
