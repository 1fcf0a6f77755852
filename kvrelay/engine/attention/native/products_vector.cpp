// The products of products.h on AVX512-BF16, AVX-512 or AVX2; plain_products.cpp is the definition.
//
// Rows of x are copied once, in the order in which they are read. A thread reads panels that lie one
// after the other, so that what the processor fetches ahead of them is used.
#include "products.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "numbers.h"

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
constexpr long BROAD = 8;              // panels of a task, if each thread has as many tasks
constexpr double SERIAL = 1e5;         // multiplications or numbers not worth waking threads for

// What one instruction multiplies is a term: a number or a pair of them, of which a block has TERMS.
// HALVES: the products of even and of odd terms have accumulators of their own. BLOCKS are summed
// before their sum is added. FEW rows are in registers together. `copy` copies a block, with zeros
// behind the first `count`.
template <int64_t KIND>
struct Single : Numbers<KIND> {  // a term is a number
  using N = Numbers<KIND>;
  static constexpr long TERMS = DEPTH;
  using Term = float;
  using Weight = Lanes;
  static void copy(Term* to, const char* from, long count) {
    store(to, N::read(from, count));
    store(to + VECTOR, N::read(from + N::BYTES * VECTOR, count - VECTOR));
  }
  static Lanes all_of(Term x) { return all(x); }
  static Lanes multiply_add(Lanes sum, Lanes x, Lanes weight) { return fused(x, weight, sum); }
};

#ifdef __AVX512BF16__
struct Bfloat16 : Numbers<BFLOAT16> {
  static constexpr bool HALVES = false;
  static constexpr long BLOCKS = RUN, TERMS = DEPTH / 2, FEW = 12;
  using Term = Word;
  using Weight = Pairs;
  static void copy(Term* to, const char* from, long count) {
    if (count >= DEPTH) {
      memcpy(to, from, BYTES * DEPTH);
    } else {
      memset(to, 0, BYTES * DEPTH);
      memcpy(to, from, size_t(BYTES * count));
    }
  }
  template <bool ODD>
  static Weight weight(const char* two) {
    return load_pairs((const Word*)(two + ODD * LINE));
  }
  static Pair all_of(Term x) { return pair(x); }
  static Lanes multiply_add(Lanes sum, Pair x, Weight weight) { return dot(sum, x, weight); }
};
#else
struct Bfloat16 : Single<BFLOAT16> {
  static constexpr bool HALVES = true;
  static constexpr long BLOCKS = 1, FEW = NARROW ? 3 : 6;
  template <bool ODD>
  static Lanes weight(const char* two) {
    const Pairs pairs = load_pairs((const Word*)two);
    return ODD ? pairs.odd : pairs.even;
  }
};
#endif

struct Float32 : Single<FLOAT32> {
  static constexpr bool HALVES = false;
  static constexpr long BLOCKS = RUN, FEW = NARROW ? 6 : 12;
  template <bool ODD>
  static Lanes weight(const char* two) {
    return load((const float*)(two + ODD * LINE));
  }
};

template <class K>
constexpr long BLOCK = DEPTH * PANEL * K::BYTES;  // bytes of a block of a panel
template <class K>
constexpr long CHUNK = 8 * STEP / BLOCK<K>;  // blocks of a panel that stay in an L1 cache: whole runs

template <int R, int W>
using Sums = Lanes[R][W];

inline void ask(const void* at, long bytes) {
  for (long i = 0; i < bytes; i += LINE) _mm_prefetch((const char*)at + i, _MM_HINT_T0);
}

// Adds the products of the even (ODD: odd) one of two terms of W tiles to `sums`.
template <class K, bool ODD, int R, int W>
inline void add_term(const typename K::Term* x, const char* packed, Sums<R, W>& sums) {
  typename K::Weight weight[W];
  UNROLL for (int j = 0; j < W; j++) weight[j] = K::template weight<ODD>(packed + j * (BLOCK<K> / 2));
  UNROLL for (int i = 0; i < R; i++) {
    const auto number = K::all_of(x[i * K::TERMS + ODD]);
    UNROLL for (int j = 0; j < W; j++) sums[i][j] = K::multiply_add(sums[i][j], number, weight[j]);
  }
}

// Adds a block of R rows and W tiles. Asks for the rows of the next one if that is worth its time, and
// for the weight that is `ahead` bytes after it, if any; with one row AVX-512 is faster without.
template <class K, int R, int W>
inline void add_block(const typename K::Term* x, const char* packed, long ahead, Sums<R, W>& evens,
                      Sums<R, W>& odds) {
  constexpr long TWO = BLOCK<K> / K::TERMS;  // bytes of two terms of a tile
  const typename K::Term* next = x + R * K::TERMS;
  for (long term = 0; term < K::TERMS; term += 2, packed += TWO) {
    if (ahead && (NARROW || R > 1))
      UNROLL for (int j = 0; j < W; j++) ask(packed + ahead + j * (BLOCK<K> / 2), TWO);
    if (!NARROW) ask(next + term * R, 2 * R * long(sizeof *x));
    add_term<K, false>(x + term, packed, evens);
    add_term<K, true>(x + term, packed, odds);
  }
}

// The blocks of a chunk that one strip adds. All strips share in asking for the next chunk; a single
// one asks half a chunk ahead.
struct Blocks {
  const char* packed;
  long count, strip, strips;
};

// Adds blocks of R rows and W tiles to `sums`, [R][PANEL]: those of a run together.
template <class K, int R, int W>
void add_blocks(const typename K::Term* x, const Blocks& blocks, long tile, float* sums) {
  const char* packed = blocks.packed + tile * (BLOCK<K> / 2);
  const long count = blocks.count, ahead = blocks.strips > 1 ? count * BLOCK<K> : CHUNK<K> * BLOCK<K> / 2;
  long asking = blocks.strip;
  for (long block = 0; block < count;) {
    Sums<R, W> first, second;
    UNROLL for (int i = 0; i < R; i++)
      UNROLL for (int j = 0; j < W; j++) first[i][j] = second[i][j] = zero();
    for (const long end = least(block + K::BLOCKS, count); block < end; block++) {
      add_block<K, R, W>(x, packed, block == asking ? ahead : 0, first, K::HALVES ? second : first);
      if (block == asking) asking += blocks.strips;
      x += R * K::TERMS;
      packed += BLOCK<K>;
    }
    UNROLL for (int i = 0; i < R; i++)
      UNROLL for (int j = 0; j < W; j++) {
        float* sum = sums + i * PANEL + j * SIDE;
        store(sum, add(load(sum), K::HALVES ? add(first[i][j], second[i][j]) : first[i][j]));
      }
  }
}

// Adds blocks of `rows` rows, R at most, to all columns of a panel.
template <class K, int R>
void add_rows(const typename K::Term* x, const Blocks& blocks, float* sums, long rows) {
  if constexpr (R > 1)
    if (rows < R) return add_rows<K, R - 1>(x, blocks, sums, rows);
  constexpr int W = R == 1 ? TILES : WIDTH;
  for (int tile = 0; tile < TILES; tile += W) add_blocks<K, R, W>(x, blocks, tile, sums + tile * SIDE);
}

// All tasks share the rows from `top` to `bottom`, cut into strips of up to FEW whose heights differ by
// one at most.
template <class K>
struct Job {
  const char *x, *packed, *bias;
  char* out;
  typename K::Term* copies;  // [chunk][strip][block][row][TERMS], with zeros beyond k
  long n, k, blocks;
  long panels, broad;  // all, those of a task
  long top, bottom, strips;
  long height, higher;  // of a strip; the first ones have a row more
  long tasks;
  std::atomic<long> next, failed;

  void cut(long first, long end) {
    top = first;
    bottom = end;
    strips = ceiling(bottom - top, K::FEW);
    height = (bottom - top) / strips;
    higher = (bottom - top) % strips;
  }
  long offset(long strip) const { return strip * height + least(strip, higher); }  // from `top`
  long rows(long strip) const { return height + (strip < higher); }
  long count(long from) const { return least(CHUNK<K>, blocks - from); }  // blocks of a chunk
  typename K::Term* copy(long strip, long from) const {
    return copies + ((bottom - top) * from + offset(strip) * count(from)) * K::TERMS;
  }

  void copy_chunk(long strip, long from) const {
    typename K::Term* to = copy(strip, from);
    const long stride = rows(strip) * K::TERMS, left = k - from * DEPTH;
    for (long i = 0; i < rows(strip); i++, to += K::TERMS) {
      const char* row = x + K::BYTES * ((top + offset(strip) + i) * k + from * DEPTH);
      for (long block = 0; block < count(from); block++)
        K::copy(to + block * stride, row + K::BYTES * DEPTH * block, left - block * DEPTH);
    }
  }

  // Rounds the sums of a strip and the panel that begins at column `from`.
  void finish(const float* sums, long strip, long from) const {
    for (long column = from; column < least(from + PANEL, n); column += VECTOR, sums += VECTOR) {
      const Lanes added = bias ? K::read(bias + K::BYTES * column, n - column) : zero();
      char* to = out + K::BYTES * ((top + offset(strip)) * n + column);
      for (long i = 0; i < rows(strip); i++, to += K::BYTES * n) {
        const Lanes sum = load(sums + i * PANEL);
        K::write(to, bias ? add(sum, added) : sum, n - column);
      }
    }
  }

  void multiply(long panel, float* sums) const {
    const char* weight = packed + panel * blocks * BLOCK<K>;
    for (long from = 0; from < blocks; from += CHUNK<K>)
      for (long i = 0; i < strips; i++) {
        const char* here = weight + from * BLOCK<K>;
        float* own = sums + offset(i) * PANEL;
        if (from == 0) memset(own, 0, size_t(4 * PANEL * rows(i)));
        add_rows<K, K::FEW>(copy(i, from), {here, count(from), i, strips}, own, rows(i));
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
    // Not on the stack, which OMP_STACKSIZE may make small.
    float* sums = (float*)aligned_alloc(LINE, size_t(4 * PANEL * (job.bottom - job.top)));
    if (!sums) job.failed.store(1);
    const Rounding rounding;
    for (long task; sums && (task = job.next.fetch_add(1)) < job.tasks;) {
      const long first = task * job.broad, end = least(first + job.broad, job.panels);
      for (long panel = first; panel < end; panel++) job.multiply(panel, sums);
    }
    free(sums);
  }
};

template <class K>
int product(const char* x, const char* packed, const char* bias, char* out, long rows, long n, long k,
            int64_t threads, Parallel parallel) {
  const Parallel team = threads < 2 || double(rows) * double(n * k) < SERIAL ? nullptr : parallel;
  const long tall = least(rows, TALL), blocks = ceiling(k, DEPTH), panels = ceiling(n, PANEL);
  const long broad = most(1, least(BROAD, panels / (BROAD * (team ? threads : 1))));
  using Term = typename K::Term;
  Term* copies = (Term*)aligned_alloc(LINE, size_t(tall * blocks * K::TERMS) * sizeof(Term));
  if (!copies) return 1;
  Job<K> job{x, packed, bias, out, copies, n, k, blocks, panels, broad};
  for (long top = 0; top < rows; top += tall) {
    job.cut(top, least(top + tall, rows));
    take(job, job.copy_strips, job.strips, double(tall * k) < SERIAL ? nullptr : team, threads);
    take(job, job.multiply_panels, ceiling(panels, broad), team, threads);
  }
  free(copies);
  return int(job.failed.load());
}

}  // namespace

int kvrelay_product(const char* x, const char* packed, const char* bias, char* out, int64_t rows,
                    int64_t n, int64_t k, int64_t kind, int64_t threads, Parallel parallel) {
  if (rows < 1) return 0;
#ifdef __AVX512BF16__
  const auto of_kind = product<Bfloat16>;
#else
  const auto of_kind = kind == FLOAT32 ? product<Float32> : product<Bfloat16>;
#endif
  return of_kind(x, packed, bias, out, rows, n, k, threads, parallel);
}
