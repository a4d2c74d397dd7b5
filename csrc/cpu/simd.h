// Sixteen fp32 lanes as a compiler vector: one source for AVX-512, AVX2 and baseline, every lane's order explicit.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/softmax.h"

// A kernel marked FC_CLONES is compiled once per instruction set and picked when the library is loaded. fmaf is written
// out and contraction is off, so all versions give the same bits.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define FC_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#elif defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define FC_CLONES __attribute__((target_clones("avx512f", "fma", "default")))
#else
#define FC_CLONES
#endif

#define FC_INLINE inline __attribute__((always_inline))
#define FC_UNROLL _Pragma("GCC unroll 16")

#if defined(__clang__) || __GNUC__ >= 12
#define FC_SHUFFLE(mask, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define FC_SHUFFLE(mask, a, b, ...) __builtin_shuffle(a, b, mask{__VA_ARGS__})
#endif

namespace fc {

typedef float f32x4 __attribute__((vector_size(16)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x4 __attribute__((vector_size(16)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

struct bf16 {
  uint16_t bits;
};

FC_INLINE float widen(float x) { return x; }
FC_INLINE float widen(bf16 x) { return float_of(static_cast<int32_t>(static_cast<uint32_t>(x.bits) << 16)); }

template <class T>
FC_INLINE T narrow(float x);
template <>
FC_INLINE float narrow<float>(float x) {
  return x;
}
template <>
FC_INLINE bf16 narrow<bf16>(float x) {  // to nearest, ties to even; NaN stays NaN
  const uint32_t u = static_cast<uint32_t>(bits_of(x));
  const uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return {static_cast<uint16_t>(x != x ? 0x7fc0 : rounded)};
}

FC_INLINE f32x16 splat(float x) { return f32x16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

FC_INLINE f32x16 load(const float* p) {
  f32x16 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
FC_INLINE f32x16 load(const bf16* p) {
  u16x16 half;
  std::memcpy(&half, p, sizeof half);
  const u32x16 word = __builtin_convertvector(half, u32x16) << 16;
  f32x16 v;
  std::memcpy(&v, &word, sizeof v);
  return v;
}
template <class T>
FC_INLINE f32x16 load(const T* p, int64_t n) {  // the first n of 16 lanes, the others 0
  T part[16] = {};
  std::memcpy(part, p, n * sizeof(T));
  return load(part);
}

FC_INLINE f32x8 load8(const float* p) {
  f32x8 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
FC_INLINE f32x8 load8(const bf16* p) {
  u16x8 half;
  std::memcpy(&half, p, sizeof half);
  const u32x8 word = __builtin_convertvector(half, u32x8) << 16;
  f32x8 v;
  std::memcpy(&v, &word, sizeof v);
  return v;
}
template <class T>
FC_INLINE f32x8 load8(const T* p, int64_t n) {
  T part[8] = {};
  std::memcpy(part, p, n * sizeof(T));
  return load8(part);
}

FC_INLINE void store(float* p, f32x16 v) { std::memcpy(p, &v, sizeof v); }
template <class T>
FC_INLINE void store(T* p, f32x16 v, int64_t n) {
  for (int64_t i = 0; i < n; ++i) p[i] = narrow<T>(v[i]);
}

FC_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  f32x16 r;
  for (int i = 0; i < 16; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
}
FC_INLINE f32x16 max(f32x16 a, f32x16 b) { return a > b ? a : b; }

template <float (*F)(float)>
FC_INLINE f32x16 map(f32x16 x) {
  f32x16 r;
  for (int i = 0; i < 16; ++i) r[i] = F(x[i]);
  return r;
}

// Sum and maximum over lanes by halves, one fixed tree.
template <f32x4 (*F)(f32x4, f32x4)>
FC_INLINE float fold(f32x16 v) {
  f32x4 q[4];
  std::memcpy(q, &v, sizeof v);
  const f32x4 r = F(F(q[0], q[2]), F(q[1], q[3]));
  const f32x4 s = F(r, FC_SHUFFLE(i32x4, r, r, 2, 3, 0, 1));
  return F(s, FC_SHUFFLE(i32x4, s, s, 1, 0, 3, 2))[0];
}
FC_INLINE f32x4 add4(f32x4 a, f32x4 b) { return a + b; }
FC_INLINE f32x4 max4(f32x4 a, f32x4 b) { return a > b ? a : b; }
FC_INLINE float sum(f32x16 v) { return fold<add4>(v); }
FC_INLINE float max(f32x16 v) { return fold<max4>(v); }

// An 8 x 8 block, rows to columns: interleave singles, pairs, then halves. Eight lanes, since GCC splits a sixteen-lane
// shuffle into scalars where the machine has none.
FC_INLINE void transpose(f32x8 (&r)[8]) {
  f32x8 t[8];
  FC_UNROLL
  for (int i = 0; i < 8; i += 2) {
    t[i] = FC_SHUFFLE(i32x8, r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    t[i + 1] = FC_SHUFFLE(i32x8, r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  FC_UNROLL
  for (int i = 0; i < 8; i += 4) {
    FC_UNROLL
    for (int j = 0; j < 2; ++j) {
      r[i + 2 * j] = FC_SHUFFLE(i32x8, t[i + j], t[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      r[i + 2 * j + 1] = FC_SHUFFLE(i32x8, t[i + j], t[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
  FC_UNROLL
  for (int j = 0; j < 4; ++j) {
    t[j] = FC_SHUFFLE(i32x8, r[j], r[4 + j], 0, 1, 2, 3, 8, 9, 10, 11);
    t[4 + j] = FC_SHUFFLE(i32x8, r[j], r[4 + j], 4, 5, 6, 7, 12, 13, 14, 15);
  }
  FC_UNROLL
  for (int i = 0; i < 8; ++i) r[i] = t[i];
}

// Below, V is a vector of 4, 8 or 16 floats: a kernel that keeps many in registers is written over V, since GCC keeps
// vectors wider than the machine's in memory. FC_VERSIONS(name, (parameters), statements) defines a kernel once per
// instruction set, each with its widest V, and calls go to the best version. Lanes may not be summed in an order that
// depends on V.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#if __GNUC__ >= 12
#define FC_TARGETS "arch=x86-64-v4", "arch=x86-64-v3"
#else
#define FC_TARGETS "avx512f", "fma"
#endif
#define FC_VERSIONS(...) FC_VERSIONS_(FC_TARGETS, __VA_ARGS__)
#define FC_VERSIONS_(...) FC_VERSIONS__(__VA_ARGS__)
#define FC_VERSIONS__(v4, v3, name, parameters, ...)          \
  FC_VERSION("default", f32x4, name, parameters, __VA_ARGS__) \
  FC_VERSION(v3, f32x8, name, parameters, __VA_ARGS__)        \
  FC_VERSION(v4, f32x16, name, parameters, __VA_ARGS__)
#define FC_VERSION(isa, vector, name, parameters, ...) \
  __attribute__((target(isa))) void name parameters {  \
    using V = vector;                                  \
    __VA_ARGS__;                                       \
  }
#else
#define FC_VERSIONS(name, parameters, ...) \
  void name parameters {                   \
    using V = f32x4;                       \
    __VA_ARGS__;                           \
  }
#endif

template <class V>
inline constexpr int kLanes = sizeof(V) / sizeof(float);

template <int lanes>
struct Integers;
template <>
struct Integers<4> {
  typedef int32_t index __attribute__((vector_size(16)));
  typedef uint32_t word __attribute__((vector_size(16)));
  typedef uint16_t half __attribute__((vector_size(8)));
};
template <>
struct Integers<8> {
  typedef i32x8 index;
  typedef u32x8 word;
  typedef u16x8 half;
};
template <>
struct Integers<16> {
  typedef i32x16 index;
  typedef u32x16 word;
  typedef u16x16 half;
};

template <class V>
FC_INLINE V fill(float x) {
  return x - V{};
}
template <class V>
FC_INLINE V read(const float* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
FC_INLINE V read(const bf16* p) {
  typename Integers<kLanes<V>>::half half;
  std::memcpy(&half, p, sizeof half);
  const auto word = __builtin_convertvector(half, typename Integers<kLanes<V>>::word) << 16;
  V v;
  std::memcpy(&v, &word, sizeof v);
  return v;
}
template <class V>
FC_INLINE void write(float* p, V v) {
  std::memcpy(p, &v, sizeof v);
}
template <class V>
FC_INLINE V fused(V a, V b, V c) {  // a * b + c, rounded once
  V r = {};
  for (int i = 0; i < kLanes<V>; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
}
// A vector that the compiler may not read from memory a second time, as it does to fold one load into each use.
template <class V>
FC_INLINE V loaded(V x) {
#if defined(__x86_64__) && defined(__GNUC__)
  asm("" : "+v"(x));
#endif
  return x;
}

// exp32 of every lane, to the same bits; written out, since GCC makes a loop with a branch of map<exp32>.
template <class V>
FC_INLINE V exponential(V x) {
  using Word = typename Integers<kLanes<V>>::word;
  const V rounder = fill<V>(12582912.0f);
  const V t = fused(x, fill<V>(1.44269504088896341f), rounder), n = t - rounder;
  const V r = fused(n, fill<V>(2.12194440e-4f), fused(n, fill<V>(-0.693359375f), x));
  V y = fill<V>(1.9875691500e-4f);
  y = fused(y, r, fill<V>(1.3981999507e-3f));
  y = fused(y, r, fill<V>(8.3334519073e-3f));
  y = fused(y, r, fill<V>(4.1665795894e-2f));
  y = fused(y, r, fill<V>(1.6666665459e-1f));
  y = fused(y, r, fill<V>(5.0000001201e-1f));
  y = fused(y, r * r, r) + fill<V>(1.0f);
  Word bits;
  std::memcpy(&bits, &t, sizeof bits);
  bits = (bits << 23) + 0x3f800000;
  V power;
  std::memcpy(&power, &bits, sizeof power);
  return x < fill<V>(-87.0f) ? V{} : y * power;
}

// tanh32 of every lane, to the same bits.
template <class V>
FC_INLINE V hyperbolic_tangent(V x) {
  const V one = fill<V>(1.0f), two = fill<V>(2.0f), most = fill<V>(40.0f), a = x < V{} ? -x : x, z = x * x;
  V y = fill<V>(-5.70498872745e-3f);
  y = fused(y, z, fill<V>(2.06390887954e-2f));
  y = fused(y, z, fill<V>(-5.37397155531e-2f));
  y = fused(y, z, fill<V>(1.33314422036e-1f));
  y = fused(y, z, fill<V>(-3.33332819422e-1f));
  const V small = fused(y * z, x, x), big = one - two / (exponential(two * (a < most ? a : most)) + one);
  return a < fill<V>(0.625f) ? small : (x < V{} ? -big : (x > V{} ? big : x));
}

// Sixteen lanes, in vectors V, to eight.
template <class V>
FC_INLINE f32x8 halves(const V (&part)[16 / kLanes<V>]) {
  f32x8 half[2];
  static_assert(sizeof part == sizeof half);
  std::memcpy(half, part, sizeof half);
  return half[0] + half[1];
}

// Lane i of the result is the sum of r[i]'s lanes, by one tree: quarters as they interleave, then pairs, then halves.
FC_INLINE f32x8 fold_eight(f32x8 (&r)[8]) {
  FC_UNROLL
  for (int i = 0; i < 8; i += 2) {
    r[i] = FC_SHUFFLE(i32x8, r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13) +
           FC_SHUFFLE(i32x8, r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  FC_UNROLL
  for (int i = 0; i < 8; i += 4) {
    r[i] = FC_SHUFFLE(i32x8, r[i], r[i + 2], 0, 1, 8, 9, 4, 5, 12, 13) +
           FC_SHUFFLE(i32x8, r[i], r[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
  }
  return FC_SHUFFLE(i32x8, r[0], r[4], 0, 1, 2, 3, 8, 9, 10, 11) +
         FC_SHUFFLE(i32x8, r[0], r[4], 4, 5, 6, 7, 12, 13, 14, 15);
}

}  // namespace fc
