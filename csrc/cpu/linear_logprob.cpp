// Forward: tasks are (tile of the vocabulary, some blocks of rows), each one product and one pass while it is in cache;
// the tiles' sums meet in fp64, in order. Backward: by tiles of the vocabulary, so that dW is written once, and groups
// of rows; each tile's logits are computed anew, turned into dz where they lie, and multiplied.
#include "cpu/linear_logprob.h"

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/head_gradient.h"
#include "cpu/logits_tile.h"

namespace fc {
namespace {

constexpr int64_t kGroup = 2048;    // rows that share the sums of all tiles, or one tile of dz
constexpr int64_t kBlock = 512;     // rows of one product
constexpr int64_t kVocab = 2048;    // most rows of the weight in one product,
constexpr int64_t kWide = 2 << 20;  // and most floats of them where they are widened
constexpr int64_t kTasks = 32;      // tasks wanted where the vocabulary is small
constexpr int64_t kInline = 1 << 20;

Cut vocabulary(const Head& head) {
  const int64_t fit = head.weight.is_wide() ? kVocab : kWide / std::max<int64_t>(head.D, 1) / 16 * 16;
  return {head.V, std::clamp<int64_t>(fit, 256, kVocab)};
}

// One worker's fp32 copies of what it multiplies.
struct Widened {
  Floats h, weight;
  Widened(const Head& head, int64_t rows, int64_t vocab)
      : h(uninitialised(head.h.is_wide() && head.N == whole_rows(head.N) ? 0 : rows * head.D)),
        weight(uninitialised(head.weight.is_wide() ? 0 : vocab * head.D)) {}
};

// One row over all tiles, in fp64.
struct RowSums {
  double lse, entropy;
  int64_t top1;

  RowSums(const TileSums* tile, const Cut& tiles) {
    const TileSums* best = tile;
    for (int64_t i = 1; i < tiles.parts; ++i) best = tile[i].top > best->top ? tile + i : best;
    const double top = best->top;
    double mass = 0, spread = 0;
    for (int64_t i = 0; i < tiles.parts; ++i) {
      const double below = tile[i].top - top;
      if (tile[i].top == -std::numeric_limits<float>::infinity()) {
        mass += tile[i].mass;  // 0, or NaN
      } else {
        const double shrink = std::exp(below);
        mass += shrink * tile[i].mass;
        spread += shrink * (tile[i].spread + below * tile[i].mass);
      }
    }
    lse = std::isinf(top) ? (mass == 0 || top > 0 ? top : mass) : top + std::log(mass);
    entropy = std::log(mass) - spread / mass;
    top1 = tiles.begin(best - tile) + best->argmax;
  }
};

void score_group(const Head& head, const int64_t* target, const int64_t* second, const Scores& s, float* logits,
                 int64_t logits_stride, const Pool& pool, const Gemm& gemm) {
  const Cut tiles = vocabulary(head), blocks(head.N, kBlock);
  const Cut shares(blocks.parts, (blocks.parts * tiles.parts + kTasks - 1) / kTasks, 1);  // of a tile's blocks
  std::vector<TileSums> sums(head.N * tiles.parts);
  std::vector<float> at(head.N), at_second(second ? head.N : 0);
  const bool small = head.N * head.V * head.D < kInline;

  pool.run(tiles.parts * shares.parts, small, [&](const auto& next) {
    const Widened widened(head, blocks.size, tiles.size);
    const Floats own = uninitialised(logits ? 0 : blocks.size * row_stride(tiles.size));
    for (int64_t task = next(); task >= 0; task = next()) {
      const int64_t tile = task / shares.parts, share = task % shares.parts, v = tiles.begin(tile);
      const Matrix w = head.weight.rows(v, tiles.length(tile), widened.weight.get());
      for (int64_t b = shares.begin(share); b < shares.begin(share) + shares.length(share); ++b) {
        const int64_t first = blocks.begin(b), rows = blocks.length(b);
        const Matrix h = head.h.rows(first, rows, whole_rows(rows), widened.h.get());
        const LogitsTile t{v, rows, w.rows, logits ? logits + first * logits_stride + v : own.get(),
                           logits ? logits_stride : row_stride(tiles.size)};
        gemm(h, w.transposed(), t.z, t.stride);
        to_logits(head, t, s.entropy, s.top1, &sums[first * tiles.parts + tile], tiles.parts);
        for (int64_t i = 0; i < rows; ++i) {
          const int64_t hit = target[first + i] - v;
          if (hit >= 0 && hit < t.cols) at[first + i] = t.z[i * t.stride + hit];
          if (!second) continue;
          const int64_t other = second[first + i] - v;
          if (other >= 0 && other < t.cols) at_second[first + i] = t.z[i * t.stride + other];
        }
      }
    }
  });

  const Cut pieces(head.N, 64);
  pool.run(pieces.parts, small, [&](const auto& next) {
    for (int64_t p = next(); p >= 0; p = next()) {
      for (int64_t r = pieces.begin(p); r < pieces.begin(p) + pieces.length(p); ++r) {
        const RowSums row(&sums[r * tiles.parts], tiles);
        s.logprob[r] = static_cast<float>(at[r] - row.lse);
        s.lse[r] = row.lse;
        if (s.entropy) s.entropy[r] = static_cast<float>(row.entropy);
        if (second) s.second_logprob[r] = static_cast<float>(at_second[r] - row.lse);
        if (s.top1) s.top1[r] = row.top1;
      }
    }
  });
}

// The rows with an upstream gradient.
std::vector<int64_t> active_rows(const Upstream& u, int64_t n) {
  std::vector<int64_t> rows;
  for (int64_t r = 0; r < n; ++r) {
    if (u.g_logprob[r] != 0 || (u.g_entropy && u.g_entropy[r] != 0)) rows.push_back(r);
  }
  return rows;
}

// dz [rows, tile] of some rows: their logits again, then their gradients in place. h and dz have room for whole_rows.
void recompute(const Head& head, const Matrix& h, const RowGradient* row, int64_t v, int64_t cols, float* dz,
               int64_t stride, const Pool& pool, const Gemm& gemm) {
  const Cut tiles(cols, 512), blocks(h.rows, kBlock);
  pool.run(tiles.parts * blocks.parts, h.rows * cols * head.D < kInline, [&](const auto& next) {
    const Floats widened = uninitialised(head.weight.is_wide() ? 0 : tiles.size * head.D);
    for (int64_t task = next(); task >= 0; task = next()) {
      const int64_t tile = task / blocks.parts, first = blocks.begin(task % blocks.parts), begin = tiles.begin(tile);
      const Matrix w = head.weight.rows(v + begin, tiles.length(tile), widened.get());
      const int64_t rows = blocks.length(task % blocks.parts);
      const LogitsTile t{v + begin, rows, w.rows, dz + first * stride + begin, stride};
      gemm(h.part(first, whole_rows(rows)), w.transposed(), t.z, t.stride);
      to_logits(head, t, false, false, nullptr, 0);
      to_gradient(head, t, row + first, nullptr);
    }
  });
}

}  // namespace

void score(const Head& head, const int64_t* target, const int64_t* second, const Scores& s, float* logits,
           int64_t logits_stride, const Pool& pool, const Gemm& gemm) {
  for (int64_t r = 0; r < head.N; r += kGroup) {
    Head group = head;
    group.N = std::min(kGroup, head.N - r);
    group.h = head.h.from_row(r);
    const auto from = [&](auto* p) { return p ? p + r : nullptr; };
    const Scores part{from(s.logprob), from(s.lse), from(s.entropy), from(s.second_logprob), from(s.top1)};
    score_group(group, target + r, from(second), part, logits ? logits + r * logits_stride : nullptr, logits_stride,
                pool, gemm);
  }
}

void linear_logprob_forward(const Head& head, const int64_t* target, const int64_t* second, const Scores& scores,
                            const Pool& pool, const Gemm& gemm) {
  need_ids("target", target, head.N, head.V);
  if (second) need_ids("second", second, head.N, head.V);
  score(head, target, second, scores, nullptr, 0, pool, gemm);
  for (int64_t r = 0; r < head.N; ++r) need_finite_lse(r, scores.lse[r]);
}

void linear_logprob_backward(const Head& head, const Upstream& u, const HeadGradient& out, const Pool& pool,
                             const Gemm& gemm) {
  need_ids("target", u.target, head.N, head.V);
  const std::vector<int64_t> rows = active_rows(u, head.N);
  const int64_t K = static_cast<int64_t>(rows.size()), D = head.D;
  std::vector<RowGradient> row;
  for (const int64_t r : rows) {
    const bool both = u.g_entropy;
    row.push_back({u.lse[r], both ? u.entropy[r] : 0, u.g_logprob[r], both ? u.g_entropy[r] : 0, u.target[r]});
  }
  const int64_t whole = whole_rows(K);
  const bool in_place = K == head.N && K == whole && head.h.is_wide();
  const Floats copy = uninitialised(in_place ? 0 : whole * D), dh_copy = uninitialised(in_place || !out.dh ? 0 : K * D);
  if (!in_place) head.h.gather(rows.data(), K, copy.get());
  if (!in_place) std::fill_n(copy.get() + K * D, (whole - K) * D, 0.0f);
  const Matrix h = in_place ? head.h.rows(0, K, nullptr) : Matrix{copy.get(), K, D, D, 1};
  float* dh = !out.dh ? nullptr : in_place ? static_cast<float*>(out.dh) : dh_copy.get();

  const Cut tiles = vocabulary(head), groups(K, kGroup);
  const int64_t stride = row_stride(tiles.size);
  const bool dw_wide = head.weight.is_wide();
  const Floats dz = uninitialised(groups.size * stride),
               dw_copy = uninitialised(out.dw && !dw_wide ? tiles.size * D : 0);
  std::vector<double> db(out.db ? tiles.size : 0);
  for (int64_t i = 0; i < tiles.parts; ++i) {
    const int64_t v = tiles.begin(i), cols = tiles.length(i);
    float* dw = !out.dw ? nullptr : dw_wide ? static_cast<float*>(out.dw) + v * D : dw_copy.get();
    std::fill(db.begin(), db.end(), 0.0);
    if (dw && K == 0) std::fill_n(dw, cols * D, 0.0f);
    for (int64_t g = 0; g < groups.parts; ++g) {
      const int64_t first = groups.begin(g);
      const Matrix part = h.part(first, groups.length(g));
      recompute(head, part, row.data() + first, v, cols, dz.get(), stride, pool, gemm);
      add_gradient(head.weight,
                   {dz.get(), stride, part.rows, v, cols, part, dh ? dh + first * D : nullptr, dw,
                    out.db ? db.data() : nullptr, i == 0, g == 0},
                   pool, gemm);
    }
    if (out.dw && !dw_wide) narrow_row(dw, cols * D, element(out.dw, head.weight.type, v * D), head.weight.type);
    if (!out.db) continue;
    const std::vector<float> rounded(db.begin(), db.begin() + cols);
    narrow_row(rounded.data(), cols, element(out.db, out.bias_type, v), out.bias_type);
  }
  if (out.dh && !in_place) scatter(dh, rows.data(), K, D, out.dh, head.h.type, head.N);
}

void need_ids(const char* name, const int64_t* ids, int64_t n, int64_t vocab) {
  if (n == 0) return;
  const auto [low, high] = std::minmax_element(ids, ids + n);
  if (0 <= *low && *high < vocab) return;
  throw std::invalid_argument(std::string(name) + ": got (" + std::to_string(*low) + ", " + std::to_string(*high) +
                              "), need ids in [0, " + std::to_string(vocab) + ")");
}

void need_finite_lse(int64_t row, double lse) {
  if (std::isfinite(lse)) return;
  throw std::invalid_argument("linear_logprob, row " + std::to_string(row) + ": got log-sum-exp " + number(lse) +
                              ", need a finite one");
}

std::string number(double x) {
  return std::isnan(x) ? "nan" : std::isinf(x) ? (x > 0 ? "inf" : "-inf") : std::to_string(x);
}

}  // namespace fc
