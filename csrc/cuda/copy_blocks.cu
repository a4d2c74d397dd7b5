// One launch for all layers. A thread owns one offset of one pool and walks the pairs in order, so a pair may read what
// an earlier one wrote and no thread waits for another.
#include "cuda/copy_blocks.h"

#include <algorithm>

#include "cuda/launch.h"

namespace fc {
namespace {

constexpr int kPools = 192;  // per launch: pointers and sizes travel in the 4 KB of kernel parameters
constexpr int kThreads = 256;

struct Pools {
  char* data[kPools];
  int64_t bytes[kPools];
};

template <class Word>
__global__ void copy(const Pools pools, const int64_t* __restrict__ pairs, int64_t num_pairs) {
  char* data = pools.data[blockIdx.y];
  const int64_t bytes = pools.bytes[blockIdx.y];
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x * sizeof(Word);
  for (int64_t at = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * sizeof(Word); at < bytes;
       at += step) {
    for (int64_t p = 0; p < num_pairs; ++p) {
      const Word word = *reinterpret_cast<const Word*>(data + pairs[2 * p] * bytes + at);
      *reinterpret_cast<Word*>(data + pairs[2 * p + 1] * bytes + at) = word;
    }
  }
}

}  // namespace

const char* copy_blocks_cuda(void* const* pools, const int64_t* bytes, int64_t num_pools, const int64_t* pairs,
                             int64_t num_pairs, int device, void* stream) {
  return on_device(device, [&] {
    for (int64_t start = 0; start < num_pools; start += kPools) {
      const int count = static_cast<int>(std::min<int64_t>(kPools, num_pools - start));
      Pools group;
      int64_t largest = 0;
      bool aligned = true;
      for (int i = 0; i < count; ++i) {
        group.data[i] = static_cast<char*>(pools[start + i]);
        group.bytes[i] = bytes[start + i];
        largest = std::max(largest, group.bytes[i]);
        aligned &= group.bytes[i] % 16 == 0 && reinterpret_cast<uintptr_t>(group.data[i]) % 16 == 0;
      }
      const int64_t words = largest / (aligned ? 16 : 1);
      const dim3 grid(static_cast<unsigned>(std::clamp<int64_t>((words + kThreads - 1) / kThreads, 1, 1024)), count);
      const auto kernel = aligned ? copy<int4> : copy<char>;
      kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(group, pairs, num_pairs);
      if (const cudaError_t status = cudaGetLastError()) return status;
    }
    return cudaSuccess;
  });
}

}  // namespace fc
