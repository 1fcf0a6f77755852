// The order of operations is that of model/native_decoder.py. In the last layer K and V of all rows are
// stored; only the kept rows attend and go on.
#include "forward.h"

#include <cstring>

namespace {

// Elements of the widest rows: `joint` are read by the attention or the activation, `wide` written.
struct Sizes {
  int64_t joint = 0, wide = 0;

  explicit Sizes(const Decoder& model) {
    for (int64_t i = 0; i < model.layer_count; i++) {
      const Layer& layer = model.layers[i];
      joint = std::max({joint, layer.qkv.outputs, layer.gate_up.outputs});
      wide = std::max({wide, layer.out.inputs, layer.down.inputs});
    }
  }
};

constexpr long KEPT = 64;  // bytes of each row for its entry and position, if it is kept: 40 and zeros

struct Pass {
  const Decoder& model;
  const Step& step;
  const Kernels& kernels = model.kernels;
  int64_t threads = step.attention->threads;
  const long bytes = bytes_of(model.kind);
  int64_t rows = step.rows;  // the kept ones alone, from the queries of the last layer on
  const int64_t* positions = step.positions;
  Arguments call = *step.attention;
  bool failed = false;
  int64_t *kept_entries, *kept_positions;
  char *hidden, *normed, *added, *joint, *wide;

  Pass(const Decoder& model, const Step& step) : model(model), step(step) {
    const long size = rows * model.size * bytes;
    kept_entries = (int64_t*)step.room;
    kept_positions = kept_entries + 4 * rows;
    hidden = step.room + rows * KEPT;
    normed = hidden + size;
    added = normed + size;
    joint = added + size;
    wide = joint + rows * Sizes(model).joint * bytes;
    call.group = model.queries / model.kv_heads;
    call.scale = model.scale;
    call.q_head = call.k_head = call.v_head = call.o_head = model.width;
    call.o_row = model.queries * model.width;
  }

  // What a caller got wrong; other memory would be read.
  int wrong() const {
    for (int64_t i = 0; i < rows; i++)
      if (beyond(step.tokens[i], model.vocab) || beyond(step.positions[i], model.positions)) return 2;
    for (int64_t i = 0; i < step.kept; i++)
      if (beyond(step.kept_rows[i], rows) || (i > 0 && step.kept_rows[i] <= step.kept_rows[i - 1]))
        return 3;
    return 0;
  }

  static bool beyond(int64_t number, int64_t end) { return number < 0 || number >= end; }

  void embed() {
    const long size = model.size * bytes;
    for (int64_t i = 0; i < rows; i++)
      memcpy(hidden + i * size, model.embedding + step.tokens[i] * size, size_t(size));
  }

  // hidden += added, if any; normed = the norm of it.
  void normalise(const char* added, const Norm& by) {
    kernels.norm(added, hidden, by.weight, normed, rows, model.size, model.kind, by.epsilon, threads,
                 kernels.parallel);
  }

  void product(const char* x, const Weight& weight, char* out) {
    failed |= kernels.product(x, weight.packed, weight.bias, out, rows, weight.outputs,
                              weight.inputs, model.kind, threads, kernels.parallel) != 0;
  }

  // Rotates `count` heads of each row of a product; the first one has the number `from`.
  void rotate(char* heads, int64_t row, const Norm& norm, int64_t from, int64_t count) {
    const char* weight = norm.weight ? norm.weight + from * model.width * bytes : nullptr;
    failed |= kernels.rotate(heads, model.angles, positions, weight, rows, row, count, model.width,
                             model.kind, norm.epsilon, threads, kernels.parallel) != 0;
  }

  // Stores K and V if there is a key, and attends if there is a query; both have rows of `row`.
  void attention(const char* query, const char* key, int64_t row) {
    call.threads = threads;
    call.query = query;
    call.key = key;
    call.value = key ? key + model.kv_heads * model.width * bytes : nullptr;
    call.out = wide;
    call.q_row = call.k_row = call.v_row = row;
    failed |= kernels.attention(&call) != 0;
  }

  void attend(const Layer& layer) {
    const int64_t row = layer.qkv.outputs;
    product(normed, layer.qkv, joint);
    rotate(joint, row, layer.heads, 0, model.queries + model.kv_heads);
    attention(joint, joint + model.queries * model.width * bytes, row);
  }

  // As `attend`, but only the kept rows attend: first K and V of all rows, then Q of these.
  void attend_kept(const Layer& layer) {
    const int64_t queries = model.queries * model.width, whole = queries / PANEL * PANEL;
    const Weight later = columns(layer.qkv, whole, layer.qkv.outputs);
    char* key = joint + (queries - whole) * bytes;
    product(normed, later, joint);
    rotate(key, later.outputs, layer.heads, model.queries, model.kv_heads);
    attention(nullptr, key, later.outputs);
    keep();
    product(normed, columns(layer.qkv, 0, queries), joint);
    rotate(joint, queries, layer.heads, 0, model.queries);
    attention(joint, nullptr, queries);
  }

  // Columns of a weight from the first one of a panel on.
  Weight columns(const Weight& all, int64_t from, int64_t end) const {
    const int64_t deep = (all.inputs + DEPTH - 1) / DEPTH * DEPTH;
    const char* bias = all.bias ? all.bias + from * bytes : nullptr;
    return {all.packed + from * deep * bytes, bias, end - from, all.inputs};
  }

  // Moves the kept rows to the front, each with an entry of its own.
  void keep() {
    const long size = model.size * bytes;
    const int64_t* of = call.entries;
    for (int64_t i = 0; i < step.kept; i++) {
      const int64_t row = step.kept_rows[i];
      while (row >= of[0] + of[2]) of += 4;
      const int64_t entry[] = {i, of[1] + row - of[0], 1, of[3]};
      memcpy(kept_entries + 4 * i, entry, sizeof entry);
      kept_positions[i] = positions[row];
      memmove(hidden + i * size, hidden + row * size, size_t(size));
      memmove(normed + i * size, normed + row * size, size_t(size));
    }
    rows = step.kept;
    call.n = rows;
    call.entries = kept_entries;
    positions = kept_positions;
  }

  int run() {
    if (const int code = wrong()) return code;
    embed();
    const char* sum = nullptr;  // of a layer, not yet added
    for (int64_t number = 0; number < model.layer_count && !failed; number++) {
      const Layer& layer = model.layers[number];
      if (step.shared) threads = step.shared->threads();
      call.layer = number;
      normalise(sum, layer.before_attention);
      const bool last = number == model.layer_count - 1;
      if (last && step.kept < rows) attend_kept(layer);
      else attend(layer);
      product(wide, layer.out, added);
      normalise(added, layer.before_mlp);
      product(normed, layer.gate_up, joint);
      kernels.gate(joint, wide, rows, layer.down.inputs, model.kind, threads, kernels.parallel);
      product(wide, layer.down, added);
      sum = added;
    }
    normalise(sum, model.norm);
    product(normed, model.head, step.logits);
    return failed;
  }
};

}  // namespace

int64_t kvrelay_forward_room(const Decoder* decoder) {
  const Sizes sizes(*decoder);
  return KEPT + bytes_of(decoder->kind) * (3 * decoder->size + sizes.joint + sizes.wide);
}

int kvrelay_forward(const Decoder* decoder, const Step* step) { return Pass(*decoder, *step).run(); }
