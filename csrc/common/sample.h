// sample: one token per row of logits by Gumbel-max under temperature, top-k, top-p and min-p. Its arguments, its
// noise.
#pragma once

#include <cstdint>

#include "common/gumbel.h"
#include "common/types.h"

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

// A row's noise: word id % 4 of block id / 4 makes the noise of token id.
struct Noise {
  uint64_t key;
  uint32_t position, epoch;

  FC_HD static Noise of(const Sample& a, int64_t row) {
    return {static_cast<uint64_t>(a.key[row]), static_cast<uint32_t>(a.position[row]),
            static_cast<uint32_t>(a.epoch[row])};
  }
  FC_HD Words words(int64_t block) const {
    return philox(key, static_cast<uint32_t>(block), position, epoch, kTokenStream);
  }
  FC_HD static float pick(const Words& w, int64_t id) {
    return gumbel(id % 4 == 0 ? w.w0 : id % 4 == 1 ? w.w1 : id % 4 == 2 ? w.w2 : w.w3);
  }
};

}  // namespace fc
