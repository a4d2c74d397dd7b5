#include "cpu/logits_tile.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "cpu/simd.h"

namespace fc {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Elements of one step. What is done to each is a plain loop over arrays that do not overlap: GCC makes vectors of the
// machine's width of it, but scalars of exp32 over the lanes of a wider one.
constexpr int64_t kStep = 64;

// Logits of one row in place, the columns up to whole vectors -inf. Returns the largest.
FC_INLINE float finish_row(const Head& head, const float* bias, int64_t cols, float* z) {
  const float cap = head.softcap, temperature = head.temperature;
  if (bias) {
    for (int64_t v = 0; v < cols; ++v) z[v] += bias[v];
  }
  if (cap > 0) {
    for (int64_t v = 0; v < cols; ++v) z[v] = cap * tanh32(z[v] / cap);
  }
  if (temperature != 1) {
    for (int64_t v = 0; v < cols; ++v) z[v] /= temperature;
  }
  f32x16 top = splat(-kInfinity);
  for (int64_t v = cols; v % kVector; ++v) z[v] = -kInfinity;
  for (int64_t v = 0; v < cols; v += kVector) top = max(load(z + v), top);
  return max(top);
}

FC_INLINE TileSums sum_row(const float* x, int64_t cols, float top, bool spread) {
  const float base = top > -kInfinity ? top : 0.0f;  // without a finite logit all weights are e^-inf = 0
  f32x16 mass = {}, lean = {};
  for (int64_t v = 0; v < cols; v += kStep) {
    float weight[kStep], leans[kStep];
    const int64_t n = std::min(kStep, (cols - v + kVector - 1) / kVector * kVector);
    for (int64_t i = 0; i < n; ++i) weight[i] = exp32(x[v + i] - base);
    for (int64_t i = 0; i < n; i += kVector) mass += load(weight + i);
    if (!spread) continue;
    for (int64_t i = 0; i < n; ++i) leans[i] = weight[i] > 0 ? weight[i] * (x[v + i] - base) : 0.0f;
    for (int64_t i = 0; i < n; i += kVector) lean += load(leans + i);
  }
  return {top, sum(mass), spread ? sum(lean) : 0.0f, -1};
}

FC_CLONES void finish_tile(const Head& head, const LogitsTile& t, bool spread, bool argmax, TileSums* sums,
                           int64_t sums_stride) {
  for (int64_t i = 0; i < t.rows; ++i) {
    float* x = t.z + i * t.stride;
    const float top = finish_row(head, head.bias ? head.bias + t.first : nullptr, t.cols, x);
    if (!sums) continue;
    TileSums& row = sums[i * sums_stride];
    row = sum_row(x, t.cols, top, spread);
    if (argmax) row.argmax = static_cast<int32_t>(std::find(x, x + t.cols, top) - x);
  }
}

FC_CLONES void differentiate(const Head& head, const LogitsTile& t, const RowGradient* row, const int64_t* source) {
  const float slope = head.softcap > 0 ? head.temperature / head.softcap : 0.0f;  // x to tanh(z / c)
  const float temperature = head.temperature;
  for (int64_t i = 0; i < t.rows; ++i) {
    const RowGradient& r = row[i];
    const float* x = t.z + (source ? source[i] : i) * t.stride;
    float* dz = t.z + i * t.stride;
    const int64_t hit = r.target - t.first;
    const bool inside = hit >= 0 && hit < t.cols;
    // without a soft cap x may be -inf, and -inf times a slope of 0 NaN
    const float bend = inside && slope > 0 ? 1 - (x[hit] * slope) * (x[hit] * slope) : 1.0f;
    const float high = static_cast<float>(r.lse), low = static_cast<float>(r.lse - high);
    const float g = r.g_logprob, ge = r.g_entropy, entropy = r.entropy;
    for (int64_t v = 0; v < t.cols; v += kStep) {
      float at[kStep], log_p[kStep], p[kStep], d[kStep];
      const int64_t n = std::min(kStep, (t.cols - v + kVector - 1) / kVector * kVector);
      std::memcpy(at, x + v, n * sizeof(float));
      for (int64_t k = 0; k < n; ++k) log_p[k] = at[k] - high - low;
      for (int64_t k = 0; k < n; ++k) p[k] = exp32(log_p[k]);
      if (ge == 0) {
        for (int64_t k = 0; k < n; ++k) d[k] = p[k] * -g;
      } else {
        for (int64_t k = 0; k < n; ++k) d[k] = p[k] > 0 ? p[k] * (-g - ge * (log_p[k] + entropy)) : 0.0f;
      }
      if (slope > 0) {
        for (int64_t k = 0; k < n; ++k) d[k] *= p[k] > 0 ? 1 - (at[k] * slope) * (at[k] * slope) : 0.0f;
      }
      if (temperature != 1) {
        for (int64_t k = 0; k < n; ++k) d[k] /= temperature;
      }
      std::memcpy(dz + v, d, n * sizeof(float));
    }
    if (inside) dz[hit] += g * bend / temperature;
  }
}

}  // namespace

void to_logits(const Head& head, const LogitsTile& tile, bool spread, bool argmax, TileSums* sums,
               int64_t sums_stride) {
  finish_tile(head, tile, spread, argmax, sums, sums_stride);
}

void to_gradient(const Head& head, const LogitsTile& tile, const RowGradient* row, const int64_t* source) {
  differentiate(head, tile, row, source);
}

}  // namespace fc
