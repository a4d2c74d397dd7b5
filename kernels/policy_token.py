"""One token's policy-gradient loss and its derivative, for a vector of tokens: what the loss kernels share.

The specification is ``fastcollab.reference.losses.policy_loss``.
"""

from __future__ import annotations

import triton
import triton.language as tl

CAP = tl.constexpr(20.0)  # LOG_RATIO_CAP of the reference


@triton.jit
def k3(d):
    """e^d - d - 1 with d capped; a series near 0, where the difference would cancel."""
    d = tl.minimum(d, CAP)
    s = d * (1 / 362880) + 1 / 40320
    s = s * d + 1 / 5040
    s = s * d + 1 / 720
    s = s * d + 1 / 120
    s = s * d + 1 / 24
    s = s * d + 1 / 6
    s = s * d + 1 / 2
    return tl.where(tl.abs(d) < 0.5, s * d * d, tl.exp(d) - 1 - d)


@triton.jit
def kl_term(logprob, ref, KL: tl.constexpr):
    """(estimate of the KL to the reference, its derivative in logprob)."""
    d = ref - logprob
    if KL == 1:
        value, slope = -d, d * 0 + 1
    elif KL == 2:
        value, slope = d * d / 2, -d
    else:
        value = k3(d)
        slope = tl.where(d <= CAP, -(value + d), 0.0)
    return value, slope


@triton.jit
def policy_token(logprob, diff, advantage, clip_low, clip_high, dual_clip, FORM: tl.constexpr):
    """(loss, its derivative in logprob with d diff = d logprob, ratio, low, high, dual): without the KL term.

    diff is the log-ratio (logprob - old); FORM 0 clip, 1 cispo, 2 reinforce; dual_clip 0: none. low, high and dual say
    where a clip acts.
    """
    ratio = tl.exp(tl.minimum(diff, CAP))
    clipped = tl.minimum(tl.maximum(ratio, 1 - clip_low), 1 + clip_high)
    low, high = ratio < 1 - clip_low, ratio > 1 + clip_high
    dual = ratio < 0
    if FORM == 0:
        free, held = ratio * advantage, clipped * advantage
        loss = -tl.minimum(free, held)
        slope = tl.where((free <= held) & (diff <= CAP), -free, 0.0)
        dual = (dual_clip > 0) & (advantage < 0) & (loss > -dual_clip * advantage)
        loss = tl.where(dual, -dual_clip * advantage, loss)
        slope = tl.where(dual, 0.0, slope)
        low, high = low & (advantage < 0), high & (advantage > 0)
    elif FORM == 1:
        slope = -clipped * advantage
        loss = slope * logprob
    else:
        slope = -advantage
        loss = slope * logprob
        low, high = dual, dual
    return loss, slope, ratio, low, high, dual
