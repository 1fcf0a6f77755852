"""One-line mistakes in the products: what is wrong, the line, and what stands there instead."""

AMX_MUTANTS = {
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


VECTOR_MUTANTS = {
    "weights at odd places are those at even ones": (
        "ODD ? pairs.odd : pairs.even;",
        "pairs.even;",
    ),
    "numbers at odd places are those at even ones": ("x[i * DEPTH + ODD]", "x[i * DEPTH]"),
    "sums begin anew with every block": (
        "add(load(sum), add(evens[i][j], odds[i][j]))",
        "add(evens[i][j], odds[i][j])",
    ),
    "a sum takes the products at even places first": (
        "add(load(sum), add(evens[i][j], odds[i][j]))",
        "add(add(load(sum), evens[i][j]), odds[i][j])",
    ),
    "one row is added up in another order": (
        "add_pair<R, W, false>(x + 2 * pair, here, evens);",
        "const long at = R == 1 ? DEPTH / 2 - 1 - pair : pair;\n"
        "add_pair<R, W, false>(x + 2 * at, packed + at * LINE, evens);",
    ),
    "two rows and more are added up in another order": (
        "add_pair<R, W, true>(x + 2 * pair, here, odds);",
        "const long at = R > 1 ? DEPTH / 2 - 1 - pair : pair;\n"
        "add_pair<R, W, true>(x + 2 * at, packed + at * LINE, odds);",
    ),
    "left and right columns have one weight": ("packed + j * (STEP / 2)", "packed"),
    "columns are left out": ("tile < TILES;", "tile < TILES - WIDTH;"),
    "every strip has a row too few": ("if (rows < R)", "if (rows <= R)"),
    "the last task has the rows of the first": ("job.top + job.offset(i)", "job.offset(i)"),
    "the last rows of many are left out": ("job.top < rows;", "job.top < 1;"),
    "few products wake threads": ("SERIAL = 1e5", "SERIAL = 0"),
    "many products wake no threads": ("SERIAL = 1e5", "SERIAL = 1e15"),
    "subnormal numbers count": ("  const Rounding rounding;\n", ""),
    "the rest of a row is read from the next row": (
        "load_bfloat16(count < VECTOR ? room : x)",
        "load_bfloat16(x)",
    ),
    "the rest of a row is left out": ("memcpy(room, x, size_t(2 * count));", ";"),
    "later blocks of many rows are the first": (
        "job.copy(i) + from * rows * DEPTH",
        "job.copy(i)",
    ),
    "later blocks of a weight are the first": ("packed + from * STEP", "packed"),
    "every strip has the rows of the first": ("(job.copy(i) + from", "(job.copy(0) + from"),
    "the sums of two strips overlap": ("sums + job.offset(i) * PANEL", "sums + i * PANEL"),
    "sums of the task before are kept": ("  memset(sums, 0", "  if (!panel) memset(sums, 0"),
    "blocks behind the last are read": ("least(CHUNK, job.blocks - from)", "CHUNK"),
    "columns beyond the last are written": (
        "const long count = least(VECTOR, job.n - column);",
        "const long count = VECTOR;",
    ),
    "rows beyond the last are read": ("least(FEW, bottom - top - offset(strip))", "FEW"),
    "a bias is left out": ("job.bias ? add(sum, bias) : sum", "sum"),
    "no bias is a bias of zeros": ("job.bias ? add(sum, bias) : sum", "add(sum, bias)"),
    "the copies are too small": ("size_t(4 * tall * blocks * DEPTH)", "size_t(4 * tall * k)"),
}

AVX2_MUTANTS = {
    **VECTOR_MUTANTS,
    "both tiles are the left one": ("packed + tile * (STEP / 2)", "packed"),
}
"""On AVX-512 a strip computes both tiles at once, so the last one changes nothing there."""
