// copy_blocks on CUDA: pointers, sizes and a stream; no torch header.
#pragma once

#include <cstdint>

namespace fc {

// pools[i] is a device pointer to blocks of bytes[i] bytes; pairs [P, 2] int64 on the device: source, destination.
// Returns null, or the CUDA runtime's words for what went wrong.
const char* copy_blocks_cuda(void* const* pools, const int64_t* bytes, int64_t num_pools, const int64_t* pairs,
                             int64_t num_pairs, int device, void* stream);

}  // namespace fc
