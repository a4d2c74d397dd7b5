// Philox4x32-10: counter-based random words, the same on host, device and in fastcollab/reference/random.py.
// Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), Random123.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define FC_HD __host__ __device__ __forceinline__
#elif defined(__GNUC__)
#define FC_HD inline __attribute__((always_inline))
#else
#define FC_HD inline
#endif

namespace fc {

enum Stream : uint32_t { kTokenStream = 0, kAuthorStream = 1 };

struct Words {
  uint32_t w0, w1, w2, w3;
};

// key: the row's 64-bit key. Counter: (block, position, epoch, stream).
FC_HD Words philox(uint64_t key, uint32_t block, uint32_t position, uint32_t epoch, uint32_t stream) {
  uint32_t c0 = block, c1 = position, c2 = epoch, c3 = stream;
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c0;
    const uint64_t p1 = static_cast<uint64_t>(0xCD9E8D57u) * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {c0, c1, c2, c3};
}

// A word as a number in (0, 1): 23 bits and a half, exact in fp32.
FC_HD float uniform(uint32_t word) { return (static_cast<float>(static_cast<int32_t>(word >> 9)) + 0.5f) * 0x1p-23f; }

// The author draw at response position `position` (writer 0 speaks iff it is below p0).
FC_HD float author_uniform(uint64_t key, uint32_t position, uint32_t epoch) {
  return uniform(philox(key, 0, position, epoch, kAuthorStream).w0);
}

}  // namespace fc
