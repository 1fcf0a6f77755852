// The AMX tiles of a thread.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

constexpr long LINE = 64;  // bytes of a row of a tile

class Tiles {
  struct alignas(64) Configuration {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } now;
  bool used = false;

 public:
  Tiles() = default;
  Tiles(const Tiles&) = delete;
  ~Tiles() {
    if (used) _tile_release();
  }

  // Gives tile i so many rows of 64 bytes.
  void configure(const uint8_t (&rows)[8]) {
    if (used && !memcmp(now.rows, rows, sizeof rows)) return;
    for (int i = 0; i < 8; i++) now.bytes[i] = LINE;
    memcpy(now.rows, rows, sizeof rows);
    asm volatile("" ::"r"(&now) : "memory");  // a compiler may think that only its start is read
    _tile_loadconfig(&now);
    used = true;
  }
};

}  // namespace
