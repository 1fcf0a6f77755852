// The products of products.h on AVX2, with the bits of those on AMX tiles; plain_products.cpp is
// the definition of both.
//
// Rows of x are widened to float32 once. Of a block the products at even and at odd places have
// accumulators of their own, which are in registers.
#include "products.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "lanes.h"

namespace {

constexpr long EIGHT = 8;          // columns of a register
constexpr long LINE = 64;          // bytes of a pair of numbers in a tile
constexpr long FEW = 3;            // rows whose accumulators are in registers together
constexpr long TALL = 513;         // rows of a task: the weight is read once for so many
constexpr long CHUNK = 8;          // blocks of a panel that stay in an L1 cache
constexpr long STRIP = FEW * DEPTH;  // numbers of a block of 3 rows of x
constexpr long AHEAD = 4 * STEP;   // bytes: the weight is asked for so early
constexpr double SERIAL = 1e5;     // multiplications that are not worth waking threads for

struct Job {
  const char *x, *packed, *bias;
  char* out;
  float* copies;  // `copy_rows` of the rows from `top` on
  long n, k, blocks;
  long top, bottom;  // rows of all tasks
  long tasks;
  std::atomic<long> next;

  long strips() const { return ceiling(bottom - top, FEW); }
  long row(long strip) const { return top + strip * FEW; }
  long rows(long strip) const { return least(FEW, bottom - row(strip)); }
  float* copy(long strip) const { return copies + strip * blocks * STRIP; }
};

template <int R, int W>
using Sums = __m256[R][W];

// Adds the products at even (ODD: odd) places of W times 8 columns to `sums`.
template <int R, int W, bool ODD>
inline void add_pair(const float* x, const char* packed, Sums<R, W>& sums) {
  __m256 weight[W];
  UNROLL for (int j = 0; j < W; j++) {
    const __m256i words = _mm256_load_si256((const __m256i*)(packed + j / 2 * (STEP / 2) + j % 2 * 32));
    weight[j] = ODD ? odd(words) : even(words);
  }
  UNROLL for (int i = 0; i < R; i++) {
    const __m256 number = _mm256_broadcast_ss(x + i * DEPTH + ODD);
    UNROLL for (int j = 0; j < W; j++) sums[i][j] = _mm256_fmadd_ps(number, weight[j], sums[i][j]);
  }
}

// Adds `count` blocks of R rows and W times 8 columns to `sums`, [R][PANEL].
template <int R, int W>
void add_blocks(const float* x, const char* packed, long count, float* sums) {
  for (long block = 0; block < count; block++, x += STRIP, packed += STEP) {
    Sums<R, W> evens, odds;
    UNROLL for (int i = 0; i < R; i++)
      UNROLL for (int j = 0; j < W; j++) evens[i][j] = odds[i][j] = _mm256_setzero_ps();
    for (long pair = 0; pair < DEPTH / 2; pair++) {
      for (int side = 0; side < W / 2; side++)
        _mm_prefetch(packed + AHEAD + side * (STEP / 2) + pair * LINE, _MM_HINT_T1);
      add_pair<R, W, false>(x + 2 * pair, packed + pair * LINE, evens);
      add_pair<R, W, true>(x + 2 * pair, packed + pair * LINE, odds);
    }
    UNROLL for (int i = 0; i < R; i++)
      UNROLL for (int j = 0; j < W; j++) {
        float* sum = sums + i * PANEL + j * EIGHT;
        _mm256_storeu_ps(sum, _mm256_add_ps(_mm256_loadu_ps(sum), _mm256_add_ps(evens[i][j], odds[i][j])));
      }
  }
}

void add_rows(const float* x, const char* packed, long count, float* sums, long rows) {
  if (rows == 1) return add_blocks<1, 4>(x, packed, count, sums);
  for (long side = 0; side < PANEL / SIDE; side++, packed += STEP / 2, sums += SIDE)
    (rows == 2 ? add_blocks<2, 2> : add_blocks<3, 2>)(x, packed, count, sums);
}

// Up to 3 rows of x as [block][row][32] in float32, with zeros beyond k.
void copy_rows(const Job& job, long row, long rows, float* to) {
  for (long i = 0; i < rows; i++, to += DEPTH) {
    const char* x = job.x + 2 * (row + i) * job.k;
    for (long at = 0; at < job.blocks * DEPTH; at += VECTOR, x += 2 * VECTOR) {
      char room[2 * VECTOR] = {};
      const long count = most(0, least(VECTOR, job.k - at));
      if (count < VECTOR) memcpy(room, x, size_t(2 * count));
      store(to + at / DEPTH * STRIP + at % DEPTH, load_bfloat16(count < VECTOR ? room : x));
    }
  }
}

void copy_strips(void* data) {
  Job& job = *(Job*)data;
  for (long i; (i = job.next.fetch_add(1)) < job.tasks;)
    copy_rows(job, job.row(i), job.rows(i), job.copy(i));
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
    for (long i = 0; i < job.strips(); i++)
      add_rows(job.copy(i) + from * STRIP, packed + from * STEP, least(CHUNK, job.blocks - from),
               sums + i * FEW * PANEL, job.rows(i));
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
  const bool alone = !parallel || threads < 2 || double(rows) * double(n * k) < SERIAL;
  const long tall = least(rows, TALL), blocks = ceiling(k, DEPTH);
  float* copies = (float*)aligned_alloc(LINE, size_t(4 * ceiling(tall, FEW) * blocks * STRIP));
  if (!copies) return 1;
  Job job{x, packed, bias, out, copies, n, k, blocks};
  const auto each = [&](void (*body)(void*), long tasks) {
    job.tasks = tasks;
    job.next.store(0);
    if (alone || tasks < 2) body(&job);
    else parallel(body, &job, unsigned(threads), 0);
  };
  for (; job.top < rows; job.top = job.bottom) {
    job.bottom = least(job.top + tall, rows);
    each(copy_strips, job.strips());
    each(multiply, ceiling(n, PANEL));
  }
  free(copies);
  return 0;
}
