"""The pool's bytes: layout, views and copies, refusals, and I/O beside computing."""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence

import pytest
import torch

from kvrelay.engine.attention.pool import DTYPES, KVPool, PoolShape


def filled(dtype: str = "float32", blocks: int = 3) -> KVPool:
    """A pool of distinct values: 2 layers, 4 positions, 2 kv heads of 3."""
    pool = KVPool(PoolShape(blocks, 2, 4, 2, 3, dtype))
    values = torch.arange(pool.tensor.numel()).view(pool.tensor.shape) % 251
    pool.tensor.copy_(values.to(DTYPES[dtype]))
    return pool


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_read_layout_and_write_back(dtype: str, count: int) -> None:
    pool, other = filled(dtype), KVPool(PoolShape(2, 2, 4, 2, 3, dtype))
    payload = pool.read(1, count)
    assert payload.nbytes == pool.nbytes(count) == 2 * 2 * count * 6 * DTYPES[dtype].itemsize
    want = pool.tensor[1, ..., :count, :].contiguous()
    assert torch.equal(torch.frombuffer(bytearray(payload), dtype=DTYPES[dtype]), want.view(-1))
    other.tensor.fill_(7)
    other.write(0, count, payload)
    assert torch.equal(other.tensor[0, ..., :count, :], want)
    assert not other.tensor[0, ..., count:, :].any()
    assert bool((other.tensor[1] == 7).all())


def test_starts_zeroed() -> None:
    assert not KVPool(PoolShape(3, 2, 4, 2, 3, "bfloat16")).tensor.any()


def test_full_block_is_a_view_and_read_only() -> None:
    pool = filled()
    payload = pool.read(2, 4)
    assert payload.readonly
    pool.tensor[2].fill_(5)
    assert payload.cast("f")[0] == 5


def test_buffer_is_the_block() -> None:
    pool = filled("bfloat16")
    buffer = pool.buffer(1)
    assert buffer is not None
    assert not buffer.readonly
    before = pool.tensor.clone()
    buffer[:] = bytes(len(buffer))
    assert not pool.tensor[1].any()
    assert torch.equal(pool.tensor[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize("size", [-1, 1])
def test_wrong_length_writes_nothing(size: int) -> None:
    pool = filled()
    before = pool.tensor.clone()
    with pytest.raises(ValueError, match="payload of 2 positions must have 192 bytes"):
        pool.write(0, 2, memoryview(bytes(pool.nbytes(2) + size)))
    assert torch.equal(pool.tensor, before)


@pytest.mark.parametrize(("block", "count"), [(-1, 1), (3, 1), (0, 0), (0, 5)])
def test_outside_is_refused(block: int, count: int) -> None:
    pool = filled()
    with pytest.raises((IndexError, ValueError)):
        pool.read(block, count)
    with pytest.raises((IndexError, ValueError)):
        pool.write(block, count, memoryview(b""))


@pytest.mark.parametrize(
    "shape",
    [
        PoolShape(0, 2, 4, 2, 3, "float32"),
        PoolShape(2, 0, 4, 2, 3, "float32"),
        PoolShape(2, 2, 0, 2, 3, "float32"),
        PoolShape(2, 2, 4, -1, 3, "float32"),
        PoolShape(2, 2, 4, 2, 0, "float32"),
    ],
)
def test_empty_shape_is_refused(shape: PoolShape) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        KVPool(shape)


def test_threads_on_their_own_blocks() -> None:
    pool = filled(blocks=8)
    wrong: list[int] = []

    def copy(blocks: Sequence[int], value: int) -> None:
        payload = memoryview(struct.pack("<f", value) * (pool.nbytes(3) // 4))
        for _ in range(200):
            for block in blocks:
                pool.write(block, 3, payload)
                if pool.read(block, 3) != payload:
                    wrong.append(block)

    threads = [threading.Thread(target=copy, args=((2 * i, 2 * i + 1), i)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
