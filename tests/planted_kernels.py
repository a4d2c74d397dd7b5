"""Kernels with planted faults, and one without, for the tests of the offline compiler."""

import triton
import triton.language as tl

from fastcollab.kernels.offline import Case


@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def product(a, b, c, K, M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """c [M, N] = a [M, K] b [K, N], one program: c in registers, BLOCK columns of a and rows of b in shared memory."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK)
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, K, BLOCK):
        left = tl.load(a + m[:, None] * K + (start + k)[None, :])
        right = tl.load(b + (start + k)[:, None] * N + n[None, :])
        total = tl.dot(left, right, total)
    tl.store(c + m[:, None] * N + n[None, :], total)


def offline_cases(target: str) -> list[Case]:
    """In order: nothing wrong; spills; too much shared memory; does not compile."""
    vector = {"x": "*fp32", "y": "*fp32", "n": "i64", "BLOCK": "constexpr"}
    matrix = {"a": "*bf16", "b": "*bf16", "c": "*fp32", "K": "i32"} | dict.fromkeys(("M", "N", "BLOCK"), "constexpr")
    m, n = (256, 128) if target == "gfx942" else (128, 64)  # 512 registers a thread for c alone, or 256: all there are
    return [
        Case(double, vector, {"BLOCK": 1024}),
        Case(product, matrix, {"M": m, "N": n, "BLOCK": 16}, num_warps=1, num_stages=1),
        Case(product, matrix, {"M": 64, "N": 64, "BLOCK": 512}, num_warps=8),
        Case(double, vector, {"BLOCK": 1000}),
    ]
