// The forward pass of a decoder in one call: its row kernels, products and attention in turn.
//
// No Python runs between two kernels. In a small model it would take longer than they do, since
// each product drives it out of the caches.
#pragma once

#include <algorithm>

#include "products.h"
#include "rows.h"

struct Norm {
  const char* weight;  // null: none
  double epsilon;
};

struct Weight {
  const char *packed, *bias;  // as kvrelay_product reads them
  int64_t outputs, inputs;
};

struct Layer {
  Norm before_attention, heads, before_mlp;
  Weight qkv, out, gate_up, down;
};

// The kernels that a pass calls, on torch's threads.
struct Kernels {
  decltype(kvrelay_norm)* norm;
  decltype(kvrelay_rotate)* rotate;
  decltype(kvrelay_gate)* gate;
  decltype(kvrelay_attention)* attention;
  decltype(kvrelay_product)* product;
  Parallel parallel;
};

// A joint row of Q, K and V has `queries` heads, then `kv_heads` twice.
struct Decoder {
  Kernels kernels;
  const Layer* layers;
  int64_t layer_count;
  Norm norm;
  Weight head;
  const char *embedding, *angles;  // [vocab, size], [positions, 2, width / 2]
  int64_t vocab, positions, size, queries, kv_heads, width, kind;
  double scale;
};

// Cores that workers share, as process/shared_cores.py has them: `computing` has a byte of each
// worker.
struct Cores {
  const volatile uint8_t* computing;
  int64_t workers, share, most, cores;

  int64_t threads() const {
    int64_t computes = 0;
    for (int64_t i = 0; i < workers; i++) computes += computing[i];
    return std::min(most, std::max(share, cores / std::max<int64_t>(computes, 1)));
  }
};

// A step of `rows` rows, of which `kept` get logits: ascending numbers of rows. `attention` has the
// step's and the pool's part. With `shared` every layer asks for its threads anew. `room` has as many
// bytes as `kvrelay_forward_room` says.
struct Step {
  const Arguments* attention;
  const int64_t *tokens, *positions, *kept_rows;
  int64_t rows, kept;
  char *room, *logits;
  const Cores* shared;  // may be null
};

// Bytes of memory that a forward pass needs for each row.
EXPORTED int64_t kvrelay_forward_room(const Decoder* decoder);

// Returns 0, 1 if a kernel has no memory, 2 for a token or a position that the model has not, 3 for
// rows to keep that do not ascend from 0 to below `rows`.
EXPORTED int kvrelay_forward(const Decoder* decoder, const Step* step);
