// Vectors of sixteen floats, and what the objects that are made of them share.
#pragma once

#include "arguments.h"

#include <initializer_list>

#define UNROLL _Pragma("GCC unroll 16")
#ifdef __AVX512F__
#include "lanes_avx512.h"
#else
#include "lanes_avx2.h"
#endif

namespace {

constexpr long VECTOR = 16;

inline long least(long a, long b) { return a < b ? a : b; }
inline long most(long a, long b) { return a > b ? a : b; }
inline long ceiling(long a, long b) { return (a + b - 1) / b; }

// Runs `body`, which takes a job's tasks by `next`; in this thread alone if `parallel` is null.
template <class Job>
void take(Job& job, void (*body)(void*), long tasks, Parallel parallel, int64_t threads) {
  job.tasks = tasks;
  job.next.store(0);
  if (!parallel || tasks < 2) body(&job);
  else parallel(body, &job, unsigned(threads), 0);
}

// Rounds to nearest and takes subnormal numbers for zero, as VDPBF16PS always does.
struct Rounding {
  const unsigned before = _mm_getcsr();
  Rounding() { _mm_setcsr(0x9fc0); }
  ~Rounding() { _mm_setcsr(before); }
};

inline Lanes power(Lanes x) {  // 2 ** x for x <= 1; error of about one unit in the last place
  x = smaller(all(1.f), x);
  const Lanes whole = nearest(x), f = subtract(x, whole);
  Lanes y = all(1.5403530393381609e-4f);
  for (const float c : {1.3333558146428443e-3f, 9.6181291076284772e-3f, 5.5504108664821580e-2f,
                        2.4022650695910072e-1f, 6.9314718055994531e-1f, 1.f})
    y = fused(y, f, all(c));
  return scaled(y, whole, x);
}

}  // namespace
