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
constexpr long TALL = 384;               // rows of a task
constexpr long BROAD = 8;                // panels of a task: its sums stay in an L2 cache
constexpr long CHUNK = 8;                // blocks of a panel that stay in an L1 cache
constexpr double SERIAL = 1e5;           // multiplications that are not worth waking threads for

struct Job {
  const char *x, *packed, *bias;
  char* out;
  long rows, n, k;
  long blocks;                      // of a row
  long tall, broad, across, tasks;  // rows and panels of a task; tasks beside each other, and all
  std::atomic<long> next, failed;
};

// For `rows` rows of x, 1 to 32. Tiles 0 to 3 are accumulators (upper left, upper right, lower left,
// lower right), 4 and 5 have upper and lower rows of x, 6 and 7 left and right columns of the weight.
void configure(Tiles& tiles, long rows) {
  const uint8_t upper = uint8_t(least(rows, SIDE)), lower = uint8_t(most(rows - SIDE, 1));
  tiles.configure({upper, upper, lower, lower, upper, lower, SIDE, SIDE});
}

// Up to 32 rows of x from some block on. What is beyond k in the last block must not be read, so
// `tail` has a copy of that one with zeros, 32 numbers a row; null if the last block is not meant.
struct Strip {
  const char* x;
  long bytes;  // of a row
  const char* tail;
};

template <bool BOTH>
void add_block(const char* x, long bytes, const char* packed) {
  _tile_loadd(6, packed, LINE);
  _tile_loadd(4, x, bytes);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, packed + STEP / 2, LINE);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (BOTH) {
    _tile_loadd(5, x + SIDE * bytes, bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// Adds `count` blocks to `sums`, [rows][32]; `packed` begins with the first one. With `first` the
// sums begin with zero. BOTH: there are more than 16 rows.
template <bool BOTH>
void add_blocks(Strip strip, const char* packed, long count, bool first, float* sums) {
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
  const long whole = count - (strip.tail != nullptr);
  for (long i = 0; i < whole; i++)
    add_block<BOTH>(strip.x + i * LINE, strip.bytes, packed + i * STEP);
  if (strip.tail) add_block<BOTH>(strip.tail, LINE, packed + whole * STEP);
  _tile_stored(0, sums, BYTES);
  _tile_stored(1, right, BYTES);
  if constexpr (BOTH) {
    _tile_stored(2, lower, BYTES);
    _tile_stored(3, last, BYTES);
  }
}

// Rounds the sums of `rows` rows from `row` on, of the panel that begins at column `from`.
void finish(const Job& job, const float* sums, long row, long rows, long from) {
  for (long column = from; column < least(from + PANEL, job.n); column += SIDE, sums += SIDE) {
    const __mmask16 here = __mmask16((1u << least(SIDE, job.n - column)) - 1);
    __m512 bias = _mm512_setzero_ps();
    if (job.bias) {
      const __m256i narrow = _mm256_maskz_loadu_epi16(here, job.bias + 2 * column);
      bias = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
    }
    for (long i = 0; i < rows; i++) {
      __m512 y = _mm512_loadu_ps(sums + i * PANEL);
      if (job.bias) y = _mm512_add_ps(y, bias);
      const __m256i narrow = (__m256i)_mm512_cvtneps_pbh(canonical(y));
      _mm256_mask_storeu_epi16(job.out + 2 * ((row + i) * job.n + column), here, narrow);
    }
  }
}

// The last block of rows [top, bottom), with zeros beyond k.
void copy_tails(const Job& job, long top, long bottom, char* to) {
  const long rest = job.k % DEPTH;
  for (long row = top; row < bottom; row++, to += LINE) {
    memcpy(to, job.x + 2 * ((row + 1) * job.k - rest), size_t(2 * rest));
    memset(to + 2 * rest, 0, size_t(LINE - 2 * rest));
  }
}

void run(const Job& job, long task, Tiles& tiles, float* sums, char* tails) {
  const long top = task / job.across * job.tall, bottom = least(top + job.tall, job.rows);
  const long left = task % job.across * job.broad;
  const long right = least(left + job.broad, ceiling(job.n, PANEL));
  const long strips = ceiling(bottom - top, FEW), chunk = strips > 1 ? CHUNK : job.blocks;
  const bool odd = job.k % DEPTH != 0;
  if (odd) copy_tails(job, top, bottom, tails);
  for (long from = 0; from < job.blocks; from += chunk) {
    const long count = least(chunk, job.blocks - from);
    const bool last = from + count == job.blocks;
    for (long panel = left; panel < right; panel++) {
      const char* packed = job.packed + (panel * job.blocks + from) * STEP;
      for (long i = 0; i < strips; i++) {
        const long row = top + i * FEW, rows = least(FEW, bottom - row);
        const char* tail = last && odd ? tails + i * FEW * LINE : nullptr;
        const Strip strip{job.x + 2 * (row * job.k + from * DEPTH), 2 * job.k, tail};
        float* own = sums + ((panel - left) * strips + i) * NUMBERS;
        configure(tiles, rows);
        (rows > SIDE ? add_blocks<true> : add_blocks<false>)(strip, packed, count, from == 0, own);
        if (last) finish(job, own, row, rows, panel * PANEL);
      }
    }
  }
}

void take_tasks(void* data) {
  Job& job = *(Job*)data;
  const long strips = ceiling(job.tall, FEW), bytes = 4 * NUMBERS * job.broad * strips;
  char* room = (char*)aligned_alloc(LINE, size_t(bytes + LINE * FEW * strips));
  if (!room) job.failed.store(1);
  const Rounding rounding;
  Tiles tiles;
  for (long task; room && (task = job.next.fetch_add(1)) < job.tasks;)
    run(job, task, tiles, (float*)room, room + bytes);
  free(room);
}

}  // namespace

int kvrelay_product(const char* x, const char* packed, const char* bias, char* out, int64_t rows,
                    int64_t n, int64_t k, int64_t threads, Parallel parallel) {
  if (rows < 1) return 0;
  const bool alone = !parallel || threads < 2 || double(rows) * double(n * k) < SERIAL;
  const long panels = ceiling(n, PANEL), tall = least(rows, TALL), down = ceiling(rows, tall);
  const long share = ceiling(panels * down, 4 * (alone ? 1 : threads));
  const long broad = most(1, least(share, BROAD)), across = ceiling(panels, broad);
  const long tasks = down * across, blocks = ceiling(k, DEPTH);
  Job job{x, packed, bias, out, rows, n, k, blocks, tall, broad, across, tasks, {0}, {0}};
  if (alone) take_tasks(&job);
  else parallel(take_tasks, &job, unsigned(threads), 0);
  return int(job.failed.load());
}
