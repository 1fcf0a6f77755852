// Numbers of every kind in plain C++, for the objects that define what a row is.
#pragma once

#include "products.h"

#include <cmath>
#include <cstring>
#include <initializer_list>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

uint32_t bits(float x) {
  uint32_t i;
  memcpy(&i, &x, 4);
  return i;
}

float number(uint32_t i) {
  float x;
  memcpy(&x, &i, 4);
  return x;
}

uint16_t bfloat16(float x) {
  const uint32_t i = bits(x);
  return x != x ? 0x7fc0 : uint16_t((i + (i >> 16 & 1) + 0x7fff) >> 16);
}

float from_half(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16;
  uint32_t exponent = half >> 10 & 31, fraction = half & 0x3ff;
  if (exponent == 31) return number(sign | 0x7f800000 | fraction << 13);
  if (exponent == 0) {
    if (fraction == 0) return number(sign);
    for (exponent = 1; !(fraction & 0x400); exponent--) fraction <<= 1;
    fraction &= 0x3ff;
  }
  return number(sign | (exponent + 112) << 23 | fraction << 13);
}

uint16_t to_half(float x) {
  const uint32_t i = bits(x), sign = i >> 16 & 0x8000, rest = i & 0x7fffffff;
  if (rest > 0x7f800000) return 0x7e00;
  if (rest >= 0x477ff000) return uint16_t(sign | 0x7c00);  // rounds to more than the largest
  const int exponent = int(rest >> 23) - 112;
  if (exponent > 0) return uint16_t(sign | (((rest + (rest >> 13 & 1) + 0xfff) >> 13) - (112 << 10)));
  if (exponent < -10) return uint16_t(sign);
  const uint32_t fraction = (rest & 0x7fffff) | 0x800000;
  const int shift = 14 - exponent;
  const uint32_t half = 1u << (shift - 1), kept = fraction >> shift, lost = fraction & (2 * half - 1);
  return uint16_t(sign | (kept + (lost > half || (lost == half && (kept & 1)))));
}

float element(const char* at, int64_t i, int64_t kind) {
  uint32_t word = 0;
  uint16_t half;
  if (kind == FLOAT32) {
    memcpy(&word, at + 4 * i, 4);
    return number(word);
  }
  memcpy(&half, at + 2 * i, 2);
  return kind == BFLOAT16 ? number(uint32_t(half) << 16) : from_half(half);
}

void put(char* at, int64_t i, float x, int64_t kind) {
  if (kind == FLOAT32) {
    const float y = x != x ? number(0x7fc00000) : x;
    memcpy(at + 4 * i, &y, 4);
    return;
  }
  const uint16_t half = kind == BFLOAT16 ? bfloat16(x) : to_half(x);
  memcpy(at + 2 * i, &half, 2);
}

float power(float x) {  // 2 ** x
  x = x > 1.f ? 1.f : x;
  if (x < -125.f) return 0.f;
  if (x != x) return x;
  const float whole = nearbyintf(x), f = x - whole;
  float y = 1.5403530393381609e-4f;
  for (const float c : {1.3333558146428443e-3f, 9.6181291076284772e-3f, 5.5504108664821580e-2f,
                        2.4022650695910072e-1f, 6.9314718055994531e-1f, 1.f})
    y = fmaf(y, f, c);
  return number(bits(y) + (uint32_t(int(whole)) << 23));
}

// Adds a block of 32 products of bfloat16; a(i) and b(i) are the numbers at place i. The products at
// even places are added up, beginning with zero and with one rounding each, and so are those at odd
// places; then both sums are added, and that to `sum`. The instruction TDPBF16PS does this, and takes
// subnormal numbers for zero everywhere.
template <class A, class B>
float add_block(float sum, const A& a, const B& b) {
  float parts[2] = {};
  for (int64_t i = 0; i < DEPTH; i++) parts[i % 2] = fmaf(a(i), b(i), parts[i % 2]);
  return sum + (parts[0] + parts[1]);
}

struct Rounding {  // as that of lanes.h
#if defined(__x86_64__)
  const unsigned before = _mm_getcsr();
  Rounding() { _mm_setcsr(0x9fc0); }
  ~Rounding() { _mm_setcsr(before); }
#endif
};

}  // namespace
