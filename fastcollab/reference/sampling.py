"""Sampling, the specification: temperature, top-k, top-p, min-p, then Gumbel-max over what is kept."""

from __future__ import annotations

import torch
from torch import Tensor

from fastcollab.config import require
from fastcollab.reference.random import LARGEST_GUMBEL, SMALLEST_GUMBEL, exp32, token_noise


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    key: Tensor,
    position: Tensor,
    epoch: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per row.

    logits [R, V] any float dtype; temperature, top_p, min_p [R] fp32; top_k, position, epoch [R] int32; key [R] int64
    -> id [R] int64, logprob [R] fp32, kept_mass [R] fp32.

    x = fp32(z / temperature), correctly rounded. The token is argmax over the kept of x + noise(key, position, epoch,
    id), the lowest id on a tie; at temperature 0 it is argmax z, filters have no effect and x = z. logprob is
    log_softmax(x) at the token, over the whole vocabulary; kept_mass is the probability of the kept set, same law.
    Filters work on weights exp32(x - max) summed in fp64, so that every backend keeps the same set.
    A row with NaN, +inf or no finite logit gets id -1 and NaN. ``ValueError`` for a value outside its range.
    """
    rows, vocab = logits.shape
    require(vocab > 0, "logits", list(logits.shape), "at least one column")
    require(bool(((temperature >= 0) & temperature.isfinite()).all()), "temperature", temperature.tolist(), ">= 0")
    require(bool((top_k >= 0).all()), "top_k", top_k.tolist(), ">= 0 (0 keeps all)")
    require(bool((top_p > 0).all()), "top_p", top_p.tolist(), "in (0, 1]")
    require(bool(((min_p >= 0) & (min_p <= 1)).all()), "min_p", min_p.tolist(), "in [0, 1]")
    greedy = temperature == 0
    x = logits.float() / torch.where(greedy, torch.ones_like(temperature), temperature)[:, None]
    top = x.amax(1)
    valid = top.isfinite()  # amax of a row with NaN is NaN
    x = torch.where(valid[:, None], x, torch.zeros_like(x))
    top = torch.where(valid, top, torch.zeros_like(top))

    weight = exp32(x - top[:, None]).double()
    mass = weight.sum(1)
    kept = _kept(x, weight, mass, top_k, top_p, min_p) if _truncates(vocab, top_k, top_p, min_p) else None
    id = torch.where(greedy, x.argmax(1), _race(x, kept, key, position.long(), epoch.long()))
    logprob = (x.gather(1, id[:, None])[:, 0].double() - top.double() - mass.log()).float()
    kept_mass = torch.ones_like(logprob)
    if kept is not None:
        truncated = ((top_k > 0) & (top_k < vocab)) | (top_p < 1) | (min_p > 0)
        share = ((weight * kept).sum(1) / mass).float()
        kept_mass = torch.where(truncated & ~greedy, share, kept_mass)
    nan = torch.full_like(logprob, torch.nan)
    return torch.where(valid, id, -1), torch.where(valid, logprob, nan), torch.where(valid, kept_mass, nan)


def _truncates(vocab: int, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> bool:
    return bool((((top_k > 0) & (top_k < vocab)) | (top_p < 1) | (min_p > 0)).any())


def _kept(x: Tensor, weight: Tensor, mass: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """bool [R, V]: what top-k, top-p and min-p keep, in that order, each on what the previous kept."""
    order = x.argsort(dim=1, descending=True, stable=True)  # ties by id: a threshold keeps the lowest
    ranked, rank = weight.gather(1, order), torch.arange(x.shape[1], device=x.device)
    k = torch.where(top_k > 0, top_k, x.shape[1]).long()[:, None]
    keep = rank < k
    total = torch.where((k < x.shape[1])[:, 0], (ranked * keep).sum(1), mass)
    before = (ranked * keep).cumsum(1) - ranked  # a token stays while those above it have not reached the mass
    keep &= (before < (top_p.double() * total)[:, None]) | (rank == 0) | (top_p >= 1)[:, None]
    keep &= ranked >= min_p.double()[:, None]  # the largest weight is 1, so the ratio to it is the weight itself
    keep &= x.gather(1, order) > -torch.inf
    return torch.zeros_like(keep).scatter(1, order, keep)


def _race(x: Tensor, kept: Tensor | None, key: Tensor, position: Tensor, epoch: Tensor) -> Tensor:
    """argmax of x + noise over the kept. Noise spans less than 20, so a token 20 below the best kept can't win."""
    score = x if kept is None else torch.where(kept, x, torch.full_like(x, -torch.inf))
    near = score >= score.amax(1, keepdim=True) - (LARGEST_GUMBEL - SMALLEST_GUMBEL + 0.5)
    row, id = near.nonzero(as_tuple=True)
    noisy = torch.full_like(x, -torch.inf)
    noisy[row, id] = score[row, id] + token_noise(key[row], position[row], epoch[row], id)
    return noisy.argmax(1)
