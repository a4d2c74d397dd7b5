"""GRPO: one policy writes alone; every token of it is trained. The control of every other method."""

from __future__ import annotations

from collections.abc import Sequence

from fastcollab.config import GRPOConfig, require
from fastcollab.methods.method import Method
from fastcollab.schedules import Schedule, Solo


class GRPO(Method):
    """DeepSeekMath (arXiv 2402.03300), with the options of DAPO and Dr.GRPO."""

    config = GRPOConfig

    def __init__(self, names: Sequence[str], args: GRPOConfig) -> None:
        require(len(names) == 1, "models", list(names), "one model for method 'grpo'")
        super().__init__(names, args)
        self.policy = names[0]
        self.schedule: Schedule = Solo(self.policy)
