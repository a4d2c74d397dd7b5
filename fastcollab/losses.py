"""The public losses, and how their metrics over micro-batches become the step's log values."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fastcollab.ops.head import linear_policy_loss
from fastcollab.ops.losses import advantage_regression, policy_loss
from fastcollab.reference.losses import LOG_RATIO_CAP, anchors, effective_advantage, kl_estimate, value_estimate

__all__ = [
    "LOG_RATIO_CAP",
    "advantage_regression",
    "anchors",
    "effective_advantage",
    "kl_estimate",
    "linear_policy_loss",
    "merge_metrics",
    "policy_loss",
    "value_estimate",
]

_COMBINE = {"min": min, "max": max}


def merge_metrics(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
    """Metrics of one step from those of its micro-batches: sums become means over all kept tokens or segments.

    ``token_sum/kl`` becomes ``kl``, ``{token_sum,min,max}/ratio`` become ``ratio/{mean,min,max}``,
    ``count/tokens`` becomes ``num_loss_tokens``. Means and extremes over nothing are left out.
    """
    parts, total = list(parts), {}
    values = [value for part in parts for value in part.values()]
    values = iter(torch.stack([v.double() for v in values]).tolist() if values else ())  # one copy from the device
    for key, value in zip((key for part in parts for key in part), values, strict=True):
        combine = _COMBINE.get(key.split("/", 1)[0], operator.add)
        total[key] = combine(total[key], value) if key in total else value
    merged = {}
    for key, value in total.items():
        kind, name = key.split("/", 1)
        count = total["count/segments" if kind == "segment_sum" else "count/tokens"]
        if kind == "count":
            merged[f"num_loss_{name}"] = value
        elif count > 0 and kind in _COMBINE:
            merged[f"{name}/{kind}"] = value
        elif count > 0:
            merged[f"{name}/mean" if f"min/{name}" in total else name] = value / count
    return merged
