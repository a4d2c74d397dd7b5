"""MInTRL: a verifier's rare corrections in some rollouts, and a regression of the log-ratio on the advantage
(arXiv 2609.12419)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fastcollab.advantages import control_advantages, group_advantages
from fastcollab.config import MInTRLConfig, parse_memory, require
from fastcollab.corrections import gives_answer
from fastcollab.engine import Engine
from fastcollab.intervention_metrics import logprob_metrics, mean, named, outcome_metrics, review_metrics, share
from fastcollab.learner import starting_weights
from fastcollab.losses import anchors, effective_advantage
from fastcollab.methods.method import Method
from fastcollab.model import Model
from fastcollab.model_verifier import ModelVerifier
from fastcollab.packing import Item
from fastcollab.schedules import Intervene, Schedule, Solo
from fastcollab.steering import Steering
from fastcollab.steps import Steps
from fastcollab.types import Rollout

VERIFIER = "verifier"


def _verifies(source: Any) -> bool:
    return all(callable(getattr(source, name, None)) for name in ("review", "correct"))


class MInTRL(Method):
    """Of each prompt's rollouts ``num_controls`` are the policy's alone and make the baseline; the others are reviewed,
    for the first ``intervention_updates`` optimiser steps. All are trained, the verifier's tokens too (spec 2)."""

    config = MInTRLConfig
    policy = "policy"

    def __init__(self, names: Sequence[str], args: MInTRLConfig) -> None:
        roles = {"policy", VERIFIER} if args.intervenes else {"policy"}
        fits = roles <= set(names) <= {"policy", VERIFIER}
        require(fits, "models", list(names), f"{' and '.join(sorted(roles))} for method 'mintrl' with these settings")
        super().__init__(("policy",), args)
        self.schedule: Schedule = Solo("policy")
        self.steering = Steering(args.max_reviews, args.max_correction_tokens, args.external_share)
        self.kappa = args.kappa
        self.verifier: Any = None
        self._warned = False

    def engines(self, models: Mapping[str, Any]) -> int:
        return 1 + (self.args.intervenes and not _verifies(models[VERIFIER]))

    def begin(self, models: Mapping[str, Any], policy: Model, engine: Engine, columns: Sequence[str]) -> None:
        if not self.args.intervenes:
            return
        if self.args.leaks is None and "answer" not in columns:
            message = f"leaks: got None and columns {list(columns)}, need a column 'answer' or a function to find leaks"
            warnings.warn(message, stacklevel=2)
        require(engine.tokenizer is not None, "processing_class", None, "a tokenizer: a verifier reads text")
        self.steps = self.args.steps if isinstance(self.args.steps, Steps) else Steps(engine.tokenizer, self.args.steps)
        self.verifier = self._verifier(models[VERIFIER], policy, engine)
        self.plan()  # its settings are checked before anything is generated

    def _verifier(self, source: Any, policy: Model, engine: Engine) -> Any:
        """The verifier that a role names: an object as it is, or a local model with an engine of its own (spec 2.8)."""
        if _verifies(source):
            return source
        args = self.args
        if source == "base":
            source = starting_weights(policy, VERIFIER, args.device)
        elif source == "policy":
            source = policy
        elif not isinstance(source, Model):
            source = Model(VERIFIER, source, device=args.device, init_kwargs=args.model_init_kwargs)
            need = f"another module than {self.policy!r}, or 'policy' or 'base'"
            require(source.module is not policy.module, VERIFIER, "the module that is trained", need)
            source.module.requires_grad_(False)
        return ModelVerifier(
            source, source.tokenizer or engine.tokenizer, args.template,
            args.max_correction_tokens, chat_template_kwargs=args.chat_template_kwargs, device=args.device,
            kv_memory=parse_memory(args.kv_memory) // 2, token_budget=args.token_budget,
        )  # fmt: skip

    @property
    def reader(self) -> Engine | None:
        """The verifier's engine, if it has one; a user's verifier may call anything else by that name."""
        engine = getattr(self.verifier, "engine", None)
        return engine if isinstance(engine, Engine) else None

    # -- rollouts

    def plan(self) -> Intervene:
        """The schedule of reviewed rollouts under the knobs as they stand."""
        args, knobs = self.args, self.steering
        return Intervene(
            ("policy", VERIFIER), self.verifier, args.chunk, args.longest_chunk, knobs.reviews, args.max_interventions,
            knobs.tokens, args.reserve, args.correction_cap, args.rollback, self.steps, args.leaks or gives_answer,
        )  # fmt: skip

    def schedule_at(self, step: int) -> Schedule | list[Schedule]:
        if not self.args.intervenes:
            return self.schedule
        if step >= self.args.intervention_updates:
            self.verifier = None  # its memory is free from here on (6.26)
            return self.schedule
        if self.reader is not None:
            self.reader.reset_stats()
        G, K = self.args.num_generations, self.args.num_controls
        return [self.schedule] * K + [self.plan()] * (G - K)

    @staticmethod
    def reviewed(rollout: Rollout) -> bool:
        return VERIFIER in rollout.writers

    # -- the loss

    def advantages(self, rewards: np.ndarray, rollouts: Sequence[Rollout]) -> tuple[torch.Tensor, dict[str, float]]:
        groups, r = [x.group for x in rollouts], torch.from_numpy(rewards)
        advantage, own = control_advantages(
            r, groups, [not self.reviewed(x) for x in rollouts], self.args.baseline, self.args.beta
        )
        return advantage, group_advantages(r, groups, scale="none")[1] | named(own)

    def loss_mask(self, rollout: Rollout) -> np.ndarray:
        """bool [len(ids)]: every token, the verifier's and a real EOS too (spec 2.4)."""
        return np.ones(len(rollout.ids), bool)

    def foreign(self, rollout: Rollout) -> np.ndarray:
        """bool [len(ids)]: what the verifier wrote."""
        return rollout.mask(VERIFIER) if self.reviewed(rollout) else np.zeros(len(rollout.ids), bool)

    def anchored(self, items: list[Item]) -> tuple[list[Item], dict[str, Any]]:
        old = [i.old_logprob for i in items]
        foreign = [self.foreign(i.rollout) & i.mask for i in items]
        own = np.concatenate([lp[i.mask & ~f] for i, lp, f in zip(items, old, foreign, strict=True)])
        constant = self.args.anchor == "const"
        if constant and self.kappa is None and len(own):
            self.kappa = float(min(0.0, np.median(own)))  # the rule of spec 2.9, then a number for the run
        kappa = self.kappa if constant else None
        anchor = [
            anchors(torch.from_numpy(lp), torch.from_numpy(f), kappa, at_least_old=self.args.anchor_guard).numpy()
            for lp, f in zip(old, foreign, strict=True)
        ]
        row = logprob_metrics([i.rollout for i in items], old, foreign) | {"kappa": kappa}
        row |= self._effective(items, old, foreign, anchor)
        return [replace(i, old_logprob=a) for i, a in zip(items, anchor, strict=True)], named(row)

    def _effective(self, items, old, foreign, anchor) -> dict[str, float | None]:
        """What the first step pushes by, of the rollouts that were corrected (spec 2.5, 3.9)."""
        A, beta, masks = np.array([i.advantage for i in items]), self.args.beta, [i.mask for i in items]
        effective = A  # of proxy anchors: they are the policy's own log-probs
        if self.args.anchor == "const":
            a, lp, mask = (torch.from_numpy(np.concatenate(parts)) for parts in (anchor, old, masks))
            owner = torch.from_numpy(np.repeat(np.arange(len(items)), [len(m) for m in masks]))
            effective = effective_advantage(a.double(), lp.double(), torch.from_numpy(A), mask, owner, beta).numpy()
        arm = ((A - effective) / beta)[[self.reviewed(i.rollout) for i in items]]  # Lambda
        fixed = np.array([f.any() for f in foreign])
        flips = mean((A * effective < 0)[fixed])
        external = np.array([f.sum() for f in foreign])
        pull, tokens = np.abs(effective), np.array([m.sum() for m in masks])
        if flips is not None and flips > self.args.sign_flip_limit and not self._warned:
            self._warned = True
            need = f"<= {self.args.sign_flip_limit}: lower beta ({self.args.beta:g}) or kappa ({self.kappa:.3g})"
            message = (
                f"sign_flip_rate: got {flips:.2f} of the corrected rollouts, whose constant anchors turn A, need {need}"
            )
            warnings.warn(message, stacklevel=2)
        return {
            "sign_flip_rate": flips,
            "log_ratio/reviewed": mean(arm),
            "log_ratio/reviewed_std": float(arm.std()) if len(arm) else None,
            "effective_advantage": mean(effective[fixed]),
            "advantage/corrected": mean(A[fixed]),
            "external_gradient_share": share(float(pull @ external), float(pull @ tokens)),
        }

    # -- figures and state

    def metrics(self, rollouts: Sequence[Rollout], rewards: np.ndarray) -> dict[str, Any]:
        arm = [self.reviewed(r) for r in rollouts]
        row = outcome_metrics(rollouts, rewards, arm)
        if any(arm):
            chosen = [r for r in rollouts if self.reviewed(r)]
            row |= review_metrics(chosen, None if self.reader is None else self.reader.stats()["tokens"])
            external = sum(len(i.inserted) for r in chosen for i in r.interventions)
            row["external_share_batch"] = share(external, sum(len(r.ids) for r in rollouts))
            row |= {"max_reviews": self.steering.reviews, "max_correction_tokens": self.steering.tokens}
            self.steering.update(external, sum(len(r.ids) for r in chosen))
        return named(row)

    def forget(self) -> None:
        if isinstance(self.verifier, ModelVerifier):
            self.verifier.forget()

    def state_dict(self) -> dict[str, Any]:
        return {"kappa": self.kappa, "steering": self.steering.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.kappa = state["kappa"]
        self.steering.load_state_dict(state["steering"])
