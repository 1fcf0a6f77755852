"""Free device memory while the largest step runs: the step is run once, before the pool is made.

It has the most positions and requests of any step. Contexts are as long as a pool of all free
memory allows; their block tables repeat one block, so they need no memory.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch

from kvrelay.engine.core.updates import Work
from kvrelay.engine.model.loading import LoadedModel
from kvrelay.engine.runner import GraphOptions, Runner
from kvrelay.errors import Unservable
from kvrelay.sampling import MAX_TOP_LOGPROBS, Sampling

_SAMPLING = Sampling(
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logprobs=MAX_TOP_LOGPROBS,
)


class DeviceMemory(Protocol):
    """The memory of a device, in bytes."""

    def free(self) -> int:
        """Free memory, after this process has returned what it caches."""

    def begin(self) -> None:
        """Begin to measure the peak."""

    def peak(self) -> int:
        """The largest growth of this process since ``begin``."""


class CudaAllocator:
    """Memory in torch's allocator and the driver. Fragmentation counts towards the peak."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def free(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def begin(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_reserved(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_reserved(self._device) - self._before


@dataclass(frozen=True, slots=True)
class StepBounds:
    """The most positions and requests of a step, the longest request, the block size."""

    positions: int
    requests: int
    length: int
    block_size: int


def free_in_largest_step(
    model: LoadedModel,
    bounds: StepBounds,
    memory: DeviceMemory,
    attention_backend: str,
    threads: int | None = None,
    graphs: GraphOptions | None = None,
) -> int:
    """Bytes of the device's memory that the largest step and the graphs leave free.

    Raises ``Unservable`` if the step and the graphs do not fit.
    """
    room = memory.free() // model.pool_shape(1, 1).block_bytes
    try:
        peak = _peak(model, bounds, room, memory, attention_backend, threads, graphs)
    except torch.OutOfMemoryError as error:
        raise Unservable(
            f"a step of {bounds.positions} positions and {bounds.requests} requests does not fit"
            " into the device memory that the weights leave: lower --max-num-batched-tokens or"
            " --max-num-seqs"
        ) from error
    gc.collect()  # graphs and their runner refer to each other
    return max(memory.free() - peak, 0)


def _peak(
    model: LoadedModel,
    bounds: StepBounds,
    room: int,
    memory: DeviceMemory,
    attention_backend: str,
    threads: int | None,
    graphs: GraphOptions | None,
) -> int:
    memory.begin()
    runner = Runner(model, 1, bounds.block_size, attention_backend, threads, graphs)
    for works in largest_steps(bounds, room):
        runner.execute(works)
    return memory.peak()


def largest_steps(bounds: StepBounds, room: int) -> Iterator[list[Work]]:
    """Three steps. Every request samples, with a grammar; ``room``: the most positions of a pool.

    The first has prompt chunks, one of them with the longest context. The second has decode rows,
    one of them so, and a chunk: the rows' memory may follow their number times the longest context.
    The third has decode rows of equal contexts, which fill the pool.
    """
    requests = min(bounds.requests, bounds.positions)
    each, more = divmod(bounds.positions, requests)
    counts = [min(each + (number < more), bounds.length) for number in range(requests)]
    longest = max(min(bounds.length, room), counts[0])
    yield [_work(longest, counts[0], bounds), *(_work(n, n, bounds) for n in counts[1:])]
    least = min(bounds.length, 2)  # a prompt and a token
    rest = min(bounds.positions - requests + 1, bounds.length)
    decodes = [_work(longest, 1, bounds), *(_work(least, 1, bounds) for _ in counts[2:])]
    yield [*decodes, _work(rest, rest, bounds)] if requests > 1 else decodes
    context = max(min(bounds.length, room // requests), least)
    yield [_work(context, 1, bounds) for _ in counts]


def _work(end: int, count: int, bounds: StepBounds) -> Work:
    """The last ``count`` of ``end`` positions."""
    blocks = [0] * -(end // -bounds.block_size)
    return Work([0] * end, end - count, count, blocks, end, _SAMPLING, _FewTokens())


class _FewTokens:
    """A grammar of the first eight tokens: a mask takes memory, whatever it allows."""

    def follow(self, tokens: Sequence[int], first: int, last: int) -> None:
        pass

    @classmethod
    def masks(cls, grammars: Sequence[Self], threads: int) -> tuple[bytes, Sequence[None]]:
        return b"\xff" * len(grammars), [None] * len(grammars)
