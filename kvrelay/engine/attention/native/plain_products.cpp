// What products_amx.cpp and products_vector.cpp compute, one element at a time in plain C++: the
// definition of an element.
#include "scalar.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cerrno>
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

// A row of numbers, with zeros behind its end.
struct Row {
  const char* numbers;
  int64_t size, kind;
  float operator[](int64_t i) const { return i < size ? element(numbers, i, kind) : 0.f; }
};

float sum_bfloat16(const Row& x, const char* tile, int64_t column) {
  float y = 0.f;
  for (int64_t block = 0; block * DEPTH < x.size; block++, tile += STEP)
    y = add_block(y, [&](int64_t i) { return x[block * DEPTH + i]; }, [&](int64_t i) {
      return element(tile, i / 2 * PANEL + column * 2 + i % 2, BFLOAT16);
    });
  return y;
}

// The sum of runs of blocks; `add(run, block)` adds the products of a block to its run.
template <class Add>
float sum_runs(int64_t size, const Add& add) {
  float y = 0.f, run = 0.f;
  for (int64_t block = 0; block * DEPTH < size; block++) {
    run = add(run, block);
    if ((block + 1) % RUN == 0 || (block + 1) * DEPTH >= size) {
      y += run;
      run = 0.f;
    }
  }
  return y;
}

float sum_float32(const Row& x, const char* tile, int64_t column) {
  return sum_runs(x.size, [&](float run, int64_t block) {
    for (int64_t i = 0; i < DEPTH; i++) {
      const float weight = element(tile + block * 2 * STEP, i * SIDE + column, FLOAT32);
      run = fmaf(x[block * DEPTH + i], weight, run);
    }
    return run;
  });
}

// As VDPBF16PS does: of each pair the odd product is added first.
float sum_pairs(const Row& x, const char* tile, int64_t column) {
  return sum_runs(x.size, [&](float run, int64_t block) {
    for (int64_t i = 0; i < DEPTH; i++) {
      const int64_t at = i ^ 1;
      const float weight = element(tile + block * STEP, at / 2 * PANEL + column * 2 + at % 2, BFLOAT16);
      run = fmaf(x[block * DEPTH + at], weight, run);
    }
    return run;
  });
}

}  // namespace

int kvrelay_product(const char* x, const char* packed, const char* bias, char* out, int64_t rows,
                    int64_t n, int64_t k, int64_t order, int64_t, Parallel) {
  const Rounding rounding;
  const int64_t kind = order == PAIRS ? BFLOAT16 : order;
  const auto sum = order == PAIRS ? sum_pairs : order == FLOAT32 ? sum_float32 : sum_bfloat16;
  const int64_t blocks = (k + DEPTH - 1) / DEPTH, bytes = bytes_of(kind);
  const int64_t step = STEP / 2 * bytes;
  for (int64_t row = 0; row < rows; row++)
    for (int64_t column = 0; column < n; column++) {
      const Row numbers{x + bytes * row * k, k, kind};
      const char* tile = packed + column / PANEL * blocks * step + column % PANEL / SIDE * (step / 2);
      float y = sum(numbers, tile, column % SIDE);
      if (bias) y += element(bias, column, kind);
      put(out, row * n + column, y, kind);
    }
  return 0;
}

int kvrelay_tiles() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (BF16 | TILE)) != (BF16 | TILE)) return -1;
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM of Linux 5.16
  return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0 ? 0 : errno;
#else
  return -1;
#endif
}
