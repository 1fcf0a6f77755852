// Sixteen floats, or sixteen 32-bit words, in two registers of AVX2.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

using Word = uint32_t;

struct Lanes {
  __m256 a, b;
};

constexpr int ROWS = 4;  // rows of a product that are in registers together
constexpr int WIDE = 1;  // vectors of each such row
constexpr int WIDE_PAIRS = 1;

inline Lanes zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Lanes all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Lanes load(const float* at) { return {_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)}; }
inline void store(float* at, Lanes x) {
  _mm256_storeu_ps(at, x.a);
  _mm256_storeu_ps(at + 8, x.b);
}
inline Lanes add(Lanes x, Lanes y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Lanes subtract(Lanes x, Lanes y) {
  return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)};
}
inline Lanes multiply(Lanes x, Lanes y) {
  return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}
inline Lanes divide(Lanes x, Lanes y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Lanes fused(Lanes x, Lanes y, Lanes z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Lanes larger(Lanes x, Lanes y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline Lanes smaller(Lanes x, Lanes y) {  // y if one is NaN
  return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)};
}
inline float largest(Lanes x) {
  const __m256 y = _mm256_max_ps(x.a, x.b);
  const __m128 z = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  const __m128 w = _mm_max_ps(z, _mm_movehl_ps(z, z));
  return _mm_cvtss_f32(_mm_max_ss(w, _mm_movehdup_ps(w)));
}
inline float first(Lanes x) { return _mm256_cvtss_f32(x.a); }
inline Lanes masked(Lanes x, __m256 mask) {
  return {_mm256_and_ps(x.a, mask), _mm256_and_ps(x.b, mask)};
}
inline __m256 bits(int x) { return _mm256_castsi256_ps(_mm256_set1_epi32(x)); }
inline Lanes magnitude(Lanes x) { return masked(x, bits(0x7fffffff)); }

inline Lanes with_sign(Lanes x, Lanes sign) {
  const Lanes s = masked(sign, _mm256_set1_ps(-0.f));
  return {_mm256_or_ps(x.a, s.a), _mm256_or_ps(x.b, s.b)};
}

inline __m256 canonical(__m256 x) {
  return _mm256_blendv_ps(x, bits(0x7fc00000), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}
inline Lanes canonical(Lanes x) { return {canonical(x.a), canonical(x.b)}; }

// The bits of the sign of each lane choose.
inline Lanes by_sign(Lanes sign, Lanes positive, Lanes negative) {
  return {_mm256_blendv_ps(positive.a, negative.a, sign.a),
          _mm256_blendv_ps(positive.b, negative.b, sign.b)};
}

inline __m256 between(__m256 x, long low, long high, __m256 other) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i above = _mm256_cmpgt_epi32(_mm256_set1_epi32(int(high)), lane);
  const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(int(low)), lane);
  return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(_mm256_andnot_si256(below, above)));
}
// Lanes [low, high) of x, and `other` elsewhere.
inline Lanes between(Lanes x, long low, long high, Lanes other) {
  return {between(x.a, low, high, other.a), between(x.b, low - 8, high - 8, other.b)};
}

// Lane i with lane i + 8, then + 4, + 2, + 1.
inline float total(Lanes x) {
  const __m256 y = _mm256_add_ps(x.a, x.b);
  const __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  const __m128 w = _mm_add_ps(z, _mm_movehl_ps(z, z));
  return _mm_cvtss_f32(_mm_add_ss(w, _mm_movehdup_ps(w)));
}

inline __m256 scaled(__m256 y, __m256 whole, __m256 x) {
  const __m256i shift = _mm256_slli_epi32(_mm256_cvtps_epi32(whole), 23);
  const __m256 z = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), shift));
  return _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_set1_ps(-125.f), _CMP_LT_OQ), z);
}
// y * 2 ** whole for |whole| small enough; zero where x is below -125.
inline Lanes scaled(Lanes y, Lanes whole, Lanes x) {
  return {scaled(y.a, whole.a, x.a), scaled(y.b, whole.b, x.b)};
}

inline Lanes nearest(Lanes x) {
  constexpr int HOW = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, HOW), _mm256_round_ps(x.b, HOW)};
}

// The right operand of a product of pairs of bfloat16, and an element of the left one; of a pair
// the odd product is added first, as VDPBF16PS does it.
struct Pairs {
  Lanes odd, even;
};
struct Pair {
  __m256 odd, even;
};
inline __m256 odd(__m256i x) {
  return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(int(0xffff0000))));
}
inline __m256 even(__m256i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
inline Pairs load_pairs(const Word* at) {
  const __m256i x = _mm256_loadu_si256((const __m256i*)at);
  const __m256i y = _mm256_loadu_si256((const __m256i*)(at + 8));
  return {{odd(x), odd(y)}, {even(x), even(y)}};
}
inline Pair pair(Word a) {
  const __m256i x = _mm256_set1_epi32(int(a));
  return {odd(x), even(x)};
}
inline Lanes dot(Lanes c, const Pair& a, const Pairs& b) {
  return fused({a.even, a.even}, b.even, fused({a.odd, a.odd}, b.odd, c));
}

// Eight bfloat16.
inline __m128i rounded(__m256 x) {
  const __m256i i = _mm256_castps_si256(canonical(x));
  const __m256i last = _mm256_and_si256(_mm256_srli_epi32(i, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(i, _mm256_add_epi32(last, _mm256_set1_epi32(0x7fff)));
  const __m256i half = _mm256_srli_epi32(up, 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

inline void store_bfloat16(char* at, Lanes x) {
  _mm_storeu_si128((__m128i*)at, rounded(x.a));
  _mm_storeu_si128((__m128i*)(at + 16), rounded(x.b));
}
inline void store_float16(char* at, Lanes x) {
  _mm_storeu_si128((__m128i*)at, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)(at + 16), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}

inline __m256 eight_bfloat16(const char* at) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)at));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline Lanes load_bfloat16(const char* at) { return {eight_bfloat16(at), eight_bfloat16(at + 16)}; }
inline Lanes load_float16(const char* at) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(at + 16)))};
}

// 32 weights as 16 pairs of bfloat16, stored and returned.
inline Pairs store_weights(Word* at, Lanes low, Lanes high) {
  const __m256i x = _mm256_set_m128i(rounded(low.b), rounded(low.a));
  const __m256i y = _mm256_set_m128i(rounded(high.b), rounded(high.a));
  _mm256_storeu_si256((__m256i*)at, x);
  _mm256_storeu_si256((__m256i*)(at + 8), y);
  return {{odd(x), odd(y)}, {even(x), even(y)}};
}

// Eight words: as they are, or of as many float16.
inline __m256i words(const char* at) { return _mm256_loadu_si256((const __m256i*)at); }
inline __m256i halves(const char* at) {
  return _mm256_castps_si256(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at)));
}
inline void widen(const char* from, float* to) {
  store(to, {_mm256_castsi256_ps(halves(from)), _mm256_castsi256_ps(halves(from + 16))});
}
inline void store_words(Word* at, __m256i x) { _mm256_store_si256((__m256i*)at, x); }

template <bool HALF>
inline void transpose_eight(const char* const* rows, long bytes, Word* out, long stride) {
  __m256i r[8], t[8];
  UNROLL for (int i = 0; i < 8; i++) r[i] = HALF ? halves(rows[i] + bytes) : words(rows[i] + bytes);
  UNROLL for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  }
  UNROLL for (int i = 0; i < 8; i += 4)
    UNROLL for (int j = 0; j < 2; j++) {
      r[i + 2 * j] = _mm256_unpacklo_epi64(t[i + j], t[i + j + 2]);
      r[i + 2 * j + 1] = _mm256_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  UNROLL for (int i = 0; i < 4; i++) {
    store_words(out + i * stride, _mm256_permute2x128_si256(r[i], r[i + 4], 0x20));
    store_words(out + (i + 4) * stride, _mm256_permute2x128_si256(r[i], r[i + 4], 0x31));
  }
}

// Sixteen words of 16 rows, `bytes` behind their beginnings, to rows of out, `stride` words apart.
template <bool HALF>
inline void transpose(const char* const* rows, long bytes, Word* out, long stride) {
  constexpr long EIGHT = HALF ? 16 : 32;
  for (int i = 0; i < 16; i += 8) {
    transpose_eight<HALF>(rows + i, bytes, out + i, stride);
    transpose_eight<HALF>(rows + i, bytes + EIGHT, out + i + 8 * stride, stride);
  }
}

// 32 bfloat16 of two rows as 32 pairs.
inline void interleave(const char* low, const char* high, Word* out) {
  for (int i = 0; i < 32; i += 8) {
    const __m256i a = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(low + 2 * i)));
    const __m256i b = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(high + 2 * i)));
    store_words(out + i, _mm256_or_si256(a, _mm256_slli_epi32(b, 16)));
  }
}

}  // namespace
