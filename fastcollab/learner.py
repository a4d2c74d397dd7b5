"""A learner: one trained model with its optimiser, its learning rate and, for the KL term, its starting weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastcollab.config import TrainConfig, require
from fastcollab.losses import merge_metrics
from fastcollab.model import Model
from fastcollab.objective import batch_loss
from fastcollab.optim import clip_grad_norm, make_optimizer, make_schedule
from fastcollab.packing import Item, micro_batches
from fastcollab.sampling import content_uid
from fastcollab.scoring import rollout_logprobs
from fastcollab.types import Rollout


def trainable(name: str, source: Any, peft_config: Any, args: TrainConfig) -> Any:
    """What is trained: a path is loaded in float32 unless told otherwise, a ``peft_config`` adds its adapter.

    A new adapter's weights are drawn from the seed and the name: neither the order of the models nor what ran before
    decides them.
    """
    if isinstance(source, (str, Path)) or peft_config is not None:
        dtype = {} if peft_config is not None else {"dtype": torch.float32}
        source = Model(name, source, device=args.device, init_kwargs=dtype | (args.model_init_kwargs or {}))
    if peft_config is not None:
        from peft import get_peft_model

        with torch.random.fork_rng():
            torch.manual_seed(content_uid(f"{args.seed} {name}") % 2**63)
            source = Model(name, get_peft_model(source.module, peft_config), tokenizer=source.tokenizer)
    return source


def starting_weights(model: Model, name: str, device: Any = None) -> Model:
    """The model as it is now, for good: the adapter off where there is one, else a frozen copy."""
    if model.peft is not None:
        return Model(name, model.peft, tokenizer=model.tokenizer, device=device, adapter="off")
    module = copy.deepcopy(model.module).requires_grad_(False).eval()
    return Model(name, module, tokenizer=model.tokenizer, device=device)


class Learner:
    """``update`` is one optimiser step; ``total_steps`` is what the learning-rate schedule spans."""

    def __init__(self, model: Model, vocab_size: int, args: TrainConfig, total_steps: int) -> None:
        self.model, self.vocab_size, self.args = model, vocab_size, args
        self.parameters = [p for p in model.module.parameters() if p.requires_grad]
        require(len(self.parameters) > 0, model.name, "no trainable parameter", "at least one")
        dtypes, need = {p.dtype for p in self.parameters}, "float32 (a small update is lost in 16 bits): load it so"
        require(dtypes == {torch.float32}, model.name, f"trainable parameters of {dtypes}", f"{need}, or train a LoRA")
        if args.gradient_checkpointing:
            module = model.module
            enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
            enable()
        self.reference = starting_weights(model, "reference", args.device) if args.kl_weight else None
        self.optimizer = make_optimizer(self.parameters, args)
        self.lr_schedule = make_schedule(self.optimizer, args, total_steps)

    @property
    def own_logprobs(self) -> bool:
        """Whether the rollouts' log-probs serve as the old ones."""
        # the engine rounds a 16-bit head's logits, the trainer's head does not
        return self.args.on_policy and self.model.dtype == torch.float32 and not self.args.trainer_logprobs

    def logprobs(self, model: Model, rollouts: Sequence[Rollout], masks: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Log-probs under this learner's settings; ``model`` is its own or its reference."""
        settings = (self.vocab_size, self.args.temperature, self.args.micro_batch_tokens)
        return rollout_logprobs(model, rollouts, masks, *settings)

    def items(
        self, rollouts: Sequence[Rollout], masks: Sequence[np.ndarray], advantage: Sequence[float], kept: np.ndarray
    ) -> list[Item]:
        """Each rollout with its loss mask, its advantage, and old (and reference) log-probs."""
        old = [r.logprob for r in rollouts]
        if not self.own_logprobs:
            old = self.logprobs(self.model, rollouts, masks)
        ref = self.logprobs(self.reference, rollouts, masks) if self.reference else [None] * len(rollouts)
        return [Item(*parts) for parts in zip(rollouts, masks, advantage, old, ref, kept, strict=True)]

    def update(self, items: Sequence[Item], denominator: float, step: int) -> dict[str, float]:
        """One optimiser step on the whole list; micro-batches only bound memory. ``step`` names it in errors."""
        args, version = self.args, self.model.version
        live = [i for i in items if args.has_gradient(i.advantage)]
        for p in self.parameters:  # zeros, not None: a batch without signal still steps, like any other
            p.grad = torch.zeros_like(p)
        total, parts = 0.0, []
        for batch in micro_batches(live, args.micro_batch_tokens, self.model.device):
            loss, metrics = batch_loss(self.model, batch, self.vocab_size, args, denominator)
            loss.backward()
            total += float(loss.detach())
            parts.append(metrics)
        norm = clip_grad_norm(self.parameters, args.max_grad_norm, step)
        rate = self.lr_schedule.get_last_lr()[0]
        self.optimizer.step()
        self.lr_schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        row = {"loss": total, "grad_norm": float(norm), "learning_rate": rate, "trained_tokens": denominator}
        row |= {"policy_version_rollout": items[0].rollout.policy_version, "policy_version_train": version}
        return row | merge_metrics(parts)
