"""The LM head's log-probs: ``log_softmax((h W^T + b) / temperature)[target]`` in chunks, so that [N, V] never exists.

Specification::

    z = h @ W.T + b;  z = c * tanh(z / c) if softcap c;  z = z / temperature
    logprob = z[target] - logsumexp(z);  entropy = -sum p log p with p = softmax(z) and 0 log 0 = 0

The backward pass recomputes each chunk of logits from the saved log-sum-exp and skips rows whose upstream gradients
are 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcollab.config import require
from fastcollab.reference.losses import Metrics, check_shapes, policy_loss

_CHUNK_BYTES = 64 << 20  # one chunk of logits
_ROWS = 16  # torch's products of 16, 32, ... rows give a row the same bits, those of fewer do not
_TILE_BYTES = 16 << 20  # one fp32 copy of a part of a 16-bit weight


def linear_logprob(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperature: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each row's target token, and the row's entropy, straight from hidden states.

    Args: h [N, D], weight [V, D], bias [V] or None, of any float dtype; target [N] int64; the soft cap comes before
    the temperature. A bias of -inf forbids a token (where no soft cap brings it back).
    Returns: logprob [N] and entropy [N] or None, fp32 (fp64 from fp64 input), logits accumulated in that dtype
    whatever the input's. Gradients reach h, weight and bias where they ask for one, each in its own dtype.
    Raises: ValueError for shapes, targets or settings out of range, and for a row whose logits are NaN, +inf or all
    -inf.
    """
    check(h, weight, bias, target, temperature, softcap)
    check_ids("target", target, weight.shape[0])
    logprob, ent = _LinearLogprob.apply(h, weight, bias, target, float(temperature), softcap, entropy)
    return logprob, (ent if entropy else None)


class Scores(NamedTuple):
    """What is known of each row [N]; ``second_logprob`` where a second target was given; ``top1`` int64."""

    logprob: Tensor
    entropy: Tensor
    second_logprob: Tensor | None
    top1: Tensor


@torch.no_grad()
def linear_scores(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    second: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> Scores:
    """Log-prob of the target and of a second one, entropy and likeliest token of each row; as ``linear_logprob``."""
    logprob, entropy = linear_logprob(h, weight, bias, target, temperature, softcap, entropy=True)
    other = None if second is None else linear_logprob(h, weight, bias, second, temperature, softcap)[0]
    rows = range(0, len(h), _step(weight, logprob.dtype))
    chunks = [h[i : i + rows.step].to(logprob.dtype) for i in rows]
    top1 = [_logits(x, weight, bias, temperature, softcap).argmax(-1) for x in chunks]
    return Scores(logprob, entropy, other, torch.cat(top1) if top1 else torch.empty_like(target))


def linear_policy_loss(
    h: Tensor,
    weight: Tensor,
    target: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    segment_ids: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    **settings: Any,
) -> tuple[Tensor, Metrics]:
    """``policy_loss`` of ``linear_logprob`` of the kept rows; the others never reach the head, whatever they hold.

    Args: h [T, D], weight [V, D], bias [V] or None, target [T]; the others and ``settings`` as in ``policy_loss``.
    Returns: loss and metrics, with ``token_sum/entropy`` if ``entropy``. Raises: as its two parts.
    """
    check_shapes({"target": target, "old_logprob": old_logprob}, advantage, mask, segment_ids)
    kept = mask.nonzero().flatten()
    logprob, ent = linear_logprob(h[kept], weight, bias, target[kept], temperature, softcap, entropy)
    whole = logprob.new_zeros(len(mask)).index_put((kept,), logprob)
    loss, metrics = policy_loss(whole, old_logprob, advantage, mask, segment_ids, **settings)
    return loss, metrics | ({"token_sum/entropy": ent.detach().sum()} if entropy else {})


def check(
    h: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, temperature: float, softcap: float | None
) -> None:
    """Shapes and settings."""
    V = weight.shape[0]
    fits = h.ndim == weight.ndim == 2 and h.shape[1] == weight.shape[1] and target.shape == h.shape[:1]
    if not fits or (bias is not None and bias.shape != (V,)):
        shapes = (list(h.shape), list(weight.shape), None if bias is None else list(bias.shape), list(target.shape))
        require(False, "h, weight, bias, target", shapes, "[N, D], [V, D], [V] or None, [N]")
    require(temperature > 0, "temperature", temperature, "> 0")
    require(softcap is None or softcap > 0, "softcap", softcap, "None or > 0")


def check_ids(name: str, ids: Tensor, V: int) -> None:
    if len(ids):
        low, high = ids.aminmax()
        require(0 <= int(low) and int(high) < V, name, (int(low), int(high)), f"ids in [0, {V})")


def _step(weight: Tensor, dtype: torch.dtype) -> int:
    step = _CHUNK_BYTES // (len(weight) * dtype.itemsize)
    return step // _ROWS * _ROWS or max(1, step)


def _tiles(weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """(rows of the vocabulary, those rows of the weight in ``dtype``)."""
    V, D = weight.shape
    step = V if weight.dtype == dtype else max(1, _TILE_BYTES // (D * dtype.itemsize))
    for v in range(0, V, step):
        yield slice(v, v + step), weight[v : v + step].to(dtype)


def _logits(h: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, softcap: float | None) -> Tensor:
    N = len(h)
    h = F.pad(h, (0, 0, 0, -N % _ROWS))
    z = h.new_empty(len(h), weight.shape[0])
    for v, w in _tiles(weight, z.dtype):
        torch.mm(h, w.T, out=z[:, v])  # with out= also under autocast in z's dtype
    z = z[:N]
    if bias is not None:
        z += bias
    if softcap is not None:
        z.div_(softcap).tanh_().mul_(softcap)
    return z.div_(temperature)


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, weight, bias, target, temperature, softcap, entropy):
        dtype = torch.promote_types(torch.promote_types(h.dtype, weight.dtype), torch.float32)
        N = h.shape[0]
        logprob, lse, ent = (h.new_empty(N, dtype=dtype) for _ in range(3))
        step = _step(weight, dtype)
        for rows in (slice(i, i + step) for i in range(0, N, step)):
            z = _logits(h[rows].to(dtype), weight, bias, temperature, softcap)
            lse[rows] = z.logsumexp(-1)
            logprob[rows] = z.gather(1, target[rows, None])[:, 0] - lse[rows]
            if entropy:
                ent[rows] = torch.special.entr(z.sub_(lse[rows, None]).exp_()).sum(-1)
        bad = ~lse.isfinite()
        if bad.any():
            row = int(bad.int().argmax())
            raise ValueError(f"linear_logprob, row {row}: got log-sum-exp {lse[row].item()}, need a finite one")
        ctx.save_for_backward(h, weight, bias, target, lse, ent if entropy else None)
        ctx.temperature, ctx.softcap, ctx.step = temperature, softcap, step
        return logprob, ent if entropy else None

    @staticmethod
    def backward(ctx, g_logprob, g_entropy):
        require(not torch.is_grad_enabled(), "create_graph", True, "False: the gradient's own gradient is not known")
        h, weight, bias, target, lse, ent = ctx.saved_tensors
        dtype, (need_h, need_w, need_b) = lse.dtype, ctx.needs_input_grad[:3]
        dh = torch.zeros_like(h) if need_h else None
        dw = torch.zeros_like(weight, dtype=dtype) if need_w else None
        db = torch.zeros_like(bias, dtype=dtype) if need_b else None
        g_logprob = torch.zeros_like(lse) if g_logprob is None else g_logprob
        active = g_logprob != 0
        if g_entropy is not None:
            active |= g_entropy != 0
        active = active.nonzero().flatten()
        for rows in active.split(ctx.step) if len(active) else ():
            x = h[rows].to(dtype)
            z = _logits(x, weight, bias, ctx.temperature, ctx.softcap)
            p = (z - lse[rows, None]).exp_()
            dz = p * -g_logprob[rows, None]
            dz.scatter_add_(1, target[rows, None], g_logprob[rows, None])
            if g_entropy is not None:
                dz += (torch.special.entr(p) - p * ent[rows, None]) * g_entropy[rows, None]
            if ctx.softcap is not None:
                dz *= 1 - (z * (ctx.temperature / ctx.softcap)).square_()
            dz /= ctx.temperature
            if need_b:
                db += dz.sum(0)
            dx = torch.zeros_like(x) if need_h else None
            for v, w in _tiles(weight, dtype) if need_h or need_w else ():
                if need_h:
                    dx.addmm_(dz[:, v], w)
                if need_w:
                    dw[v].addmm_(dz[:, v].T, x)
            if need_h:
                dh[rows] = dx.to(h.dtype)
        return dh, None if dw is None else dw.to(weight.dtype), None if db is None else db.to(bias.dtype), *[None] * 4
