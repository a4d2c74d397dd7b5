// sample on CUDA: pointers, sizes and a stream; no torch header.
#pragma once

#include "common/sample.h"

namespace fc {

// All pointers on the device, V up to kMaxVocab. A row whose temperature, top_k, top_p or min_p is outside its range
// gets id -1 and NaN. Returns null, or the CUDA runtime's words for what went wrong.
const char* sample_cuda(const Sample& a, int device, void* stream);

}  // namespace fc
