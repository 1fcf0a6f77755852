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

float at(const char* numbers, int64_t i) { return element(numbers, i, BFLOAT16); }

}  // namespace

int kvrelay_product(const char* x, const char* packed, const char* bias, char* out, int64_t rows,
                    int64_t n, int64_t k, int64_t, Parallel) {
  const Rounding rounding;
  const int64_t blocks = (k + DEPTH - 1) / DEPTH;
  for (int64_t row = 0; row < rows; row++)
    for (int64_t column = 0; column < n; column++) {
      const char* tile = packed + column / PANEL * blocks * STEP + column % PANEL / SIDE * (STEP / 2);
      float y = 0.f;
      for (int64_t block = 0; block < blocks; block++, tile += STEP) {
        const char* here = x + 2 * (row * k + block * DEPTH);
        const int64_t count = k - block * DEPTH;
        y = add_block(y, [&](int64_t i) { return i < count ? at(here, i) : 0.f; },
                      [&](int64_t i) { return at(tile, i / 2 * PANEL + column % SIDE * 2 + i % 2); });
      }
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
