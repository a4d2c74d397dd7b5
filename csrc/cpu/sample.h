// sample on CPU.
#pragma once

#include "common/sample.h"
#include "cpu/parallel.h"

namespace fc {

// Throws std::invalid_argument where a temperature, top_k, top_p or min_p is outside its range.
void sample(const Sample& a, const Pool& pool);

}  // namespace fc
