"""Triton's interpreter as a device: programs in random order, bfloat16 rounded as a GPU rounds it.

Import it before any kernel, in a process of its own with TRITON_INTERPRET=1; or, for the tests
marked ``gpu``, with KVRELAY_TEST_DEVICE=cuda: then the kernels are compiled and run there.

The interpreter of Triton 3.7.1 (https://github.com/triton-lang/triton) gets bfloat16 wrong in two
places, which ``install`` replaces: ``tl.dot`` multiplies the bits as integers, and a cast from
float32 cuts instead of rounding. ``wrong_casts`` and ``wrong_products`` observe both, and a test
fails once either is mended.
"""

from __future__ import annotations

import inspect
import mmap
import os
import random
from collections.abc import Callable
from itertools import product
from typing import TypeVar, cast

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime import interpreter

DEVICE = torch.device(os.environ.get("KVRELAY_TEST_DEVICE", "cpu"))
interprets = os.environ.get("TRITON_INTERPRET") == "1"
assert interprets == (DEVICE.type == "cpu"), "the interpreter runs on the CPU, kernels elsewhere"

ORDER = random.Random(0)
"""Draws the order of programs; a check seeds it."""

_NO_RESERVE = 0x4000  # MAP_NORESERVE
_Array = NDArray[np.generic]
_Given = TypeVar("_Given", torch.Tensor, torch.Tensor | None)


def there(given: _Given) -> _Given:
    """A tensor on the device that runs the kernels, with the same strides if it has no gaps."""
    return given if given is None else given.to(DEVICE)


class _Handle:
    """The part of the interpreter's values that is used here."""

    data: _Array
    dtype: object


def widened(bits: _Array) -> NDArray[np.float32]:
    """Bfloat16, as the interpreter keeps it, as float32."""
    return cast(NDArray[np.float32], (bits.astype(np.uint32) << 16).view(np.float32))


def narrowed(numbers: _Array) -> NDArray[np.uint16]:
    """Float32 rounded to the nearest bfloat16, ties to even."""
    source = torch.from_numpy(np.ascontiguousarray(numbers, np.float32))
    return cast(NDArray[np.uint16], source.bfloat16().view(torch.uint16).numpy())


def vast(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory there. On the host, pages that nobody touches take none."""
    if not interprets:
        return torch.empty(elements, dtype=dtype, device=DEVICE)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    return torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize, flags=flags), dtype=dtype)


def _cast(builder: object, source: _Handle, target: object, *rounding: object) -> object:
    element, kind = source.dtype, cast(object, getattr(target, "scalar", target))
    if (element, kind) == (tl.bfloat16, tl.float32):
        return interpreter.TensorHandle(widened(source.data), kind)
    if (element, kind) == (tl.float32, tl.bfloat16):
        return interpreter.TensorHandle(narrowed(source.data), kind)
    return _own_cast(builder, source, target)


def _dot(
    builder: object, left: _Handle, right: _Handle, start: _Handle, *precision: object
) -> object:
    """Sums each output in one order, as a GPU's products do; BLAS may choose it by the rows."""
    left_data, right_data = (
        widened(each.data) if each.dtype == tl.bfloat16 else each.data.astype(np.float32)
        for each in (left, right)
    )
    products = np.einsum("mk,kn->mn", left_data, right_data)
    return interpreter.TensorHandle(products + start.data, tl.float32)


LAUNCHES: list[Callable[[], None]] | None = None
"""Where launches are noted, if they are, to be repeated."""


def _run(executor: object, *given: object, **named: object) -> None:
    """All programs of a grid, in random order, on the memory of the tensors themselves."""
    if LAUNCHES is not None:
        LAUNCHES.append(lambda: _programs(executor, *given, **named))
    with _disable_current_modes():
        _programs(executor, *given, **named)


def _programs(executor: object, *given: object, **named: object) -> None:
    function = cast(Callable[..., object], executor.fn)  # type: ignore[attr-defined]
    known = inspect.getfullargspec(function).args
    kept = {name: value for name, value in named.items() if name in known}
    constants: list[str] = executor.constexprs  # type: ignore[attr-defined]
    scope = interpreter._patch_lang(function)
    try:
        arguments = {
            name: value if name in constants else interpreter._implicit_cvt(value)
            for name, value in inspect.getcallargs(function, *given, **kept).items()
        }
        sizes: tuple[int, ...] = executor.grid  # type: ignore[attr-defined]
        grid = (*sizes, 1, 1)[:3]
        assert 0 < grid[0] < 1 << 31, grid
        assert all(0 < size <= 65535 for size in grid[1:]), grid  # as CUDA limits them
        interpreter.interpreter_builder.set_grid_dim(*grid)
        programs = list(product(*map(range, grid)))
        ORDER.shuffle(programs)
        for program in programs:
            interpreter.interpreter_builder.set_grid_idx(*program)
            function(**arguments)
    finally:
        scope.restore()


def wrong_casts() -> bool:
    """Whether the interpreter's own cast of 1.9999 to bfloat16 is not 2."""
    handle = interpreter.TensorHandle(np.array([1.9999], np.float32), tl.float32)
    found = _own_cast(interpreter.interpreter_builder, handle, tl.bfloat16)
    return bool(widened(found.data)[0] != 2.0)


def wrong_products() -> bool:
    """Whether the interpreter's own product of bfloat16 is wrong: 1 * 1."""
    one = interpreter.TensorHandle(narrowed(np.ones((1, 1))), tl.bfloat16)
    none = interpreter.TensorHandle(np.zeros((1, 1), np.float32), tl.float32)
    found = _own_dot(interpreter.interpreter_builder, one, one, none, None, None)
    return bool(found.data[0, 0] != 1.0)


_builder = interpreter.InterpreterBuilder
_own_cast = _builder.cast_impl
_own_dot = _builder.create_dot


def install() -> None:
    """Replace what is wrong, and the fixed order of programs."""
    _builder.cast_impl = _cast
    _builder.create_dot = _dot
    interpreter.GridExecutor.__call__ = _run


if interprets:
    install()

if __name__ == "__main__":
    print(wrong_casts(), wrong_products())
