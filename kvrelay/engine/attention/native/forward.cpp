// The order of operations is that of model/native_decoder.py.
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

struct Pass {
  const Decoder& model;
  const Step& step;
  const Kernels& kernels = model.kernels;
  int64_t threads = step.attention->threads;
  const long bytes = bytes_of(model.kind);
  int64_t rows = step.rows;  // the kept ones alone, from the last attention on
  bool failed = false;
  char *hidden = step.room, *normed, *added, *joint, *wide;

  Pass(const Decoder& model, const Step& step) : model(model), step(step) {
    const long size = rows * model.size * bytes;
    normed = hidden + size;
    added = normed + size;
    joint = added + size;
    wide = joint + rows * Sizes(model).joint * bytes;
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

  void attend(int64_t layer, const Weight& qkv, const Norm& heads) {
    const int64_t turning = model.queries + model.kv_heads;
    failed |= kernels.rotate(joint, model.angles, step.positions, heads.weight, rows, qkv.outputs,
                             turning, model.width, model.kind, heads.epsilon, threads,
                             kernels.parallel) != 0;
    Arguments& call = *step.attention;
    call.layer = layer;
    call.group = model.queries / model.kv_heads;
    call.scale = model.scale;
    call.query = joint;
    call.key = call.query + bytes * model.width * model.queries;
    call.value = call.key + bytes * model.width * model.kv_heads;
    call.out = wide;
    call.q_row = call.k_row = call.v_row = qkv.outputs;
    call.q_head = call.k_head = call.v_head = call.o_head = model.width;
    call.o_row = model.queries * model.width;
    failed |= kernels.attention(&call) != 0;
  }

  // Moves the kept rows to the front.
  void keep(char* all, long size) {
    for (int64_t i = 0; i < step.kept; i++)
      memmove(all + i * size * bytes, all + step.kept_rows[i] * size * bytes, size_t(size * bytes));
  }

  int run() {
    if (const int code = wrong()) return code;
    embed();
    const char* sum = nullptr;  // of a layer, not yet added
    for (int64_t number = 0; number < model.layer_count && !failed; number++) {
      const Layer& layer = model.layers[number];
      if (step.shared) threads = step.attention->threads = step.shared->threads();
      normalise(sum, layer.before_attention);
      product(normed, layer.qkv, joint);
      attend(number, layer.qkv, layer.heads);
      if (number == model.layer_count - 1) {  // nothing reads its other rows
        keep(wide, layer.out.inputs);
        keep(hidden, model.size);
        rows = step.kept;
      }
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
  return bytes_of(decoder->kind) * (3 * decoder->size + sizes.joint + sizes.wide);
}

int kvrelay_forward(const Decoder* decoder, const Step* step) { return Pass(*decoder, *step).run(); }
