"""The numbers of a step arrive on the device unchanged, each part where kernels can load it."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from kvrelay.engine.cuda.upload import ALIGNED, StepUpload


def test_parts_of_any_shape_and_size() -> None:
    """Empty parts, matrices, and a buffer that must grow; the last upload is never mixed in."""
    rng = random.Random(3)
    upload = StepUpload(torch.device("cpu"))
    for most in (4, 100, 30_000, 50):
        shapes = [(0,), (rng.randint(0, most), 4), (rng.randint(1, most),), (0, 8), (1,)]
        parts = [np.array(rng.choices(range(-9, 9), k=int(np.prod(s))), np.int32) for s in shapes]
        parts = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
        there = upload.send(parts)
        for part, found in zip(parts, there, strict=True):
            assert found.shape == part.shape
            assert np.array_equal(found.numpy(), part)
            assert (found.storage_offset() % ALIGNED) == 0


def test_the_device_buffer_stays_while_it_is_large_enough() -> None:
    """A graph that was captured with an address reads the same address at each replay."""
    upload = StepUpload(torch.device("cpu"))
    places = {upload.send([np.arange(n, dtype=np.int32)])[0].data_ptr() for n in (5, 900, 7)}
    assert len(places) == 1


@pytest.mark.parametrize("allocation", [0, 1, 2])
@pytest.mark.parametrize("sent", [[], [5]])
def test_after_an_allocation_that_failed(
    monkeypatch: pytest.MonkeyPatch, allocation: int, sent: list[int]
) -> None:
    """The device's buffer or one of the pinned ones: the next steps of any size are sent."""
    upload = StepUpload(torch.device("cpu"))
    for words in sent:
        upload.send([np.arange(words, dtype=np.int32)])
    own, before = torch.empty, [None] * allocation

    def empty(*size: int, **named: object) -> torch.Tensor:
        if not before:
            raise torch.OutOfMemoryError
        before.pop()
        made: torch.Tensor = own(*size, **named)  # type: ignore[call-overload]
        return made

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        with pytest.raises(torch.OutOfMemoryError):
            upload.send([np.arange(30_000, dtype=np.int32)])
    for words in (9, 20_000, 30_000, 7, 31_000, 70_000):
        (found,) = upload.send([np.arange(words, dtype=np.int32)])
        assert np.array_equal(found.numpy(), np.arange(words))
