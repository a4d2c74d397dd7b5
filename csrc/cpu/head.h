// The LM head as CPU operators see it: matrices of either type, the caller's matrix product, and how work is cut.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>

#include "common/types.h"
#include "cpu/scratch.h"

namespace fc {

// What a product reads.
struct Matrix {
  const float* data;
  int64_t rows, cols, row_stride, col_stride;
  Matrix transposed() const { return {data, cols, rows, col_stride, row_stride}; }
  Matrix part(int64_t first, int64_t n) const { return {data + first * row_stride, n, cols, row_stride, col_stride}; }
};

// c [a.rows, b.cols] = a b, rows of c c_stride apart. Threads of the pool call it at once, each for itself: what it
// computes may depend on the shapes alone.
using Gemm = std::function<void(const Matrix& a, const Matrix& b, float* c, int64_t c_stride)>;

// Rows of a product of which each should have the bits that it has in any other block: torch's products round a row by
// the number of all, in classes, and multiples of 16 are in one.
inline int64_t whole_rows(int64_t n) { return (n + 15) / 16 * 16; }

// [0, total) in parts of at most `limit` (a multiple of `unit`), as equal as multiples of `unit` can be.
struct Cut {
  int64_t total, size, parts;
  Cut(int64_t total, int64_t limit, int64_t unit = 16) : total(total) {
    const int64_t wanted = std::max<int64_t>(1, (total + limit - 1) / limit);
    size = std::max(unit, ((total + wanted - 1) / wanted + unit - 1) / unit * unit);
    parts = (total + size - 1) / size;
  }
  int64_t begin(int64_t i) const { return i * size; }
  int64_t length(int64_t i) const { return std::min(size, total - i * size); }
};

// How far apart rows of n floats lie in a buffer: whole vectors, but not 2^k floats, since products walk down columns
// and these would meet in one cache set.
inline int64_t row_stride(int64_t n) {
  const int64_t whole = (n + 15) / 16 * 16;
  return whole % 256 ? whole : whole + 16;
}

// Rows of float32 or bfloat16, `stride` elements apart.
struct Table {
  const void* data;
  Type type;
  int64_t cols, stride;

  bool is_wide() const { return type == Type::kFloat32; }
  Table columns(int64_t first, int64_t n) const;
  Table from_row(int64_t first) const;
  // Rows [first, first + n) as fp32: where they lie, or widened into scratch [n, cols].
  Matrix rows(int64_t first, int64_t n, float* scratch) const { return rows(first, n, n, scratch); }
  // The same, then rows of zeros up to `padded` in all, which are made in scratch [padded, cols].
  Matrix rows(int64_t first, int64_t n, int64_t padded, float* scratch) const;
  // Row index[i] as fp32 into out[i], for n rows of cols each.
  void gather(const int64_t* index, int64_t n, float* out) const;
};

void widen_row(const void* from, Type type, int64_t n, float* to);
void narrow_row(const float* from, int64_t n, void* to, Type type);
// Rows of cols each into rows index[i] of out [rows, cols], zeros into all others.
void scatter(const float* from, const int64_t* index, int64_t n, int64_t cols, void* out, Type type, int64_t rows);
inline int64_t size_of(Type type) { return type == Type::kFloat32 ? 4 : 2; }
inline char* element(void* data, Type type, int64_t i) { return static_cast<char*>(data) + i * size_of(type); }

// z = h W^T + bias; softcap c > 0: z = c tanh(z / c); x = z / temperature are the logits of the softmax.
struct Head {
  Table h, weight;    // [N, D], [V, D]
  const float* bias;  // [V] or null
  int64_t N, D, V;
  float temperature, softcap;  // softcap 0: off
};

// Where gradients end, each in the type of what it belongs to; null where nobody asks.
struct HeadGradient {
  void *dh, *dw, *db;  // [N, D], [V, D], [V], contiguous
  Type bias_type;
};

}  // namespace fc
