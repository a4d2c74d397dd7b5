"""Group-relative advantages: how much better a rollout's reward is than its group's mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastcollab.config import require
from fastcollab.reference.losses import value_estimate

Rewards = Sequence[float | None] | Tensor


def has_reward(rewards: Rewards) -> Tensor:
    """bool [N]: False where the row abstained (None or NaN). Such a row's tokens must leave the loss mask."""
    return ~_to_tensor(rewards).isnan()


def group_advantages(
    rewards: Rewards | Sequence[Sequence[float | None]],
    group_ids: Sequence[int] | Tensor | None = None,
    scale: str = "group",
    eps: float = 1e-6,
) -> tuple[Tensor, dict[str, float]]:
    """``A = (r - mean) / (std + eps)`` within each group; ``scale="none"`` does not divide (Dr.GRPO).

    std is the sample standard deviation (ddof 1), as in TRL and verl. A group whose rewards span max - min <= eps, a
    group of one among them, gets exactly 0. Rows without a reward (None or NaN) count in neither mean nor std and get
    0; mask their tokens with ``has_reward``. Statistics are computed in fp64.

    Args: rewards [N] with group_ids [N] (any integers, in any order), or ragged groups (a list of lists, no
    group_ids) whose rows come back in order.
    Returns: advantage [N] fp32 on the CPU, and metrics ``reward`` (mean of all rewards), ``reward_std`` (mean of the
    groups' stds, groups of one as 0), ``frac_reward_zero_std`` (of the groups that have a reward),
    ``reward/abstain_frac``; without any reward only the last.
    Raises: ValueError for an infinite reward (its row), unequal lengths, an unknown scale, eps < 0.
    """
    require(scale in ("group", "none"), "scale", scale, "group or none")
    require(eps >= 0, "eps", eps, ">= 0")
    if group_ids is None:
        require(not isinstance(rewards, Tensor), "group_ids", None, "[N] for a tensor of rewards")
        group_ids = [g for g, group in enumerate(rewards) for _ in group]
        rewards = [r for group in rewards for r in group]
    r, ids = _to_tensor(rewards), torch.as_tensor(group_ids, dtype=torch.int64).cpu()
    require(len(r) == len(ids), "number of group_ids", len(ids), f"{len(r)}, one per reward")
    require(len(r) > 0, "number of rewards", 0, ">= 1")
    infinite = r.isinf()
    require(not infinite.any(), f"reward of row {int(infinite.int().argmax())}", "inf", "a finite number or None")

    kept = ~r.isnan()
    _, ids = ids.unique(return_inverse=True)
    G = int(ids.max()) + 1
    g, x = ids[kept], r[kept]

    def group_sum(values: Tensor) -> Tensor:
        return torch.zeros(G, dtype=torch.float64).index_add_(0, g, values)

    n = group_sum(torch.ones_like(x))
    centered = x - (group_sum(x) / n)[g]
    std = (group_sum(centered.square()) / (n - 1).clamp(min=1)).sqrt()
    high = torch.full((G,), -torch.inf, dtype=torch.float64).scatter_reduce_(0, g, x, "amax")
    low = torch.full((G,), torch.inf, dtype=torch.float64).scatter_reduce_(0, g, x, "amin")
    is_flat = high - low <= eps
    advantage = torch.zeros_like(r)
    advantage[kept] = torch.where(is_flat[g], 0, centered / (std[g] + eps) if scale == "group" else centered)

    metrics = {"reward/abstain_frac": float((~kept).double().mean())}
    if len(x):
        scored = n > 0
        metrics["reward"] = float(x.mean())
        metrics["reward_std"] = float(std[scored].mean())
        metrics["frac_reward_zero_std"] = float(is_flat[scored].double().mean())
    return advantage.float(), metrics


def control_advantages(
    rewards: Rewards,
    group_ids: Sequence[int] | Tensor,
    is_control: Sequence[bool] | Tensor,
    baseline: str = "mean",
    beta: float = 0.0,
) -> tuple[Tensor, dict[str, float]]:
    """A = r - V(prompt), the baseline V from the control rollouts' rewards alone; not divided by anything.

    ``baseline``: "mean" of the prompt's controls | "loo": for a control the mean of the others, which keeps its
    gradient whole (mintrl spec 7.6) | "soft": beta log mean exp(r / beta) (7.4). Computed in fp64. Rows without a
    reward (None or NaN) count nowhere. Source: MInTRL (arXiv 2609.12419), mintrl spec 2.3, 6.20, 6.25.

    Args: rewards [N]; group_ids [N], any integers; is_control [N] bool.
    Returns: advantage [N] fp32 on the CPU, NaN where the row has no reward or its prompt no baseline (such rows must
    leave the loss), and metrics ``value`` (mean baseline of the prompts), ``flat`` (share of the prompts that have a
    baseline and whose rows all have A = 0), ``no_baseline`` (share of rows that leave the loss).
    """
    require(baseline in ("mean", "loo", "soft"), "baseline", baseline, "mean, loo or soft")
    r, control = _to_tensor(rewards), torch.as_tensor(is_control, dtype=torch.bool)
    _, ids = torch.as_tensor(group_ids, dtype=torch.int64).unique(return_inverse=True)
    lengths = (len(r), len(ids), len(control))
    require(len(set(lengths)) == 1, "rewards, group_ids, is_control", lengths, "one length")
    advantage, values, flat = torch.full_like(r, torch.nan), [], []
    for g in range(int(ids.max()) + 1):
        own = (ids == g) & ~r.isnan()
        voters = own & control
        value = (
            value_estimate(r[voters], beta if baseline == "soft" else 0.0) if voters.any() else r.new_tensor(torch.nan)
        )
        advantage[own] = r[own] - value
        if baseline == "loo":
            n = int(voters.sum())
            others = (r[voters].sum() - r[voters]) / (n - 1) if n > 1 else r.new_full((n,), torch.nan)
            advantage[voters] = r[voters] - others
        if voters.any():
            values.append(float(value))
            flat.append(bool((advantage[own].nan_to_num() == 0).all()))
    metrics = {"no_baseline": float(advantage.isnan().double().mean())}
    if values:
        metrics |= {"value": sum(values) / len(values), "flat": sum(flat) / len(flat)}
    return advantage.float(), metrics


def bnpo_weights(tokens: Sequence[int] | Tensor, rows: int) -> Tensor:
    """fp64 [N]: what advantages are multiplied by so that a mean over all tokens becomes TRL's "bnpo".

    That is the mean over micro-batches of ``rows`` rollouts, in order, of each one's mean over tokens. The loss is
    homogeneous in the advantage, clipped or not, so a positive factor weighs a rollout. ``tokens`` [N] are the
    rollouts' numbers of tokens in the loss. Source: corl spec 2.2.
    """
    require(rows >= 1, "rows", rows, ">= 1")
    tokens = torch.as_tensor(tokens, dtype=torch.float64)
    batch = torch.arange(len(tokens)) // rows
    each = torch.zeros(int(batch[-1]) + 1 if len(batch) else 0, dtype=torch.float64).index_add_(0, batch, tokens)
    return tokens.sum() / (len(each) * each.clamp(min=1))[batch]


def _to_tensor(rewards: Rewards) -> Tensor:
    if isinstance(rewards, Tensor):
        return rewards.detach().double().cpu()
    return torch.tensor([float("nan") if r is None else float(r) for r in rewards], dtype=torch.float64)
