// One pass sums log-ratios by runs of a segment's tokens, in fp64; the second writes each run's constant gradient.
#include "cpu/advantage_regression.h"

#include <cmath>
#include <limits>
#include <vector>

#include "cpu/segments.h"
#include "cpu/simd.h"

namespace fc {
namespace {

// grad[i] is the slope of its run where mask holds and x is not below the floor, else 0.
FC_CLONES void spread(const std::vector<SegmentRun>& runs, const std::vector<float>& slope, const bool* mask,
                      const float* x, float floor, int64_t begin, int64_t end, float* grad) {
  const int64_t first = runs.empty() ? end : runs[0].begin;
  for (int64_t i = begin; i < first; ++i) grad[i] = 0;
  for (const SegmentRun& run : runs) {
    const float g = slope[run.id];
    if (x) {
      for (int64_t i = run.begin; i < run.end; ++i) grad[i] = mask[i] && x[i] >= floor ? g : 0.0f;
    } else {
      for (int64_t i = run.begin; i < run.end; ++i) grad[i] = mask[i] ? g : 0.0f;
    }
  }
}

}  // namespace

RegressionSums advantage_regression(const AdvantageRegression& a, const Pool& pool) {
  const Packed packed{a.T, a.S, a.mask, a.segment_ids, a.advantage};
  const SegmentSums segments = sum_segments(packed, a.logprob, a.anchor, a.floor, pool);
  RegressionSums sums;
  double* v = sums.value;
  std::vector<float> slope(a.S);
  bool bad = segments.bad;
  v[3] = static_cast<double>(segments.floored);
  for (int64_t s = 0; s < a.S; ++s) {
    const int64_t n = segments.count[s];
    if (n == 0) continue;
    const double A = a.advantage[s], log_ratio = segments.sum[s], fit = a.beta * log_ratio, e = fit - A;
    const double norm = a.length_norm == 0 ? 1 : static_cast<double>(a.length_norm == 1 ? n : a.max_length);
    bad |= !std::isfinite(A);
    slope[s] = static_cast<float>(e / norm);
    v[0] += e * e / (2 * a.beta * norm);
    v[1] += static_cast<double>(n);
    v[2] += 1;
    v[4] += e * e;
    v[5] += log_ratio;
    v[6] += log_ratio * log_ratio;
    v[7] += std::fabs(fit);
    v[8] += std::fabs(A);
  }
  if (bad) report_bad_tokens(packed, {{"logprob", a.logprob}, {"anchor", a.anchor}}, a.floor);
  const bool floored = a.floor > -std::numeric_limits<float>::infinity();
  pool.run(packed.blocks(), a.T <= kInlineTokens, [&](const auto& next) {
    for (int64_t b = next(); b >= 0; b = next()) {
      spread(segments.runs[b], slope, a.mask, floored ? a.logprob : nullptr, a.floor, b * kTokenBlock,
             std::min(a.T, (b + 1) * kTokenBlock), a.grad);
    }
  });
  return sums;
}

}  // namespace fc
