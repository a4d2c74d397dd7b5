"""What people use today for the operators: eager, chunked and compiled torch, and the libraries that are importable.

Head baselines take (h [N, D], weight [V, D], target [N]) and return log-probs [N]; loss baselines take [B, T] tensors.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Logprob = Callable[[Tensor, Tensor, Tensor], Tensor]
Found = tuple[dict[str, Callable[..., Any]], dict[str, str]]  # what is there; of what is absent, the reason

CLIP_LOW, CLIP_HIGH, BETA = 0.2, 0.28, 0.04
ROW_CHUNK = 256


def _missing(package: str) -> str | None:
    return None if importlib.util.find_spec(package) else f"{package} is not installed"


def _no_compiler(device: torch.device) -> str | None:
    """Why torch.compile does not run: it needs a C++ compiler for the CPU, Triton for a GPU."""
    if device.type == "cuda":
        return _missing("triton")
    return None if shutil.which("c++") or shutil.which("g++") or shutil.which("clang++") else "no C++ compiler on PATH"


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


# -- the head


def naive_logprob(h: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.linear(h, weight).float().log_softmax(-1).gather(1, target[:, None])[:, 0]


def selective_logprob(h: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """TRL's way: the logits stay whole, their normaliser is taken row by row (in 16 bits: the row's log-softmax)."""
    logits = F.linear(h, weight)
    if logits.dtype == torch.float32:
        picked = logits.gather(1, target[:, None])[:, 0]
        return picked - torch.stack([row.logsumexp(0) for row in logits])
    return torch.stack([row.log_softmax(0)[t] for row, t in zip(logits, target, strict=True)])


def chunked_logprob(h: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Rows in chunks; in training each chunk's logits are computed again in the backward pass."""
    pieces = zip(h.split(ROW_CHUNK), target.split(ROW_CHUNK), strict=True)
    if not torch.is_grad_enabled():
        return torch.cat([naive_logprob(x, weight, t) for x, t in pieces])
    return torch.cat([checkpoint(naive_logprob, x, weight, t, use_reentrant=False) for x, t in pieces])


def _liger_logprob() -> Logprob:
    from liger_kernel.chunked_loss.fused_linear_ppo import _ChunkedSelectiveLogProbFunction as function

    return lambda h, weight, target: function.apply(h, weight, target, None, 1.0, 4096)


def _cce_logprob(device: torch.device) -> Logprob:
    from cut_cross_entropy import linear_cross_entropy

    impl = "cce" if device.type == "cuda" else "torch_compile"
    return lambda h, weight, target: -linear_cross_entropy(h, weight, target, reduction="none", impl=impl)


def logprobs(device: torch.device, dtype: torch.dtype) -> Found:
    """Name -> log-probs of the head."""
    found: dict[str, Logprob] = {"eager": naive_logprob, "selective": selective_logprob, "row chunks": chunked_logprob}
    absent = {}
    if reason := _no_compiler(device):
        absent["torch.compile"] = reason
    else:
        found["torch.compile"] = compiled(naive_logprob)
    if reason := _missing("liger_kernel"):
        absent["Liger"] = reason
    else:
        found["Liger"] = _liger_logprob()
    reason = _missing("cut_cross_entropy") or _no_compiler(device)
    if device.type == "cuda" and dtype == torch.float32:
        reason = reason or "cut_cross_entropy computes in 16 bits on a GPU"
    if reason:
        absent["CCE"] = reason
    else:
        found["CCE"] = _cce_logprob(device)
    return found, absent


# -- the losses


def policy_loss(logprob: Tensor, old: Tensor, ref: Tensor | None, advantage: Tensor, mask: Tensor) -> tuple:
    """The clipped surrogate as TRL writes it, [B, T] and advantage [B] -> loss and the means of its metrics.

    In order: ratio, its least and largest, k3 of old to new, share clipped low, high, either, k3 to the reference.
    """
    kept = mask.sum().clamp(min=1)

    def mean(x: Tensor) -> Tensor:
        return (x * mask).sum() / kept

    A = advantage[:, None]
    ratio = torch.exp(logprob - old)
    token = -torch.min(ratio * A, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * A)
    if ref is not None:
        kl = torch.exp(ref - logprob) - (ref - logprob) - 1
        token = token + BETA * kl
    loss = mean(token)
    with torch.no_grad():
        low, high = (ratio < 1 - CLIP_LOW) & (A < 0), (ratio > 1 + CLIP_HIGH) & (A > 0)
        back = logprob - old
        metrics = [mean(ratio), ratio.masked_fill(~mask, torch.inf).min(), ratio.masked_fill(~mask, 0).max()]
        metrics += [mean(torch.exp(back) - back - 1), mean(low.float()), mean(high.float()), mean((low | high).float())]
        if ref is not None:
            metrics.append(mean(kl))
    return loss, metrics


def advantage_regression(logprob: Tensor, anchor: Tensor, advantage: Tensor, mask: Tensor, beta: float) -> tuple:
    """Sum each sequence's log-ratio, regress it on its advantage: [B, T] and advantage [B] -> loss and five means.

    In order: residual squared, log-ratio, log-ratio squared, absolute fit, absolute advantage.
    """
    log_ratio = ((logprob - anchor) * mask).sum(1)
    residual = beta * log_ratio - advantage
    loss = (residual.square() / (2 * beta)).mean()
    with torch.no_grad():
        each = [residual.square(), log_ratio, log_ratio.square(), (beta * log_ratio).abs(), advantage.abs()]
        metrics = [x.mean() for x in each]
    return loss, metrics


def losses(eager: Callable[..., Any], device: torch.device) -> Found:
    if reason := _no_compiler(device):
        return {"eager": eager}, {"torch.compile": reason}
    return {"eager": eager, "torch.compile": compiled(eager)}, {}


def head_losses(device: torch.device, dtype: torch.dtype) -> Found:
    """Name -> (h, weight, target [N], old [B, T], advantage [B], mask [B, T]) -> loss; B T = N."""
    found, absent = logprobs(device, dtype)
    found.pop("Liger", None)
    found.pop("torch.compile", None)

    def on(logprob: Logprob) -> Callable[..., Tensor]:
        def loss(h, weight, target, old, advantage, mask):
            return policy_loss(logprob(h, weight, target).view(old.shape).float(), old, None, advantage, mask)[0]

        return loss

    whole: dict[str, Callable[..., Tensor]] = {name: on(function) for name, function in found.items()}
    if "torch.compile" not in absent:
        whole["torch.compile"] = compiled(on(naive_logprob))
    if "Liger" not in absent:
        whole["Liger"] = _liger_loss(compile_it="torch.compile" not in absent)
    return whole, absent


def _liger_loss(compile_it: bool) -> Callable[..., Tensor]:
    """All sequences in one chunk, which is faster than its default of one: the weight's gradient is written once."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    def loss(h, weight, target, old, advantage, mask):
        B, T = old.shape
        module = LigerFusedLinearGRPOLoss(beta=0.0, epsilon_low=CLIP_LOW, epsilon_high=CLIP_HIGH, loss_type="bnpo",
                                          use_ref_model=False, compiled=compile_it, chunk_size=B)  # fmt: skip
        return module(h.view(B, T, -1), weight, target.view(B, T), mask.float(), advantage, old_per_token_logps=old)[0]

    return loss


# -- attention


def append(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None:
    """Write T new rows to the pages."""
    k_pool.view(-1, *k.shape[1:]).index_copy_(0, slots, k)
    v_pool.view(-1, *v.shape[1:]).index_copy_(0, slots, v)


def rows_sdpa(q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor, table: Tensor,
              counts: list[int], lengths: list[int], scale: float) -> Tensor:  # fmt: skip
    """Append; then for each row gather its pages and call SDPA for its ``counts[r]`` last of ``lengths[r]`` tokens."""
    append(k, v, k_pool, v_pool, slots)
    outs = []
    for row, (piece, length) in enumerate(zip(q.split(counts), lengths, strict=True)):
        keys, values = (pool[table[row]].flatten(0, 1)[:length].transpose(0, 1)[None] for pool in (k_pool, v_pool))
        mask = None
        if len(piece) > 1:
            last = torch.arange(length - len(piece), length, device=q.device)
            mask = torch.arange(length, device=q.device) <= last[:, None]
        out = F.scaled_dot_product_attention(piece.transpose(0, 1)[None], keys, values, attn_mask=mask, scale=scale,
                                             enable_gqa=True)  # fmt: skip
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def batch_sdpa(q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor, table: Tensor,
               length: int, scale: float) -> Tensor:  # fmt: skip
    """Decode rows of one length: append, gather all pages at once, one SDPA."""
    append(k, v, k_pool, v_pool, slots)
    keys, values = (pool[table].flatten(1, 2)[:, :length].transpose(1, 2) for pool in (k_pool, v_pool))
    return contiguous_sdpa(q, keys, values, scale)


def contiguous_sdpa(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """q [R, H, D] over keys and values [R, Hkv, L, D]: no pages, no append."""
    return F.scaled_dot_product_attention(q[:, :, None], keys, values, scale=scale, enable_gqa=True)[:, :, 0]


def causal_sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


def flash_decode(scale: float) -> Callable[..., Tensor]:
    """flash-attn over its own pages of 256 tokens: q, k, v [R, heads, D], k_pool, v_pool, table, cached int32 [R]."""
    from flash_attn import flash_attn_with_kvcache

    def run(q, k, v, k_pool, v_pool, table, cached):
        return flash_attn_with_kvcache(q[:, None], k_pool, v_pool, k[:, None], v[:, None], cache_seqlens=cached,
                                       block_table=table, softmax_scale=scale, causal=True)[:, 0]  # fmt: skip

    return run


def flash_packed(cu_seqlens: Tensor, longest: int, scale: float) -> Callable[..., Tensor]:
    from flash_attn import flash_attn_varlen_func

    return lambda q, k, v: flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, longest, longest,
                                                  softmax_scale=scale, causal=True)  # fmt: skip


def no_flash(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return "flash-attn needs a GPU"
    return _missing("flash_attn") or ("flash-attn takes no fp32" if dtype == torch.float32 else None)


# -- sampling and copies


def multinomial(logits: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """softmax, the filters by a sort as ``transformers`` does them, torch.multinomial -> id, log-prob [R]."""
    logprob = logits.log_softmax(-1)
    id = torch.multinomial(_filtered(logits, top_k, top_p).softmax(-1), 1)
    return id[:, 0], logprob.gather(1, id)[:, 0]


def gumbel_argmax(logits: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """argmax of the logits plus Gumbel noise from torch's generator -> id, log-prob [R]."""
    logprob = logits.log_softmax(-1)
    noise = torch.empty_like(logits).exponential_().log_().neg_()
    id = (_filtered(logits, top_k, top_p) + noise).argmax(-1)
    return id, logprob.gather(1, id[:, None])[:, 0]


def _filtered(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k)[0][:, -1:], -torch.inf)
    if top_p < 1:
        ranked, order = logits.sort(-1)
        drop = ranked.softmax(-1).cumsum(-1) <= 1 - top_p
        drop[:, -1] = False
        logits = logits.masked_fill(drop.scatter(1, order, drop), -torch.inf)
    return logits


def index_copy(pools: list[Tensor], source: Tensor, destination: Tensor) -> None:
    for pool in pools:
        pool.index_copy_(0, destination, pool.index_select(0, source))
