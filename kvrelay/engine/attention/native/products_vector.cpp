// The products of products.h on AVX-512 or AVX2, with the bits of those on AMX tiles;
// plain_products.cpp is the definition of all.
//
// Rows of x are widened to float32 once. Of a block the products at even and at odd places have
// accumulators of their own, which are in registers.
#include "products.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "lanes.h"

namespace {

// Accumulators of FEW rows by WIDTH tiles are in registers together.
#ifdef __AVX512F__
constexpr long FEW = 6;
constexpr int WIDTH = 2;
#else
constexpr long FEW = 3;
constexpr int WIDTH = 1;
#endif
constexpr int TILES = PANEL / SIDE;  // of a panel
constexpr long LINE = 64;            // bytes of a pair of numbers in a tile
constexpr long TALL = 516;           // rows of a task: the weight is read once for so many
constexpr long CHUNK = 8;            // blocks of a panel that stay in an L1 cache
constexpr long AHEAD = 4 * STEP;     // bytes: the weight is asked for so early
constexpr double SERIAL = 1e5;       // multiplications that are not worth waking threads for

// All tasks share the rows from `top` to `bottom`, cut into strips of up to FEW.
struct Job {
  const char *x, *packed, *bias;
  char* out;
  float* copies;  // `copy_rows` of every strip
  long n, k, blocks;
  long top, bottom;
  long tasks;
  std::atomic<long> next;

  long strips() const { return ceiling(bottom - top, FEW); }
  long offset(long strip) const { return strip * FEW; }  // from `top`
  long rows(long strip) const { return least(FEW, bottom - top - offset(strip)); }
  float* copy(long strip) const { return copies + offset(strip) * blocks * DEPTH; }
};

template <int R, int W>
using Sums = Lanes[R][W];

// Adds the products at even (ODD: odd) places of W tiles to `sums`.
template <int R, int W, bool ODD>
inline void add_pair(const float* x, const char* packed, Sums<R, W>& sums) {
  UNROLL for (int j = 0; j < W; j++) {
    const Pairs pairs = load_pairs((const Word*)(packed + j * (STEP / 2)));
    const Lanes weight = ODD ? pairs.odd : pairs.even;
    UNROLL for (int i = 0; i < R; i++) sums[i][j] = fused(all(x[i * DEPTH + ODD]), weight, sums[i][j]);
  }
}

// Adds `count` blocks of R rows and W tiles to `sums`, [R][PANEL].
template <int R, int W>
void add_blocks(const float* x, const char* packed, long count, float* sums) {
  for (long block = 0; block < count; block++, x += R * DEPTH, packed += STEP) {
    Sums<R, W> evens, odds;
    UNROLL for (int i = 0; i < R; i++)
      UNROLL for (int j = 0; j < W; j++) evens[i][j] = odds[i][j] = zero();
    for (long pair = 0; pair < DEPTH / 2; pair++) {
      const char* here = packed + pair * LINE;
      for (int j = 0; j < W; j++) _mm_prefetch(here + AHEAD + j * (STEP / 2), _MM_HINT_T1);
      add_pair<R, W, false>(x + 2 * pair, here, evens);
      add_pair<R, W, true>(x + 2 * pair, here, odds);
    }
    UNROLL for (int i = 0; i < R; i++)
      UNROLL for (int j = 0; j < W; j++) {
        float* sum = sums + i * PANEL + j * SIDE;
        store(sum, add(load(sum), add(evens[i][j], odds[i][j])));
      }
  }
}

// Adds `count` blocks of `rows` rows, R at most, to all columns of a panel.
template <int R>
void add_rows(const float* x, const char* packed, long count, float* sums, long rows) {
  if constexpr (R > 1)
    if (rows < R) return add_rows<R - 1>(x, packed, count, sums, rows);
  constexpr int W = R == 1 ? TILES : WIDTH;
  for (int tile = 0; tile < TILES; tile += W)
    add_blocks<R, W>(x, packed + tile * (STEP / 2), count, sums + tile * SIDE);
}

// Rows of x as [block][row][32] in float32, with zeros beyond k.
void copy_rows(const Job& job, long row, long rows, float* to) {
  for (long i = 0; i < rows; i++, to += DEPTH) {
    const char* x = job.x + 2 * (row + i) * job.k;
    for (long at = 0; at < job.blocks * DEPTH; at += VECTOR, x += 2 * VECTOR) {
      char room[2 * VECTOR] = {};
      const long count = most(0, least(VECTOR, job.k - at));
      if (count < VECTOR) memcpy(room, x, size_t(2 * count));
      store(to + at / DEPTH * rows * DEPTH + at % DEPTH, load_bfloat16(count < VECTOR ? room : x));
    }
  }
}

void copy_strips(void* data) {
  Job& job = *(Job*)data;
  for (long i; (i = job.next.fetch_add(1)) < job.tasks;)
    copy_rows(job, job.top + job.offset(i), job.rows(i), job.copy(i));
}

// Rounds the sums of `rows` rows from `row` on, of the panel that begins at column `from`.
void finish(const Job& job, const float* sums, long row, long rows, long from) {
  for (long column = from; column < least(from + PANEL, job.n); column += VECTOR, sums += VECTOR) {
    const long count = least(VECTOR, job.n - column);
    char room[2 * VECTOR] = {};
    if (job.bias) memcpy(room, job.bias + 2 * column, size_t(2 * count));
    const Lanes bias = load_bfloat16(room);
    for (long i = 0; i < rows; i++) {
      const Lanes sum = load(sums + i * PANEL);
      store_bfloat16(room, job.bias ? add(sum, bias) : sum);
      memcpy(job.out + 2 * ((row + i) * job.n + column), room, size_t(2 * count));
    }
  }
}

void run(const Job& job, long panel, float* sums) {
  const char* packed = job.packed + panel * job.blocks * STEP;
  memset(sums, 0, size_t(4 * PANEL * (job.bottom - job.top)));
  for (long from = 0; from < job.blocks; from += CHUNK)
    for (long i = 0; i < job.strips(); i++) {
      const long rows = job.rows(i), count = least(CHUNK, job.blocks - from);
      add_rows<FEW>(job.copy(i) + from * rows * DEPTH, packed + from * STEP, count,
                    sums + job.offset(i) * PANEL, rows);
    }
  finish(job, sums, job.top, job.bottom - job.top, panel * PANEL);
}

void multiply(void* data) {
  Job& job = *(Job*)data;
  alignas(LINE) float sums[TALL * PANEL];
  const Rounding rounding;
  for (long panel; (panel = job.next.fetch_add(1)) < job.tasks;) run(job, panel, sums);
}

}  // namespace

int kvrelay_product(const char* x, const char* packed, const char* bias, char* out, int64_t rows,
                    int64_t n, int64_t k, int64_t threads, Parallel parallel) {
  if (rows < 1) return 0;
  const Parallel team = threads < 2 || double(rows) * double(n * k) < SERIAL ? nullptr : parallel;
  const long tall = least(rows, TALL), blocks = ceiling(k, DEPTH);
  float* copies = (float*)aligned_alloc(LINE, size_t(4 * tall * blocks * DEPTH));
  if (!copies) return 1;
  Job job{x, packed, bias, out, copies, n, k, blocks};
  for (; job.top < rows; job.top = job.bottom) {
    job.bottom = least(job.top + tall, rows);
    take(job, copy_strips, job.strips(), team, threads);
    take(job, multiply, ceiling(n, PANEL), team, threads);
  }
  free(copies);
  return 0;
}
