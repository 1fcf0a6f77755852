// The products of products.h on AMX tiles; plain_products.cpp is their definition.
//
// An accumulator may leave its tile between two blocks of 32 numbers: a float32 that is stored and
// loaded again has the same bits.
#include "products.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "lanes.h"
#include "tiles.h"

namespace {

constexpr long FEW = 2 * SIDE;           // rows of one block of accumulators
constexpr long NUMBERS = FEW * PANEL;    // of the four accumulators
constexpr long TALL = 512;               // rows of a task: the weight is read once for so many
constexpr long BROAD = 4;                // panels of a task: its sums stay in an L2 cache
constexpr long CHUNK = 8;                // blocks of a panel that stay in an L1 cache
constexpr long STRIP = FEW * LINE;       // bytes of a block of 32 rows of x
constexpr double PASSING = 1 << 20;      // bytes of a result that would not stay in an L2 cache
constexpr double SERIAL = 1e5;           // multiplications that are not worth waking threads for

struct Job {
  const char *x, *packed, *bias;
  char *out, *copies;  // `copy_rows` of the rows from `top` on
  long n, k;
  long blocks, chunk;          // of a row; those that a task takes at a time
  bool passing;                // the result is written past the caches
  long top, bottom, broad;     // rows of all tasks, panels of one
  long tasks;
  std::atomic<long> next, failed;

  long strips() const { return ceiling(bottom - top, FEW); }
  char* copy(long strip) const { return copies + strip * blocks * STRIP; }
};

// For `rows` rows of x, 1 to 32. Tiles 0 to 3 are accumulators (upper left, upper right, lower left,
// lower right), 4 and 5 have upper and lower rows of x, 6 and 7 left and right columns of the weight.
void configure(Tiles& tiles, long rows) {
  const uint8_t upper = uint8_t(least(rows, SIDE)), lower = uint8_t(most(rows - SIDE, 1));
  tiles.configure({upper, upper, lower, lower, upper, lower, SIDE, SIDE});
}

template <bool BOTH>
void add_block(const char* x, const char* packed) {
  _tile_loadd(6, packed, LINE);
  _tile_loadd(4, x, LINE);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, packed + STEP / 2, LINE);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (BOTH) {
    _tile_loadd(5, x + SIDE * LINE, LINE);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// Adds `count` blocks to `sums`, [rows][32]; x, as `copy_rows` made it, and `packed` begin with the
// first one. With `first` the sums begin with zero. BOTH: there are more than 16 rows.
template <bool BOTH>
void add_blocks(const char* x, const char* packed, long count, bool first, float* sums) {
  constexpr long BYTES = 4 * PANEL;
  asm volatile("" ::: "memory");  // what was written before is read by the instructions below
  float *right = sums + SIDE, *lower = sums + SIDE * PANEL, *last = lower + SIDE;
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, BYTES);
    _tile_loadd(1, right, BYTES);
    if constexpr (BOTH) {
      _tile_loadd(2, lower, BYTES);
      _tile_loadd(3, last, BYTES);
    }
  }
  for (long i = 0; i < count; i++) add_block<BOTH>(x + i * STRIP, packed + i * STEP);
  _tile_stored(0, sums, BYTES);
  _tile_stored(1, right, BYTES);
  if constexpr (BOTH) {
    _tile_stored(2, lower, BYTES);
    _tile_stored(3, last, BYTES);
  }
}

__m512 bias_of(const Job& job, __mmask16 here, long column) {
  if (!job.bias) return _mm512_setzero_ps();
  const __m256i narrow = _mm256_maskz_loadu_epi16(here, job.bias + 2 * column);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

// Rounds the sums of `rows` rows from `row` on, of the panel that begins at column `from`.
void finish(const Job& job, const float* sums, long row, long rows, long from) {
  const __mmask32 here = __mmask32((1ull << least(PANEL, job.n - from)) - 1);
  const __m512 low = bias_of(job, __mmask16(here), from);
  const __m512 high = bias_of(job, __mmask16(here >> SIDE), from + SIDE);
  char* out = job.out + 2 * (row * job.n + from);
  for (long i = 0; i < rows; i++, sums += PANEL, out += 2 * job.n) {
    __m512 left = _mm512_loadu_ps(sums), right = _mm512_loadu_ps(sums + SIDE);
    if (job.bias) {
      left = _mm512_add_ps(left, low);
      right = _mm512_add_ps(right, high);
    }
    const __m512i narrow = (__m512i)_mm512_cvtne2ps_pbh(canonical(right), canonical(left));
    if (job.passing && here == ~__mmask32(0) && uintptr_t(out) % LINE == 0)
      _mm512_stream_si512((__m512i*)out, narrow);
    else
      _mm512_mask_storeu_epi16(out, here, narrow);
  }
}

// Up to 32 rows of x as [block][row][32], with zeros beyond k. Rows as far apart as in x would share
// few sets of a cache.
void copy_rows(const Job& job, long row, long rows, char* to) {
  const char* x = job.x + 2 * row * job.k;
  const long whole = job.k / DEPTH;
  for (long block = 0; block < whole; block++, x += LINE, to += STRIP)
    for (long i = 0; i < rows; i++)
      _mm512_store_si512(to + i * LINE, _mm512_loadu_si512(x + 2 * i * job.k));
  if (whole == job.blocks) return;
  const __mmask32 here = (1u << job.k % DEPTH) - 1;
  for (long i = 0; i < rows; i++)
    _mm512_store_si512(to + i * LINE, _mm512_maskz_loadu_epi16(here, x + 2 * i * job.k));
}

// Asks the memory for lines of the weight that are used next; where there are none does no harm.
void fetch(const char* at, const char* end) {
  for (; at < end; at += LINE) _mm_prefetch(at, _MM_HINT_T1);
}

void copy_strips(void* data) {
  Job& job = *(Job*)data;
  for (long i; (i = job.next.fetch_add(1)) < job.tasks;) {
    const long row = job.top + i * FEW;
    copy_rows(job, row, least(FEW, job.bottom - row), job.copy(i));
  }
}

void run(const Job& job, long task, Tiles& tiles, float* sums) {
  const long left = task * job.broad, right = least(left + job.broad, ceiling(job.n, PANEL));
  const long strips = job.strips();
  for (long from = 0; from < job.blocks; from += job.chunk) {
    const long count = least(job.chunk, job.blocks - from);
    const bool last = from + count == job.blocks;
    for (long panel = left; panel < right; panel++) {
      const char* packed = job.packed + (panel * job.blocks + from) * STEP;
      const char* soon = panel + 1 < right ? packed + job.blocks * STEP
                         : last            ? job.packed + right * job.blocks * STEP
                                           : job.packed + (left * job.blocks + from + count) * STEP;
      for (long i = 0; i < strips; i++) {
        const long row = job.top + i * FEW, rows = least(FEW, job.bottom - row);
        float* own = sums + ((panel - left) * strips + i) * NUMBERS;
        if (strips > 1) fetch(soon + STEP * job.chunk * i / strips, soon + STEP * job.chunk * (i + 1) / strips);
        configure(tiles, rows);
        (rows > SIDE ? add_blocks<true> : add_blocks<false>)(job.copy(i) + from * STRIP, packed, count,
                                                             from == 0, own);
        if (last) finish(job, own, row, rows, panel * PANEL);
      }
    }
  }
}

void multiply(void* data) {
  Job& job = *(Job*)data;
  float* sums = (float*)aligned_alloc(LINE, size_t(4 * NUMBERS * job.broad * job.strips()));
  if (!sums) job.failed.store(1);
  const Rounding rounding;
  Tiles tiles;
  for (long task; sums && (task = job.next.fetch_add(1)) < job.tasks;) run(job, task, tiles, sums);
  _mm_sfence();  // before another thread reads what was written past the caches
  free(sums);
}

}  // namespace

int kvrelay_product(const char* x, const char* packed, const char* bias, char* out, int64_t rows,
                    int64_t n, int64_t k, int64_t, int64_t threads, Parallel parallel) {
  if (rows < 1) return 0;
  const Parallel team = threads < 2 || double(rows) * double(n * k) < SERIAL ? nullptr : parallel;
  const long tall = least(rows, TALL), panels = ceiling(n, PANEL), blocks = ceiling(k, DEPTH);
  const long share = ceiling(panels, 4 * (team ? threads : 1));
  const bool passing = 2.0 * double(rows) * double(n) > PASSING;
  const long chunk = tall > FEW ? least(CHUNK, blocks) : blocks;
  char* copies = (char*)aligned_alloc(LINE, size_t(ceiling(tall, FEW) * blocks * STRIP));
  if (!copies) return 1;
  Job job{x, packed, bias, out, copies, n, k, blocks, chunk, passing};
  job.broad = most(1, least(share, BROAD));
  for (; job.top < rows; job.top = job.bottom) {
    job.bottom = least(job.top + tall, rows);
    take(job, copy_strips, job.strips(), team, threads);
    take(job, multiply, ceiling(panels, job.broad), team, threads);
  }
  free(copies);
  return int(job.failed.load());
}
