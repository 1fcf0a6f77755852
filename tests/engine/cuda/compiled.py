"""Compiles what the launchers launch, for GPUs that are not here, and reads what a program needs.

``python -m tests.engine.cuda.compiled SM`` prints one JSON object a kernel. No driver is needed:
the call of a kernel is recorded with its arguments, and compiled as Triton would at that call.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kvrelay.engine.cuda.arguments import AttentionOptions
from kvrelay.engine.cuda.attention import PagedEntries, PagedPool
from kvrelay.engine.cuda.rows import gated, norm, rotate

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
}
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


@dataclass(frozen=True, slots=True)
class Launched:
    """A recorded call: the kernel, its arguments by name and the options of the compiler."""

    case: str
    kernel: JITFunction
    arguments: dict[str, object]
    options: dict[str, object]

    @property
    def name(self) -> str:
        """Of the kernel's function."""
        return str(self.kernel.fn.__name__)


@dataclass(frozen=True, slots=True)
class Resources:
    """What one compiled kernel needs: bytes of ``local`` memory are spilled registers."""

    case: str
    kernel: str
    warps: int
    registers: int
    local: int
    shared: int
    fused: int  # products and sums of float32 that were fused
    products: int  # instructions of tensor cores
    wide_loads: int  # of 16 bytes


def recorded(case: str, run: Callable[[], object]) -> list[Launched]:
    """The launches of ``run``, none of which happens."""
    found: list[Launched] = []

    def record(
        kernel: JITFunction, *given: object, grid: object, warmup: bool, **named: object
    ) -> None:
        options = {name: named.pop(name) for name in _OPTIONS if name in named}
        names = [parameter.name for parameter in kernel.params]
        arguments = dict(zip(names, given, strict=False)) | named
        assert set(arguments) == set(names), kernel
        found.append(Launched(case, kernel, arguments, options))

    own = JITFunction.run
    JITFunction.run = record
    try:
        run()
    finally:
        JITFunction.run = own
    return found


def compiled(launched: Launched, architecture: int) -> Resources:
    """Compile a recorded call, with the specialisations that Triton makes of its arguments."""
    signature: dict[str, object] = {}
    constants: dict[tuple[int, ...], object] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for number, parameter in enumerate(launched.kernel.params):
        value = launched.arguments[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[(number,)] = value
        elif parameter.do_not_specialize:
            signature[parameter.name] = "i32"
        elif isinstance(value, tuple):
            kinds = [
                _specialised((number, place), field, "", constants, attributes)
                for place, field in enumerate(value)
            ]
            signature[parameter.name] = type(value)(*kinds)
        else:
            kind = _specialised((number,), value, parameter.annotation, constants, attributes)
            signature[parameter.name] = kind
    made = triton.compile(
        ASTSource(launched.kernel, signature, constants, attributes),
        target=GPUTarget("cuda", architecture, 32),
        options=launched.options,
    )
    registers, local = _usage(made.asm["cubin"])
    text: str = made.asm["ptx"]
    return Resources(
        case=launched.case,
        kernel=launched.name,
        warps=cast(int, launched.options["num_warps"]),
        registers=registers,
        local=local,
        shared=made.metadata.shared,
        fused=len(re.findall(r"\bfma\.rn\.f32\b", text)),
        products=len(re.findall(r"\bmma\.sync|\bwgmma\.mma_async|\btcgen05\.mma", text)),
        wide_loads=len(re.findall(r"ld\.global[.\w]*\.v4\.b32|cp\.async\.cg", text)),
    )


def _specialised(
    path: tuple[int, ...],
    value: object,
    annotation: object,
    constants: dict[tuple[int, ...], object],
    attributes: dict[tuple[int, ...], list[list[object]]],
) -> str:
    """The type of an argument or of a field of one, whose specialisation is noted."""
    kind, aligned = _kind(value, annotation)
    if kind == "constexpr":
        constants[path] = value
    elif aligned:
        attributes[path] = [["tt.divisibility", 16]]
    return kind


def _kind(value: object, annotation: object) -> tuple[str, bool]:
    """Type of an argument, and whether it or its address is a multiple of 16."""
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype], value.data_ptr() % 16 == 0
    if isinstance(value, bool | float):
        return "fp32", False
    assert isinstance(value, int)
    if value == 1:
        return "constexpr", False
    wide = "int64" in str(annotation) or not -(1 << 31) <= value < 1 << 31
    return "i64" if wide else "i32", value % 16 == 0


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and its bytes of local memory and stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [_TOOLS / "cuobjdump", "-res-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def calls() -> Iterator[Launched]:
    """What a decoder layer launches, in the shapes of models: dtype, group, head dim, blocks."""
    for case, dtype, heads, keys, dim, block in (
        ("qwen3-0.6b", torch.bfloat16, 16, 8, 128, 16),
        ("llama-3-70b", torch.bfloat16, 64, 8, 128, 16),
        ("llama-2-7b fp16", torch.float16, 32, 32, 128, 16),
        ("qwen2-0.5b", torch.bfloat16, 14, 2, 64, 32),
        ("head 80, block 7", torch.bfloat16, 6, 2, 80, 7),
        ("head 256", torch.bfloat16, 8, 4, 256, 16),
        ("float32", torch.float32, 16, 8, 128, 16),
    ):
        yield from _layer(case, dtype, heads, keys, dim, block, AttentionOptions())
    sinks = torch.zeros(64, dtype=torch.bfloat16)
    options = AttentionOptions(128, 0.0, sinks)
    yield from _layer("window and sinks", torch.bfloat16, 64, 8, 64, 16, options)
    options = AttentionOptions(4096, 50.0)
    yield from _layer("window and cap", torch.bfloat16, 16, 8, 256, 16, options)


def _layer(
    case: str,
    dtype: torch.dtype,
    heads: int,
    keys: int,
    dim: int,
    block: int,
    options: AttentionOptions,
) -> Iterator[Launched]:
    """Memory is on the meta device but for addresses, which are those of small tensors."""
    pool = PagedPool(_head_major(dtype, keys, dim, block))
    numbers = torch.zeros(64, 4, dtype=torch.int32)
    flat = torch.zeros(4096, dtype=torch.int32)
    entries = PagedEntries(numbers, flat, flat[:64], 32, 256, 4000)
    joint = torch.zeros(64, (heads + 2 * keys) * dim, dtype=dtype)
    angles = torch.zeros(64, dim, dtype=dtype), torch.zeros(64, dim, dtype=dtype)
    weight = torch.zeros(heads + keys, dim, dtype=dtype)
    hidden = torch.zeros(64, 2048, dtype=dtype)
    query = torch.zeros(64, heads, dim, dtype=dtype)

    def run() -> None:
        norm(hidden, hidden, hidden[0], 1e-6)
        rotate(joint, heads, pool, 3, entries.slots, angles, weight, 1e-6)
        rows = joint.view(64, -1, dim)
        pool.store(3, entries.slots, rows[:, heads : heads + keys], rows[:, heads + keys :])
        pool.attend(3, query, entries, dim**-0.5, options)
        gated(torch.zeros(64, 6144, dtype=dtype))

    yield from recorded(case, run)


def _head_major(dtype: torch.dtype, keys: int, dim: int, block: int) -> torch.Tensor:
    """A pool as a worker has it: [block, kv head, layer, k|v, position, head dim] underneath."""
    return torch.zeros(4, keys, 8, 2, block, dim, dtype=dtype).permute(0, 2, 3, 4, 1, 5)


def main(architecture: int, case: str | None = None) -> None:
    """Print what each kernel, or each of one case, needs on this architecture."""
    for launched in (one for one in calls() if case in (None, one.case)):
        print(json.dumps(asdict(compiled(launched, architecture))), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
