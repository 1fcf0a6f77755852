// The forward pass of a decoder in one call: its row kernels, products and attention in turn.
//
// Between the kernels no other code runs. Python between them takes longer than they do in a small
// model: the weights have driven it out of the caches.
#pragma once

#include "products.h"
#include "rows.h"

struct Norm {
  const char* weight;  // null: none
  double epsilon;
};

struct Weight {
  const char *packed, *bias;  // as kvrelay_product reads them
  int64_t columns, numbers;
};

struct Layer {
  Norm before_attention, heads, before_mlp;
  Weight qkv, out, gate_up, down;
};

// The kernels that a pass calls, all with torch's threads.
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
  int64_t count;  // of layers
  Norm norm;
  Weight head;
  const char *embedding, *angles;  // [vocab, size], [positions, 2, width / 2]
  int64_t vocab, size, queries, kv_heads, width, kind;
  double scale;
};

// A step of `rows` rows, of which `kept` get logits: ascending numbers of rows. `attention` has the
// step's and the pool's part. `room` has as many bytes as `kvrelay_forward_room` says.
struct Step {
  Arguments* attention;
  const int64_t *tokens, *positions, *kept_rows;
  int64_t rows, kept;
  char *room, *logits;
};

// Bytes of memory that a forward pass needs for each row.
EXPORTED int64_t kvrelay_forward_room(const Decoder* decoder);

// Returns 0, 1 if a kernel has no memory, 2 for a token beyond the embedding.
EXPORTED int kvrelay_forward(const Decoder* decoder, const Step* step);
