"""One-line mistakes in the kernel, each of which the checks must find."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvrelay.engine.attention.native import build
from kvrelay.engine.attention.native.library import runs, tiles_refused

VARIANT = "avx2"
KERNEL, LANES, COMMON = "attention.cpp", "lanes_avx2.h", "lanes.h"
ROWS, ROWS_H = "rows.cpp", "rows.h"
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
        "g = all(share(part.tops[from], peak));",
        "g = all(1.f);",
    ),
    "a segment is merged into nothing": (KERNEL, "wide, begun < seg)", "wide, begun <= seg)"),
    "segments are merged in another order": (
        KERNEL,
        "State(item.split->parts + i * State",
        "State(item.split->parts + (item.split->count - 1 - i) * State",
    ),
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
        "s[i] = power(fused(load(scores + r * TILE + VECTOR * i), by, beside));",
        "s[i] = group.vectors < 4 ? power(fused(load(scores + r * TILE + VECTOR * i), by, beside))"
        " : power(add(multiply(load(scores + r * TILE + VECTOR * i), by), beside));",
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
    "the rest of a row is not read": (ROWS, "memcpy(room, at, size_t(BYTES * count));", ";"),
    "the rest of a row is read whole": (
        ROWS,
        "if (count >= VECTOR) return read(at);",
        "return read(at);",
    ),
    "the rest of a row is written whole": (
        ROWS,
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
        ROWS,
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


# Of the products on AMX tiles, in the same way.
PRODUCTS = "products.cpp"
PRODUCT_MUTANTS = {
    "sums begin anew with every chunk": ("from == 0, own);", "true, own);"),
    "sums of the task before are kept": ("from == 0, own);", "false, own);"),
    "the sums of a task overlap": ("((panel - left) * strips + i) * NUMBERS", "i * NUMBERS"),
    "left and right columns are swapped": (
        "_tile_loadd(6, packed, LINE);",
        "_tile_loadd(6, packed + STEP / 2, LINE);",
    ),
    "the last task has the rows of the first": (
        "row = job.top + i * FEW, rows",
        "row = i * FEW, rows",
    ),
    "the last rows of many are left out": ("job.top < rows;", "job.top < 1;"),
    "few products wake threads": ("SERIAL = 1e5", "SERIAL = 0"),
    "many products wake no threads": ("SERIAL = 1e5", "SERIAL = 1e15"),
    "subnormal numbers count": ("  const Rounding rounding;\n", ""),
    "the number of rows changes the order of blocks": (
        "for (long i = 0; i < count; i++) add_block<BOTH>(x + i * STRIP, packed + i * STEP);",
        "for (long j = 0; j < count; j++) {\n    const long i = BOTH ? j : count - 1 - j;\n"
        "    add_block<BOTH>(x + i * STRIP, packed + i * STEP);\n  }",
    ),
    "the rest of a row is read from the next row": (
        "_mm512_maskz_loadu_epi16(here, x + 2 * i * job.k)",
        "_mm512_loadu_si512(x + 2 * i * job.k)",
    ),
    "the rest of a row is left out": (
        "_mm512_maskz_loadu_epi16(here, x + 2 * i * job.k)",
        "_mm512_setzero_si512()",
    ),
    "the rest of a row has no zeros behind it": (
        "_mm512_maskz_loadu_epi16(here, x + 2 * i * job.k)",
        "_mm512_mask_loadu_epi16(_mm512_set1_epi32(-1), here, x + 2 * i * job.k)",
    ),
    "every strip has the rows of the first": (
        "job.copy(i) + from * STRIP",
        "job.copy(0) + from * STRIP",
    ),
    "later blocks of many rows are the first": (
        "job.copy(i) + from * STRIP",
        "job.copy(i)",
    ),
    "later rows are copies of the first": (
        "const long row = job.top + i * FEW;\n",
        "const long row = i * FEW;\n",
    ),
    "columns beyond the last are written": (
        "__mmask32((1ull << least(PANEL, job.n - from)) - 1)",
        "~__mmask32(0)",
    ),
    "rows beyond the last are read": (
        "row, least(FEW, job.bottom - row), job.copy(i)",
        "row, FEW, job.copy(i)",
    ),
    "the bias is added after rounding": (
        "left = _mm512_add_ps(left, low);",
        "left = _mm512_add_ps(_mm512_castsi512_ps(_mm512_and_si512("
        "_mm512_castps_si512(left), _mm512_set1_epi32(int(0xffff0000)))), low);",
    ),
    "both halves have the bias of the left one": (
        "right = _mm512_add_ps(right, high);",
        "right = _mm512_add_ps(right, low);",
    ),
    "a NaN has the bits of its origin": (
        "_mm512_cvtne2ps_pbh(canonical(right), canonical(left))",
        "_mm512_cvtne2ps_pbh(canonical(right), left)",
    ),
    "a result is cut off and not rounded": (
        "(__m512i)_mm512_cvtne2ps_pbh(canonical(right), canonical(left));",
        "_mm512_permutex2var_epi16(_mm512_srli_epi32(_mm512_castps_si512(canonical(left)), 16),"
        " _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28,"
        " 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0),"
        " _mm512_srli_epi32(_mm512_castps_si512(canonical(right)), 16));",
    ),
    "a large result is aligned anyway": (" && uintptr_t(out) % LINE == 0", ""),
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


def compile_in(folder: Path, variant: str = VARIANT) -> Path:
    """The object of the sources in a folder, with the flags of the build."""
    path = folder / "mutant.so"
    flags = [*build.FLAGS, *build.flags_and_sources(variant, folder), "-o", str(path)]
    subprocess.run([*build.compiler(), *flags], check=True, timeout=SECONDS)
    return path


PROGRAMS = (["guarded"], ["row_checks", "11", "60"], ["checks", VARIANT, "11", "12"])
TILE_PROGRAMS = (["guarded"], ["checks", build.AMX, "11", "12"])
PRODUCT_PROGRAMS = (["product_guarded"], ["product_checks", "11", "60"])


def found_by(path: Path, programs: Sequence[list[str]] = PROGRAMS) -> str | None:
    """The name of the program that fails on an object, or ``None``."""
    for words in ([name, str(path), *rest] for name, *rest in programs):
        command = [sys.executable, "-m", f"tests.engine.native.{words[0]}", *words[1:]]
        if subprocess.run(command, capture_output=True, timeout=SECONDS).returncode != 0:
            return words[0]
    return None


@pytest.fixture
def sources(tmp_path: Path, compiled: None) -> Path:
    for path in (*build.FOLDER.glob("*.cpp"), *build.FOLDER.glob("*.h")):
        shutil.copy(path, tmp_path)
    return tmp_path


@pytest.fixture
def processor() -> None:
    if not runs(VARIANT):
        pytest.skip(f"not a processor for {VARIANT}")


@pytest.fixture
def tiles() -> None:
    if reason := tiles_refused():
        pytest.skip(reason)


def change(source: Path, line: str, wrong: str) -> None:
    text = source.read_text()
    assert text.count(line) == 1, f"{source.name} has {line!r} {text.count(line)} times"
    source.write_text(text.replace(line, wrong))


@pytest.mark.slow
def test_the_kernel_itself_passes(sources: Path, processor: None) -> None:
    assert found_by(compile_in(sources)) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_found(sources: Path, processor: None, name: str) -> None:
    file, line, wrong = MUTANTS[name]
    change(sources / file, line, wrong)
    assert found_by(compile_in(sources)) is not None


# The parts of the object with AMX: the file, its mistakes, and the programs that must find them.
AMX_PARTS = {
    "products": (PRODUCTS, PRODUCT_MUTANTS, PRODUCT_PROGRAMS),
    "tiles": (KERNEL, TILE_MUTANTS, TILE_PROGRAMS),
}


@pytest.mark.slow
@pytest.mark.parametrize("part", AMX_PARTS)
def test_a_part_with_amx_itself_passes(sources: Path, tiles: None, part: str) -> None:
    _, _, programs = AMX_PARTS[part]
    assert found_by(compile_in(sources, build.AMX), programs) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "name"),
    [(part, name) for part, (_, mutants, _) in AMX_PARTS.items() for name in mutants],
)
def test_a_mistake_with_amx_is_found(sources: Path, tiles: None, part: str, name: str) -> None:
    file, mutants, programs = AMX_PARTS[part]
    change(sources / file, *mutants[name])
    assert found_by(compile_in(sources, build.AMX), programs) is not None


def test_every_mistake_has_its_line() -> None:
    """What the slow tests change is still in the sources, once."""
    changed = [*MUTANTS.values()]
    changed += [(file, *pair) for file, pairs, _ in AMX_PARTS.values() for pair in pairs.values()]
    counts = {line: (build.FOLDER / file).read_text().count(line) for file, line, _ in changed}
    assert set(counts.values()) == {1}, counts
