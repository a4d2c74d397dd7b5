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

    See :func:`fastcollab.reference.sampling.sample`. Every implementation draws the same ids: decisions rest on counts
    and on fp32 values of the same bits, only top-p compares an fp64 sum with top_p times the mass. Sums are the same in
    any order where no weight is below 2^-29 of the mass. Elsewhere they are within V 2^-53 of each other, relative, and
    top-p may keep a token more or less where a sum comes that close to the threshold.

    native on CUDA: V up to 524,288, no host sync. A value outside its range can't raise there: its row gets id -1 and
    NaN, as a row without a law does.
    """
    impl, where = choose("sample", logits.device, logits.dtype)
    law = (logits, temperature, top_k, top_p, min_p, key, position, epoch)
    if impl == "native" and logits.is_cuda:
        return where.sample(*law, torch.cuda.current_stream(logits.device).cuda_stream)
    return where.sample(*law)


@fake("sample")
def _(logits, temperature, top_k, top_p, min_p, key, position, epoch, stream=0):
    return torch.empty_like(key), torch.empty_like(temperature), torch.empty_like(temperature)
