"""Tandem RL: a trained senior and a frozen junior write in turns; GRPO on the senior's tokens (arXiv 2606.28166)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastcollab.config import TandemConfig, require
from fastcollab.methods.method import Method
from fastcollab.schedules import Call, Schedule, Solo, Word
from fastcollab.types import Rollout


class Tandem(Method):
    """The clipped surrogate with the response mask narrowed to the senior's tokens (eq. 1 of the paper)."""

    config = TandemConfig

    def __init__(self, names: Sequence[str], args: TandemConfig) -> None:
        require(set(names) == {"senior", "junior"}, "models", list(names), "'senior' and 'junior' for method 'tandem'")
        super().__init__(names, args)
        self.policy = "senior"
        chosen = args.schedule or Word(("senior", "junior"), args.p, args.max_gap)
        self.schedule: Schedule = chosen if isinstance(chosen, Schedule) else Call(chosen, ("senior", "junior"))
        require("senior" in self.schedule.writers, "schedule", self.schedule.writers, "'senior' among its writers")

    def schedules(self) -> dict[str, Schedule]:
        return {"solo": Solo("senior"), "team": self.schedule}

    def denominator_mask(self, rollout: Rollout) -> np.ndarray:
        """bool [len(ids)]: the tokens that a token-mean divides by (spec row 13)."""
        if self.args.denominator == "response":
            return np.ones(len(rollout.ids), bool)
        return self.loss_mask(rollout)

    def metrics(self, rollouts: Sequence[Rollout], rewards: np.ndarray) -> dict[str, float]:
        """The monitors of spec 3.6. ``senior_token_frac`` must lie near p; its absence would mean plain GRPO."""
        senior = [r.mask("senior") for r in rollouts]
        tokens = sum(len(r.ids) for r in rollouts)
        switches = [int((np.diff(r.author.astype(np.int16)) != 0).sum()) for r in rollouts]
        later = [d for r in rollouts for d in r.draws if d.reason != "start"]
        ended = [r for r in rollouts if r.finish == "eos"]
        return {
            "tandem/senior_token_frac": sum(int(m.sum()) for m in senior) / max(1, tokens),
            "tandem/draws": len(later) / len(rollouts),
            "tandem/switches": sum(switches) / len(rollouts),
            "tandem/run_length": tokens / max(1, sum(switches) + len(rollouts)),
            "tandem/gap_draw_frac": sum(d.reason == "gap" for d in later) / max(1, len(later)),
            "tandem/eos_by_senior_frac": sum(r.finish_author == "senior" for r in ended) / max(1, len(ended)),
            "tandem/no_senior_frac": sum(not m.any() for m in senior) / len(rollouts),
        }
