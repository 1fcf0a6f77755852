// The rows of rows.h, one element at a time in plain C++: their definition.
#include "rows.h"
#include "scalar.h"

namespace {

float through(float x, int64_t kind) {  // rounded to the kind
  if (kind == FLOAT32) return x;
  char room[2];
  put(room, 0, x, kind);
  return element(room, 0, kind);
}

struct Squares {  // element i goes to sum i % 16
  float sums[16] = {};
  void add(int64_t i, float x) { sums[i % 16] = fmaf(x, x, sums[i % 16]); }
  float scale(int64_t size, double epsilon) {
    for (const int half : {8, 4, 2, 1})
      for (int i = 0; i < half; i++) sums[i] += sums[i + half];
    return 1.f / sqrtf(sums[0] / float(size) + float(epsilon));
  }
};

void norm(const char* added, char* residual, const char* weight, char* out, int64_t size,
          int64_t kind, double epsilon) {
  Squares squares;
  for (int64_t i = 0; i < size; i++) {
    float x = element(residual, i, kind);
    if (added) {
      x = through(x + element(added, i, kind), kind);
      put(residual, i, x, kind);
    }
    squares.add(i, x);
  }
  const float scale = squares.scale(size, epsilon);
  for (int64_t i = 0; i < size; i++) {
    const float x = through(element(residual, i, kind) * scale, kind);
    put(out, i, x * element(weight, i, kind), kind);
  }
}

void rotate(char* head, const char* angles, const char* weight, int64_t width, int64_t kind,
            double epsilon) {
  float x[WIDEST];
  Squares squares;
  for (int64_t i = 0; i < width; i++) squares.add(i, x[i] = element(head, i, kind));
  const float scale = squares.scale(width, epsilon);
  for (int64_t i = 0; weight && i < width; i++)
    x[i] = through(through(x[i] * scale, kind) * element(weight, i, kind), kind);
  const int64_t half = width / 2;
  for (int64_t i = 0; i < half; i++) {
    const float cosine = element(angles, i, kind), sine = element(angles, half + i, kind);
    const float a = x[i], b = x[half + i];
    put(head, i, through(a * cosine, kind) - through(b * sine, kind), kind);
    put(head, half + i, through(b * cosine, kind) + through(a * sine, kind), kind);
  }
}

float silu(float x) {
  const float e = power(fabsf(x) * float(-LOG2E));
  return x * (std::signbit(x) ? e : 1.f) / (1.f + e);
}

void gate(const char* joint, char* out, int64_t size, int64_t kind) {
  for (int64_t i = 0; i < size; i++)
    put(out, i, through(silu(element(joint, i, kind)), kind) * element(joint, size + i, kind), kind);
}

}  // namespace

int kvrelay_norm(const char* added, char* residual, const char* weight, char* out, int64_t rows,
                 int64_t size, int64_t kind, double epsilon, int64_t threads, Parallel parallel) {
  return each_row<Rounding>(rows, size, {threads, parallel}, [=](long row) {
    const int64_t at = row * size * bytes_of(kind);
    norm(added ? added + at : nullptr, residual + at, weight, out + at, size, kind, epsilon);
  });
}

int kvrelay_rotate(char* joint, const char* angles, const int64_t* positions, const char* weight,
                   int64_t rows, int64_t stride, int64_t heads, int64_t width, int64_t kind,
                   double epsilon, int64_t threads, Parallel parallel) {
  if (width > WIDEST || width % 2) return 1;
  return each_row<Rounding>(rows, heads * width, {threads, parallel}, [=](long row) {
    for (int64_t head = 0; head < heads; head++)
      rotate(joint + (row * stride + head * width) * bytes_of(kind),
             angles + positions[row] * width * bytes_of(kind),
             weight ? weight + head * width * bytes_of(kind) : nullptr, width, kind, epsilon);
  });
}

int kvrelay_gate(const char* joint, char* out, int64_t rows, int64_t size, int64_t kind,
                 int64_t threads, Parallel parallel) {
  return each_row<Rounding>(rows, size, {threads, parallel}, [=](long row) {
    gate(joint + 2 * row * size * bytes_of(kind), out + row * size * bytes_of(kind), size, kind);
  });
}
