// Sixteen floats, or sixteen 32-bit words, in one register of AVX-512.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

using Word = uint32_t;
using Lanes = __m512;

constexpr int ROWS = 6;  // rows of a product that are in registers together
constexpr int WIDE = 4;  // vectors of each such row
constexpr int WIDE_PAIRS =
#ifdef __AVX512BF16__
    4;
#else
    2;
#endif

inline Lanes zero() { return _mm512_setzero_ps(); }
inline Lanes all(float x) { return _mm512_set1_ps(x); }
inline Lanes load(const float* at) { return _mm512_loadu_ps(at); }
inline void store(float* at, Lanes x) { _mm512_storeu_ps(at, x); }
inline Lanes add(Lanes a, Lanes b) { return _mm512_add_ps(a, b); }
inline Lanes subtract(Lanes a, Lanes b) { return _mm512_sub_ps(a, b); }
inline Lanes multiply(Lanes a, Lanes b) { return _mm512_mul_ps(a, b); }
inline Lanes divide(Lanes a, Lanes b) { return _mm512_div_ps(a, b); }
inline Lanes fused(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }
inline Lanes larger(Lanes a, Lanes b) { return _mm512_max_ps(a, b); }
inline Lanes smaller(Lanes a, Lanes b) { return _mm512_min_ps(a, b); }  // b if one is NaN
inline float largest(Lanes x) { return _mm512_reduce_max_ps(x); }
inline float first(Lanes x) { return _mm512_cvtss_f32(x); }
inline Lanes magnitude(Lanes x) { return _mm512_abs_ps(x); }

inline Lanes with_sign(Lanes x, Lanes sign) {
  return _mm512_or_ps(x, _mm512_and_ps(sign, _mm512_set1_ps(-0.f)));
}

inline Lanes canonical(Lanes x) {
  return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q),
                            _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
}

// The bits of the sign of each lane choose.
inline Lanes by_sign(Lanes sign, Lanes positive, Lanes negative) {
  return _mm512_mask_mov_ps(positive, _mm512_movepi32_mask(_mm512_castps_si512(sign)), negative);
}

// Lanes [low, high) of x, and `other` elsewhere.
inline Lanes between(Lanes x, long low, long high, Lanes other) {
  const long above = high >= 16 ? 0xffff : high <= 0 ? 0 : (1L << high) - 1;
  const long below = low >= 16 ? 0xffff : low <= 0 ? 0 : (1L << low) - 1;
  return _mm512_mask_mov_ps(other, __mmask16(above & ~below), x);
}

// Lane i with lane i + 8, then + 4, + 2, + 1.
inline float total(Lanes x) {
  const __m256 y = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  const __m128 w = _mm_add_ps(z, _mm_movehl_ps(z, z));
  return _mm_cvtss_f32(_mm_add_ss(w, _mm_movehdup_ps(w)));
}

// y * 2 ** whole for |whole| small enough; zero where x is below -125.
inline Lanes scaled(Lanes y, Lanes whole, Lanes x) {
  const __m512i shift = _mm512_slli_epi32(_mm512_cvtps_epi32(whole), 23);
  const __mmask16 kept = _mm512_cmp_ps_mask(x, all(-125.f), _CMP_NLT_UQ);
  return _mm512_castsi512_ps(_mm512_maskz_add_epi32(kept, _mm512_castps_si512(y), shift));
}

inline Lanes nearest(Lanes x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT); }

// The right operand of a product, and an element of the left one: floats, or pairs of bfloat16.
#ifdef __AVX512BF16__
using Pairs = __m512i;
using Pair = __m512i;
inline Pairs load_pairs(const Word* at) { return _mm512_loadu_si512(at); }
inline Pair pair(Word a) { return _mm512_set1_epi32(int(a)); }
inline Lanes dot(Lanes c, Pair a, Pairs b) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
inline __m256i rounded(Lanes x) { return (__m256i)_mm512_cvtneps_pbh(x); }
#else  // the same bits: of a pair the odd product is added first
struct Pairs {
  Lanes odd, even;
};
using Pair = Pairs;
inline Pairs parts(__m512i x) {
  return {_mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(int(0xffff0000)))),
          _mm512_castsi512_ps(_mm512_slli_epi32(x, 16))};
}
inline Pairs load_pairs(const Word* at) { return parts(_mm512_loadu_si512(at)); }
inline Pair pair(Word a) { return parts(_mm512_set1_epi32(int(a))); }
inline Lanes dot(Lanes c, const Pair& a, const Pairs& b) {
  return fused(a.even, b.even, fused(a.odd, b.odd, c));
}
inline __m256i rounded(Lanes x) {
  const __m512i i = _mm512_castps_si512(x);
  const __m512i last = _mm512_and_si512(_mm512_srli_epi32(i, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(i, _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(
      _mm512_srli_epi32(_mm512_mask_mov_epi32(up, nan, _mm512_set1_epi32(0x7fc00000)), 16));
}
#endif

inline void store_bfloat16(char* at, Lanes x) { _mm256_storeu_si256((__m256i*)at, rounded(x)); }
inline void store_float16(char* at, Lanes x) {
  _mm256_storeu_si256((__m256i*)at, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

inline Lanes load_bfloat16(const char* at) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline Lanes load_float16(const char* at) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at));
}

// 32 weights as 16 pairs of bfloat16, stored and returned.
inline Pairs store_weights(Word* at, Lanes low, Lanes high) {
#ifdef __AVX512BF16__
  const Pairs made = (__m512i)_mm512_cvtne2ps_pbh(high, low);
  _mm512_storeu_si512(at, made);
  return made;
#else
  const __m512i made = _mm512_inserti64x4(_mm512_castsi256_si512(rounded(low)), rounded(high), 1);
  _mm512_storeu_si512(at, made);
  return parts(made);
#endif
}

// Sixteen words: as they are, or of as many float16.
inline __m512i words(const char* at) { return _mm512_loadu_si512(at); }
inline __m512i halves(const char* at) {
  return _mm512_castps_si512(_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at)));
}
inline void widen(const char* from, float* to) {
  store(to, _mm512_castsi512_ps(halves(from)));
}
inline void store_words(Word* at, __m512i x) { _mm512_store_si512(at, x); }

// Sixteen words of 16 rows, `bytes` behind their beginnings, to rows of out, `stride` words apart.
template <bool HALF>
inline void transpose(const char* const* rows, long bytes, Word* out, long stride) {
  __m512i r[16], t[16];
  UNROLL for (int i = 0; i < 16; i++) r[i] = HALF ? halves(rows[i] + bytes) : words(rows[i] + bytes);
  UNROLL for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  UNROLL for (int i = 0; i < 16; i += 4)
    UNROLL for (int j = 0; j < 2; j++) {
      r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  UNROLL for (int j = 0; j < 4; j++)
    UNROLL for (int i = 0; i < 2; i++) {
      t[8 * i + j] = _mm512_shuffle_i32x4(r[8 * i + j], r[8 * i + j + 4], 0x88);
      t[8 * i + j + 4] = _mm512_shuffle_i32x4(r[8 * i + j], r[8 * i + j + 4], 0xdd);
    }
  UNROLL for (int j = 0; j < 4; j++) {
    r[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
    r[j + 4] = _mm512_shuffle_i32x4(t[j + 4], t[j + 12], 0x88);
    r[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd);
    r[j + 12] = _mm512_shuffle_i32x4(t[j + 4], t[j + 12], 0xdd);
  }
  UNROLL for (int i = 0; i < 16; i++) store_words(out + i * stride, r[i]);
}

// 32 bfloat16 of two rows as 32 pairs.
inline void interleave(const char* low, const char* high, Word* out) {
  alignas(64) static const struct Order {
    uint16_t left[32], right[32];
    constexpr Order() : left(), right() {
      for (uint16_t i = 0; i < 16; i++) {
        left[2 * i] = i;
        left[2 * i + 1] = uint16_t(32 + i);
        right[2 * i] = uint16_t(16 + i);
        right[2 * i + 1] = uint16_t(48 + i);
      }
    }
  } ORDER;
  const __m512i a = words(low), b = words(high);
  store_words(out, _mm512_permutex2var_epi16(a, _mm512_load_si512(ORDER.left), b));
  store_words(out + 16, _mm512_permutex2var_epi16(a, _mm512_load_si512(ORDER.right), b));
}

}  // namespace
