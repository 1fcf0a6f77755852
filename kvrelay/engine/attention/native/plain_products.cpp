// What products.cpp computes, one element at a time in plain C++: the definition of an element.
//
// In a block of 32 numbers the products at even places are added up, beginning with zero and with
// one rounding each, and so are those at odd places; then both sums are added, and that to the
// element. The instruction TDPBF16PS does this, and takes subnormal numbers for zero everywhere.
#include "products.h"
#include "scalar.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cerrno>
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

float at(const char* numbers, int64_t i) { return element(numbers, i, BFLOAT16); }

// The 32 numbers that a column has in a block, at even distances.
float add_block(float sum, const char* x, int64_t count, const char* tile, int64_t column) {
  float parts[2] = {};
  for (int64_t i = 0; i < DEPTH; i++) {
    const float weight = at(tile, i / 2 * PANEL + column * 2 + i % 2);
    parts[i % 2] = fmaf(i < count ? at(x, i) : 0.f, weight, parts[i % 2]);
  }
  return sum + (parts[0] + parts[1]);
}

}  // namespace

int kvrelay_product(const char* x, const char* packed, const char* bias, char* out, int64_t rows,
                    int64_t n, int64_t k, int64_t, Parallel) {
  const Rounding rounding;
  const int64_t blocks = (k + DEPTH - 1) / DEPTH;
  for (int64_t row = 0; row < rows; row++)
    for (int64_t column = 0; column < n; column++) {
      const char* tile = packed + column / PANEL * blocks * STEP + column % PANEL / SIDE * (STEP / 2);
      float y = 0.f;
      for (int64_t block = 0; block < blocks; block++, tile += STEP)
        y = add_block(y, x + 2 * (row * k + block * DEPTH), k - block * DEPTH, tile, column % SIDE);
      if (bias) y += at(bias, column);
      const uint16_t half = bfloat16(y);
      memcpy(out + 2 * (row * n + column), &half, 2);
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
