"""Launches the kernels between the matrix products of a decoder layer."""

from __future__ import annotations

import torch

from kvrelay.engine.cuda.attention import PagedPool, power_of_two
from kvrelay.engine.cuda.launch import launch
from kvrelay.engine.cuda.row_kernels import add_and_norm, gate_and_up, rotate_and_store

_GATE_COLUMNS = 1024
_NORM_COLUMNS = 2048  # of a warp's share of four


def norm(
    added: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """The norm of ``residual`` [rows, size] after ``added``, if any, is added to it in place."""
    rows, size = residual.shape
    out = torch.empty_like(residual)
    width = power_of_two(size)
    launch(
        add_and_norm,
        (rows,),
        residual if added is None else added,
        residual,
        weight,
        out,
        epsilon,
        warps=4 if width <= _NORM_COLUMNS else 8,
        SIZE=size,
        WIDTH=width,
        ADD=added is not None,
    )
    return out


def rotate(
    joint: torch.Tensor,
    queries: int,
    pool: PagedPool,
    layer: int,
    slots: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    norm_weight: torch.Tensor | None,
    epsilon: float,
) -> torch.Tensor:
    """Q [rows, queries, head dim] of the joint product; K and V go to the pool.

    ``angles`` are cosines and signed sines [rows, head dim].
    """
    rows = joint.shape[0]
    query = torch.empty((rows, queries, pool.dim), dtype=joint.dtype, device=joint.device)
    launch(
        rotate_and_store,
        (rows, queries + 2 * pool.kv_heads),
        joint,
        query,
        pool.layer(layer),
        slots,
        *angles,
        joint if norm_weight is None else norm_weight,
        joint.stride(0),
        epsilon,
        warps=1,
        QUERIES=queries,
        KEYS=pool.kv_heads,
        NORM=norm_weight is not None,
        BLOCK=pool.block_size,
        DIM=pool.dim,
        WIDTH=pool.width,
    )
    return query


def gated(joint: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of [rows, 2 * size], side by side."""
    rows, size = joint.shape[0], joint.shape[1] // 2
    out = torch.empty((rows, size), dtype=joint.dtype, device=joint.device)
    width = min(_GATE_COLUMNS, power_of_two(size))
    launch(gate_and_up, (rows, -(-size // width)), joint, out, warps=4, SIZE=size, WIDTH=width)
    return out
