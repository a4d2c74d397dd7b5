// policy_loss on CPU: value, gradient and metrics of the clipped policy-gradient family in one pass over packed tokens.
#pragma once

#include <cstdint>
#include <limits>

#include "cpu/parallel.h"

namespace fc {

// Token-level settings. form: 0 clip, 1 cispo, 2 reinforce. kl: 1, 2 or 3. dual_clip 0: none.
struct PolicyTerms {
  double clip_low, clip_high, dual_clip;
  int form, kl;
  double beta;
};

// 0 loss (undivided), 1 tokens, 2 segments, 3 ratio, 4 its minimum, 5 its maximum, 6 approx_kl, clip fractions 7 low,
// 8 high, 9 region, 10 dual, 11 kl.
struct PolicySums {
  double value[12] = {0, 0, 0, 0, std::numeric_limits<double>::infinity(), 0, 0, 0, 0, 0, 0, 0};

  void merge(const PolicySums& other) {
    for (int i = 0; i < 12; ++i) {
      const double x = other.value[i];
      if (i == 4) {
        value[i] = x < value[i] ? x : value[i];
      } else if (i == 5) {
        value[i] = x > value[i] ? x : value[i];
      } else {
        value[i] += x;
      }
    }
  }
};

// Adds n kept tokens to sums (all but the number of segments) and writes grad[i], the gradient of the loss in
// logprob[i]. weight[i] multiplies loss and gradient (null: 1); advantage is per token; ref may be null; log_ratio
// replaces logprob - old in the ratio (null: token ratio). Checks nothing: what is not finite spoils the sums.
void policy_tokens(const PolicyTerms& terms, int64_t n, const float* logprob, const float* old, const float* ref,
                   const float* advantage, const float* weight, float* grad, PolicySums& sums,
                   const float* log_ratio = nullptr);

struct PolicyLoss {
  PolicyTerms terms;
  bool sequence_ratio;  // the ratio is exp of the segment's mean difference
  bool per_sequence;    // a token's loss is divided by its segment's number of kept tokens
  int64_t T, S;
  const float *logprob, *old, *ref;  // [T]; ref may be null
  const float* advantage;            // [S]
  const bool* mask;                  // [T]: False tokens count nowhere, whatever they hold
  const int64_t* segment_ids;        // [T], any order
  float* grad;                       // [T]
};

// Throws std::invalid_argument for a kept token with a value that is not finite or a segment that is not there.
PolicySums policy_loss(const PolicyLoss& a, const Pool& pool);

}  // namespace fc
