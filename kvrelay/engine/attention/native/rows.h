// The operations between the matrix products of a decoder: one call computes all rows of a step.
//
// Sums and norms, the rotation of queries and keys, and the gated activation. A row is rounded
// where `transformers` rounds it, and an element depends on its own row only: neither the number of
// rows nor that of threads can change a bit. plain_rows.cpp is the definition.
#pragma once

#include "arguments.h"

#include <atomic>

#define EXPORTED extern "C" __attribute__((visibility("default")))

constexpr long WIDEST = 1024;  // elements of a head that is rotated

// Where the threads of a call are from.
struct Team {
  int64_t threads;
  Parallel parallel;  // null: one thread
};

// residual += added, which may be null; out = the norm of residual times weight. [rows, size]
EXPORTED int kvrelay_norm(const char* added, char* residual, const char* weight, char* out,
                          int64_t rows, int64_t size, int64_t kind, double epsilon,
                          int64_t threads, Parallel parallel);

// Rotates the first `heads` heads of every row in place, after a norm if there is a weight
// [heads, width]. `angles` [positions, 2, width / 2] are cosines and sines.
EXPORTED int kvrelay_rotate(char* joint, const char* angles, const int64_t* positions,
                            const char* weight, int64_t rows, int64_t stride, int64_t heads,
                            int64_t width, int64_t kind, double epsilon, int64_t threads,
                            Parallel parallel);

// out [rows, size] = silu of the first half of joint [rows, 2 size] times the second.
EXPORTED int kvrelay_gate(const char* joint, char* out, int64_t rows, int64_t size, int64_t kind,
                          int64_t threads, Parallel parallel);

namespace {

constexpr long SERIAL_ELEMENTS = 1 << 16;  // not worth waking threads for

template <class Body>
struct Spread {
  const Body* body;
  long rows, step;
  std::atomic<long> next;
};

template <class Body, class Mode>
void take_rows(void* data) {
  Spread<Body>& spread = *(Spread<Body>*)data;
  const Mode mode;
  for (long from; (from = spread.next.fetch_add(spread.step)) < spread.rows;)
    for (long row = from; row < from + spread.step && row < spread.rows; row++) (*spread.body)(row);
}

// body(row) for every row; `Mode` is the rounding of a thread meanwhile.
template <class Mode, class Body>
int each_row(long rows, long elements, Team team, const Body& body) {
  const bool alone = !team.parallel || team.threads < 2 || rows < 2 || rows * elements < SERIAL_ELEMENTS;
  const long step = alone ? rows : (rows + 4 * team.threads - 1) / (4 * team.threads);
  Spread<Body> spread{&body, rows, step, {0}};
  if (alone) take_rows<Body, Mode>(&spread);
  else team.parallel(take_rows<Body, Mode>, &spread, unsigned(team.threads), 0);
  return 0;
}

}  // namespace
