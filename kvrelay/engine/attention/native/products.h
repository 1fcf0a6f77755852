// Products of rows with a packed weight: one call computes all rows of a step.
//
// out [rows, n] = x [rows, k] times the transpose of weight [n, k], plus a bias; all are bfloat16 or
// all are float32. An element is a float32 sum in an order that depends on neither rows nor threads:
// in bfloat16 over blocks of 32 numbers, each of which is summed first; in float32, and in bfloat16 on
// AVX512-BF16, over runs of 128. The bias is added before the result is rounded. Numbers below the
// smallest normal one are zero. plain_products.cpp is the definition.
//
// A packed weight has zeros in the place of what is beyond n and k. It is made of panels of 32
// columns, a panel of blocks of 32 numbers in ascending order, a block of two tiles of 16 columns,
// a tile of [pair of numbers][column][2] in bfloat16 and of [number][column] in float32.
#pragma once

#include "arguments.h"

constexpr int64_t PAIRS = 3; // a kind beside those of arguments.h
constexpr long DEPTH = 32;   // numbers of a row in a block
constexpr long RUN = 4;      // blocks of a run, whose products are one chain of sums
constexpr long SIDE = 16;    // rows and columns of a tile
constexpr long PANEL = 32;   // columns
constexpr long STEP = 2048;  // bytes of a block of a panel in bfloat16

// `x` is [rows, k], `bias` [n] and may be null, `out` [rows, n]; one thread if `parallel` is null.
// The objects for AMX and AVX512-BF16 have no float32. The plain object's `kind` may be PAIRS, which is
// bfloat16 with the sums of AVX512-BF16. Returns 1 if there is no memory, else 0.
extern "C" __attribute__((visibility("default"))) int kvrelay_product(
    const char* x, const char* packed, const char* bias, char* out, int64_t rows, int64_t n,
    int64_t k, int64_t kind, int64_t threads, Parallel parallel);

// Asks for tiles: 0 if this process may use them, -1 if the processor has none that compute
// bfloat16, else why the system refuses them, as in errno. All threads of the process have them.
extern "C" __attribute__((visibility("default"))) int kvrelay_tiles();
