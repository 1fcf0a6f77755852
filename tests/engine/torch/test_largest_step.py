"""The pool leaves room for the largest step: on a device whose memory is counted byte by byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeGuard

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from kvrelay.engine.core.updates import Work
from kvrelay.engine.largest_step import StepBounds, largest_steps
from kvrelay.engine.model.loading import LoadedModel, load_model
from kvrelay.engine.runner import Runner
from kvrelay.engine.sampling.masks import MaskThread
from kvrelay.engine.step_down import Way
from kvrelay.errors import Unservable
from kvrelay.sampling import Sampling
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.engines.native import limits_of
from tests.models import tiny_model

ROOM = 48 << 20
SIZE, SEQUENCES, POSITIONS = 16, 32, 512


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A ``DeviceMemory`` of ``total`` bytes beside the weights: all storages made from now on."""

    def __init__(self, total: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._total = total
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._before = 0
        self._most = 0
        self.steps: list[list[Work]] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        given = {self._key(a) for a in args if _plain(a)}
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if _plain(each) and self._key(each) not in given:
                storage = each.untyped_storage()
                self._storages[self._key(each)] = (_weak(storage), storage.nbytes())
        taken = self.taken()
        self._most = max(self._most, taken)
        if taken > self._total:
            raise torch.OutOfMemoryError(f"{taken} of {self._total} bytes")
        return made

    def taken(self) -> int:
        """Bytes of the storages that live."""
        self._storages = {k: v for k, v in self._storages.items() if not v[0].expired()}  # type: ignore[no-untyped-call]
        return sum(size for _, size in self._storages.values())

    def free(self) -> int:
        return self._total - self.taken()

    def begin(self) -> None:
        self._before = self._most = self.taken()

    def peak(self) -> int:
        return self._most - self._before

    def _key(self, tensor: torch.Tensor) -> int:
        key: int = tensor.untyped_storage()._cdata
        return key


def _weak(storage: torch.UntypedStorage) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _plain(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor; packed weights are not counted."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


@contextmanager
def memory_of(total: int) -> Iterator[Counted]:
    counted = Counted(total)
    with counted:
        yield counted


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path: Path = tmp_path_factory.mktemp("model")
    model = tiny_model(
        "llama",
        path,
        hidden_size=256,
        intermediate_size=2048,
        num_hidden_layers=12,  # attention gathers one layer at a time
        max_position_embeddings=2048,
    )
    return load_model(model, device="cpu", attention_backend="sdpa")


def config(share: float, **more: int) -> WorkerConfig:
    return WorkerConfig(
        model="m",
        kv_share=share,
        block_size=SIZE,
        max_num_seqs=more.get("requests", SEQUENCES),
        max_num_batched_tokens=more.get("positions", POSITIONS),
        num_blocks=more.get("blocks"),
    )


def serve(loaded: LoadedModel, blocks: int) -> None:
    """A full step of prompts, then one of decode rows whose contexts fill the pool."""
    runner = Runner(loaded, blocks, SIZE, "sdpa")
    sampling = Sampling(top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2, logprobs=5)
    each = POSITIONS // SEQUENCES
    used = blocks // SEQUENCES
    tables = [range(n * used, (n + 1) * used) for n in range(SEQUENCES)]
    runner.execute([Work([1] * each, 0, each, t, each, sampling) for t in tables])
    length = min(used * SIZE, 2048)
    runner.execute([Work([1] * length, length - 1, 1, t, length, sampling) for t in tables])


def test_the_pool_leaves_room_for_every_step(loaded: LoadedModel) -> None:
    with memory_of(ROOM) as memory:
        limits = limits_of(config(0.95), loaded, memory, Way("sdpa"))
        assert memory.taken() < 4096, "the measured step leaves nothing behind"
    block = loaded.pool_shape(1, SIZE).block_bytes
    assert 0.2 * ROOM < limits.num_blocks * block < 0.8 * ROOM
    with memory_of(ROOM):
        serve(loaded, limits.num_blocks)
    with memory_of(ROOM), pytest.raises(torch.OutOfMemoryError):
        serve(loaded, int(0.95 * ROOM) // block)


def test_a_given_pool_is_not_measured(loaded: LoadedModel) -> None:
    with memory_of(1 << 20) as memory:
        assert limits_of(config(0.5, blocks=77), loaded, memory, Way("sdpa")).num_blocks == 77


def test_a_step_that_does_not_fit_is_refused_at_start(loaded: LoadedModel) -> None:
    with (
        memory_of(1 << 20) as memory,
        pytest.raises(Unservable, match=r"512 positions and 32 .*--max-num-batched-tokens"),
    ):
        limits_of(config(0.5), loaded, memory, Way("sdpa"))


@pytest.mark.parametrize(
    ("positions", "requests", "length", "room"),
    [(512, 32, 2048, 10**6), (512, 32, 2048, 100), (7, 32, 64, 10**6), (512, 3, 100, 10**6)],
)
def test_steps_are_the_largest_there_can_be(
    positions: int, requests: int, length: int, room: int
) -> None:
    prompts, mixed, rows = largest_steps(StepBounds(positions, requests, length, SIZE), room)
    several = min(requests, positions)
    for works in (prompts, mixed, rows):
        assert len(works) == several
        assert all(work.sampling is not None for work in works)
        with MaskThread(20).computing(works) as masks:
            made = masks()
        assert made is not None, "no request has a grammar"
        assert made.rows == tuple(range(several))
        assert not made.errors
        assert np.array_equal(made.forbidden, [[token > 7 for token in range(20)]] * several)
        for work in works:
            end = work.start + work.count
            assert end <= length
            assert len(work.tokens) == end
            assert len(work.blocks) * SIZE >= end
    assert sum(work.count for work in prompts) == min(positions, several * length)
    longest = max(min(length, room), prompts[0].count)
    assert prompts[0].start + prompts[0].count == longest
    *decodes, chunk = mixed
    assert [work.start + work.count for work in decodes] == [longest, *[2] * (several - 2)]
    assert chunk.count == min(positions - several + 1, length)
    assert chunk.start == 0
    contexts = {work.start + work.count for work in rows}
    assert contexts == {max(min(length, room // several), 2)}
    assert {work.count for work in (*decodes, *rows)} == {1}
