"""vLLM's pages as canonical blocks: every layout that is learned, and those that are refused."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvrelay.engine.vllm.kv.layout import learn_layout
from kvrelay.engine.vllm.kv.pages import HostPages, PageShape, check_pages
from kvrelay.errors import Unservable
from tests.engine.vllm.rig import FakeLayer, HalvesWriter, RowsWriter, TilesWriter, caches

Writer = HalvesWriter | TilesWriter | RowsWriter


def shape_of(dtype: str, size: int = 8, dim: int = 6) -> PageShape:
    return PageShape(5, 3, size, 2, dim, dtype)


def opened(
    shape: PageShape, writer: Writer, page: int | None = None, by_position: bool = False
) -> tuple[HostPages, list[FakeLayer], list[torch.Tensor]]:
    tensors = caches(shape, page, by_position)
    layers = [FakeLayer(writer)] * shape.num_layers
    layout = learn_layout(layers[0], tensors[0], shape.head_dim)
    return HostPages(shape, tensors, layout), layers, tensors


KINDS = [
    (HalvesWriter(), None, False),
    (HalvesWriter(), 4, False),
    (TilesWriter(), None, False),
    (TilesWriter(), 4, False),
    (RowsWriter(), None, False),
    (RowsWriter(), 2, False),
    (RowsWriter(), None, True),
    (RowsWriter(), 4, True),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("writer", "page", "by_position"), KINDS)
def test_what_the_backend_wrote_is_read(
    writer: Writer, page: int | None, by_position: bool, dtype: str
) -> None:
    shape = shape_of(dtype)
    pages, layers, tensors = opened(shape, writer, page, by_position)
    check_pages(pages, layers, tensors)
    assert all(not tensor.any() for tensor in tensors)
    numbers = torch.Generator().manual_seed(1)
    both = torch.randn((3, 2, 8, 2, 6), generator=numbers).to(shape.torch_dtype)
    slots = torch.arange(2 * 8, 3 * 8)
    for layer, tensor, (key, value) in zip(layers, tensors, both, strict=True):
        layer.impl.do_kv_cache_update(layer, key, value, tensor, slots)
    for count in (8, 7, 4, 3, 1):
        wanted = both.permute(3, 0, 1, 2, 4)[:, :, :, :count].contiguous()
        payload = pages.read(2, count)
        assert payload.nbytes == pages.nbytes(count)
        assert bytes(payload) == wanted.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(("writer", "page", "by_position"), KINDS)
def test_a_block_that_is_written_in_part_is_zero_behind(
    writer: Writer, page: int | None, by_position: bool
) -> None:
    pages, _, tensors = opened(shape_of("float32"), writer, page, by_position)
    for tensor in tensors:
        tensor.fill_(float("nan"))
    payload = memoryview(torch.randn(pages.nbytes(5) // 4).numpy().tobytes())
    pages.write(3, 5, payload)
    assert pages.read(3, 5) == payload
    whole = torch.frombuffer(bytearray(pages.read(3, 8)), dtype=torch.float32)
    assert not whole.isnan().any()
    others = torch.frombuffer(bytearray(pages.read(2, 8)), dtype=torch.float32)
    assert others.isnan().all()


def test_a_payload_of_another_length_changes_nothing() -> None:
    pages, _, _ = opened(shape_of("float32"), RowsWriter())
    with pytest.raises(ValueError, match="payload"):
        pages.write(1, 5, memoryview(bytes(pages.nbytes(4))))
    assert not any(pages.read(1, 8))


@pytest.mark.parametrize(("size", "dim"), [(160, 6), (2, 300), (1, 1)])
def test_long_blocks_and_wide_heads(size: int, dim: int) -> None:
    """More positions or dims than a number in float16 or bfloat16 can tell apart."""
    writers: tuple[Writer, ...] = (HalvesWriter(), RowsWriter())
    for writer, dtype in itertools.product(writers, ("bfloat16", "float16")):
        shape = shape_of(dtype, size, dim)
        pages, layers, tensors = opened(shape, writer)
        check_pages(pages, layers, tensors)


class ShuffledWriter(RowsWriter):
    """Swaps two dims of K: no strides describe it."""

    def do_kv_cache_update(
        self,
        layer: object,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        order = [1, 0, *range(2, key.shape[2])]
        super().do_kv_cache_update(layer, key[:, :, order], value, kv_cache, slot_mapping)


class RoundingWriter(RowsWriter):
    """Keeps small whole numbers and rounds others, as a quantised cache would."""

    def do_kv_cache_update(
        self,
        layer: object,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        super().do_kv_cache_update(layer, key.round(), value, kv_cache, slot_mapping)


class HeadsTurnedWriter(RowsWriter):
    """Puts the heads into another order: only the check with random numbers can tell."""

    def do_kv_cache_update(
        self,
        layer: object,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        super().do_kv_cache_update(layer, key.flip(1), value.flip(1), kv_cache, slot_mapping)


class DroppingWriter(RowsWriter):
    """Writes no V."""

    def do_kv_cache_update(
        self,
        layer: object,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        super().do_kv_cache_update(layer, key, value * 0, kv_cache, slot_mapping)


@pytest.mark.parametrize("writer", [ShuffledWriter(), DroppingWriter()])
def test_an_unknown_order_is_refused(writer: RowsWriter) -> None:
    with pytest.raises(Unservable, match="in an order that kvrelay does not know"):
        opened(shape_of("float32"), writer)


@pytest.mark.parametrize("writer", [RoundingWriter(), HeadsTurnedWriter()])
def test_pages_that_are_not_read_back_are_refused(writer: RowsWriter) -> None:
    pages, layers, tensors = opened(shape_of("float32"), writer)
    with pytest.raises(Unservable, match="not read back byte for byte"):
        check_pages(pages, layers, tensors)


def test_a_backend_without_a_cache_update_is_refused() -> None:
    shape = shape_of("float32")
    layer = FakeLayer(object())  # type: ignore[arg-type]
    with pytest.raises(Unservable, match="writes its KV cache inside attention"):
        learn_layout(layer, caches(shape)[0], shape.head_dim)


def test_a_cache_of_something_else_is_refused() -> None:
    with pytest.raises(Unservable, match="something else than K and V"):
        learn_layout(FakeLayer(RowsWriter()), torch.zeros(4, 2, 8, 13), 6)
