// The arguments of every object of the attention kernel; library.py has the same structure.
#pragma once

#include <cstdint>

constexpr int64_t REVISION = 3;  // of the definition of rows: a change of any bit is a new one

constexpr int64_t FLOAT32 = 0;
constexpr int64_t BFLOAT16 = 1;
constexpr int64_t FLOAT16 = 2;
constexpr long bytes_of(int64_t kind) { return kind == FLOAT32 ? 4 : 2; }

constexpr long TILE = 64;      // keys of a tile
constexpr long SEGMENT = 512;  // keys whose weights share one running maximum
constexpr double LOG2E = 1.4426950408889634;

// Runs body(data) once on each of `threads` threads, as GOMP_parallel does.
using Parallel = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);

// Strides are in elements; the elements of one head lie side by side.
struct Arguments {
  // Of a call: arguments.py packs them in one piece.
  int64_t layer, group;
  double scale;
  const char* query;  // [row, kv head * group + member, dim]; null: only store
  const char* key;    // [row, kv head, dim]: stored before anything is read; may be null
  const char* value;
  char* out;
  int64_t q_row, q_head, k_row, k_head, v_row, v_head, o_row, o_head;
  // Of a step.
  const int64_t* entries;  // [n][first row, first position, positions, offset in tables]
  const int32_t* tables;   // the numbers of the blocks of all entries
  int64_t n, threads;
  // Of a pool and its model.
  char* pool;
  Parallel parallel;   // null: one thread
  const float* sinks;  // a logit of each query head that has no value; may be null
  int64_t window;      // keys that a row sees, its own included; 0: all
  double softcap;      // 0: none
  int64_t kind, block_size, kv_heads, dim;
  int64_t tiles;  // 1: the plain object adds products of bfloat16 as AMX tiles do
  int64_t s_block, s_layer, s_kv, s_pos, s_head;
};

extern "C" __attribute__((visibility("default"))) int kvrelay_attention(const Arguments* arguments);
