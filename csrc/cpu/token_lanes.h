// Eight packed tokens as vectors: as wide as AVX2, so that comparisons and selects stay single instructions there.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/simd.h"

namespace fc {

constexpr int64_t kTokens = 8;

typedef double f64x4 __attribute__((vector_size(32)));
typedef int64_t i64x4 __attribute__((vector_size(32)));

// GCC 12 may build it lane by lane where x is no constant and not in memory: keep such vectors, not their scalars.
FC_INLINE f32x8 splat8(float x) { return f32x8{x, x, x, x, x, x, x, x}; }
FC_INLINE f32x8 where(i32x8 keep, f32x8 x) { return keep ? x : f32x8{}; }
FC_INLINE f32x8 min(f32x8 a, f32x8 b) { return a < b ? a : b; }
FC_INLINE f32x8 max(f32x8 a, f32x8 b) { return a > b ? a : b; }
FC_INLINE f32x8 fma(f32x8 a, f32x8 b, f32x8 c) {
  f32x8 r;
  for (int i = 0; i < kTokens; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
}

// The first n of eight: floats (the others 0), bools as -1 or 0.
FC_INLINE f32x8 load_tokens(const float* p, int64_t n) { return n == kTokens ? load8(p) : load8(p, n); }
FC_INLINE void store_tokens(float* p, f32x8 v, int64_t n) {
  if (n == kTokens) {
    std::memcpy(p, &v, sizeof v);
  } else {
    for (int64_t i = 0; i < n; ++i) p[i] = v[i];
  }
}
FC_INLINE uint64_t mask_bytes(const bool* mask, int64_t n) {
  uint64_t bytes = 0;
  if (n == kTokens) {
    std::memcpy(&bytes, mask, kTokens);
  } else {
    std::memcpy(&bytes, mask, n);
  }
  return bytes;
}
FC_INLINE i32x8 kept(uint64_t bytes) {
  const i32x8 halves = {static_cast<int32_t>(bytes), static_cast<int32_t>(bytes >> 32)};
  const i32x8 own = {1, 1 << 8, 1 << 16, 1 << 24, 1, 1 << 8, 1 << 16, 1 << 24};
  return (FC_SHUFFLE(i32x8, halves, halves, 0, 0, 0, 0, 1, 1, 1, 1) & own) != 0;
}

FC_INLINE bool all_finite(f32x8 v) {
  bool finite = true;
  for (int i = 0; i < kTokens; ++i) finite &= v[i] - v[i] == 0;
  return finite;
}

FC_INLINE bool all_are(const int64_t* ids, int64_t n, int64_t id) {
  if (n != kTokens) return false;
  i64x4 low, high;
  std::memcpy(&low, ids, sizeof low);
  std::memcpy(&high, ids + 4, sizeof high);
  const i64x4 differs = (low ^ id) | (high ^ id);
  return !((differs[0] | differs[1]) | (differs[2] | differs[3]));
}

// Eight fp64 sums.
struct Sums8 {
  f64x4 low = {}, high = {};

  FC_INLINE void add(f32x8 v) {
    f32x4 half[2];
    std::memcpy(half, &v, sizeof v);
    low += __builtin_convertvector(half[0], f64x4);
    high += __builtin_convertvector(half[1], f64x4);
  }
  FC_INLINE void add(f32x8 a, f32x8 b) {  // a - b, each widened first
    f32x4 x[2], y[2];
    std::memcpy(x, &a, sizeof a);
    std::memcpy(y, &b, sizeof b);
    low += __builtin_convertvector(x[0], f64x4) - __builtin_convertvector(y[0], f64x4);
    high += __builtin_convertvector(x[1], f64x4) - __builtin_convertvector(y[1], f64x4);
  }
  FC_INLINE double total() const {
    const f64x4 sum = low + high;
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
  }
};

}  // namespace fc
