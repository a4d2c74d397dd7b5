"""``linear_policy_loss`` in Triton: head and token-level loss in one pass, three GEMMs instead of four.

The logits of some rows over the whole vocabulary are multiplied by the library GEMM into a bounded buffer. A row's
log-prob gives its loss and that loss' gradient at once, so the same logits become their own gradients, from which
dh and dW follow. Memory is bounded by ``_BUFFER_BYTES``; where the kept rows do not fit into it at once, dW of a 16-bit
weight is summed in an fp32 copy.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastcollab.kernels.logits import (
    accumulate,
    case,
    compute_dtype,
    logit_gradient,
    merge,
    outside,
    product,
    require_finite,
    require_ids,
    scaled,
    softmax_part,
)
from fastcollab.kernels.offline import Case
from fastcollab.kernels.policy_loss import policy_loss_forward

_BUFFER_BYTES = 1 << 30  # logits and their gradients
_CAST_BYTES = 64 << 20  # the part of a narrow weight that is widened at a time
_ROW_IDS = 4096  # ids of one step of the row kernel
_DZ_ROWS, _DZ_IDS = 16, 256  # tile of the gradient kernel


@triton.jit
def _row_kernel(z, bias, target, lse, logprob, entropy, V, stride_z, softcap, scale,
                HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, IDS: tl.constexpr):  # fmt: skip
    """One row of logits z [rows, V] fp32: its lse, its target's log-prob, its entropy."""
    row = tl.program_id(0).to(tl.int64)
    aim = tl.load(target + row).to(tl.int32)
    peak = tl.full((1,), float("-inf"), tl.float32)
    mass = tl.zeros((1,), tl.float32)
    spread = tl.zeros((1,), tl.float32)
    chosen = tl.zeros((1,), tl.float32)
    for v0 in range(0, V, IDS):
        ids = v0 + tl.arange(0, IDS)
        known = ids < V
        x = tl.load(z + row * stride_z + ids, mask=known, other=float("-inf"))[None, :]
        x = scaled(x, bias, ids, known, softcap, scale, HAS_BIAS, SOFTCAP)
        x = tl.where(known[None, :], x, float("-inf"))
        chosen += tl.sum(tl.where((ids == aim)[None, :], x, 0.0), 1)
        x_peak, x_mass, x_spread = softmax_part(x, ENTROPY)
        peak, mass, spread = merge(peak, mass, spread, x_peak, x_mass, x_spread)
    at = row + tl.arange(0, 1)
    log_mass = tl.log(mass)
    tl.store(lse + at, tl.where(peak == float("inf"), peak, peak + log_mass))
    tl.store(logprob + at, chosen - peak - log_mass)
    if ENTROPY:
        tl.store(entropy + at, log_mass - spread / mass)


@triton.jit
def _dz_kernel(z, dz, bias, target, lse, g, db, n, V, stride_z, stride_dz, softcap, scale, HAS_BIAS: tl.constexpr,
               SOFTCAP: tl.constexpr, NEED_B: tl.constexpr, ROWS: tl.constexpr, IDS: tl.constexpr):  # fmt: skip
    """Logits z [n, V] fp32 to their gradients dz [n, V] (where dz is z: in place), db [row blocks, V] sums."""
    columns = tl.cdiv(V, IDS)
    block = tl.program_id(0) // columns
    at = block * ROWS + tl.arange(0, ROWS)
    ids = (tl.program_id(0) % columns) * IDS + tl.arange(0, IDS)
    real = at < n
    rows = at.to(tl.int64)
    there = real[:, None] & (ids < V)[None, :]
    x = tl.load(z + rows[:, None] * stride_z + ids[None, :], mask=there, other=0.0)
    x = scaled(x, bias, ids, ids < V, softcap, scale, HAS_BIAS, SOFTCAP)
    hit = ids[None, :] == tl.load(target + rows, mask=real, other=-1).to(tl.int32)[:, None]
    # beyond n a row weighs 0 with probabilities 0
    normal = tl.load(lse + rows, mask=real, other=float("inf"))
    weight = tl.load(g + rows, mask=real, other=0.0)
    d = logit_gradient(x, normal, hit, weight, weight, weight, softcap, scale, False, SOFTCAP)
    tl.store(dz + rows[:, None] * stride_dz + ids[None, :], d.to(dz.dtype.element_ty), mask=there)
    if NEED_B:
        tl.store(db + block.to(tl.int64) * V + ids, tl.sum(d, 0), mask=ids < V)


def _tiles(weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """(ids, their rows of the weight in ``dtype``): all at once where nothing has to be widened."""
    V, D = weight.shape
    step = V if weight.dtype == dtype else max(1, _CAST_BYTES // (D * dtype.itemsize))
    for v in range(0, V, step):
        yield slice(v, min(v + step, V)), weight[v : v + step].to(dtype)


def _buffers(n: int, V: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """(rows of gradients at a time, rows of logits at a time, width): fp32 logits become gradients in place."""
    width = triton.cdiv(V, 16) * 16  # aligned rows for the library GEMM
    if dtype == torch.float32:
        rows = max(1, _BUFFER_BYTES // (4 * width))
        return min(n, rows), min(n, rows), width
    logits = min(n, max(1, _BUFFER_BYTES // 4 // (4 * width)))
    return min(n, max(logits, (_BUFFER_BYTES - 4 * width * logits) // (dtype.itemsize * width))), logits, width


def _require_tokens(named: dict[str, Tensor], rows: Tensor, segment_ids: Tensor, S: int) -> None:
    """The reference's errors for what is kept: segment ids out of range, values that are not finite."""
    foreign = outside(segment_ids, S)
    bad = foreign | ~torch.stack(list(named.values())).isfinite().all(0)
    if bad.any():
        i = int(bad.int().argmax())
        if foreign[i]:
            raise ValueError(f"segment_ids: got {int(segment_ids[i])} at token {int(rows[i])}, need in [0, {S})")
        values = {name: x[i].item() for name, x in named.items()}
        where = f"token {int(rows[i])} of segment {int(segment_ids[i])}"
        raise ValueError(f"{where}: got {values}, need finite values under the mask")


def linear_policy_loss_forward(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperature: float,
    softcap: float,
    entropy: bool,
    old_logprob: Tensor,
    ref_logprob: Tensor | None,
    advantage: Tensor,
    mask: Tensor,
    segment_ids: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    form: int,
    per_sequence: bool,
    beta: float,
    kl: int,
    scale: float,
    need_h: bool,
    need_w: bool,
    need_b: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """sums fp64 [13] (loss, tokens, segments, ratio, its minimum and maximum, approx_kl, low, high, region, dual, kl,
    entropy) and ``scale`` times the loss' gradients dh, dw, db, [0] where not needed.

    h [N, D], weight [V, D], bias [V]; target, segment_ids [N] int64, mask [N] bool, log-probs [N], advantage [S].
    Rows with mask False are left out before the head; their number goes to the host, in the end whether all is well.
    Raises: ValueError for a kept row whose lse, log-probs or advantage are not finite, or whose target is outside
    [0, V) or segment id outside [0, S).
    """
    (N, D), V, S, dtype = h.shape, weight.shape[0], len(advantage), compute_dtype(h, weight)
    dh = torch.zeros_like(h) if need_h else h.new_empty(0)
    dw = torch.zeros_like(weight) if need_w else weight.new_empty(0)
    db = torch.zeros(V if need_b else 0, device=h.device)
    b_dtype = h.dtype if bias is None else bias.dtype
    sums = torch.zeros(13, dtype=torch.float64, device=h.device)
    rows = mask.nonzero()[:, 0]
    n = len(rows)
    if n == 0:
        sums[4] = torch.inf
        return sums, dh, dw, db.to(b_dtype)
    pick = lambda x: x if n == N else x[rows]  # noqa: E731
    x, target, ids, old = pick(h), pick(target), pick(segment_ids), pick(old_logprob).float()
    x = x.to(dtype)
    ref = None if ref_logprob is None else pick(ref_logprob).float()
    advantage = advantage.float()
    known = ids.clamp(0, S - 1)  # a foreign id is refused at the end
    given = {"old_logprob": old, "advantage": advantage[known]} | ({} if ref is None else {"ref_logprob": ref})
    share = torch.full_like(old, scale)  # of each token's gradient
    if per_sequence:
        share /= torch.zeros(S, dtype=torch.int64, device=h.device).index_add_(0, known, torch.ones_like(ids))[known]
    kept = torch.ones_like(ids, dtype=torch.bool)
    settings = clip_low, clip_high, dual_clip, form, 0

    def loss(t: slice, per_sequence: bool) -> tuple[Tensor, Tensor]:
        r = None if ref is None else ref[t]
        return policy_loss_forward(logprob[t], old[t], r, advantage, kept[t], ids[t], *settings, per_sequence, beta, kl)

    R, L, width = _buffers(n, V, dtype)
    dz = torch.empty(R, width, dtype=dtype, device=h.device)
    logits = dz if dtype == torch.float32 else torch.empty(L, width, device=h.device)
    lse, logprob, ent = torch.empty(3, n, device=h.device)
    db_part = torch.empty(triton.cdiv(L, _DZ_ROWS) if need_b else 0, V, device=h.device)
    dw_sum = dw if n <= R or weight.dtype == torch.float32 else torch.zeros_like(weight, dtype=torch.float32)
    cap = {"HAS_BIAS": bias is not None, "SOFTCAP": softcap > 0}
    for r in range(0, n, R):
        of_tile = slice(r, min(r + R, n))
        d = dz[: of_tile.stop - r]
        for i in range(r, of_tile.stop, L):
            m = min(L, of_tile.stop - i)
            z = logits[:m]
            for v, w in _tiles(weight, dtype):
                product(x[i : i + m], w.T, z[:, v])
            with torch.cuda.device_of(h):
                _row_kernel[(m,)](z, bias, target[i:], lse[i:], logprob[i:], ent[i:], V, width, softcap,
                                  1 / temperature, **cap, ENTROPY=entropy, IDS=_ROW_IDS, num_warps=8)  # fmt: skip
                g = loss(slice(i, i + m), False)[1] * share[i : i + m]
                blocks = triton.cdiv(m, _DZ_ROWS)
                if need_h or need_w or need_b:
                    _dz_kernel[(blocks * triton.cdiv(V, _DZ_IDS),)](
                        z, d[i - r :], bias, target[i:], lse[i:], g, db_part, m, V, width, width, softcap,
                        1 / temperature, **cap, NEED_B=need_b, ROWS=_DZ_ROWS, IDS=_DZ_IDS,
                    )  # fmt: skip
            if need_b:
                db += db_part[:blocks].sum(0)
        if need_h:
            acc = torch.zeros(len(d), D, device=h.device)
            for v, w in _tiles(weight, dtype):
                accumulate(acc, d[:, v], w)
            dh[rows[of_tile]] = acc.to(h.dtype)
        if need_w and n <= R:
            product(d[:, :V].T, x, dw)
        elif need_w:
            accumulate(dw_sum, d[:, :V].T, x[of_tile])
    finite = torch.stack([lse, logprob, *given.values()]).isfinite().all(0)
    if (~finite | outside(target, V) | outside(ids, S)).any():  # one wait for the device, not one for each
        require_ids("target", target, V)
        _require_tokens(given, rows, ids, S)
        require_finite(lse, rows, "linear_policy_loss")
        _require_tokens({"logprob": logprob}, rows, ids, S)
    if dw_sum is not dw:
        dw.copy_(dw_sum)
    sums[:12] = loss(slice(0, n), per_sequence)[0]
    if entropy:
        sums[12] = ent.double().sum()
    return sums, dh, dw, db.to(b_dtype)


def offline_cases(target: str) -> list[Case]:
    """bf16 gradients with all options, fp32 ones with none."""
    types = dict.fromkeys(("z", "lse", "logprob", "entropy", "g", "db"), "*fp32") | {"target": "*i64"}
    types |= dict.fromkeys(("V", "n", "stride_z", "stride_dz"), "i32") | {"softcap": "fp32", "scale": "fp32"}
    cases = []
    for name, on in (("*bf16", True), ("*fp32", False)):
        own, cap = types | {"bias": name, "dz": name}, {"HAS_BIAS": on, "SOFTCAP": on}
        tile = {"NEED_B": on, "ROWS": _DZ_ROWS, "IDS": _DZ_IDS}
        cases.append(case(_row_kernel, own, cap | {"ENTROPY": on, "IDS": _ROW_IDS}, 8, 2))
        cases.append(case(_dz_kernel, own, cap | tile, 4, 2))
    return cases
