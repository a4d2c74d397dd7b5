"""GRPO: one policy writes alone; every token of it is trained. The control of every other method."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastcollab.config import GRPOConfig, require
from fastcollab.schedules import Schedule, Solo
from fastcollab.types import Rollout


class GRPO:
    """DeepSeekMath (arXiv 2402.03300), with the options of DAPO and Dr.GRPO."""

    config = GRPOConfig

    def __init__(self, names: Sequence[str], args: GRPOConfig) -> None:
        require(len(names) == 1, "models", list(names), "one model for method 'grpo'")
        self.args = args
        self.policy = names[0]
        self.schedule: Schedule = Solo(self.policy)

    def schedules(self) -> dict[str, Schedule]:
        """Schedules to evaluate, by name."""
        return {"solo": Solo(self.policy)}

    def loss_mask(self, rollout: Rollout) -> np.ndarray:
        """bool [len(ids)]: the tokens that are trained."""
        return rollout.mask(self.policy)

    def denominator_mask(self, rollout: Rollout) -> np.ndarray:
        """bool [len(ids)]: the tokens that a token-mean divides by."""
        return self.loss_mask(rollout)

    def metrics(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        return {}
