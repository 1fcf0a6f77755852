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
    "a tile has columns and no rows": ("most(rows - SIDE, 1))", "most(rows - SIDE, 0))"),
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
    "weights of float32 at odd places are those at even ones": (
        "load((const float*)(two + ODD * LINE))",
        "load((const float*)two)",
    ),
    "numbers at odd places are those at even ones": ("x[i * K::TERMS + ODD]", "x[i * K::TERMS]"),
    "sums begin anew with every run": ("store(sum, add(load(sum), K", "store(sum, add(zero(), K"),
    "halves are added one after the other": (
        "add(load(sum), K::HALVES ? add(first[i][j], second[i][j]) : first[i][j])",
        "K::HALVES ? add(add(load(sum), first[i][j]), second[i][j]) : add(load(sum), first[i][j])",
    ),
    "float32 has halves too": ("K::HALVES ? second : first);", "second);"),
    "a run is a block": ("least(block + K::BLOCKS, count)", "block + 1"),
    "one row is added up in another order": (
        "add_term<K, false>(x + term, packed, evens);",
        "const long by = R == 1 ? K::TERMS - 2 - 2 * term : 0;\n"
        "add_term<K, false>(x + term + by, packed + by / 2 * TWO, evens);",
    ),
    "two rows and more are added up in another order": (
        "add_term<K, true>(x + term, packed, odds);",
        "const long by = R > 1 ? K::TERMS - 2 - 2 * term : 0;\n"
        "add_term<K, true>(x + term + by, packed + by / 2 * TWO, odds);",
    ),
    "left and right columns have one weight": (
        "<ODD>(packed + j * (BLOCK<K> / 2))",
        "<ODD>(packed)",
    ),
    "columns are left out": ("tile < TILES;", "tile < TILES - WIDTH;"),
    "every strip has a row too few": ("if (rows < R)", "if (rows <= R)"),
    "later rows are copies of the first": (
        "(top + offset(strip) + i) * k",
        "(offset(strip) + i) * k",
    ),
    "the last task has the rows of the first": (
        "((top + offset(strip)) * n + column)",
        "(offset(strip) * n + column)",
    ),
    "the last rows of many are left out": ("top < rows; top", "top < 1; top"),
    "few products wake threads": ("SERIAL = 1e5", "SERIAL = 0"),
    "many products wake no threads": ("SERIAL = 1e5", "SERIAL = 1e15"),
    "few rows are copied by all threads": ("double(tall * k) < SERIAL ? nullptr : team", "team"),
    "subnormal numbers count": ("    const Rounding rounding;\n", ""),
    "the rest of a row is read from the next row": ("left - block * DEPTH);", "DEPTH);"),
    "the rest of a row is left out": (
        "K::copy(to + block * stride,",
        "if (left >= (block + 1) * DEPTH) K::copy(to + block * stride,",
    ),
    "later blocks of many rows are the first": ("(copy(i, from), {here", "(copy(i, 0), {here"),
    "later blocks of a weight are the first": ("weight + from * BLOCK<K>", "weight"),
    "every strip has the rows of the first": ("(copy(i, from), {here", "(copy(0, from), {here"),
    "the sums of two strips overlap": ("sums + offset(i) * PANEL", "sums + i * PANEL"),
    "sums of the task before are kept": ("if (from == 0) memset", "if (!panel && !from) memset"),
    "sums of a chunk before are lost": ("if (from == 0) memset", "memset"),
    "blocks behind the last are read": ("least(CHUNK<K>, blocks - from)", "CHUNK<K>"),
    "columns beyond the last are written": (": sum, n - column);", ": sum, VECTOR);"),
    "a bias beyond the last is read": ("column, n - column) : zero()", "column, VECTOR) : zero()"),
    "rows beyond the last are read": ("height + (strip < higher)", "height + (higher > 0)"),
    "a bias is left out": ("bias ? add(sum, added) : sum", "sum"),
    "no bias is a bias of zeros": ("bias ? add(sum, added) : sum", "add(sum, added)"),
    "the copies are too small": ("tall * blocks * K::TERMS", "tall * k * K::TERMS / DEPTH"),
    "a task has panels behind the last": (
        "least(first + job.broad, job.panels)",
        "first + job.broad",
    ),
    "a task has a panel too few": ("panel < end; panel++", "panel < end - 1; panel++"),
    "later tasks have the panels of the first": ("first = task * job.broad,", "first = 0,"),
}

PAIR_MUTANTS = {
    "weights at odd places are those at even ones": (
        "load_pairs((const Word*)(two + ODD * LINE))",
        "load_pairs((const Word*)two)",
    ),
    "half of the numbers are copied": (
        "memcpy(to, from, BYTES * DEPTH)",
        "memcpy(to, from, DEPTH)",
    ),
    "the rest of a row has no zeros behind it": ("memset(to, 0, BYTES * DEPTH);", ""),
    "even and odd pairs are added apart": (
        "struct Bfloat16 : Numbers<BFLOAT16> {\n  static constexpr bool HALVES = false;",
        "struct Bfloat16 : Numbers<BFLOAT16> {\n  static constexpr bool HALVES = true;",
    ),
    "a run is a block": (
        "BLOCKS = RUN, TERMS = DEPTH / 2",
        "BLOCKS = 1, TERMS = DEPTH / 2",
    ),
    "subnormal sums count": ("    const Rounding rounding;\n", ""),
}
"""What only the object for AVX512-BF16 compiles; the last holds for all."""

AVX2_MUTANTS = {
    **VECTOR_MUTANTS,
    "both tiles are the left one": ("packed + tile * (BLOCK<K> / 2)", "packed"),
}
"""On AVX-512 a strip computes both tiles at once, so the last one changes nothing there."""
