// linear_policy_loss on CPU: the token-level policy loss and its gradient in the head in one pass over the logits.
#pragma once

#include <cstdint>

#include "cpu/head.h"
#include "cpu/parallel.h"
#include "cpu/policy_loss.h"
#include "cpu/segments.h"

namespace fc {

struct LinearPolicyLoss {
  const Head& head;  // N tokens
  PolicyTerms terms;
  bool entropy;            // its sum is asked for
  bool per_sequence;       // a token's loss is divided by its segment's number of kept tokens
  double scale;            // of the gradients, not of the sums
  Packed tokens;           // N of them; those outside the mask are never read
  const int64_t* target;   // [N]
  const float *old, *ref;  // [N]; ref may be null
};

// sums [13]: those of PolicySums, then the sum of entropies. Throws std::invalid_argument for a kept token whose
// target, segment or numbers are not fit, naming it.
void linear_policy_loss(const LinearPolicyLoss& a, const HeadGradient& out, double* sums, const Pool& pool,
                        const Gemm& gemm);

}  // namespace fc
