"""What the trainer's tests share: a small pair, a dense reward, and the gradients of one update."""

from __future__ import annotations

import dataclasses

import torch
from tiny_models import VOCAB, tiny_model

import fastcollab as fc
from fastcollab.advantages import group_advantages
from fastcollab.trainer import Trainer

WORDS = list(range(10, VOCAB, 3))
ROWS = [{"prompt": [3 + i, 4, 5 + i][: 2 + i % 2], "target": 20 + i} for i in range(6)]


def reward(completions, target, **kwargs):
    """Mean closeness of the ids to a target id: dense, so that few groups are flat."""
    return [1 - sum(abs(i - t) for i in ids) / (len(ids) * VOCAB) for ids, t in zip(completions, target, strict=True)]


def config(cls, tmp_path, **changes):
    settings = dict(
        output_dir=str(tmp_path), prompts_per_step=3, num_generations=4, max_completion_length=10, max_steps=3
    )
    return cls(**settings | dict(learning_rate=1e-3, kv_memory="4MiB", disable_tqdm=True) | changes)


def pair():
    return {"senior": tiny_model("qwen3"), "junior": tiny_model("qwen3", seed=1)}


def trainer(tmp_path, models=None, **changes):
    models = pair() if models is None else models
    schedule = fc.Word(boundaries=WORDS, max_gap=4)
    args = config(fc.TandemConfig, tmp_path, schedule=schedule, **changes)
    return Trainer("tandem", models, ROWS, reward, args, None, None, None, ())


def prepared(t):
    """One batch, ready for ``update``."""
    rollouts = t.rollouts()
    rewards, _ = t.rewards(rollouts)
    advantage, _ = group_advantages(torch.from_numpy(rewards), [r.group for r in rollouts])
    return t.items(rollouts, rewards, advantage)


def gradients(t, items):
    """Gradients of one update, before clipping, with the weights left alone."""
    taken = {}
    t.learner.optimizer.register_step_pre_hook(
        lambda *_: taken.update({n: p.grad.clone() for n, p in t.policy.module.named_parameters()})
    )
    t.learner.args = dataclasses.replace(t.args, max_grad_norm=0.0)
    for group in t.learner.optimizer.param_groups:
        group["lr"] = 0.0
    t.update(items)
    return taken


def weights(module):
    return {n: p.detach().clone() for n, p in module.named_parameters()}


def equal(a, b):
    return all(torch.equal(a[n], b[n]) for n in a)
