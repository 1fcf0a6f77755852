// The order of operations is that of model/native_decoder.py.
#include "forward.h"

#include <cstring>

namespace {

struct Pass {
  const Decoder& model;
  const Step& step;
  const Kernels& kernels = model.kernels;
  const int64_t threads = step.attention->threads;
  const long bytes = model.kind == FLOAT32 ? 4 : 2;
  int64_t rows = step.rows;  // the kept ones alone, from the last attention on
  bool failed = false;

  void norm(const char* added, const Norm& norm) {
    kernels.norm(added, step.hidden, norm.weight, step.normed, rows, model.size, model.kind,
                 norm.epsilon, threads, kernels.parallel);
  }

  void product(const char* x, const Weight& weight, char* out) {
    failed |= kernels.product(x, weight.packed, weight.bias, out, rows, weight.columns,
                              weight.numbers, threads, kernels.parallel) != 0;
  }

  void attend(int64_t layer, const Weight& qkv, const Norm& heads) {
    const int64_t turning = model.queries + model.kv_heads;
    kernels.rotate(step.joint, model.angles, step.positions, heads.weight, rows, qkv.columns,
                   turning, model.width, model.kind, heads.epsilon, threads, kernels.parallel);
    Arguments& call = *step.attention;
    call.layer = layer;
    call.group = model.queries / model.kv_heads;
    call.scale = model.scale;
    call.query = step.joint;
    call.key = call.query + bytes * model.width * model.queries;
    call.value = call.key + bytes * model.width * model.kv_heads;
    call.out = step.wide;
    call.q_row = call.k_row = call.v_row = qkv.columns;
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
    const char* added = nullptr;
    for (int64_t number = 0; number < model.count && !failed; number++) {
      const Layer& layer = model.layers[number];
      norm(added, layer.before_attention);
      product(step.normed, layer.qkv, step.joint);
      attend(number, layer.qkv, layer.heads);
      if (number == model.count - 1) {  // nothing reads its other rows
        keep(step.wide, layer.out.numbers);
        keep(step.hidden, model.size);
        rows = step.kept;
      }
      product(step.wide, layer.out, step.added);
      norm(step.added, layer.before_mlp);
      product(step.normed, layer.gate_up, step.joint);
      kernels.gate(step.joint, step.wide, rows, layer.down.numbers, model.kind, threads,
                   kernels.parallel);
      product(step.wide, layer.down, step.added);
      added = step.added;
    }
    norm(added, model.norm);
    product(step.normed, model.head, step.logits);
    return failed;
  }
};

}  // namespace

int kvrelay_forward(const Decoder* decoder, const Step* step) { return Pass{*decoder, *step}.run(); }
