// One task per pool; the pairs of a pool in order, since one may read what an earlier one wrote.
#include "cpu/copy_blocks.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace fc {

void copy_blocks(const BlockPool* pools, int64_t num_pools, const int64_t* pairs, int64_t num_pairs, const Pool& pool) {
  constexpr int64_t kInline = 1 << 20;  // bytes below which threads cost more than they save
  int64_t bytes = 0;
  for (int64_t i = 0; i < num_pools; ++i) {
    bytes += pools[i].bytes * num_pairs;
    for (int64_t j = 0; j < 2 * num_pairs; ++j) {
      if (pairs[j] >= 0 && pairs[j] < pools[i].blocks) continue;
      throw std::invalid_argument("pairs: got block " + std::to_string(pairs[j]) + " in pair " + std::to_string(j / 2) +
                                  ", need a block in [0, " + std::to_string(pools[i].blocks) + ")");
    }
  }
  pool.run(num_pools, bytes < kInline, [&](const auto& next) {
    for (int64_t i = next(); i >= 0; i = next()) {
      for (int64_t j = 0; j < num_pairs; ++j) {
        const int64_t from = pairs[2 * j], to = pairs[2 * j + 1], size = pools[i].bytes;
        if (from != to) std::memcpy(pools[i].data + to * size, pools[i].data + from * size, size);
      }
    }
  });
}

}  // namespace fc
