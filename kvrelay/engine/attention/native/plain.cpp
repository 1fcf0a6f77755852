// What attention.cpp computes, one row at a time in plain C++: the definition of a row.
//
// The oracle of the tests and of the self-test: SDPA is faster. Build with -ffp-contract=off.
#include "scalar.h"

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace {

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
float larger(float a, float b) { return a > b ? a : b; }

float tangent(float x) {
  const float e = power(fabsf(x) * float(-2 * LOG2E));
  return copysignf((1.f - e) / (1.f + e), x);
}

float share(float own, float peak, float by) { return own == peak ? 1.f : power((own - peak) * by); }

struct Part {
  float top, sums[16], *acc;
};

struct Row {
  const Arguments& g;
  const int64_t* entry;
  const int64_t index, head, last, first;
  const int64_t size, step;
  const bool tiles;
  const float by;  // of a score, or of the tangent of its soft cap

  Row(const Arguments& g, const int64_t* entry, int64_t index, int64_t head)
      : g(g), entry(entry), index(index), head(head), last(entry[1] + index),
        first(g.window ? most(0, last - g.window + 1) : 0), size(bytes_of(g.kind)),
        step(g.kind == BFLOAT16 ? 2 : 1), tiles(g.tiles && g.kind == BFLOAT16),
        by(float((g.softcap > 0 ? g.softcap : g.scale) * LOG2E)) {}

  const char* key(int64_t p) const {
    return g.pool + size * (g.tables[entry[3] + p / g.block_size] * g.s_block + g.layer * g.s_layer +
                            p % g.block_size * g.s_pos + head / g.group * g.s_head);
  }

  float score(int64_t p) const {
    const char* query = g.query + size * ((entry[0] + index) * g.q_row + head * g.q_head);
    float s = 0.f;
    if (tiles) {
      for (int64_t d = 0; d < g.dim; d += DEPTH)
        s = add_block(s, [&](int64_t i) { return d + i < g.dim ? element(query, d + i, g.kind) : 0.f; },
                      [&](int64_t i) { return d + i < g.dim ? element(key(p), d + i, g.kind) : 0.f; });
      return s;
    }
    for (int64_t d = 0; d < g.dim; d += step)  // of a pair the second product first
      for (int64_t x = least(d + step, g.dim) - 1; x >= d; x--)
        s = fmaf(element(query, x, g.kind), element(key(p), x, g.kind), s);
    return s;
  }

  // Keys of one tile, those that the row sees.
  void add_tile(int64_t tile, int64_t end, Part& part) const {
    const float capped = g.softcap > 0 ? float(g.scale / g.softcap) : 0.f;
    float s[TILE], w[TILE] = {}, high = -INFINITY;
    const int64_t from = most(first, tile) - tile, to = least(end, tile + TILE) - tile;
    for (int64_t i = from; i < to; i++) {
      s[i] = score(tile + i);
      if (capped != 0.f) s[i] = tangent(s[i] * capped);
      high = larger(high, s[i]);
    }
    const float past = part.top, peak = larger(past, high);
    const float base = peak == -INFINITY ? 0.f : peak;
    for (int64_t i = from; i < to; i++) {
      w[i] = power((s[i] - base) * by);
      if (g.kind == BFLOAT16) w[i] = number(uint32_t(bfloat16(w[i])) << 16);
    }
    if (peak != past) {
      const float f = power((past - peak) * by);
      for (float& x : part.sums) x *= f;
      for (int64_t d = 0; d < g.dim; d++) part.acc[d] *= f;
      part.top = peak;
    }
    for (int64_t i = 0; i < TILE; i += step)
      for (int64_t x = i + step - 1; x >= i; x--) part.sums[i / step % 16] += w[x];
    if (tiles) {
      for (int64_t i = 0; i < TILE; i += DEPTH)
        for (int64_t d = 0; d < g.dim; d++)
          part.acc[d] = add_block(part.acc[d], [&](int64_t x) { return w[i + x]; }, [&](int64_t x) {
            return i + x < from || i + x >= to ? 0.f : element(key(tile + i + x) + size * g.s_kv, d, g.kind);
          });
      return;
    }
    for (int64_t i = from / step * step; i < to; i += step)
      for (int64_t x = least(i + step, to) - 1; x >= most(i, from); x--) {
        const char* value = key(tile + x) + size * g.s_kv;
        for (int64_t d = 0; d < g.dim; d++)
          part.acc[d] = fmaf(w[x], element(value, d, g.kind), part.acc[d]);
      }
  }

  void run(float* memory) const {
    Part whole{-INFINITY, {}, memory}, part{-INFINITY, {}, memory + g.dim};
    for (int64_t seg = first / SEGMENT; seg <= last / SEGMENT; seg++) {
      Part& into = seg == first / SEGMENT ? whole : part;
      into.top = -INFINITY;
      memset(into.sums, 0, sizeof into.sums);
      memset(into.acc, 0, size_t(4 * g.dim));
      const int64_t end = least((seg + 1) * SEGMENT, last + 1);
      for (int64_t tile = most(first, seg * SEGMENT) / TILE * TILE; tile < end; tile += TILE)
        add_tile(tile, end, into);
      if (&into == &part) merge(whole, part);
    }
    finish(whole);
  }

  void merge(Part& whole, const Part& part) const {
    const float peak = larger(whole.top, part.top);
    const float f = share(whole.top, peak, by), h = share(part.top, peak, by);
    whole.top = peak;
    for (int i = 0; i < 16; i++) whole.sums[i] = fmaf(part.sums[i], h, whole.sums[i] * f);
    for (int64_t d = 0; d < g.dim; d++) whole.acc[d] = fmaf(part.acc[d], h, whole.acc[d] * f);
  }

  void finish(Part& whole) const {
    for (const int half : {8, 4, 2, 1})
      for (int i = 0; i < half; i++) whole.sums[i] += whole.sums[i + half];
    float sum = whole.sums[0], f = 1.f;
    if (g.sinks) {
      const float top = whole.top * by, sink = g.sinks[head] * float(LOG2E);
      const float peak = larger(top, sink);
      f = share(top, peak, 1.f);
      sum = fmaf(sum, f, power(sink - peak));
    }
    char* out = g.out + size * ((entry[0] + index) * g.o_row + head * g.o_head);
    for (int64_t d = 0; d < g.dim; d++) put(out, d, whole.acc[d] * f / sum + 0.f, g.kind);
  }
};

struct Job {
  const Arguments* g;
  int64_t rows;
  std::atomic<int64_t> next, failed;
};

void take_rows(void* data) {
  Job& job = *(Job*)data;
  const Arguments& g = *job.g;
  const Rounding rounding;
  float* memory = (float*)malloc(size_t(8 * g.dim));
  if (!memory) job.failed.store(1);
  for (int64_t row; memory && (row = job.next.fetch_add(1)) < job.rows;) {
    const int64_t* entry = g.entries;
    for (; row >= entry[2]; entry += 4) row -= entry[2];
    for (int64_t head = 0; head < g.kv_heads * g.group; head++) Row(g, entry, row, head).run(memory);
  }
  free(memory);
}

void store_new(const Arguments& g) {
  const int64_t size = bytes_of(g.kind);
  for (int64_t e = 0; e < g.n; e++)
    for (int64_t i = 0; i < g.entries[4 * e + 2]; i++)
      for (int64_t head = 0; head < g.kv_heads; head++) {
        const Row row(g, g.entries + 4 * e, i, head * g.group);
        char* to = const_cast<char*>(row.key(row.last));
        const int64_t from = g.entries[4 * e] + i;
        memcpy(to, g.key + size * (from * g.k_row + head * g.k_head), size_t(size * g.dim));
        memcpy(to + size * g.s_kv, g.value + size * (from * g.v_row + head * g.v_head),
               size_t(size * g.dim));
      }
}

}  // namespace

int kvrelay_attention(const Arguments* arguments) {
  const Arguments& g = *arguments;
  if (g.key) store_new(g);
  if (!g.query) return 0;
  Job job{&g, 0, {0}, {0}};
  for (int64_t e = 0; e < g.n; e++) job.rows += g.entries[4 * e + 2];
  if (g.parallel && g.threads > 1 && job.rows > 1) g.parallel(take_rows, &job, unsigned(g.threads), 0);
  else take_rows(&job);
  return int(job.failed.load());
}

// The revision, and which objects this machine can run.
extern "C" __attribute__((visibility("default"))) int64_t kvrelay_revision() { return REVISION; }

extern "C" __attribute__((visibility("default"))) int kvrelay_runs(const char* variant) {
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!strcmp(variant, "avx2")) return avx2;
  if (!strcmp(variant, "avx512")) return avx512;
  unsigned a = 0, b, c, d;  // by its number, since GCC 9 does not know the name
  const bool brain = avx512 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 5 & 1;
  if (!strcmp(variant, "avx512bf16")) return brain;
  if (!strcmp(variant, "amx")) return brain && kvrelay_tiles() == 0;
#endif
  return !strcmp(variant, "plain");
}
