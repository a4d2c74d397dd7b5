"""Tiles of logits: the GEMM, bias, soft cap and temperature that the head's kernels share, their block sizes, and the
matrix products around them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastcollab.config import require
from fastcollab.kernels.offline import Case

GROUP = 16  # row blocks that sweep the vocabulary together: their hidden states stay in L2, a weight tile is read once
SLICES = tl.constexpr(8)


class Tile(NamedTuple):
    """Block sizes of one GEMM kernel: rows x vocabulary x width, and how it is launched."""

    rows: int
    ids: int
    width: int
    num_warps: int
    num_stages: int


def tile_of(target: str, dtype: torch.dtype, widen: bool = False) -> Tile:
    """Block sizes on ``target`` ("sm_80", "sm_90", "sm_100", "gfx942", "cpu": the interpreter) of a GEMM in ``dtype``.
    ``widen``: of tiles that come in another one.

    16-bit: the accumulators take half of the registers on sm_90 (tensor memory on sm_100), and the stages what shared
    memory there is. fp32 has no tensor cores in IEEE precision: the largest tile that no option makes spill.
    """
    if target == "cpu":
        return Tile(16, 64, 16, 1, 1)
    if dtype == torch.float32:
        wide = {"gfx942": Tile(64, 128, 16, 8, 2)} | ({} if widen else {"sm_80": Tile(128, 128, 16, 8, 3)})
        return wide.get(target, Tile(64, 128, 16, 8, 3))
    return {"sm_80": Tile(128, 128, 64, 8, 4), "gfx942": Tile(128, 128, 64, 8, 2)}.get(target, Tile(128, 256, 64, 8, 4))


def target_of(device: torch.device) -> str:
    """The name of a device's target as in ``tile_of``; an unknown chip takes the nearest older one of its maker."""
    if device.type == "cpu":
        return "cpu"
    if torch.version.hip:
        return "gfx942"
    major = torch.cuda.get_device_capability(device)[0]
    return "sm_100" if major >= 10 else "sm_90" if major == 9 else "sm_80"


def compute_dtype(h: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype the GEMMs multiply in: the wider of the two."""
    return torch.promote_types(h.dtype, weight.dtype)


def widens(h: Tensor, weight: Tensor) -> bool:
    """Whether tiles are widened to fp32 before the product: two dtypes; interpreted bf16 is bits."""
    return h.dtype != weight.dtype or h.device.type == "cpu"


def case(kernel: Any, types: dict[str, str], constants: dict[str, Any], num_warps: int, num_stages: int) -> Case:
    """An offline compilation: ``types`` of the arguments that are no constants, in any order."""
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    return Case(kernel, signature, constants, num_warps, num_stages)


@triton.jit
def block_of(pid, row_blocks, columns, GROUP: tl.constexpr):
    """(row block, column) of a program: ``GROUP`` row blocks go through all columns before the next ones start."""
    group = pid // (GROUP * columns)
    within = pid % (GROUP * columns)
    size = tl.minimum(row_blocks - group * GROUP, GROUP)
    return group * GROUP + within % size, within // size


@triton.jit
def product_tile(h, w, row, id, N, V, stride_h, stride_w, D: tl.constexpr, WIDEN: tl.constexpr,
                 BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """fp32 [BLOCK_N, BLOCK_V] h[row..] w[id..]^T; rows beyond N and ids beyond V repeat the last one. WIDEN: in fp32.

    Offsets within the tile are 32-bit, which halves the registers that addresses take; those of its corner are 64-bit.
    """
    d = tl.arange(0, BLOCK_D)
    h += row.to(tl.int64) * stride_h
    w += id.to(tl.int64) * stride_w
    h_at = tl.minimum(tl.arange(0, BLOCK_N), N - 1 - row)[:, None] * stride_h + d[None, :]
    w_at = tl.minimum(tl.arange(0, BLOCK_V), V - 1 - id)[:, None] * stride_w + d[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    for d0 in range(0, D, BLOCK_D):
        if D % BLOCK_D == 0:
            a = tl.load(h + d0 + h_at)
            b = tl.load(w + d0 + w_at)
        else:
            a = tl.load(h + d0 + h_at, mask=(d0 + d < D)[None, :], other=0.0)
            b = tl.load(w + d0 + w_at, mask=(d0 + d < D)[None, :], other=0.0)
        if WIDEN:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    return acc


@triton.jit
def halves(z):
    """z [rows, 2 n] as two [rows, n] of adjacent ids."""
    rows: tl.constexpr = z.shape[0]
    n: tl.constexpr = z.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(z, (rows, 2, n)), (0, 2, 1)))


@triton.jit
def slices(z):
    """z [rows, 8 n] as ``SLICES`` [rows, n]: an epilogue in slices holds the temporaries of one in registers."""
    left, right = halves(z)
    a, b = halves(left)
    c, d = halves(right)
    return halves(a) + halves(b) + halves(c) + halves(d)


@triton.jit
def tanh(x):
    """About 2 ulp: a polynomial (Cephes) near 0, where 1 - 2 / (e^2x + 1) would cancel."""
    z = x * x
    y = -5.70498872745e-3 * z + 2.06390887954e-2
    y = y * z - 5.37397155531e-2
    y = y * z + 1.33314422036e-1
    y = y * z - 3.33332819422e-1
    far = 1 - 2 / (tl.exp(2 * tl.abs(x)) + 1)
    return tl.where(tl.abs(x) < 0.625, y * z * x + x, tl.where(x < 0, -far, far))


@triton.jit
def scaled(z, bias, ids, known, softcap, scale, HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr):
    """x = cap(z + bias) * scale, for a tile z [rows, ids]; ``known``: which ids exist; ``scale``: 1/temperature."""
    if HAS_BIAS:
        z += tl.load(bias + ids, mask=known, other=0.0).to(tl.float32)[None, :]
    if SOFTCAP:
        z = softcap * tanh(z / softcap)
    return z * scale


@triton.jit
def merge(peak, mass, spread, x_peak, x_mass, x_spread):
    """Join two partial softmaxes of the same rows: maximum, sum of e = exp(x - maximum), sum of e (x - maximum)."""
    joint = tl.maximum(peak, x_peak)
    base = tl.where(joint == float("-inf"), 0.0, joint)
    down, x_down = peak - base, x_peak - base
    a, b = tl.exp(down), tl.exp(x_down)
    # a part without a finite logit has mass 0 at maximum -inf
    spread = a * (spread + tl.where(a > 0, down * mass, 0.0)) + b * (x_spread + tl.where(b > 0, x_down * x_mass, 0.0))
    return joint, a * mass + b * x_mass, spread


@triton.jit
def softmax_part(x, ENTROPY: tl.constexpr):
    """(maximum, sum of e = exp(x - maximum), sum of e (x - maximum)) over the ids of a tile x [rows, ids]."""
    peak = tl.max(x, 1)
    down = x - tl.where(peak == float("-inf"), 0.0, peak)[:, None]
    e = tl.exp(down)
    mass = tl.sum(e, 1)
    spread = tl.sum(e * tl.maximum(down, -200.0), 1) if ENTROPY else mass
    return peak, mass, spread


@triton.jit
def logit_gradient(x, lse, hit, g, g_entropy, entropy, softcap, scale, ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr):
    """d(g logprob + g_entropy entropy) / dz for a tile of x = cap(z) * scale; ``hit`` marks the target's logit."""
    down = x - lse[:, None]
    p = tl.exp(down)
    dx = g[:, None] * (tl.where(hit, 1.0, 0.0) - p)
    if ENTROPY:
        dx -= g_entropy[:, None] * p * (tl.maximum(down, -200.0) + entropy[:, None])
    if SOFTCAP:
        t = x / (softcap * scale)
        dx *= 1 - t * t
    return dx * scale


_EXACT = {"fp32_precision": ("ieee", "none"), "allow_bf16_reduced_precision_reduction": (False,),
          "allow_fp16_reduced_precision_reduction": (False,), "allow_fp16_accumulation": (False,)}  # fmt: skip
_FLAGS = Lock()  # autograd's threads would put back each other's settings


@contextmanager
def _exact_matmul() -> Iterator[None]:
    """Library GEMMs as the kernels here multiply, in IEEE fp32 and summed in fp32, whatever the user allows his own."""
    matmul = torch.backends.cuda.matmul
    with _FLAGS:
        loose = {name: value for name, right in _EXACT.items() if (value := getattr(matmul, name)) not in right}
        for name in loose:
            setattr(matmul, name, _EXACT[name][0])
        try:
            yield
        finally:
            for name, value in loose.items():
                setattr(matmul, name, value)


@_exact_matmul()
def product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b, summed in fp32, rounded once to the dtype of ``out`` (that of a and b, or fp32)."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif out.dtype == torch.float32 and a.is_cuda:
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:
        out.copy_(a.float() @ b.float())


@_exact_matmul()
def accumulate(acc: Tensor, a: Tensor, b: Tensor) -> None:
    """acc += a @ b in fp32; a and b of one dtype."""
    if a.dtype != torch.float32 and a.is_cuda:
        torch.addmm(acc, a, b, out_dtype=torch.float32, out=acc)
    else:
        acc.addmm_(a.float(), b.float())


def outside(ids: Tensor, V: int) -> Tensor:
    """[N] bool: which ids are not in [0, V)."""
    return (ids < 0) | (ids >= V)


def require_ids(name: str, ids: Tensor, V: int) -> None:
    """ValueError for ids outside [0, V), as the reference says it; waits for the device."""
    low, high = map(int, ids.aminmax())
    require(0 <= low and high < V, name, (low, high), f"ids in [0, {V})")


def require_finite(lse: Tensor, rows: Tensor | None = None, op: str = "linear_logprob") -> None:
    """ValueError for the first row whose log-sum-exp is NaN or infinite; ``rows``: their numbers where not 0, 1, ..."""
    bad = ~lse.isfinite()
    if bad.any():
        i = int(bad.int().argmax())
        row = i if rows is None else int(rows[i])
        raise ValueError(f"{op}, row {row}: got log-sum-exp {lse[i].item()}, need a finite one")
