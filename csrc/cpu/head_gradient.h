// The products of a head's backward pass, given the gradient of its products z.
#pragma once

#include <cstdint>

#include "cpu/head.h"
#include "cpu/parallel.h"

namespace fc {

// dz [rows, cols] (rows `stride` apart) belongs to rows h [rows, D] and to `cols` rows of the weight from `first` on.
struct TileGradient {
  const float* dz;
  int64_t stride, rows, first, cols;
  Matrix h;
  float* dh;            // [rows, D] += dz W, or null
  float* dw;            // [cols, D] += dz^T h, or null
  double* db;           // [cols] += column sums of dz, or null
  bool new_dh, new_dw;  // = instead of +=
};
void add_gradient(const Table& weight, const TileGradient& tile, const Pool& pool, const Gemm& gemm);

}  // namespace fc
