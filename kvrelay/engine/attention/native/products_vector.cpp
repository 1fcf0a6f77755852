// The products of products.h on AVX-512 or AVX2, in bfloat16 with the bits of those on AMX tiles;
// plain_products.cpp is the definition of all.
//
// Rows of x are copied once, as float32, in the order in which they are read.
#include "products.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "lanes.h"

namespace {

#ifdef __AVX512F__
constexpr bool NARROW = false;
#else
constexpr bool NARROW = true;  // half as many registers, of half the size
#endif
constexpr int WIDTH = NARROW ? 1 : 2;  // tiles of a few rows whose accumulators are in registers
constexpr int TILES = PANEL / SIDE;    // of a panel
constexpr long LINE = 64;              // bytes
constexpr long TALL = 516;             // rows of a task: the weight is read once for so many
constexpr long MANY = 6;               // strips: computing more hides the way of the next weight
constexpr long AHEAD = 4 * STEP;       // bytes: the first of few strips asks for the weight so early
constexpr double SERIAL = 1e5;         // multiplications or numbers not worth waking threads for

// HALVES: the products at even and at odd places of a block have accumulators of their own. BLOCKS
// are summed before their sum is added.
struct Bfloat16 {
  static constexpr bool HALVES = true;
  static constexpr long BLOCKS = 1, BYTES = 2, FEW = NARROW ? 3 : 6;  // rows that are in registers together
  static Lanes read(const char* at) { return load_bfloat16(at); }
  static void write(char* at, Lanes x) { store_bfloat16(at, x); }
  template <bool ODD>
  static Lanes weight(const char* pair) {
    const Pairs pairs = load_pairs((const Word*)pair);
    return ODD ? pairs.odd : pairs.even;
  }
};

struct Float32 {
  static constexpr bool HALVES = false;
  static constexpr long BLOCKS = RUN, BYTES = 4, FEW = NARROW ? 6 : 12;
  static Lanes read(const char* at) { return load((const float*)at); }
  static void write(char* at, Lanes x) { store((float*)at, canonical(x)); }
  template <bool ODD>
  static Lanes weight(const char* pair) {
    return load((const float*)(pair + ODD * LINE));
  }
};

template <class K>
constexpr long BLOCK = DEPTH * PANEL * K::BYTES;  // bytes of a block of a panel
template <class K>
constexpr long CHUNK = 8 * STEP / BLOCK<K>;  // blocks of a panel that stay in an L1 cache: whole runs

template <int R, int W>
using Sums = Lanes[R][W];

template <int WHERE>
inline void ask(const void* at, long bytes) {
  for (long i = 0; i < bytes; i += LINE) _mm_prefetch((const char*)at + i, (_mm_hint)WHERE);
}

// Adds the products at even (ODD: odd) places of a pair of numbers of W tiles to `sums`.
template <class K, bool ODD, int R, int W>
inline void add_numbers(const float* x, const char* packed, Sums<R, W>& sums) {
  Lanes weight[W];
  UNROLL for (int j = 0; j < W; j++) weight[j] = K::template weight<ODD>(packed + j * (BLOCK<K> / 2));
  UNROLL for (int i = 0; i < R; i++) {
    const Lanes number = all(x[i * DEPTH + ODD]);
    UNROLL for (int j = 0; j < W; j++) sums[i][j] = fused(number, weight[j], sums[i][j]);
  }
}

// Adds a block of R rows and W tiles; asks for the rows of the next one if that is worth its time.
template <class K, int R, int W>
inline void add_block(const float* x, const char* packed, long ahead, Sums<R, W>& evens,
                      Sums<R, W>& odds) {
  const float* next = x + R * DEPTH;
  for (long pair = 0; pair < DEPTH / 2; pair++, packed += 2 * SIDE * K::BYTES) {
    UNROLL for (int j = 0; j < W; j++)
      ask<_MM_HINT_T0>(packed + ahead + j * (BLOCK<K> / 2), 2 * SIDE * K::BYTES);
    if (!NARROW) ask<_MM_HINT_T0>(next + pair * 2 * R, 2 * R * long(sizeof *x));
    add_numbers<K, false>(x + 2 * pair, packed, evens);
    add_numbers<K, true>(x + 2 * pair, packed, odds);
  }
}

// Adds `count` blocks of R rows and W tiles to `sums`, [R][PANEL]: the blocks of a run together.
template <class K, int R, int W>
void add_blocks(const float* x, const char* packed, long count, long ahead, float* sums) {
  for (long block = 0; block < count;) {
    Sums<R, W> first, second;
    UNROLL for (int i = 0; i < R; i++)
      UNROLL for (int j = 0; j < W; j++) first[i][j] = second[i][j] = zero();
    for (const long end = least(block + K::BLOCKS, count); block < end; block++) {
      add_block<K, R, W>(x, packed, ahead, first, K::HALVES ? second : first);
      x += R * DEPTH;
      packed += BLOCK<K>;
    }
    UNROLL for (int i = 0; i < R; i++)
      UNROLL for (int j = 0; j < W; j++) {
        float* sum = sums + i * PANEL + j * SIDE;
        store(sum, add(load(sum), K::HALVES ? add(first[i][j], second[i][j]) : first[i][j]));
      }
  }
}

// Adds `count` blocks of `rows` rows, R at most, to all columns of a panel.
template <class K, int R>
void add_rows(const float* x, const char* packed, long count, long ahead, float* sums, long rows) {
  if constexpr (R > 1)
    if (rows < R) return add_rows<K, R - 1>(x, packed, count, ahead, sums, rows);
  constexpr int W = R == 1 ? TILES : WIDTH;
  for (int tile = 0; tile < TILES; tile += W)
    add_blocks<K, R, W>(x, packed + tile * (BLOCK<K> / 2), count, ahead, sums + tile * SIDE);
}

// Up to VECTOR numbers, with zeros behind the last.
template <class K>
inline Lanes read(const char* at, long count) {
  if (count >= VECTOR) return K::read(at);
  char room[K::BYTES * VECTOR] = {};
  if (count > 0) memcpy(room, at, size_t(K::BYTES * count));
  return K::read(room);
}

template <class K>
inline void write(char* at, Lanes x, long count) {
  if (count >= VECTOR) return K::write(at, x);
  char room[K::BYTES * VECTOR];
  K::write(room, x);
  memcpy(at, room, size_t(K::BYTES * count));
}

// All tasks share the rows from `top` to `bottom`, cut into strips of up to FEW.
template <class K>
struct Job {
  const char *x, *packed, *bias;
  char* out;
  float* copies;  // [chunk][strip][block][row][32], with zeros beyond k
  long n, k, blocks;
  long top, bottom;
  long tasks;
  std::atomic<long> next;

  long strips() const { return ceiling(bottom - top, K::FEW); }
  long offset(long strip) const { return strip * K::FEW; }  // from `top`
  long rows(long strip) const { return least(K::FEW, bottom - top - offset(strip)); }
  long count(long from) const { return least(CHUNK<K>, blocks - from); }  // blocks of a chunk
  float* copy(long strip, long from) const {
    return copies + ((bottom - top) * from + offset(strip) * count(from)) * DEPTH;
  }

  void copy_chunk(long strip, long from) const {
    float* to = copy(strip, from);
    const long stride = rows(strip) * DEPTH, left = k - from * DEPTH;
    for (long i = 0; i < rows(strip); i++, to += DEPTH) {
      const char* row = x + K::BYTES * ((top + offset(strip) + i) * k + from * DEPTH);
      for (long at = 0; at < count(from) * DEPTH; at += VECTOR)
        store(to + at / DEPTH * stride + at % DEPTH, read<K>(row + K::BYTES * at, left - at));
    }
  }

  // Rounds the sums of a strip and the panel that begins at column `from`.
  void finish(const float* sums, long strip, long from) const {
    for (long column = from; column < least(from + PANEL, n); column += VECTOR, sums += VECTOR) {
      const Lanes added = bias ? read<K>(bias + K::BYTES * column, n - column) : zero();
      char* to = out + K::BYTES * ((top + offset(strip)) * n + column);
      for (long i = 0; i < rows(strip); i++, to += K::BYTES * n) {
        const Lanes sum = load(sums + i * PANEL);
        write<K>(to, bias ? add(sum, added) : sum, n - column);
      }
    }
  }

  // Each of many strips asks for its share of the next chunk.
  void multiply(long panel, float* sums) const {
    const char* weight = packed + panel * blocks * BLOCK<K>;
    const bool many = strips() > MANY;
    const long share = ceiling(CHUNK<K> * BLOCK<K>, LINE * strips()) * LINE;
    for (long from = 0; from < blocks; from += CHUNK<K>)
      for (long i = 0; i < strips(); i++) {
        const char* here = weight + from * BLOCK<K>;
        float* own = sums + offset(i) * PANEL;
        if (from == 0) memset(own, 0, size_t(4 * PANEL * rows(i)));
        if (many) ask<_MM_HINT_T1>(here + CHUNK<K> * BLOCK<K> + i * share, share);
        const long ahead = many || i > 0 ? 0 : AHEAD;
        add_rows<K, K::FEW>(copy(i, from), here, count(from), ahead, own, rows(i));
        if (from + CHUNK<K> >= blocks) finish(own, i, panel * PANEL);
      }
  }

  static void copy_strips(void* data) {
    Job& job = *(Job*)data;
    for (long i; (i = job.next.fetch_add(1)) < job.tasks;)
      for (long from = 0; from < job.blocks; from += CHUNK<K>) job.copy_chunk(i, from);
  }

  static void multiply_panels(void* data) {
    Job& job = *(Job*)data;
    alignas(LINE) float sums[TALL * PANEL];
    const Rounding rounding;
    for (long panel; (panel = job.next.fetch_add(1)) < job.tasks;) job.multiply(panel, sums);
  }
};

template <class K>
int product(const char* x, const char* packed, const char* bias, char* out, long rows, long n, long k,
            int64_t threads, Parallel parallel) {
  const Parallel team = threads < 2 || double(rows) * double(n * k) < SERIAL ? nullptr : parallel;
  const long tall = least(rows, TALL), blocks = ceiling(k, DEPTH);
  float* copies = (float*)aligned_alloc(LINE, size_t(4 * tall * blocks * DEPTH));
  if (!copies) return 1;
  Job<K> job{x, packed, bias, out, copies, n, k, blocks};
  for (; job.top < rows; job.top = job.bottom) {
    job.bottom = least(job.top + tall, rows);
    take(job, job.copy_strips, job.strips(), double(tall * k) < SERIAL ? nullptr : team, threads);
    take(job, job.multiply_panels, ceiling(n, PANEL), team, threads);
  }
  free(copies);
  return 0;
}

}  // namespace

int kvrelay_product(const char* x, const char* packed, const char* bias, char* out, int64_t rows,
                    int64_t n, int64_t k, int64_t kind, int64_t threads, Parallel parallel) {
  if (rows < 1) return 0;
  const auto of_kind = kind == FLOAT32 ? product<Float32> : product<Bfloat16>;
  return of_kind(x, packed, bias, out, rows, n, k, threads, parallel);
}
