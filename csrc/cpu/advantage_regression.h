// advantage_regression on CPU: squared error of each segment's summed log-ratio against its advantage.
#pragma once

#include <cstdint>

#include "cpu/parallel.h"

namespace fc {

struct AdvantageRegression {
  int64_t T, S;
  const float *logprob, *anchor;  // [T]
  const float* advantage;         // [S]
  const bool* mask;               // [T]: False tokens count nowhere, whatever they hold
  const int64_t* segment_ids;     // [T], any order
  double beta;
  int length_norm;  // what divides a segment's loss: 0 nothing, 1 its kept tokens, 2 max_length
  int64_t max_length;
  float floor;  // of logprob and anchor; -inf: none
  float* grad;  // [T]
};

// 0 loss (sum over segments), 1 tokens, 2 segments, 3 floored tokens, 4 e^2, 5 Lambda, 6 Lambda^2, 7 |beta Lambda|,
// 8 |A|, with e = beta Lambda - A and Lambda the sum of logprob - anchor over a segment's kept tokens.
struct RegressionSums {
  double value[9] = {};
};

// Throws std::invalid_argument for a kept token with a value that is not finite or a segment that is not there.
RegressionSums advantage_regression(const AdvantageRegression& a, const Pool& pool);

}  // namespace fc
