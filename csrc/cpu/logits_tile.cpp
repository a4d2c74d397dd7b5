#include "cpu/logits_tile.h"

#include <algorithm>
#include <limits>

#include "cpu/simd.h"

namespace fc {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

FC_INLINE f32x16 finish(const Head& head, f32x16 z) {
  if (head.softcap > 0) z = splat(head.softcap) * map<tanh32>(z / splat(head.softcap));
  return head.temperature == 1 ? z : z / splat(head.temperature);
}

// Logits of one row in place, the columns up to whole vectors -inf. Returns the largest.
FC_INLINE float finish_row(const Head& head, const float* bias, int64_t cols, float* z) {
  const int64_t whole = cols / kLanes * kLanes;
  f32x16 top = splat(-kInfinity);
  for (int64_t v = 0; v < whole; v += kLanes) {
    f32x16 x = load(z + v);
    if (bias) x += load(bias + v);
    x = finish(head, x);
    store(z + v, x);
    top = max(x, top);
  }
  if (whole < cols) {
    f32x16 x = load(z + whole, cols - whole);
    if (bias) x += load(bias + whole, cols - whole);
    x = finish(head, x);
    for (int64_t i = cols - whole; i < kLanes; ++i) x[i] = -kInfinity;
    store(z + whole, x);
    top = max(x, top);
  }
  return max(top);
}

FC_INLINE TileSums sum_row(const float* x, int64_t cols, float top, bool spread) {
  const f32x16 base = splat(top > -kInfinity ? top : 0.0f);  // without a finite logit all weights are e^-inf = 0
  f32x16 mass = {}, lean = {};
  for (int64_t v = 0; v < cols; v += kLanes) {
    const f32x16 below = load(x + v) - base, weight = map<exp32>(below);
    mass += weight;
    if (spread) lean += weight > 0 ? weight * below : f32x16{};
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
  const f32x16 slopes = splat(slope), temperature = splat(head.temperature);
  for (int64_t i = 0; i < t.rows; ++i) {
    const RowGradient& r = row[i];
    const float* x = t.z + (source ? source[i] : i) * t.stride;
    float* dz = t.z + i * t.stride;
    const int64_t hit = r.target - t.first;
    const bool inside = hit >= 0 && hit < t.cols;
    const float bend = inside ? 1 - (x[hit] * slope) * (x[hit] * slope) : 0.0f;
    const float high = static_cast<float>(r.lse), low = static_cast<float>(r.lse - high);
    const f32x16 lse = splat(high), rest = splat(low), g = splat(-r.g_logprob), ge = splat(r.g_entropy),
                 entropy = splat(r.entropy);
    const bool with_entropy = r.g_entropy != 0;
    for (int64_t v = 0; v < t.cols; v += kLanes) {
      const f32x16 at = load(x + v), log_p = at - lse - rest, p = map<exp32>(log_p);
      f32x16 d = with_entropy ? p * (g - ge * (log_p + entropy)) : p * g;
      if (slope > 0) d *= 1.0f - (at * slopes) * (at * slopes);
      if (head.temperature != 1) d /= temperature;
      store(dz + v, p > 0 ? d : f32x16{});
    }
    if (inside) dz[hit] += r.g_logprob * bend / head.temperature;
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
