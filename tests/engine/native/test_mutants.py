"""One-line mistakes in the kernel, each of which the checks must find."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvrelay.engine.attention.native import build
from kvrelay.engine.attention.native.library import runs

VARIANT = "avx2"
KERNEL, LANES, COMMON = "attention.cpp", "lanes_avx2.h", "lanes.h"
ROWS, ROWS_H = "rows.cpp", "rows.h"
SECONDS = 200
# What is wrong -> the file, the line, and what stands there instead.
MUTANTS = {
    "a row sees the next position": (
        KERNEL,
        "const long to = least(high, position(i) + 1 - tile);",
        "const long to = least(high, position(i) + 2 - tile);",
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
    "sums are not scaled": (KERNEL, "sum = multiply(sum, all(f));", ";"),
    "outputs are not scaled": (KERNEL, "if (f != 1.f)", "if (f > 1.f)"),
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
        "s[i] = power(fused(s[i], all(scale.by), base));",
        "s[i] = vectors < 4 ? power(fused(s[i], all(scale.by), base))"
        " : power(add(multiply(s[i], all(scale.by)), base));",
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


def compile_in(folder: Path) -> Path:
    """The object of the sources in a folder, with the flags of the build."""
    path = folder / "mutant.so"
    sources = [str(folder / name) for name in build.SOURCES]
    flags = [*build.FLAGS, *build.VARIANTS[VARIANT], *sources, "-o", str(path)]
    subprocess.run([*build.compiler(), *flags], check=True, timeout=SECONDS)
    return path


def found_by(path: Path) -> str | None:
    """The name of the program that fails on an object, or ``None``."""
    programs = (["guarded"], ["row_checks", "11", "60"], ["checks", "11", "12"])
    for words in ([name, str(path), *rest] for name, *rest in programs):
        command = [sys.executable, "-m", f"tests.engine.native.{words[0]}", *words[1:]]
        if subprocess.run(command, capture_output=True, timeout=SECONDS).returncode != 0:
            return words[0]
    return None


@pytest.fixture
def sources(tmp_path: Path, compiled: None) -> Path:
    if not runs(VARIANT):
        pytest.skip(f"not a processor for {VARIANT}")
    for path in (*build.FOLDER.glob("*.cpp"), *build.FOLDER.glob("*.h")):
        shutil.copy(path, tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_kernel_itself_passes(sources: Path) -> None:
    assert found_by(compile_in(sources)) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_found(sources: Path, name: str) -> None:
    file, line, wrong = MUTANTS[name]
    text = (sources / file).read_text()
    assert text.count(line) == 1, f"{file} has {line!r} {text.count(line)} times"
    (sources / file).write_text(text.replace(line, wrong))
    assert found_by(compile_in(sources)) is not None
