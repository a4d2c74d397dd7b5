"""What one optimiser step computes, against a loop over rollouts that counts and clips for itself."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tiny_models import VOCAB, tiny_model

import fastcollab as fc
from fastcollab.advantages import group_advantages
from fastcollab.trainer import Trainer

WORDS = list(range(10, VOCAB, 3))
ROWS = [{"prompt": [3 + i, 4, 5 + i][: 2 + i % 2]} for i in range(6)]
LOSSES = [{}, {"denominator": "response"}, {"loss_type": "grpo"}, {"loss_type": "dr_grpo"}]
LENGTH = 10
names = pytest.mark.parametrize("changes", LOSSES, ids=["dapo", "response", "grpo", "dr_grpo"])


def spread(completion_ids, **kwargs):
    return [len(set(ids)) + sum(ids) / (len(ids) * VOCAB) for ids in completion_ids]


def config(tmp_path, **changes):
    settings = dict(output_dir=str(tmp_path), prompts_per_step=3, num_generations=4, max_completion_length=LENGTH)
    settings |= dict(max_steps=1, learning_rate=0.0, max_grad_norm=0.0, kv_memory="4MiB", disable_tqdm=True)
    return fc.TandemConfig(**settings | dict(schedule=fc.Word(boundaries=WORDS, max_gap=4)) | changes)


def pair():
    return {"senior": tiny_model("qwen3"), "junior": tiny_model("qwen3", seed=1)}


def trainer(tmp_path, reward=spread, **changes):
    return Trainer("tandem", pair(), ROWS, reward, config(tmp_path, **changes), None, None, None, ())


def batch(t, flat=(), abstained=()):
    """Rollouts and random rewards of one step: one value in the groups ``flat``, NaN in the rows ``abstained``."""
    rollouts = t.rollouts()
    rewards = np.random.default_rng(0).normal(size=len(rollouts))
    for k, r in enumerate(rollouts):
        if r.group in flat:
            rewards[k] = 0.5
    rewards[list(abstained)] = np.nan
    return rollouts, rewards


def items_of(t, rollouts, rewards):
    groups = [r.group for r in rollouts]
    advantage, _ = group_advantages(torch.from_numpy(rewards), groups, scale=t.args.scale_rewards)
    return t.items(rollouts, rewards, advantage)


def gradient(t, items):
    """Gradients of one update and its metrics (learning rate 0, no clipping of the norm)."""
    taken = {}
    t.learner.optimizer.register_step_pre_hook(
        lambda *_: taken.update({n: p.grad.clone() for n, p in t.policy.module.named_parameters()})
    )
    return taken, t.update(items)


def counted(t, rollouts, rewards):
    """Indices of the rows that count: scored, and ended where the option asks for it."""
    cut = t.args.mask_truncated_completions
    return [k for k, r in enumerate(rollouts) if not np.isnan(rewards[k]) and not (cut and r.finish == "length")]


def plain_denominator(t, rollouts, rewards):
    rows = [rollouts[k] for k in counted(t, rollouts, rewards)]
    if t.args.loss_type == "dr_grpo":
        return len(rows)
    if t.args.loss_type == "grpo":
        return sum(0 in r.author.tolist() for r in rows)
    return sum(len(r.ids) if t.args.denominator == "response" else r.author.tolist().count(0) for r in rows)


def senior_logprob(module, rollout, temperature):
    """Log-probs [n] of the senior's tokens, from one unpacked forward."""
    ids = torch.tensor([rollout.prompt_ids + rollout.ids])
    start = len(rollout.prompt_ids)
    logp = (module(ids).logits[0] / temperature).log_softmax(-1)[start - 1 : -1].gather(1, ids[0, start:, None])
    return logp[torch.from_numpy(rollout.author == 0), 0]


def plain_gradient(t, module, rollouts, rewards, shift=None, reference=None):
    """The oracle. ``shift[k]`` [len(ids)] is log(new / old) of rollout k's tokens; None is 0."""
    args, total = t.args, 0.0
    for k in counted(t, rollouts, rewards):
        r = rollouts[k]
        group = np.array([x for x, q in zip(rewards, rollouts, strict=True) if q.group == r.group])
        group = group[~np.isnan(group)]
        std = group.std(ddof=1) + 1e-6 if args.scale_rewards == "group" else 1.0
        advantage = 0.0 if np.ptp(group) == 0 else float((rewards[k] - group.mean()) / std)
        logp = senior_logprob(module, r, args.temperature)
        if len(logp) == 0:
            continue
        drift = logp - logp.detach() + (0 if shift is None else torch.from_numpy(shift[k][r.author == 0]))
        if args.importance_sampling_level == "sequence":
            drift = drift.mean().expand_as(logp)
        ratio, high = drift.exp(), args.epsilon if args.epsilon_high is None else args.epsilon_high
        if args.loss_type == "cispo":
            token = -ratio.detach().clamp(max=high) * advantage * logp
        else:
            bound = ratio.clamp(max=float("inf") if args.delta is None else args.delta)
            token = -torch.minimum(bound * advantage, ratio.clamp(1 - args.epsilon, 1 + high) * advantage)
        if args.beta:
            with torch.no_grad():
                ref = senior_logprob(reference, r, args.temperature)
            token = token + args.beta * ((ref - logp).exp() - (ref - logp) - 1)
        total = total + token.sum() / {"grpo": len(token), "dr_grpo": LENGTH}.get(args.loss_type, 1)
    module.zero_grad()
    (total / plain_denominator(t, rollouts, rewards)).backward()
    return {n: p.grad for n, p in module.named_parameters()}


def assert_same(got, want):
    assert max(float(g.abs().max()) for g in want.values()) > 1e-3  # far above the tolerance
    for name, g in want.items():
        torch.testing.assert_close(got[name], g, atol=2e-6, rtol=1e-4)


@names
def test_flat_groups_stay_in_the_denominator(tmp_path, changes):
    t = trainer(tmp_path, **changes)
    rollouts, rewards = batch(t, flat=(1,))
    items = items_of(t, rollouts, rewards)
    live = [k for k, r in enumerate(rollouts) if r.group != 1]
    assert [k for k, i in enumerate(items) if i.advantage != 0] == live
    want = plain_denominator(t, rollouts, rewards)
    assert plain_denominator(t, [rollouts[k] for k in live], rewards[live]) < want
    got, row = gradient(t, items)
    assert t.denominator(items) == row["trained_tokens"] == want
    assert_same(got, plain_gradient(t, pair()["senior"], rollouts, rewards))


@names
@pytest.mark.parametrize("truncated", [False, True])
def test_rows_that_leave_the_loss_count_nowhere(tmp_path, changes, truncated):
    """P15, P16, P19: no reward, or cut off and masked by option: neither in the sum nor in what it is divided by."""
    t = trainer(tmp_path, mask_truncated_completions=truncated, **changes)
    rollouts, rewards = batch(t, abstained=() if truncated else (1, 6))
    items = items_of(t, rollouts, rewards)
    kept = counted(t, rollouts, rewards)
    assert 0 < len(kept) < len(rollouts) and [k for k, i in enumerate(items) if i.kept] == kept
    gone = [r for k, r in enumerate(rollouts) if k not in kept]
    assert any(0 in r.author for r in gone)  # they would have counted
    want = plain_denominator(t, rollouts, rewards)
    got, row = gradient(t, items)
    assert t.denominator(items) == row["trained_tokens"] == want
    assert_same(got, plain_gradient(t, pair()["senior"], rollouts, rewards))


def test_a_batch_that_abstains_is_all_zero(tmp_path):
    t = trainer(tmp_path)
    rollouts, rewards = batch(t, abstained=range(12))
    got, row = gradient(t, items_of(t, rollouts, rewards))
    assert row["trained_tokens"] == 1 and not any(g.any() for g in got.values())


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_kl_starts_at_zero_at_the_run_temperature(tmp_path, temperature):
    """The reference is scored at the temperature of the run, as the policy is."""
    args = config(tmp_path, temperature=temperature, beta=0.1, max_steps=3, learning_rate=1e-3)
    rows = fc.train("tandem", pair(), ROWS, spread, args).log_history
    assert abs(rows[0]["kl"]) < 1e-9 and rows[-1]["kl"] > 1e-6


@pytest.mark.parametrize("flat", [(0, 1, 2), (1,)], ids=["all", "one"])
def test_flat_groups_are_still_pulled_to_the_reference(tmp_path, flat):
    """P18: with beta the KL term of a group of equal rewards stays, once the weights have moved."""
    t = trainer(tmp_path, beta=0.3, temperature=0.6)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in t.policy.module.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    moved = copy.deepcopy(t.policy.module)
    rollouts, rewards = batch(t, flat=flat)
    got, row = gradient(t, items_of(t, rollouts, rewards))
    assert row["kl"] > 1e-2 and (row["loss"] > 1e-3 or len(flat) == 1)
    assert row["num_loss_tokens"] == sum(r.author.tolist().count(0) for r in rollouts)
    assert_same(got, plain_gradient(t, moved, rollouts, rewards, reference=pair()["senior"]))


@pytest.mark.parametrize("epsilon_high", [None, 0.4])
def test_each_side_is_clipped_at_its_own_epsilon(tmp_path, epsilon_high):
    """Old log-probs set by hand: ratios 0.7 .. 1.5 on both signs of the advantage."""
    t = trainer(tmp_path, epsilon=0.2, epsilon_high=epsilon_high)
    rollouts, rewards = batch(t)
    items, rng = items_of(t, rollouts, rewards), np.random.default_rng(1)
    ratio = [rng.choice([0.7, 0.9, 1.1, 1.3, 1.5], len(r.ids)).astype(np.float32) for r in rollouts]
    for item, x in zip(items, ratio, strict=True):
        item.old_logprob = item.old_logprob - np.log(x)
    got, row = gradient(t, items)
    senior = np.concatenate([x[r.author == 0] for x, r in zip(ratio, rollouts, strict=True)])
    good = np.concatenate([np.full(i.mask.sum(), i.advantage > 0) for i in items])
    bound = 1.2 if epsilon_high is None else 1.4
    assert {1.3, 1.5} <= {round(float(x), 1) for x in senior[good]}
    assert row["clip_ratio/high_mean"] == pytest.approx((good & (senior > bound)).mean())
    assert row["clip_ratio/low_mean"] == pytest.approx((~good & (senior < 0.8)).mean())
    assert row["ratio/max"] == pytest.approx(1.5, abs=1e-4)
    assert_same(got, plain_gradient(t, pair()["senior"], rollouts, rewards, shift=[np.log(x) for x in ratio]))


SURROGATES = [
    {"importance_sampling_level": "sequence", "epsilon": 0.02, "loss_type": "grpo"},
    {"loss_type": "cispo", "epsilon_high": 1.2},
    {"delta": 1.4, "epsilon": 0.15},
]


@pytest.mark.parametrize("changes", SURROGATES, ids=["gspo", "cispo", "dual clip"])
def test_every_surrogate_equals_its_plain_loop(tmp_path, changes):
    """Ratios 0.7 .. 1.5 by hand: GSPO's one ratio a rollout, CISPO's constant weight, the second clip of delta."""
    t = trainer(tmp_path, micro_batch_tokens=60, **changes)
    rollouts, rewards = batch(t)
    items, rng = items_of(t, rollouts, rewards), np.random.default_rng(1)
    shift = [np.log(rng.choice([0.7, 0.9, 1.1, 1.3, 1.5], len(r.ids))).astype(np.float32) for r in rollouts]
    for item, x in zip(items, shift, strict=True):
        item.old_logprob = item.old_logprob - x
    got, row = gradient(t, items)
    assert "entropy" in row and (row["clip_ratio/dual_mean"] > 0.1 if "delta" in changes else True)
    assert 0.02 < row["clip_ratio/region_mean"] < 0.98
    assert_same(got, plain_gradient(t, pair()["senior"], rollouts, rewards, shift=shift))


def test_settings_of_the_surrogate_are_checked():
    for changes, message in (
        ({"importance_sampling_level": "word"}, "importance_sampling_level: got 'word', need token or sequence"),
        ({"delta": 1.0}, "delta: got 1.0, need None or > 1"),
        ({"loss_type": "cispo"}, "epsilon_high: got None, need > 0 with loss_type 'cispo', the largest ratio"),
        ({"loss_type": "cispo", "epsilon_high": 2.0, "delta": 3.0}, "delta: got 3.0, need None with loss_type 'cispo'"),
        ({"loss_type": "ppo"}, "loss_type: got 'ppo', need dapo or grpo or dr_grpo or cispo"),
    ):
        with pytest.raises(ValueError, match=message):
            fc.GRPOConfig(**changes)


@pytest.mark.parametrize("scale", ["group", "none"])
def test_scale_rewards(tmp_path, scale, monkeypatch):
    """``none`` leaves the deviations from the mean, so a reward three times as large gives three times the gradient."""
    seen, make = [], Trainer.items
    monkeypatch.setattr(Trainer, "items", lambda self, *parts: seen.append(parts) or make(self, *parts))

    def run(factor):
        args = config(tmp_path, scale_rewards=scale)
        result = fc.train("tandem", pair(), ROWS, lambda **k: [factor * x for x in spread(**k)], args)
        return result.log_history[0]["grad_norm"]

    assert run(3.0) / run(1.0) == pytest.approx(3.0 if scale == "none" else 1.0, rel=1e-4)
    rollouts, rewards, advantage = seen[1]
    for g in range(3):
        own = [k for k, r in enumerate(rollouts) if r.group == g]
        want = rewards[own] - rewards[own].mean()
        want = want / rewards[own].std(ddof=1) if scale == "group" else want
        np.testing.assert_allclose(advantage[own].numpy(), want, atol=1e-5)


def test_gradient_checkpointing_replays_the_layers_and_changes_no_gradient(tmp_path):
    """Every decoder layer runs a second time in the backward, with the same result."""
    runs = []
    for on in (False, True):
        t = trainer(tmp_path, gradient_checkpointing=on, micro_batch_tokens=40)
        rollouts, rewards = batch(t)
        items, calls = items_of(t, rollouts, rewards), []
        for layer in t.policy.module.model.layers:
            layer.mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        packs = []
        hidden = t.policy.hidden
        t.policy.hidden = lambda *a, hidden=hidden, packs=packs: packs.append(1) or hidden(*a)
        got, _ = gradient(t, items)
        runs.append((got, len(calls) / (len(packs) * len(t.policy.module.model.layers))))
        assert len(packs) > 1
    (want, once), (got, twice) = runs
    assert (once, twice) == (1, 2)
    for name, g in want.items():
        torch.testing.assert_close(got[name], g, atol=1e-7, rtol=1e-6)
