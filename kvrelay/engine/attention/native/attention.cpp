// Paged causal attention on the CPU in which a row is rounded the same way wherever it is computed.
//
// A row is one query head at one position; plain.cpp is its definition, and every object gives the
// same bits. Keys are taken in tiles of TILE from position 0. A score is one chain of multiply-adds
// over the head's dimensions; a tile's maximum moves the running one; weights are exp2 of the
// scaled differences; an output is one chain over the visible keys. Every SEGMENT keys begin anew, and the
// segments are merged in order. Rows share packed tiles and registers, never an accumulator, so
// neither other rows, nor where a prompt is cut, nor the number of threads can change a bit.
// Build with -ffp-contract=off.
#include "lanes.h"

#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstdlib>
#include <cstring>
#ifdef __AMX_BF16__
#include "tiles.h"
#endif

namespace {

constexpr long SHARE = 768;        // rows that use one packed tile
constexpr long FETCHED = 64;       // bytes that come from memory together
constexpr long STORED = 64;        // positions that a thread stores at a time
constexpr double SERIAL = 50e3;    // nanoseconds of work that are not worth waking threads for
constexpr long SPLIT = 16 << 20;   // floats of the parts of split items in a call, at most
constexpr double BYTES_A_NS = 12;  // one thread packs so much, about
constexpr double PRODUCTS_A_NS = 40;

// What a thread needs for a call. It is not kept: a thread_local destructor would link the unwinder,
// which needs glibc 2.35.
struct Memory {
  char* bytes = nullptr;
  long size = 0;
  ~Memory() { free(bytes); }
  bool reserve(long wanted) {
    if (wanted <= size) return true;
    free(bytes);
    size = 0;
    bytes = (char*)aligned_alloc(64, size_t(ceiling(wanted, 4096) * 4096));
    if (bytes) size = wanted;
    return bytes;
  }
};

// ---- c[M][16 N] (+)= a[M][k] * b[k][16 N]

struct Floats {
  using Right = Lanes;
  using Left = Lanes;
  static Right right(const Word* at) { return load((const float*)at); }
  static Left left(Word a) {
    float x;
    memcpy(&x, &a, 4);
    return all(x);
  }
  static Lanes dot(Lanes c, const Left& a, const Right& b) { return fused(a, b, c); }
};

struct BrainFloats {
  using Right = Pairs;
  using Left = Pair;
  static Right right(const Word* at) { return load_pairs(at); }
  static Left left(Word a) { return pair(a); }
  static Lanes dot(Lanes c, const Left& a, const Right& b) { return ::dot(c, a, b); }
};

template <class Kind, int M, int N>
void product(const Word* a, long lda, const Word* b, long ldb, long k, float* c, long ldc,
             bool onto) {
  Lanes acc[M][N];
  UNROLL for (int i = 0; i < M; i++)
    UNROLL for (int j = 0; j < N; j++) acc[i][j] = onto ? load(c + i * ldc + j * VECTOR) : zero();
  for (long x = 0; x < k; x++) {
    typename Kind::Right row[N];
    UNROLL for (int j = 0; j < N; j++) row[j] = Kind::right(b + x * ldb + j * VECTOR);
    UNROLL for (int i = 0; i < M; i++) {
      const typename Kind::Left left = Kind::left(a[i * lda + x]);
      UNROLL for (int j = 0; j < N; j++) acc[i][j] = Kind::dot(acc[i][j], left, row[j]);
    }
  }
  UNROLL for (int i = 0; i < M; i++)
    UNROLL for (int j = 0; j < N; j++) store(c + i * ldc + j * VECTOR, acc[i][j]);
}

using Product = void (*)(const Word*, long, const Word*, long, long, float*, long, bool);

template <class Kind, int M, int N>
Product chosen(long m, long n) {
  if constexpr (M > 1)
    if (m < M) return chosen<Kind, M - 1, N>(m, n);
  if constexpr (N > 1)
    if (n < N) return chosen<Kind, M, N - 1>(m, n);
  return product<Kind, M, N>;
}

template <bool PAIRS>
void matmul(long m, long vectors, const Word* a, long lda, const Word* b, long ldb, long k,
            float* c, long ldc, bool onto) {
  constexpr int N = PAIRS ? WIDE_PAIRS : WIDE;
  for (long j = 0; j < vectors; j += N) {
    const long n = least(N, vectors - j);
    const Product run = PAIRS ? chosen<BrainFloats, ROWS, N>(m, n) : chosen<Floats, ROWS, N>(m, n);
    run(a, lda, b + j * VECTOR, ldb, k, c + j * VECTOR, ldc, onto);
  }
}

#ifdef __AMX_BF16__
constexpr bool AMX = true;
constexpr int TILE_ROWS = 16;

// The number of a tile must be a literal.
template <int N>
void tiled_columns(const Word* a, long lda, const Word* b, long ldb, long k, float* c, long ldc,
                   bool onto) {
  const long left = 4 * lda, right = 4 * ldb, bytes = 4 * ldc;
  asm volatile("" ::: "memory");  // what was written before is read by the instructions below
  if (onto) {
    _tile_loadd(0, c, bytes);
    if constexpr (N > 1) _tile_loadd(1, c + 16, bytes);
    if constexpr (N > 2) _tile_loadd(2, c + 32, bytes);
    if constexpr (N > 3) _tile_loadd(3, c + 48, bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (const Word* end = a + k; a < end; a += 16, b += 16 * ldb) {
    _tile_loadd(4, a, left);
    _tile_loadd(5, b, right);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (N > 1) {
      _tile_loadd(6, b + 16, right);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (N > 2) {
      _tile_loadd(7, b + 32, right);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (N > 3) {
      _tile_loadd(5, b + 48, right);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, c, bytes);
  if constexpr (N > 1) _tile_stored(1, c + 16, bytes);
  if constexpr (N > 2) _tile_stored(2, c + 32, bytes);
  if constexpr (N > 3) _tile_stored(3, c + 48, bytes);
  asm volatile("" ::: "memory");
}

// As `matmul`, of pairs: m is 1 to 16, k a multiple of 16 words.
void tiled_matmul(Tiles& tiles, long m, long vectors, const Word* a, long lda, const Word* b,
                  long ldb, long k, float* c, long ldc, bool onto) {
  const uint8_t rows = uint8_t(m);
  tiles.configure({rows, rows, rows, rows, rows, 16, 16, 16});
  for (long j = 0; j < vectors; j += 4, b += 4 * VECTOR, c += 4 * VECTOR) {
    switch (vectors - j) {
      case 1: tiled_columns<1>(a, lda, b, ldb, k, c, ldc, onto); break;
      case 2: tiled_columns<2>(a, lda, b, ldb, k, c, ldc, onto); break;
      case 3: tiled_columns<3>(a, lda, b, ldb, k, c, ldc, onto); break;
      default: tiled_columns<4>(a, lda, b, ldb, k, c, ldc, onto);
    }
  }
}
#else
constexpr bool AMX = false;
constexpr int TILE_ROWS = ROWS;
struct Tiles {};
void tiled_matmul(Tiles&, long, long, const Word*, long, const Word*, long, long, float*, long, bool) {}
#endif

// ---- weights

inline float power(float x) { return first(power(all(x))); }

inline Lanes tangent(Lanes x) {  // the hyperbolic one
  const Lanes e = power(multiply(magnitude(x), all(float(-2 * LOG2E))));
  return with_sign(divide(subtract(all(1.f), e), add(all(1.f), e)), x);
}

inline float larger(float a, float b) { return a > b ? a : b; }

// By what a part with maximum `own` is scaled beside a maximum `peak` that is at least as large.
inline float share(float own, float peak, float by) {
  return own == peak ? 1.f : power((own - peak) * by);
}

struct Scale {
  float by;           // of a score, or of the tangent of its soft cap
  float capped = 0.f; // of a score before the tangent; 0: no soft cap
  explicit Scale(const Arguments& g) : by(float(g.scale * LOG2E)) {
    if (g.softcap > 0) {
      by = float(g.softcap * LOG2E);
      capped = float(g.scale / g.softcap);
    }
  }
};

// ---- rows and their parts

struct State {  // of `count` rows: maxima, sums in lanes, outputs before the division
  float *tops, *sums, *acc;
  static long floats(long count, long wide) { return ceiling(count, 16) * 16 + count * (VECTOR + wide); }
  State(float* at, long count)
      : tops(at), sums(at + ceiling(count, 16) * 16), acc(sums + count * VECTOR) {}
};

// Rows that are multiplied together, at most VECTOR.
struct Group {
  long first, rows;                   // of the state
  long vectors;                       // of scores; there are no keys beyond
  long lows[VECTOR], highs[VECTOR];   // of the tile's keys each row sees [low, high), if EDGES
  alignas(64) float factors[VECTOR];  // by what each row's past in this segment is to be scaled
};

// Scores of a group, TILE a row, to weights of the keys that each row sees: all if not EDGES.
template <bool PAIRS, bool EDGES>
void weigh(Group& group, const Scale& scale, const State& state, float* scores, Word* weights) {
  const Lanes none = all(-INFINITY), by = all(scale.by);
  alignas(64) float peaks[VECTOR] = {}, bases[VECTOR];
  for (long r = 0; r < group.rows; r++) {
    float* row = scores + r * TILE;
    Lanes peak = none;
    UNROLL for (long i = 0; i < TILE / VECTOR; i++) {
      Lanes s = EDGES && i >= group.vectors ? none : load(row + VECTOR * i);
      if constexpr (EDGES) {
        if (scale.capped != 0.f) s = tangent(multiply(s, all(scale.capped)));
        s = between(s, group.lows[r] - VECTOR * i, group.highs[r] - VECTOR * i, none);
        store(row + VECTOR * i, s);
      }
      peak = larger(peak, s);
    }
    peaks[r] = largest(peak);
  }
  float* tops = state.tops + group.first;
  const Lanes past = load(tops), peak = larger(past, load(peaks));
  const Lanes base = larger(all(-FLT_MAX), peak);  // finite if no key was seen
  store(tops, between(peak, 0, group.rows, past));
  store(bases, base);
  store(group.factors, power(multiply(subtract(past, base), by)));
  for (long r = 0; r < group.rows; r++) {
    float* sums = state.sums + (group.first + r) * VECTOR;
    const Lanes beside = all(bases[r]);
    Lanes sum = multiply(load(sums), all(group.factors[r])), s[TILE / VECTOR];
    UNROLL for (long i = 0; i < TILE / VECTOR; i++)
      s[i] = power(multiply(subtract(load(scores + r * TILE + VECTOR * i), beside), by));
    if constexpr (PAIRS) {
      UNROLL for (long i = 0; i < TILE / VECTOR; i += 2) {
        const Pairs made = store_weights(weights + r * TILE + VECTOR / 2 * i, s[i], s[i + 1]);
        sum = BrainFloats::dot(sum, pair(0x3f803f80), made);  // ones
      }
    } else {
      UNROLL for (long i = 0; i < TILE / VECTOR; i++) {
        sum = add(sum, s[i]);
        store((float*)weights + r * TILE + VECTOR * i, s[i]);
      }
    }
    store(sums, sum);
  }
}

// Adds a segment of row `from` to row `to`; `begun`: there was one before.
void merge(const State& target, long to, const State& part, long from, long wide, float by,
           bool begun) {
  float *sums = target.sums + to * VECTOR, *acc = target.acc + to * wide;
  const float *more = part.sums + from * VECTOR, *next = part.acc + from * wide;
  if (!begun) {
    target.tops[to] = part.tops[from];
    memcpy(sums, more, 4 * VECTOR);
    memcpy(acc, next, size_t(4 * wide));
    return;
  }
  const float peak = larger(target.tops[to], part.tops[from]);
  const Lanes f = all(share(target.tops[to], peak, by)), g = all(share(part.tops[from], peak, by));
  target.tops[to] = peak;
  store(sums, fused(load(more), g, multiply(load(sums), f)));
  for (long x = 0; x < wide; x += VECTOR)
    store(acc + x, fused(load(next + x), g, multiply(load(acc + x), f)));
}

struct Split {  // the segments of an item, computed by several threads and merged by the last
  float* parts;  // [segment] states
  long first, count;
  std::atomic<long> left;
};

struct Item {  // positions [from, to) of one entry, the heads of kv heads [low, high)
  const int64_t* entry;
  long low, high, from, to;
  long begin, end;  // segments
  Split* split;     // or null: all segments are here
};

struct Job {
  const Arguments* g;
  Item* items;
  long count;
  std::atomic<long> next, failed;
};

template <int64_t KIND>
struct Worker {
  static constexpr bool PAIRS = KIND == BFLOAT16, HALF = KIND == FLOAT16;
  static constexpr bool TILED = PAIRS && AMX;  // then both products take whole blocks of 32
  static constexpr long BYTES = bytes_of(KIND), PER = PAIRS ? 2 : 1;
  static constexpr long GROUP = TILED ? TILE_ROWS : ROWS;  // rows that are multiplied together
  static constexpr long EDGES = TILED ? TILE / PER : 1;    // rows of `edge`

  const Arguments& g;
  const Item& item;
  Tiles& tiles;
  const long rows, count, wide, padded, words;  // rows: of a kv head; count: of the item
  const Scale scale;
  Word *keys = nullptr, *values = nullptr, *query = nullptr, *weights = nullptr, *edge = nullptr;
  float *scores = nullptr, *whole = nullptr, *segment = nullptr;
  char *staged = nullptr, *zeros = nullptr;

  Worker(const Arguments& g, const Item& item, Tiles& tiles)
      : g(g), item(item), tiles(tiles), rows((item.to - item.from) * g.group),
        count(rows * (item.high - item.low)), wide(ceiling(g.dim, VECTOR) * VECTOR),
        padded(ceiling(g.dim, VECTOR * PER) * VECTOR * PER),
        words(ceiling(TILED ? padded : g.dim, PER)), scale(g) {}

  bool reserve(Memory& memory) {
    const long state = State::floats(count, wide), row = padded * BYTES;
    const long sizes[] = {TILE * padded / PER * 4, TILE / PER * (padded + 16) * 4, count * words * 4,
                          GROUP * TILE * 4, EDGES * padded * 4, GROUP * TILE * 4, state * 4, state * 4,
                          2 * TILE * row, row};
    void* const places[] = {&keys, &values, &query, &weights, &edge, &scores, &whole, &segment,
                            &staged, &zeros};
    long sum = 0;
    for (const long size : sizes) sum += ceiling(size, 64) * 64;
    if (!memory.reserve(sum)) return false;
    char* at = memory.bytes;
    for (int i = 0; i < 10; i++) {
      memcpy(places[i], &at, sizeof at);
      at += ceiling(sizes[i], 64) * 64;
    }
    memset(zeros, 0, size_t(row));
    if (padded != g.dim) memset(staged, 0, size_t(2 * TILE * row));
    if (words * PER != g.dim) memset(query, 0, size_t(count * words * 4));
    return true;
  }

  long packed(long position) const { return item.entry[0] + position - item.entry[1]; }
  // visit(row of the item, its position, its query head) for every row.
  template <class Visit>
  void each_row(Visit visit) const {
    long r = 0;
    for (long head = item.low; head < item.high; head++)
      for (long position = item.from; position < item.to; position++)
        for (long i = 0; i < g.group; i++) visit(r++, position, head * g.group + i);
  }
  long first_seen(long position) const {
    return g.window ? most(0, position - g.window + 1) : 0;
  }

  void run() {
    const State total(whole, count), part(segment, count);
    load_queries();
    for (long seg = item.begin; seg < item.end; seg++) {
      const State state(item.split ? item.split->parts + (seg - item.split->first) *
                                         State::floats(count, wide)
                                   : segment,
                        count);
      attend(seg, state);
      if (item.split) continue;
      add(total, state, seg);
    }
    if (!item.split) {
      finish(total);
    } else if (item.split->left.fetch_sub(1) == 1) {
      for (long i = 0; i < item.split->count; i++)
        add(total, State(item.split->parts + i * State::floats(count, wide), count),
            item.split->first + i);
      finish(total);
    }
  }

  void load_queries() {
    each_row([&](long r, long position, long head) {
      const char* at = g.query + BYTES * (packed(position) * g.q_row + head * g.q_head);
      if constexpr (HALF) {
        for (long x = 0; x < g.dim; x += VECTOR) {
          const long left = least(VECTOR, g.dim - x);
          char half[2 * VECTOR] = {};
          float wider[VECTOR];
          memcpy(half, at + 2 * x, size_t(2 * left));
          widen(half, wider);
          memcpy(query + r * words + x, wider, size_t(4 * left));
        }
      } else {
        memcpy(query + r * words, at, size_t(BYTES * g.dim));
      }
    });
  }

  // Merges segment `seg` into every row that saw a key of it.
  void add(const State& total, const State& part, long seg) {
    each_row([&](long r, long position, long) {
      const long begun = first_seen(position) / SEGMENT;
      if (begun <= seg && seg <= position / SEGMENT) merge(total, r, part, r, wide, scale.by, begun < seg);
    });
  }

  void attend(long seg, const State& state) {
    memset(state.sums, 0, size_t(4 * count * (VECTOR + wide)));
    for (long r = 0; r < count; r++) state.tops[r] = -INFINITY;
    const long begin = most(seg * SEGMENT, first_seen(item.from)), end = least((seg + 1) * SEGMENT, item.to);
    int64_t offsets[TILE] = {}, ahead[TILE] = {};
    find(begin, end, ahead);
    for (long tile = begin / TILE * TILE; tile < end; tile += TILE) {
      memcpy(offsets, ahead, sizeof offsets);
      const long low = most(begin - tile, 0), high = least(TILE, end - tile);
      find(tile + TILE, end, ahead);
      for (long head = item.low; head < item.high; head++) {
        const bool more = head + 1 < item.high;
        pack(offsets, low, high, head, more ? offsets : ahead, more ? head + 1 : item.low);
        attend_tile(tile, low, high, (head - item.low) * rows, state);
      }
    }
  }

  // Where the keys of the tile of position `from` lie, those below `to` only.
  void find(long from, long to, int64_t* offsets) const {
    const int32_t* table = g.tables + item.entry[3];
    long block = from / g.block_size, at = from % g.block_size;
    for (long i = from % TILE; from < to && i < TILE; i++, from++) {
      offsets[i] = BYTES * (table[block] * g.s_block + at * g.s_pos);
      if (++at == g.block_size) {
        at = 0;
        block++;
      }
    }
  }

  // K as columns and V as rows of floats, or of pairs (key 2i, key 2i + 1), and zeros outside
  // [low, high); of V up to `high`, and up to TILE if TILED. What is next is asked of the memory:
  // [the same keys, or the next tile's].
  void pack(const int64_t* offsets, long low, long high, long head, const int64_t* next,
            long next_head) {
    const char* base = g.pool + BYTES * (g.layer * g.s_layer);
    const char* soon = base + BYTES * next_head * g.s_head;
    const char *k[TILE], *v[TILE];
    for (long i = 0; i < TILE; i++) {
      k[i] = v[i] = zeros;
      if (i < low || i >= high) continue;
      k[i] = base + offsets[i] + BYTES * head * g.s_head;
      v[i] = k[i] + BYTES * g.s_kv;
      if (padded != g.dim) {
        char *here = staged + 2 * i * padded * BYTES, *there = here + padded * BYTES;
        memcpy(here, k[i], size_t(BYTES * g.dim));
        memcpy(there, v[i], size_t(BYTES * g.dim));
        k[i] = here;
        v[i] = there;
      }
    }
    constexpr long STEP = HALF ? 2 * VECTOR : 4 * VECTOR;  // bytes of a vector of words
    const long steps = padded * BYTES / STEP;
    for (long i = 0; i < high; i += VECTOR)
      for (long x = 0; x < padded * BYTES; x += STEP) {
        const long step = x / STEP;  // whole rows of memory are asked for, one behind another
        for (long y = i + VECTOR * step / steps; y < i + VECTOR * (step + 1) / steps; y++)
          for (long byte = 0; byte < padded * BYTES; byte += FETCHED) {
            _mm_prefetch(v[y] + byte, _MM_HINT_T0);
            _mm_prefetch(soon + next[y] + byte, _MM_HINT_T1);
            _mm_prefetch(soon + next[y] + byte + BYTES * g.s_kv, _MM_HINT_T1);
          }
        transpose<HALF>(k + i, x, keys + x / STEP * VECTOR * TILE + i, TILE);
      }
    if constexpr (PAIRS) {
      for (long i = 0; i < (TILED ? TILE : high); i += 2)
        for (long x = 0; x < padded; x += 32)
          interleave(v[i] + 2 * x, v[i + 1] + 2 * x, values + i / 2 * padded + x);
    } else {
      constexpr long STRIDE = long(sizeof(halves(zeros))) / 4;  // words of a register
      for (long i = 0; i < high; i++)
        for (long x = 0; x < padded; x += STRIDE)
          store_words(values + i * padded + x,
                      HALF ? halves(v[i] + BYTES * x) : ::words(v[i] + BYTES * x));
    }
  }

  // The rows of one kv head, which begin at row `offset`, over a packed tile.
  void attend_tile(long tile, long low, long high, long offset, const State& state) {
    const long begin = most(item.from, tile + low), positions = item.to;
    const long end = g.window ? least(positions, tile + high - 1 + g.window) : positions;
    if (begin >= end) return;
    const bool hidden = begin + 1 - tile < high || first_seen(end - 1) > tile + low;
    const bool apart = hidden && !finite(high);
    const long last = (end - item.from) * g.group;
    for (long r = (begin - item.from) * g.group; r < last; r += GROUP) {
      Group group{offset + r, least(GROUP, last - r)};
      const long from = item.from + r / g.group, to = item.from + (r + group.rows - 1) / g.group;
      const long top = least(high, to + 1 - tile), bottom = most(low, first_seen(from) - tile);
      const bool edges = from + 1 - tile < TILE || high < TILE || low > 0 || first_seen(to) > tile ||
                         scale.capped != 0.f || apart;
      group.vectors = ceiling(top, VECTOR);
      for (long i = 0; edges && i < group.rows; i++) {
        const long position = item.from + (r + i) / g.group;
        group.lows[i] = most(low, first_seen(position) - tile);
        group.highs[i] = least(high, position + 1 - tile);
      }
      multiply_rows(group.rows, group.vectors, query + group.first * words, words, keys, TILE, words,
                    scores, TILE, false);
      (edges ? weigh<PAIRS, true> : weigh<PAIRS, false>)(group, scale, state, scores, weights);
      float* acc = state.acc + group.first * wide;
      rescale(group, acc);
      if (apart) {
        for (long i = 0; i < group.rows; i++)
          add_apart(weights + i * TILE, group.lows[i], group.highs[i], acc + i * wide);
        continue;
      }
      const long begun = TILED ? 0 : bottom / PER, ended = TILED ? TILE / PER : ceiling(top, PER);
      multiply_rows(group.rows, wide / VECTOR, weights + begun, TILE, values + begun * padded, padded,
                    ended - begun, acc, wide, true);
    }
  }

  // Scales the past of all rows if that of one changes: faster than a choice for each.
  void rescale(const Group& group, float* acc) const {
    bool changed = false;
    for (long i = 0; i < group.rows; i++) changed |= group.factors[i] != 1.f;
    for (long i = 0; changed && i < group.rows; i++)
      for (float* at = acc + i * wide; at < acc + (i + 1) * wide; at += VECTOR)
        store(at, multiply(load(at), all(group.factors[i])));
  }

  template <class... Rest>
  void multiply_rows(Rest... rest) {
    if constexpr (TILED) tiled_matmul(tiles, rest...);
    else matmul<PAIRS>(rest...);
  }

  // Whether every packed value is a number: zero times another one is not zero.
  bool finite(long high) const {
    constexpr Word UPPER = 0x7f800000, LOWER = PAIRS ? 0x7f80 : 0x80000000;
    Word found = 0;
    for (long i = 0; i < ceiling(high, PER) * padded; i++)
      found |= Word((values[i] & UPPER) == UPPER) |
               Word(PAIRS && (values[i] & LOWER) == LOWER);
    return found == 0;
  }

  // One row over keys [from, to) and no other: the same sums.
  void add_apart(const Word* weight, long from, long to, float* acc) {
    if constexpr (TILED) memset(edge, 0, size_t(4 * EDGES * padded));
    for (long x = from / PER; x < ceiling(to, PER); x++) {
      const bool no_low = PAIRS && x * PER < from, no_high = PAIRS && x * PER + 1 >= to;
      const Word kept = no_low ? 0xffff0000 : no_high ? 0x0000ffff : 0xffffffff;
      const Word* right = values + x * padded;
      Word* copy = edge + x % EDGES * padded;
      for (long y = 0; y < wide; y++) copy[y] = right[y] & kept;
      if constexpr (!TILED) matmul<PAIRS>(1, wide / VECTOR, weight + x, TILE, copy, padded, 1, acc, wide, true);
    }
    if constexpr (TILED)
      tiled_matmul(tiles, 1, wide / VECTOR, weight, TILE, edge, padded, EDGES, acc, wide, true);
  }

  void finish(const State& state) {
    char last[4 * VECTOR];
    each_row([&](long r, long position, long head) {
      char* out = g.out + BYTES * (packed(position) * g.o_row + head * g.o_head);
      float sum = ::total(load(state.sums + r * VECTOR)), f = 1.f;
      if (g.sinks) {
        const float top = state.tops[r] * scale.by, sink = g.sinks[head] * float(LOG2E);
        const float peak = larger(top, sink);
        f = share(top, peak, 1.f);
        sum = fmaf(sum, f, power(sink - peak));
      }
      for (long x = 0; x < wide; x += VECTOR) {  // + 0: hidden keys may turn the sign of a zero
        const Lanes y = multiply(load(state.acc + r * wide + x), all(f));
        const Lanes z = canonical(::add(divide(y, all(sum)), zero()));
        const bool fits = g.dim - x >= VECTOR;
        char* to = fits ? out + BYTES * x : last;
        if constexpr (PAIRS) store_bfloat16(to, z);
        else if constexpr (HALF) store_float16(to, z);
        else store((float*)to, z);
        if (!fits) memcpy(out + BYTES * x, last, size_t(BYTES * (g.dim - x)));
      }
    });
  }
};

template <int64_t KIND>
bool work(const Arguments& g, const Item& item, Memory& memory, Tiles& tiles) {
  Worker<KIND> worker(g, item, tiles);
  if (!worker.reserve(memory)) return false;
  worker.run();
  return true;
}

void take_items(void* data) {
  Memory memory;
  Job& job = *(Job*)data;
  const Rounding rounding;
  Tiles tiles;
  for (long i; (i = job.next.fetch_add(1)) < job.count;) {
    const int64_t kind = job.g->kind;
    const auto run = kind == FLOAT32 ? work<FLOAT32> : kind == BFLOAT16 ? work<BFLOAT16> : work<FLOAT16>;
    if (!run(*job.g, job.items[i], memory, tiles)) job.failed.store(1);
  }
}

// ---- the call

struct Copying {
  const Arguments* g;
  std::atomic<long> next;
};

// New keys and values to the pool, STORED positions of an entry at a time.
void take_stores(void* data) {
  Copying& copying = *(Copying*)data;
  const Arguments& g = *copying.g;
  const long bytes = bytes_of(g.kind), head = bytes * g.dim;
  long piece = copying.next.fetch_add(1), first = 0;
  for (const int64_t* entry = g.entries; entry < g.entries + 4 * g.n; entry += 4) {
    const long pieces = ceiling(entry[2], STORED);
    for (; piece < first + pieces; piece = copying.next.fetch_add(1)) {
      const long from = (piece - first) * STORED, to = least(entry[2], from + STORED);
      for (long i = from; i < to; i++) {
        const long position = entry[1] + i, row = entry[0] + i;
        const int64_t block = g.tables[entry[3] + position / g.block_size];
        char* place = g.pool + bytes * (block * g.s_block + g.layer * g.s_layer +
                                        position % g.block_size * g.s_pos);
        for (long h = 0; h < g.kv_heads; h++, place += bytes * g.s_head) {
          memcpy(place, g.key + bytes * (row * g.k_row + h * g.k_head), size_t(head));
          memcpy(place + bytes * g.s_kv, g.value + bytes * (row * g.v_row + h * g.v_head), size_t(head));
        }
      }
    }
    first += pieces;
  }
}

// How the work of a call is cut. It depends on the batch and the threads, and decides no bit.
struct Plan {
  const Arguments& g;
  const long wide = ceiling(g.dim, VECTOR) * VECTOR;
  double total = 0;
  long positions = 0;
  Item* items = nullptr;
  Split* splits = nullptr;
  float* parts = nullptr;
  long count = 0, split_count = 0, floats = 0;

  double cost(long keys, long heads, long positions) const {  // nanoseconds
    const double bytes = g.kind == FLOAT32 ? 8 : 4;
    return double(keys * heads * g.dim) *
           (bytes / BYTES_A_NS + 2.0 * double(positions * g.group) / PRODUCTS_A_NS);
  }

  long first(long position) const { return g.window ? most(0, position - g.window + 1) : 0; }

  // Calls visit(entry, from, to, heads of an item) for every piece of rows.
  template <class Visit>
  void each(long threads, Visit visit) const {
    const long width = most(1, SHARE / g.group);
    for (const int64_t* entry = g.entries; entry < g.entries + 4 * g.n; entry += 4) {
      const bool few = entry[2] * g.group <= 2 * ROWS;  // then the heads of a position lie together
      const long together = few ? ceiling(g.kv_heads, threads) : 1;
      for (long to = entry[1] + entry[2]; to > entry[1]; to -= width)  // the longest first
        visit(entry, most(entry[1], to - width), to, together);
    }
  }

  void measure(long threads) {
    each(threads, [&](const int64_t*, long from, long to, long) {
      total += cost(to - first(from), g.kv_heads, to - from);
      positions += to - from;
    });
  }

  // Fills the items, or only counts them.
  void cut(long threads, bool fill) {
    count = split_count = floats = 0;
    each(threads, [&](const int64_t* entry, long from, long to, long together) {
      const long begin = first(from) / SEGMENT, end = ceiling(to, SEGMENT);
      for (long low = 0; low < g.kv_heads; low += together) {
        const long high = least(g.kv_heads, low + together);
        const long state = ceiling(State::floats((to - from) * g.group * (high - low), wide), 16) * 16;
        const bool alone = threads == 1 || end - begin == 1 || floats + state * (end - begin) > SPLIT ||
                           cost(to - first(from), high - low, to - from) * double(threads) * 2 < total;
        if (alone) {
          if (fill) items[count] = {entry, low, high, from, to, begin, end, nullptr};
          count++;
          continue;
        }
        if (fill) {
          Split* split = splits + split_count;
          split->parts = parts + floats;
          split->first = begin;
          split->count = end - begin;
          split->left.store(end - begin);
          for (long seg = begin; seg < end; seg++)
            items[count + seg - begin] = {entry, low, high, from, to, seg, seg + 1, split};
        }
        split_count++;
        count += end - begin;
        floats += state * (end - begin);
      }
    });
  }
};

}  // namespace

// 0, or 1 if there is no memory.
int kvrelay_attention(const Arguments* arguments) {
  Memory memory;
  const Arguments& g = *arguments;
  Plan plan{g};
  plan.measure(1);
  const long threads = g.parallel && plan.total > SERIAL ? g.threads : 1;
  if (g.key) {
    Copying copying{&g, {0}};
    if (threads > 1 && plan.positions > 2 * STORED) g.parallel(take_stores, &copying, unsigned(threads), 0);
    else take_stores(&copying);
  }
  if (!g.query) return 0;
  plan.cut(threads, false);
  const long item_bytes = ceiling(plan.count * long(sizeof(Item)), 64) * 64;
  const long split_bytes = ceiling(plan.split_count * long(sizeof(Split)), 64) * 64;
  if (!memory.reserve(item_bytes + split_bytes + 4 * plan.floats)) return 1;
  plan.items = (Item*)memory.bytes;
  plan.splits = (Split*)(memory.bytes + item_bytes);
  plan.parts = (float*)(memory.bytes + item_bytes + split_bytes);
  plan.cut(threads, true);
  Job job{&g, plan.items, plan.count, {0}, {0}};
  if (threads > 1 && plan.count > 1) g.parallel(take_items, &job, unsigned(threads), 0);
  else take_items(&job);
  return int(job.failed.load());
}
