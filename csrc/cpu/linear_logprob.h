// linear_logprob on CPU: log-probs straight from hidden states, forward and backward, by tiles of the caller's
// products.
#pragma once

#include <cstdint>
#include <string>

#include "cpu/head.h"
#include "cpu/parallel.h"

namespace fc {

// What is known of each row; null where nobody asks.
struct Scores {
  float* logprob;
  double* lse;
  float *entropy, *second_logprob;
  int64_t* top1;
};

// Writes all scores asked for; `second` may be null. Where `logits` is given it becomes x [N, V], rows logits_stride
// apart, at least V rounded up to whole vectors, with room for whole_rows(N) of them. A row without a finite
// log-sum-exp has it in `lse` and no use.
void score(const Head& head, const int64_t* target, const int64_t* second, const Scores& scores, float* logits,
           int64_t logits_stride, const Pool& pool, const Gemm& gemm);

// Throws std::invalid_argument for ids outside the vocabulary and for the first row whose log-sum-exp is not finite.
void linear_logprob_forward(const Head& head, const int64_t* target, const int64_t* second, const Scores& scores,
                            const Pool& pool, const Gemm& gemm);

// Per row; g_entropy and entropy may both be null. The logits are computed anew, for the rows with a gradient alone.
struct Upstream {
  const float *g_logprob, *g_entropy, *entropy;
  const double* lse;
  const int64_t* target;
};
void linear_logprob_backward(const Head& head, const Upstream& upstream, const HeadGradient& out, const Pool& pool,
                             const Gemm& gemm);

// Throws "<name>: got (low, high), need ids in [0, V)".
void need_ids(const char* name, const int64_t* ids, int64_t n, int64_t vocab);

// Throws "linear_logprob, row <row>: got log-sum-exp <lse>, need a finite one".
void need_finite_lse(int64_t row, double lse);

// "nan", "inf", "-inf" or the number, as Python writes it.
std::string number(double x);

}  // namespace fc
