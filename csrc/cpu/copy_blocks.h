// copy_blocks on CPU: whole blocks copied inside each pool, pair after pair.
#pragma once

#include <cstdint>

#include "cpu/parallel.h"

namespace fc {

struct BlockPool {
  char* data;
  int64_t blocks, bytes;  // bytes of one block
};

// pairs [P, 2]: source, destination. Throws std::invalid_argument where a pair points outside a pool.
void copy_blocks(const BlockPool* pools, int64_t num_pools, const int64_t* pairs, int64_t num_pairs, const Pool& pool);

}  // namespace fc
