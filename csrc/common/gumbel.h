// Gumbel noise in fp32 from one polynomial log, every rounding written out: bit-equal on host, device and in torch.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/philox.h"

namespace fc {

// One rounding each, whatever the compiler would like to contract.
#ifdef __CUDA_ARCH__
FC_HD float mul(float a, float b) { return __fmul_rn(a, b); }
FC_HD float add(float a, float b) { return __fadd_rn(a, b); }
#else
FC_HD float mul(float a, float b) { return a * b; }
FC_HD float add(float a, float b) { return a + b; }
#endif

FC_HD int32_t bits_of(float x) {
  int32_t i;
  std::memcpy(&i, &x, 4);
  return i;
}
FC_HD float float_of(int32_t i) {
  float x;
  std::memcpy(&x, &i, 4);
  return x;
}

// log of a positive normal number; about 1 ulp. Coefficients: Cephes logf.
FC_HD float log32(float x) {
  const int32_t shifted = bits_of(x) - 0x3f3504f3;  // bits of sqrt(1/2): the mantissa lands in [sqrt(1/2), sqrt(2))
  const float e = static_cast<float>(shifted >> 23);
  const float f = add(float_of((shifted & 0x007fffff) + 0x3f3504f3), -1.0f);
  const float z = mul(f, f);
  float y = 7.0376836292e-2f;
  y = fmaf(y, f, -1.1514610310e-1f);
  y = fmaf(y, f, 1.1676998740e-1f);
  y = fmaf(y, f, -1.2420140846e-1f);
  y = fmaf(y, f, 1.4249322787e-1f);
  y = fmaf(y, f, -1.6668057665e-1f);
  y = fmaf(y, f, 2.0000714765e-1f);
  y = fmaf(y, f, -2.4999993993e-1f);
  y = fmaf(y, f, 3.3333331174e-1f);
  y = mul(mul(f, z), y);
  y = fmaf(e, -2.12194440e-4f, y);
  y = fmaf(z, -0.5f, y);
  return fmaf(e, 0.693359375f, add(f, y));
}

// Standard Gumbel noise of a random word: -log(-log(u)), in [-2.82, 16.64].
FC_HD float gumbel(uint32_t word) { return -log32(-log32(uniform(word))); }

}  // namespace fc
