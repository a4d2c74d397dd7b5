// The vectorised passes over a tile of the head's products: to logits and their softmax sums, and to their gradients.
#pragma once

#include <cstdint>

#include "cpu/head.h"

namespace fc {

constexpr int64_t kVector = 16;  // a tile's rows have room for whole vectors: columns beyond the last are written

// One row within one tile: its largest logit, sum of e^(x - top), sum of (x - top) e^(x - top), and where the top is.
struct TileSums {
  float top, mass, spread;
  int32_t argmax;
};

// Products z [rows, cols] of the vocabulary from `first` on become logits x in place; sums[i * sums_stride] are those
// of row i (null: not asked), the spread and the argmax only where asked for.
struct LogitsTile {
  int64_t first, rows, cols;
  float* z;
  int64_t stride;
};
void to_logits(const Head& head, const LogitsTile& tile, bool spread, bool argmax, TileSums* sums, int64_t sums_stride);

// What a row's gradient needs: its log-sum-exp (whose fp32 rounding would scale the whole row) and entropy, and the
// upstream gradients of log-prob and entropy.
struct RowGradient {
  double lse;
  float entropy, g_logprob, g_entropy;
  int64_t target;
};

// Logits become gradients of the products in place. Row i is made of the logits in row source[i] >= i (null: i).
void to_gradient(const Head& head, const LogitsTile& tile, const RowGradient* row, const int64_t* source);

}  // namespace fc
