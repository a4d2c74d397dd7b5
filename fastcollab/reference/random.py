"""Counter-based random numbers: Philox4x32-10, uniforms and Gumbel noise, bit-equal to csrc/common.

A row's 64-bit key and the counter (block, position, epoch, stream) name each number, so a draw depends on nothing else:
not on the batch, the order of calls or the device. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
(SC 2011). All of it runs on Python ints and on int64 tensors alike, up to the fp32 functions, which take tensors.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

Int = TypeVar("Int", int, Tensor)

TOKEN_STREAM, AUTHOR_STREAM = 0, 1
LARGEST_GUMBEL = 16.635532  # of the word 0xffffffff
SMALLEST_GUMBEL = -2.811543  # of the word 0
_MASK = 0xFFFFFFFF


def philox(key: Int, block: Int, position: Int, epoch: Int, stream: int) -> tuple[Int, Int, Int, Int]:
    """Four 32-bit words of Philox4x32-10 under a 64-bit key (its low word first); arguments broadcast."""
    c0, c1, c2, c3 = block & _MASK, position & _MASK, epoch & _MASK, stream
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2  # 64-bit products: a tensor's wrap around, the words are right
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def uniform(word):
    """A 32-bit word as a number in (0, 1): 23 bits and a half, exact in fp32. A tensor gives fp32, an int a float."""
    bits = word >> 9
    return ((bits.float() if isinstance(bits, Tensor) else bits) + 0.5) * 2.0**-23


def author_uniform(key: Int, position: Int, epoch: Int):
    """The author draw at a response position: writer 0 speaks iff it is below p0, and so on cumulatively."""
    return uniform(philox(key, 0 * position, position, epoch, AUTHOR_STREAM)[0])


def fma(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """fp32 fused multiply-add with one rounding, by way of fp64: exact product, sum rounded to odd, then to fp32.

    Source: Boldo and Melquiond, "Emulation of FMA and correctly rounded sums" (2008).
    """
    product = a.double() * (b.double() if isinstance(b, Tensor) else b)
    c = c.double() if isinstance(c, Tensor) else torch.full_like(product, c)
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    bits = total.view(torch.int64)
    even = (error.abs() > 0) & (bits % 2 == 0)
    step = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(even, bits + step, bits).view(torch.float64).float()


def _horner(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    y = torch.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        y = fma(y, x, _fp32(c))
    return y


def _fp32(x: float) -> float:
    return torch.tensor(x, dtype=torch.float32).item()


_LOG = (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
        2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1)  # fmt: skip
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LOG2_HIGH, _LOG2_LOW, _LOG2_E = 0.693359375, _fp32(-2.12194440e-4), _fp32(1.44269504088896341)


def log32(x: Tensor) -> Tensor:
    """log of positive normal fp32 numbers by Cephes' polynomial, about 1 ulp; as in csrc/common/gumbel.h."""
    shifted = x.view(torch.int32) - 0x3F3504F3  # bits of sqrt(1/2)
    e = (shifted >> 23).float()
    f = ((shifted & 0x007FFFFF) + 0x3F3504F3).view(torch.float32) - 1.0
    z = f * f
    y = (f * z) * _horner(f, _LOG)
    y = fma(z, -0.5, fma(e, _LOG2_LOW, y))
    return fma(e, _LOG2_HIGH, f + y)


def exp32(x: Tensor) -> Tensor:
    """exp of fp32 numbers <= 88 by Cephes' polynomial, about 1 ulp; 0 below -87; as in csrc/common/softmax.h."""
    t = fma(x, _LOG2_E, 12582912.0)  # 1.5 * 2^23: the sum rounds x / log 2 to an integer
    n = t - 12582912.0
    r = fma(n, -_LOG2_LOW, fma(n, -_LOG2_HIGH, x))
    y = fma(_horner(r, _EXP), r * r, r) + 1.0
    power = ((t.view(torch.int32) << 23) + 0x3F800000).view(torch.float32)
    return torch.where(x < -87.0, torch.zeros_like(x), y * power)


def gumbel(word: Tensor) -> Tensor:
    """Standard Gumbel noise -log(-log(u)) of int64 words, fp32, in [SMALLEST_GUMBEL, LARGEST_GUMBEL]."""
    return -log32(-log32(uniform(word)))


def token_noise(key: Tensor, position: Tensor, epoch: Tensor, ids: Tensor) -> Tensor:
    """Gumbel noise of vocabulary ids (all int64, broadcast together): word id % 4 of block id // 4. fp32."""
    words = torch.stack(torch.broadcast_tensors(*philox(key, ids // 4, position, epoch, TOKEN_STREAM)))
    return gumbel(words.gather(0, (ids % 4).expand(words.shape[1:])[None])[0])
