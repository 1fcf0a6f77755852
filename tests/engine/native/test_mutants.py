"""One-line mistakes in the kernel, each of which the checks must find."""

from __future__ import annotations

import multiprocessing
import runpy
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvrelay.engine.attention.native import build
from kvrelay.engine.attention.native.library import runs
from tests.engine.native.emulated import compile_object, need
from tests.engine.native.product_mutants import (
    AMX_MUTANTS,
    AVX2_MUTANTS,
    PAIR_MUTANTS,
    VECTOR_MUTANTS,
)

VARIANT = build.AVX2
KERNEL, LANES, COMMON = "attention.cpp", "lanes_avx2.h", "lanes.h"
ROWS, ROWS_H, NUMBERS = "rows.cpp", "rows.h", "numbers.h"
SECONDS = 200
# What is wrong -> the file, the line, and what stands there instead.
MUTANTS = {
    "a row sees the next position": (
        KERNEL,
        "group.highs[i] = least(high, position + 1 - tile);",
        "group.highs[i] = least(high, position + 2 - tile);",
    ),
    "a window is one key wider": (
        KERNEL,
        "g.window ? most(0, position - g.window + 1) : 0;\n  }\n\n  void run",
        "g.window ? most(0, position - g.window) : 0;\n  }\n\n  void run",
    ),
    "a segment is merged without its scale": (
        KERNEL,
        "g = all(share(part.tops[from], peak, by));",
        "g = all(1.f);",
    ),
    "a segment is merged into nothing": (KERNEL, "by, begun < seg)", "by, begun <= seg)"),
    "segments are merged in another order": (
        KERNEL,
        "State(item.split->parts + i * State",
        "State(item.split->parts + (item.split->count - 1 - i) * State",
    ),
    "what is only stored attends": (KERNEL, "if (!g.query) return 0;", ""),
    "no isolation of a NaN": (KERNEL, "= hidden && !finite(high);", "= false;"),
    "half of a pair is not isolated": (KERNEL, "x * PER + 1 >= to;", "false;"),
    "a NaN has the bits of its origin": (KERNEL, "= canonical(::add(", "= (::add("),
    "sums are not scaled": (
        KERNEL,
        "multiply(load(sums), all(group.factors[r]))",
        "load(sums)",
    ),
    "outputs are not scaled": (KERNEL, "factors[i] != 1.f;", "factors[i] > 1.f;"),
    "rows of the next head get a maximum": (
        KERNEL,
        "store(tops, between(peak, 0, group.rows, past));",
        "store(tops, peak);",
    ),
    "the last row of a group sees what the first sees": (
        KERNEL,
        "low > 0 || first_seen(to) > tile",
        "low > 0 || first_seen(from) > tile",
    ),
    "no soft cap in the middle of a prompt": (KERNEL, "scale.capped != 0.f || apart;", "apart;"),
    "only the first keys of a prompt are stored": (
        KERNEL,
        "pieces = ceiling(entry[2], STORED);",
        "pieces = least(entry[2], 1);",
    ),
    "a sink has no weight": (KERNEL, "fmaf(sum, f, power(sink - peak))", "sum * f"),
    "a soft cap without its divisor": (KERNEL, "float(g.scale / g.softcap)", "float(g.scale)"),
    "offsets of 32 bits": (
        KERNEL,
        "(table[block] * g.s_block + at * g.s_pos)",
        "int(table[block] * g.s_block + at * g.s_pos)",
    ),
    "heads are read beyond their end": (KERNEL, "if (padded != g.dim) {", "if (false) {"),
    "keys before every window are read": (
        KERNEL,
        "if (i < low || i >= high) continue;",
        "if (i >= high) continue;",
    ),
    "subnormal numbers count": (COMMON, "_mm_setcsr(0x9fc0)", "_mm_setcsr(0x1f80)"),
    "a tiny call wakes threads": (KERNEL, "SERIAL = 50e3", "SERIAL = 0"),
    "the first rows of a call are rounded otherwise": (
        KERNEL,
        "s[i] = power(multiply(subtract(load(scores + r * TILE + VECTOR * i), beside), by));",
        "s[i] = group.vectors < 4"
        " ? power(multiply(subtract(load(scores + r * TILE + VECTOR * i), beside), by))"
        " : power(subtract(multiply(load(scores + r * TILE + VECTOR * i), by),"
        " multiply(beside, by)));",
    ),
    "of a pair the even product is first": (
        LANES,
        "fused({a.even, a.even}, b.even, fused({a.odd, a.odd}, b.odd, c))",
        "fused({a.odd, a.odd}, b.odd, fused({a.even, a.even}, b.even, c))",
    ),
    "lanes are summed in another order": (
        LANES,
        "const __m256 y = _mm256_add_ps(x.a, x.b);",
        "const __m256 y = _mm256_hadd_ps(x.a, x.b);",
    ),
    "new values are stored one position late": (
        KERNEL,
        "position % g.block_size * g.s_pos);",
        "(position + 1) % g.block_size * g.s_pos);",
    ),
    "a sum is not rounded before the norm": (
        ROWS,
        "x = N::through(add(x, N::read(added + at, left)));",
        "x = add(x, N::read(added + at, left));",
    ),
    "a norm is not rounded before its weight": (
        ROWS,
        "N::through(multiply(N::read(residual + at, left), scale));",
        "multiply(N::read(residual + at, left), scale);",
    ),
    "a norm of the first rows is rounded otherwise": (
        ROWS,
        "return 1.f / sqrtf(total(squares) / float(size) + float(epsilon));",
        "return 1.f / sqrtf(total(squares) * (1.f / float(size)) + float(epsilon));",
    ),
    "epsilon is left out": (ROWS, " + float(epsilon));", ");"),
    "the rest of a row is not read": (
        NUMBERS,
        "if (count > 0) memcpy(room, at, size_t(BYTES * count));",
        ";",
    ),
    "the rest of a row is read whole": (
        NUMBERS,
        "if (count >= VECTOR) return read(at);",
        "return read(at);",
    ),
    "the rest of a row is written whole": (
        NUMBERS,
        "if (count >= VECTOR) return write(at, x);",
        "return write(at, x);",
    ),
    "a rotation turns the other way": (ROWS, "subtract(ac, bs)", "add(ac, bs)"),
    "a product of a rotation is not rounded": (
        ROWS,
        "N::through(multiply(b, sine));",
        "multiply(b, sine);",
    ),
    "every row has the first position": (ROWS, "positions[row] * bytes", "positions[0] * bytes"),
    "heads share one weight": (ROWS, "weight + head * bytes", "weight"),
    "an activation is not rounded": (ROWS, "multiply(N::through(silu), up)", "multiply(silu, up)"),
    "an activation of negative numbers": (ROWS, "by_sign(x, all(1.f), e)", "all(1.f)"),
    "a NaN of a row has the bits of its origin": (
        NUMBERS,
        "store((float*)at, canonical(x));",
        "store((float*)at, x);",
    ),
    "the last rows are left out": (
        ROWS_H,
        "row < spread.rows; row++",
        "row + 1 < spread.rows; row++",
    ),
    "few rows wake threads": (ROWS_H, "SERIAL_ELEMENTS = 1 << 16", "SERIAL_ELEMENTS = 0"),
}


TILE_MUTANTS = {
    "sums of outputs begin with zero": (
        "  if (onto) {\n    _tile_loadd(0",
        "  if (false) {\n    _tile_loadd(0",
    ),
    "the fourth vector is the first": ("_tile_loadd(5, b + 48, right)", "_tile_loadd(5, b, right)"),
    "the third vector is not kept": (
        "if constexpr (N > 2) _tile_stored(2, c + 32, bytes);",
        "if constexpr (N > 3) _tile_stored(2, c + 32, bytes);",
    ),
    "more rows than there are": ("const uint8_t rows = uint8_t(m);", "const uint8_t rows = 16;"),
    "one block of a row": ("end = a + k; a < end", "end = a + 16; a < end"),
    "vectors after the fourth are the first": ("b += 4 * VECTOR, c +=", "b += 0, c +="),
    "a narrow head ends where its numbers end": (
        "words(ceiling(TILED ? padded : g.dim, PER))",
        "words(ceiling(g.dim, PER))",
    ),
    "values of earlier keys are left": ("(TILED ? TILE : high)", "high"),
    "values of other tiles are left for a row apart": (
        "if constexpr (TILED) memset(edge, 0, size_t(4 * EDGES * padded));\n",
        "",
    ),
    "only the first 32 keys have values": (
        "TILED ? TILE / PER : ceiling(top",
        "TILED ? 16 : ceiling(top",
    ),
    "hidden values reach other rows": ("if (apart) {", "if (apart && !TILED) {"),
}
"""In the part of attention.cpp for AMX."""


FORWARD_MUTANTS = {
    "the sum before a norm is left out": (
        "normalise(sum, layer.before",
        "normalise(nullptr, layer.before",
    ),
    "the last layer's sum is left out": (
        "normalise(sum, model.norm)",
        "normalise(nullptr, model.norm)",
    ),
    "values are left where keys are": ("key + model.kv_heads * model.width * bytes", "key"),
    "every layer has the K and V of the first": ("call.layer = number;", "call.layer = 0;"),
    "keys are not rotated": ("0, model.queries + model.kv_heads);", "0, model.queries);"),
    "rows are kept after the first layer": ("number == model.layer_count - 1", "number == 0"),
    "only decoding rows store K and V in the last layer": (
        "attention(nullptr, key, later",
        "attention(nullptr, nullptr, later",
    ),
    "the first keys of kept rows are another head's": ("(queries - whole) * bytes", "0"),
    "keys of rows that are not kept are not rotated": (
        "later.outputs, layer.heads, model.queries, model.kv_heads",
        "later.outputs, layer.heads, model.queries, 0",
    ),
    "keys have the norm of queries": ("from * model.width * bytes : nullptr", "0 : nullptr"),
    "queries of kept rows are not rotated": (
        "rotate(joint, queries, layer.heads, 0, model.queries)",
        "rotate(joint, queries, layer.heads, 0, 0)",
    ),
    "columns are those of the first panel": ("all.packed + from * deep * bytes", "all.packed"),
    "columns begin amid a panel": ("queries / PANEL * PANEL", "queries"),
    "columns have the bias of the first": ("all.bias + from * bytes", "all.bias"),
    "inputs beyond whole blocks are not counted": (
        "(all.inputs + DEPTH - 1) / DEPTH * DEPTH",
        "all.inputs",
    ),
    "the first rows are kept": ("normed + row * size", "normed + i * size"),
    "kept rows are added to the first": ("hidden + row * size", "hidden + i * size"),
    "kept rows are where the first ones are": (
        "kept_positions[i] = positions[row]",
        "kept_positions[i] = positions[i]",
    ),
    "kept rows see the first keys alone": ("of[1] + row - of[0]", "of[1]"),
    "kept rows are of the first entry": ("while (row >= of[0] + of[2]) of += 4;", ""),
    "a bias is left out": ("weight.packed, weight.bias, out", "weight.packed, nullptr, out"),
}
"""In forward.cpp."""


PROGRAMS = (["guarded"], ["row_checks", "11", "60"], ["checks", VARIANT, "11", "12"])
TILE_PROGRAMS = (["guarded"], ["checks", build.AMX, "11", "12"])
FORWARD_PROGRAMS = (["forward_checks", "11", "60"],)

# Processes that have imported torch already: they are forked for every program.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        f"tests.engine.native.{name}"
        for name in ("checks", "guarded", "product_guarded", "forward_checks")
    ]
)


def run_program(name: str, *words: str) -> None:
    """As ``python -m`` does."""
    sys.argv = [name, *words]
    runpy.run_module(f"tests.engine.native.{name}", run_name="__main__")


def found_by(path: Path, programs: Sequence[list[str]] = PROGRAMS) -> str | None:
    """The name of the program that fails on an object, or ``None``."""
    for name, *rest in programs:
        process = FORKS.Process(target=run_program, args=(name, str(path), *rest))
        process.start()
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
            raise TimeoutError(name)
        if process.exitcode != 0:
            return name
    return None


@pytest.fixture
def sources(tmp_path: Path, compiled: None) -> Path:
    for path in (*build.FOLDER.glob("*.cpp"), *build.FOLDER.glob("*.h")):
        shutil.copy(path, tmp_path)
    return tmp_path


def compile_in(folder: Path, variant: str, names: Sequence[str]) -> Path:
    return compile_object(folder / "mutant.so", variant, [folder / name for name in names])


def change(source: Path, line: str, wrong: str) -> None:
    text = source.read_text()
    assert text.count(line) == 1, f"{source.name} has {line!r} {text.count(line)} times"
    source.write_text(text.replace(line, wrong))


@pytest.mark.slow
def test_the_kernel_itself_passes(sources: Path) -> None:
    need(VARIANT)
    assert found_by(compile_in(sources, VARIANT, build.SOURCES)) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_found(sources: Path, name: str) -> None:
    need(VARIANT)
    file, line, wrong = MUTANTS[name]
    change(sources / file, line, wrong)
    assert found_by(compile_in(sources, VARIANT, build.SOURCES)) is not None


@dataclass(frozen=True, slots=True)
class Part:
    """Of an object: a source, what is compiled, its mistakes, the programs that must find them."""

    variant: str
    file: str
    sources: tuple[str, ...]
    mutants: Mapping[str, tuple[str, str]]
    programs: Sequence[list[str]]


def products_of(variant: str, mutants: Mapping[str, tuple[str, str]]) -> Part:
    """The products of a variant, which need no other source."""
    file = build.PRODUCT_SOURCES[variant]
    programs = (["product_guarded", variant], ["product_checks", variant, "11", "60"])
    return Part(variant, file, (file,), mutants, programs)


PARTS = {
    "products on AMX": products_of(build.AMX, AMX_MUTANTS),
    "products on AVX512-BF16": products_of(build.AVX512_BF16, PAIR_MUTANTS),
    "products on AVX-512": products_of(build.AVX512, VECTOR_MUTANTS),
    "products on AVX2": products_of(build.AVX2, AVX2_MUTANTS),
    "tiles": Part(build.AMX, KERNEL, build.SOURCES, TILE_MUTANTS, TILE_PROGRAMS),
    "forward pass": Part(
        build.PLAIN, "forward.cpp", build.PLAIN_SOURCES, FORWARD_MUTANTS, FORWARD_PROGRAMS
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_a_part_itself_passes(sources: Path, part: str) -> None:
    one = PARTS[part]
    need(one.variant)
    assert found_by(compile_in(sources, one.variant, one.sources), one.programs) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "name"),
    [(part, name) for part, one in PARTS.items() for name in one.mutants],
)
def test_a_mistake_in_a_part_is_found(sources: Path, part: str, name: str) -> None:
    one = PARTS[part]
    need(one.variant)
    if one.variant == build.AVX2 and name in VECTOR_MUTANTS and runs(build.AVX512):
        pytest.skip("the same source is changed for AVX-512")
    change(sources / one.file, *one.mutants[name])
    assert found_by(compile_in(sources, one.variant, one.sources), one.programs) is not None


def test_every_mistake_has_its_line() -> None:
    """What the slow tests change is still in the sources, once."""
    changed = [*MUTANTS.values()]
    changed += [(one.file, *pair) for one in PARTS.values() for pair in one.mutants.values()]
    counts = {
        (file, line): (build.FOLDER / file).read_text().count(line) for file, line, _ in changed
    }
    assert set(counts.values()) == {1}, counts
