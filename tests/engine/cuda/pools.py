"""The worker's own pool under the interpreted kernels: ``.. pools SEED``."""

from __future__ import annotations

import random
import sys

import torch

from tests.engine.cuda.interpreter import DEVICE, ORDER, there  # isort: skip (it comes before every kernel)

from kvrelay.engine.attention.batch import pack
from kvrelay.engine.attention.pool import KVPool, PoolShape
from kvrelay.engine.attention.sdpa import SdpaBackend
from kvrelay.engine.attention.triton_backend import TritonBackend
from kvrelay.engine.core.updates import Work

LIMIT = 2e-5


def run(rng: random.Random) -> None:
    """Backends over a worker's pool: K, V and payloads lie where SDPA's and the store's do.

    Also with as many positions as heads or layers: no check of shapes sees dimensions of the same
    length that are exchanged.
    """
    tables = [3, 5, 1, *range(6, 15)], [0, 2, 4, *range(15, 25)]
    steps = (
        [Work([0] * 9, 0, 9, tables[0], 9, None)],
        [Work([0] * 10, 9, 1, tables[0], 10, None), Work([0] * 9, 0, 9, tables[1], 9, None)],
    )
    for size, heads, layers, dim in ((2, 2, 2, 16), (4, 4, 4, 16), (7, 3, 2, 24), (1, 2, 3, 16)):
        told = f"blocks of {size}, {heads} heads, {layers} layers"
        shape = PoolShape(40, layers, size, heads, dim, "float32")
        ours, real = KVPool(shape, DEVICE), KVPool(shape, DEVICE)
        backends = TritonBackend(ours), SdpaBackend(real)
        for works in steps:
            batch = pack(works, size)
            begun = [backend.step(batch) for backend in backends]
            for layer in rng.sample(range(layers), layers):
                query = there(torch.randn(len(batch.tokens), 2 * heads, dim))
                key, value = there(torch.randn(2, len(query), heads, dim))
                got, want = (step.attend(layer, query, key, value, None) for step in begun)
                error = (got - want).abs().max().item()
                assert error < LIMIT, f"{told}: off by {error}"
        assert torch.equal(ours.tensor, real.tensor), told
        assert ours.read(2, size) == real.read(2, size), told


if __name__ == "__main__":
    number = int(sys.argv[1])
    torch.manual_seed(number)
    ORDER.seed(number)
    with torch.inference_mode():
        run(random.Random(number))
    print(f"seed {number}: passed")
