// Numbers of every kind as vectors of floats.
#pragma once

#include <cstring>

#include "lanes.h"

namespace {

template <int64_t KIND>
struct Numbers {
  static constexpr long BYTES = bytes_of(KIND);

  static Lanes read(const char* at) {
    if constexpr (KIND == FLOAT32) return load((const float*)at);
    else if constexpr (KIND == BFLOAT16) return load_bfloat16(at);
    else return load_float16(at);
  }
  static void write(char* at, Lanes x) {
    if constexpr (KIND == FLOAT32) store((float*)at, canonical(x));
    else if constexpr (KIND == BFLOAT16) store_bfloat16(at, canonical(x));
    else store_float16(at, canonical(x));
  }
  // Rounded to the kind.
  static Lanes through(Lanes x) {
    if constexpr (KIND == FLOAT32) return x;
    char room[4 * VECTOR];
    write(room, x);
    return read(room);
  }
  // The first `count` of 16, which may be less than one; zeros in the place of the others.
  static Lanes read(const char* at, long count) {
    if (count >= VECTOR) return read(at);
    char room[4 * VECTOR] = {};
    if (count > 0) memcpy(room, at, size_t(BYTES * count));
    return read(room);
  }
  static void write(char* at, Lanes x, long count) {
    if (count >= VECTOR) return write(at, x);
    char room[4 * VECTOR];
    write(room, x);
    memcpy(at, room, size_t(BYTES * count));
  }
};

}  // namespace
