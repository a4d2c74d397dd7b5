"""Drawing one token per row of logits."""

from __future__ import annotations

import torch
from torch import Tensor

from fastcollab.ops.dispatch import choose, fake


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
    """Draw one token per row: id [R] int64 (-1: no valid law), logprob and kept_mass [R] fp32.

    See :func:`fastcollab.reference.sampling.sample`; every implementation draws the same ids.
    """
    run = choose("sample", logits.device, logits.dtype)[1].sample
    return run(logits, temperature, top_k, top_p, min_p, key, position, epoch)


@fake("sample")
def _(logits, temperature, top_k, top_p, min_p, key, position, epoch):
    return torch.empty_like(key), torch.empty_like(temperature), torch.empty_like(temperature)
