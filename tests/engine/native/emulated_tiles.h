// AMX tiles without AMX: included before a source, it stands in for the compiler's intrinsics.
//
// What each instruction does, and what it refuses, is from Intel's Software Developer's Manual; a
// refused one ends the process, as on a processor. Not seen here: a store that the compiler moves past
// a real load of a tile, whose reads it does not know of, and the system's permission to use tiles.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace emulated {

constexpr int TILES = 8, MOST_ROWS = 16, MOST_BYTES = 64;

struct Tile {
  int rows, bytes;  // as configured
  alignas(64) char data[MOST_ROWS][MOST_BYTES];
};

struct State {
  bool configured;
  Tile tiles[TILES];
};

inline thread_local State state;

inline void need(bool fine) {
  if (!fine) abort();
}

// The number is a part of the instruction.
template <int I>
Tile& tile() {
  static_assert(I >= 0 && I < TILES);
  need(state.configured && state.tiles[I].rows > 0);
  return state.tiles[I];
}

inline void clear(Tile& one) { memset(one.data, 0, sizeof one.data); }

inline void load_configuration(const void* at) {
  const uint8_t *given = (const uint8_t*)at, *rows = given + 48;
  need(given[0] == 1 && given[1] == 0);  // the palette, and where an interrupted load goes on
  for (int i = 2; i < 16; i++) need(given[i] == 0);
  for (int i = 0; i < 16; i++) {
    uint16_t bytes;
    memcpy(&bytes, given + 16 + 2 * i, sizeof bytes);
    need(i < TILES ? rows[i] <= MOST_ROWS && bytes <= MOST_BYTES : !rows[i]);
    need(!rows[i] == !bytes);
    if (i >= TILES) continue;
    state.tiles[i].rows = rows[i];
    state.tiles[i].bytes = bytes;
    clear(state.tiles[i]);
  }
  state.configured = true;
}

inline void release() { state.configured = false; }

inline void load(Tile& to, const void* from, long stride) {
  clear(to);
  for (int row = 0; row < to.rows; row++)
    memcpy(to.data[row], (const char*)from + row * stride, size_t(to.bytes));
}

inline void store(const Tile& from, void* to, long stride) {
  for (int row = 0; row < from.rows; row++)
    memcpy((char*)to + row * stride, from.data[row], size_t(from.bytes));
}

// The even or the odd ones of pairs of bfloat16 as float32.
inline __m512 evens(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline __m512 odds(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000))));
}

// Adds the products of pairs of bfloat16: sums of the even and of the odd ones, then their sum.
inline void add_products(Tile& sums, const Tile& left, const Tile& right) {
  need(&sums != &left && &sums != &right && &left != &right);
  need(sums.rows == left.rows && sums.bytes == right.bytes && right.rows == left.bytes / 4);
  need(left.bytes % 4 == 0 && sums.bytes % 4 == 0);
  const unsigned before = _mm_getcsr();
  _mm_setcsr(0x9fc0);  // subnormal numbers are zero, nearest even, no exceptions
  for (int row = 0; row < sums.rows; row++) {
    __m512 even = _mm512_setzero_ps(), odd = even;
    for (int k = 0; k < right.rows; k++) {
      uint32_t pair;
      memcpy(&pair, left.data[row] + 4 * k, sizeof pair);
      const __m512i pairs = _mm512_load_si512(right.data[k]), x = _mm512_set1_epi32(int(pair));
      even = _mm512_fmadd_ps(evens(x), evens(pairs), even);
      odd = _mm512_fmadd_ps(odds(x), odds(pairs), odd);
    }
    const __m512 sum = _mm512_load_ps(sums.data[row]);
    const __m512 made = _mm512_add_ps(sum, _mm512_add_ps(even, odd));
    const __mmask16 here = __mmask16((1u << sums.bytes / 4) - 1);
    _mm512_store_ps(sums.data[row], _mm512_maskz_mov_ps(here, made));
  }
  _mm_setcsr(before);
}

}  // namespace emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(at) emulated::load_configuration(at)
#define _tile_release() emulated::release()
#define _tile_zero(i) emulated::clear(emulated::tile<i>())
#define _tile_loadd(i, from, stride) emulated::load(emulated::tile<i>(), from, stride)
#define _tile_stored(i, to, stride) emulated::store(emulated::tile<i>(), to, stride)
#define _tile_dpbf16ps(c, a, b) \
  emulated::add_products(emulated::tile<c>(), emulated::tile<a>(), emulated::tile<b>())
