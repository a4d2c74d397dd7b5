// One block per row; the row is read anew in each pass, from the L2 cache.
#include "cuda/sample.h"

#include "common/sample_row.h"
#include "cuda/launch.h"

namespace fc {
namespace {

struct Block {
  static constexpr int kLanes = 1024;

  template <class F>
  __device__ __forceinline__ void lanes(const F& f) const {
    f(static_cast<int>(threadIdx.x));
    __syncthreads();
  }
  __device__ __forceinline__ void barrier() const { __syncthreads(); }
  __device__ __forceinline__ void add(uint64_t* counter, uint64_t n) const {
    atomicAdd(reinterpret_cast<unsigned long long*>(counter), static_cast<unsigned long long>(n));
  }
};

template <class T>
__global__ void __launch_bounds__(Block::kLanes) sample(const Sample a) {
  __shared__ Scratch<Block::kLanes> scratch;
  sample_row<T>(Block{}, scratch, a, blockIdx.x);
}

}  // namespace

const char* sample_cuda(const Sample& a, int device, void* stream) {
  return on_device(device, [&] {
    if (a.R == 0) return cudaSuccess;
    const auto kernel = a.type == Type::kFloat32 ? sample<float> : sample<uint16_t>;
    kernel<<<static_cast<unsigned>(a.R), Block::kLanes, 0, static_cast<cudaStream_t>(stream)>>>(a);
    return cudaGetLastError();
  });
}

}  // namespace fc
