// The rows of rows.h in vectors; plain_rows.cpp is their definition.
#include "rows.h"

#include <cmath>

#include "numbers.h"

namespace {

inline float scale_of(Lanes squares, long size, double epsilon) {
  return 1.f / sqrtf(total(squares) / float(size) + float(epsilon));
}

template <int64_t KIND>
void norm(const char* added, char* residual, const char* weight, char* out, long size,
          double epsilon) {
  using N = Numbers<KIND>;
  Lanes squares = zero();
  for (long i = 0; i < size; i += VECTOR) {
    const long at = i * N::BYTES, left = size - i;
    Lanes x = N::read(residual + at, left);
    if (added) {
      x = N::through(add(x, N::read(added + at, left)));
      N::write(residual + at, x, left);
    }
    squares = fused(x, x, squares);
  }
  const Lanes scale = all(scale_of(squares, size, epsilon));
  for (long i = 0; i < size; i += VECTOR) {
    const long at = i * N::BYTES, left = size - i;
    const Lanes x = N::through(multiply(N::read(residual + at, left), scale));
    N::write(out + at, multiply(x, N::read(weight + at, left)), left);
  }
}

template <int64_t KIND>
void rotate(char* head, const char* angles, const char* weight, long width, double epsilon) {
  using N = Numbers<KIND>;
  const long half = width / 2;
  float x[WIDEST + VECTOR];
  Lanes squares = zero();
  for (long i = 0; i < width; i += VECTOR) {
    const Lanes y = N::read(head + i * N::BYTES, width - i);
    squares = fused(y, y, squares);
    store(x + i, y);
  }
  store(x + ceiling(width, VECTOR) * VECTOR, zero());  // read, not used, if half is no multiple of 16
  if (weight) {
    const Lanes scale = all(scale_of(squares, width, epsilon));
    for (long i = 0; i < width; i += VECTOR) {
      const Lanes y = N::through(multiply(load(x + i), scale));
      store(x + i, N::through(multiply(y, N::read(weight + i * N::BYTES, width - i))));
    }
  }
  for (long i = 0; i < half; i += VECTOR) {
    const long at = i * N::BYTES, left = half - i;
    const Lanes a = load(x + i), b = load(x + half + i);
    const Lanes cosine = N::read(angles + at, left);
    const Lanes sine = N::read(angles + half * N::BYTES + at, left);
    const Lanes ac = N::through(multiply(a, cosine)), bs = N::through(multiply(b, sine));
    const Lanes bc = N::through(multiply(b, cosine)), as = N::through(multiply(a, sine));
    N::write(head + at, subtract(ac, bs), left);
    N::write(head + half * N::BYTES + at, add(bc, as), left);
  }
}

template <int64_t KIND>
void gate(const char* joint, char* out, long size) {
  using N = Numbers<KIND>;
  for (long i = 0; i < size; i += VECTOR) {
    const long at = i * N::BYTES, left = size - i;
    const Lanes x = N::read(joint + at, left), up = N::read(joint + size * N::BYTES + at, left);
    const Lanes e = power(multiply(magnitude(x), all(float(-LOG2E))));
    const Lanes silu = divide(multiply(x, by_sign(x, all(1.f), e)), add(all(1.f), e));
    N::write(out + at, multiply(N::through(silu), up), left);
  }
}

template <int64_t KIND>
int norm_rows(const char* added, char* residual, const char* weight, char* out, long rows, long size,
              double epsilon, Team team) {
  const long row_bytes = size * Numbers<KIND>::BYTES;
  return each_row<Rounding>(rows, size, team, [=](long row) {
    const long at = row * row_bytes;
    norm<KIND>(added ? added + at : nullptr, residual + at, weight, out + at, size, epsilon);
  });
}

template <int64_t KIND>
int rotate_rows(char* joint, const char* angles, const int64_t* positions, const char* weight,
                long rows, long stride, long heads, long width, double epsilon, Team team) {
  const long bytes = width * Numbers<KIND>::BYTES;
  return each_row<Rounding>(rows, heads * width, team, [=](long row) {
    for (long head = 0; head < heads; head++)
      rotate<KIND>(joint + row * stride * Numbers<KIND>::BYTES + head * bytes,
                   angles + positions[row] * bytes, weight ? weight + head * bytes : nullptr, width,
                   epsilon);
  });
}

template <int64_t KIND>
int gate_rows(const char* joint, char* out, long rows, long size, Team team) {
  const long row_bytes = size * Numbers<KIND>::BYTES;
  return each_row<Rounding>(rows, size, team, [=](long row) {
    gate<KIND>(joint + 2 * row * row_bytes, out + row * row_bytes, size);
  });
}

}  // namespace

int kvrelay_norm(const char* added, char* residual, const char* weight, char* out, int64_t rows,
                 int64_t size, int64_t kind, double epsilon, int64_t threads, Parallel parallel) {
  const auto run = kind == FLOAT32    ? norm_rows<FLOAT32>
                   : kind == BFLOAT16 ? norm_rows<BFLOAT16>
                                      : norm_rows<FLOAT16>;
  return run(added, residual, weight, out, rows, size, epsilon, {threads, parallel});
}

int kvrelay_rotate(char* joint, const char* angles, const int64_t* positions, const char* weight,
                   int64_t rows, int64_t stride, int64_t heads, int64_t width, int64_t kind,
                   double epsilon, int64_t threads, Parallel parallel) {
  if (width > WIDEST || width % 2) return 1;
  const auto run = kind == FLOAT32    ? rotate_rows<FLOAT32>
                   : kind == BFLOAT16 ? rotate_rows<BFLOAT16>
                                      : rotate_rows<FLOAT16>;
  return run(joint, angles, positions, weight, rows, stride, heads, width, epsilon,
             {threads, parallel});
}

int kvrelay_gate(const char* joint, char* out, int64_t rows, int64_t size, int64_t kind,
                 int64_t threads, Parallel parallel) {
  const auto run = kind == FLOAT32    ? gate_rows<FLOAT32>
                   : kind == BFLOAT16 ? gate_rows<BFLOAT16>
                                      : gate_rows<FLOAT16>;
  return run(joint, out, rows, size, {threads, parallel});
}
