// sample on CPU: one token per row of logits by Gumbel-max under temperature, top-k, top-p and min-p.
#pragma once

#include <cstdint>

#include "cpu/parallel.h"
#include "cpu/types.h"

namespace fc {

struct Sample {
  const void* logits;  // [R, V], rows `stride` elements apart
  Type type;
  int64_t R, V, stride;
  const float* temperature;  // all [R]
  const int32_t* top_k;
  const float *top_p, *min_p;
  const int64_t* key;
  const int32_t *position, *epoch;
  int64_t* id;  // -1 where the row has NaN, +inf or no finite value
  float *logprob, *kept_mass;
};

// Throws std::invalid_argument where a temperature is not a finite number >= 0 or top_k is negative.
void sample(const Sample& a, const Pool& pool);

}  // namespace fc
