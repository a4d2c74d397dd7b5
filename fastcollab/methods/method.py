"""A method: what differs between ways to train, as what the one training loop asks. The defaults are GRPO's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fastcollab.advantages import group_advantages
from fastcollab.config import TrainConfig
from fastcollab.engine import Engine
from fastcollab.model import Model
from fastcollab.packing import Item
from fastcollab.schedules import Schedule, Solo
from fastcollab.types import Rollout


class Method:
    """``policy`` is the trained role, ``schedule`` who writes. Subclasses check roles and settings when made."""

    config: type[TrainConfig]
    policy: str
    schedule: Schedule

    def __init__(self, names: Sequence[str], args: Any) -> None:
        self.args, self.roles = args, tuple(names)  # roles: the models that the rollout engine loads

    def engines(self, models: Mapping[str, Any]) -> int:
        """Number of engines that share ``args.kv_memory``."""
        return 1

    def begin(self, models: Mapping[str, Any], policy: Model, engine: Engine, columns: Sequence[str]) -> None:
        """Called once with all roles as the user gave them and the dataset's columns, before any update."""

    # -- rollouts

    def schedules(self) -> dict[str, Schedule]:
        """Schedules to evaluate, by name."""
        return {"solo": Solo(self.policy)}

    def schedule_at(self, step: int) -> Schedule | list[Schedule]:
        """The schedule of the batch that is used from optimiser step ``step`` (from 0) on, or one per sample."""
        return self.schedule

    # -- the loss

    def advantages(self, rewards: np.ndarray, rollouts: Sequence[Rollout]) -> tuple[torch.Tensor, dict[str, float]]:
        """fp32 [N] and metrics, from rewards [N] with NaN where there is none; a NaN advantage leaves the loss."""
        groups = [r.group for r in rollouts]
        return group_advantages(torch.from_numpy(rewards), groups, scale=self.args.scale_rewards)

    def loss_mask(self, rollout: Rollout) -> np.ndarray:
        """bool [len(ids)]: the tokens that are trained."""
        return rollout.mask(self.policy)

    def denominator_mask(self, rollout: Rollout) -> np.ndarray:
        """bool [len(ids)]: the tokens that a token-mean divides by."""
        return self.loss_mask(rollout)

    def anchored(self, items: list[Item]) -> tuple[list[Item], dict[str, Any]]:
        """The items with what the log-ratio is taken against, and metrics of it."""
        return items, {}

    def metrics(self, rollouts: Sequence[Rollout], rewards: np.ndarray) -> dict[str, Any]:
        """Figures of one batch."""
        return {}

    # -- state between batches

    def forget(self) -> None:
        """Drop cached KV beside the rollout engine's: a checkpoint starts cold."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What ``state_dict`` gave."""
