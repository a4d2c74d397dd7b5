// One queue of independent products, each of a shape that depends on the tile alone: blocks of dh, which run over the
// whole tile of the vocabulary, then blocks of dW. No two write the same place, so nothing depends on who runs them.
#include "cpu/head_gradient.h"

#include <algorithm>

#include "cpu/simd.h"

namespace fc {
namespace {

constexpr int64_t kRows = 256;    // rows of h, and
constexpr int64_t kCols = 512;    // columns of h in one block of dh
constexpr int64_t kDepth = 2048;  // rows of the weight in one of its products
constexpr int64_t kVocab = 512;   // rows of the weight in one block of dW
constexpr int64_t kInline = 1 << 20;

FC_CLONES void add_rows(const float* from, int64_t rows, int64_t cols, float* to, int64_t stride) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t d = 0; d < cols; ++d) to[i * stride + d] += from[i * cols + d];
  }
}

// out[v] += sum of column v, in fp32 over 64 rows and in fp64 beyond.
FC_CLONES void sum_columns(const float* dz, int64_t stride, int64_t rows, int64_t cols, double* out) {
  float part[kVocab];
  for (int64_t r = 0; r < rows; r += 64) {
    std::fill_n(part, cols, 0.0f);
    for (int64_t i = r; i < std::min(rows, r + 64); ++i) {
      for (int64_t v = 0; v < cols; ++v) part[v] += dz[i * stride + v];
    }
    for (int64_t v = 0; v < cols; ++v) out[v] += part[v];
  }
}

// c = a b, or c += a b by way of `sum`.
void multiply(const Gemm& gemm, const Matrix& a, const Matrix& b, bool add, float* sum, float* c, int64_t stride) {
  if (!add) return gemm(a, b, c, stride);
  gemm(a, b, sum, b.cols);
  add_rows(sum, a.rows, b.cols, c, stride);
}

}  // namespace

void add_gradient(const Table& weight, const TileGradient& t, const Pool& pool, const Gemm& gemm) {
  const int64_t D = weight.cols;
  const Cut rows(t.dh ? t.rows : 0, kRows), cols(D, kCols), depth(t.cols, kDepth), vocab(t.cols, kVocab);
  const int64_t blocks = rows.parts * cols.parts, tasks = blocks + (t.dw || t.db ? vocab.parts : 0);
  const int64_t dh_sum = std::min(rows.size, rows.total) * cols.size, dw_sum = t.dw ? vocab.size * D : 0;
  const int64_t wide = weight.is_wide() || !t.dh ? 0 : depth.size * cols.size;
  pool.run(tasks, t.rows * t.cols * D < kInline, [&](const auto& next) {
    const Floats sum = uninitialised(std::max(dh_sum, dw_sum)), widened = uninitialised(wide);
    for (int64_t task = next(); task >= 0; task = next()) {
      if (task < blocks) {
        const int64_t r = task / cols.parts, n = rows.length(r), c = task % cols.parts, at = cols.begin(c);
        const Table w = weight.columns(at, cols.length(c));
        for (int64_t k = 0; k < depth.parts; ++k) {
          const Matrix part = w.rows(t.first + depth.begin(k), depth.length(k), widened.get());
          const Matrix left{t.dz + rows.begin(r) * t.stride + depth.begin(k), n, depth.length(k), t.stride, 1};
          multiply(gemm, left, part, k > 0 || !t.new_dh, sum.get(), t.dh + rows.begin(r) * D + at, D);
        }
      } else {
        const int64_t v = vocab.begin(task - blocks), n = vocab.length(task - blocks);
        const Matrix left{t.dz + v, t.rows, n, t.stride, 1};
        if (t.dw) multiply(gemm, left.transposed(), t.h, !t.new_dw, sum.get(), t.dw + v * D, D);
        if (t.db) sum_columns(left.data, t.stride, t.rows, n, t.db + v);
      }
    }
  });
}

}  // namespace fc
