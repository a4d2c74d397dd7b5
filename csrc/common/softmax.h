// exp and tanh for softmax in fp32, every rounding written out: bit-equal on host, device and in torch.
#pragma once

#include "common/gumbel.h"

namespace fc {

// exp(x) for x <= 88, about 1 ulp; 0 below -87 (-inf too), exactly 1 at 0, NaN at NaN. Coefficients: Cephes expf.
FC_HD float exp32(float x) {
  const float t = fmaf(x, 1.44269504088896341f, 12582912.0f);  // 1.5 * 2^23: the sum rounds x / log 2 to an integer
  const float n = add(t, -12582912.0f);
  const float r = fmaf(n, 2.12194440e-4f, fmaf(n, -0.693359375f, x));
  float y = 1.9875691500e-4f;
  y = fmaf(y, r, 1.3981999507e-3f);
  y = fmaf(y, r, 8.3334519073e-3f);
  y = fmaf(y, r, 4.1665795894e-2f);
  y = fmaf(y, r, 1.6666665459e-1f);
  y = fmaf(y, r, 5.0000001201e-1f);
  y = add(fmaf(y, mul(r, r), r), 1.0f);
  const float power = float_of(static_cast<int32_t>(static_cast<uint32_t>(bits_of(t)) << 23) + 0x3f800000);
  return x < -87.0f ? 0.0f : mul(y, power);
}

// tanh, about 2 ulp. Small arguments by Cephes' polynomial, the others by exp.
FC_HD float tanh32(float x) {
  const float a = x < 0.0f ? -x : x;
  const float z = mul(x, x);
  float y = -5.70498872745e-3f;
  y = fmaf(y, z, 2.06390887954e-2f);
  y = fmaf(y, z, -5.37397155531e-2f);
  y = fmaf(y, z, 1.33314422036e-1f);
  y = fmaf(y, z, -3.33332819422e-1f);
  const float small = fmaf(mul(y, z), x, x);
  const float big = add(1.0f, -(2.0f / add(exp32(mul(2.0f, a < 40.0f ? a : 40.0f)), 1.0f)));
  return a < 0.625f ? small : (x < 0.0f ? -big : (x > 0.0f ? big : x));
}

}  // namespace fc
