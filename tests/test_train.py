"""The trainer's arithmetic: what a step computes, against plain loops; the invariants of Tandem."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from tiny_models import VOCAB
from training import ROWS, WORDS, config, equal, gradients, pair, prepared, reward, trainer, weights

import fastcollab as fc
from fastcollab.packing import Item, micro_batches
from fastcollab.types import Rollout


def test_p_one_is_bit_equal_to_grpo(tmp_path):
    """Spec row 29: the mask is all ones, so weights and metrics of Tandem at p = 1 are those of GRPO."""
    one = fc.Word(boundaries=WORDS, p=1.0)
    tandem = fc.train("tandem", pair(), ROWS, reward, config(fc.TandemConfig, tmp_path / "t", schedule=one))
    grpo = fc.train("grpo", {"policy": pair()["senior"]}, ROWS, reward, config(fc.GRPOConfig, tmp_path / "g"))
    assert equal(weights(tandem.models["senior"]), weights(grpo.models["policy"]))
    assert not equal(weights(tandem.models["senior"]), weights(pair()["senior"]))
    for a, b in zip(tandem.log_history, grpo.log_history, strict=True):
        assert a["reward"] == b["reward"] and a["grad_norm"] == b["grad_norm"] and a["tandem/senior_token_frac"] == 1.0


def test_p_zero_has_zero_gradient(tmp_path):
    t = trainer(tmp_path)
    t.method.schedule = fc.Word(boundaries=WORDS, p=0.0)
    items = prepared(t)
    assert not any(i.mask.any() for i in items)
    assert all(not g.any() for g in gradients(t, items).values())


@pytest.mark.parametrize(
    "changes", [{}, {"loss_type": "grpo"}, {"loss_type": "dr_grpo"}, {"denominator": "response"}, {"temperature": 0.6}]
)
def test_gradient_equals_a_plain_loop(tmp_path, changes):
    """The whole step against one unpacked forward per rollout and a scalar loss; junior tokens are context only."""
    t = trainer(tmp_path, **changes)
    items = prepared(t)
    assert len({i.advantage for i in items}) > 4
    got = gradients(t, items)

    model = copy.deepcopy(pair()["senior"])
    total = 0.0
    for i in items:
        ids = torch.tensor([i.rollout.prompt_ids + i.rollout.ids])
        logp = (model(ids).logits[0] / t.args.temperature).log_softmax(-1)[len(i.rollout.prompt_ids) - 1 : -1]
        logp = logp.gather(1, ids[0, len(i.rollout.prompt_ids) :, None])[:, 0]
        senior = torch.from_numpy(i.rollout.author == 0)
        surrogate = (-(logp - logp.detach()).exp() * i.advantage)[senior].sum()
        scale = {"dapo": 1.0, "grpo": 1 / max(1, int(senior.sum())), "dr_grpo": 1 / 10}[t.args.loss_type]
        total = total + surrogate * scale
    if t.args.loss_type == "dapo":
        response = t.args.denominator == "response"
        count = sum(len(i.rollout.ids) if response else int(i.mask.sum()) for i in items)
    else:
        count = sum(bool(i.mask.any()) for i in items) if t.args.loss_type == "grpo" else len(items)
    (total / count).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(got[name], p.grad, atol=2e-6, rtol=1e-4)


def test_junior_positions_have_exactly_zero_gradient(tmp_path):
    """The upstream gradient reaches the head only at hidden states that predict senior tokens."""
    t = trainer(tmp_path)
    items = prepared(t)
    seen = []
    plain_hidden = t.policy.hidden

    def spy(*args):
        h = plain_hidden(*args)
        h.register_hook(lambda g: seen.append(g.clone()))
        return h

    t.policy.hidden = spy
    gradients(t, items)
    batches = list(micro_batches([i for i in items if i.advantage != 0], t.args.micro_batch_tokens))
    for gradient, batch in zip(seen, batches, strict=True):
        touched = torch.zeros(len(gradient), dtype=torch.bool)
        touched[batch.hidden_index] = True
        assert not gradient[~touched].any() and gradient[touched].any(1).all()
        assert not touched.all()
        for s, item in enumerate(batch.items):
            assert (
                batch.target[batch.segment_ids == s].tolist()
                == np.array(item.rollout.ids)[item.rollout.author == 0].tolist()
            )


@pytest.mark.parametrize("budget", [16, 40, 100_000])
def test_micro_batches_never_change_the_gradient(tmp_path, budget):
    """And zero-advantage groups, which are skipped, stay in the denominator."""
    t = trainer(tmp_path, micro_batch_tokens=budget)
    items = prepared(t)
    for i in items[:4]:
        i.advantage = 0.0
    whole = trainer(tmp_path)
    want = gradients(whole, items)
    assert (len(list(micro_batches(items, budget))) == 1) == (budget == 100_000)
    denominator = t.denominator(items)
    assert denominator == sum(int(i.mask.sum()) for i in items)
    for name, g in gradients(t, items).items():
        torch.testing.assert_close(g, want[name], atol=1e-6, rtol=1e-5)


def test_packing_repeats_the_prompt_of_a_split_group_and_keeps_every_target():
    rng = np.random.default_rng(0)
    items = []
    for group, length in enumerate((3, 7)):
        for sample in range(5):
            ids = rng.integers(3, VOCAB, rng.integers(1, 9)).tolist()
            author = rng.integers(0, 2, len(ids)).astype(np.uint8)
            logprob = -rng.random(len(ids)).astype(np.float32)
            r = Rollout(
                list(range(3, 3 + length)), ids, author, ("a", "b"), logprob, "length", group=group, sample=sample
            )
            items.append(Item(r, r.mask("a"), 1.0, logprob))
    for budget in (1, 20, 1000):
        batches = list(micro_batches(items, budget))
        assert sum(len(b.target) for b in batches) == sum(int(i.mask.sum()) for i in items)
        assert all(len(b.input_ids) <= budget or len(b.items) == 1 for b in batches)
        for b in batches:
            context = torch.cat([b.input_ids, torch.tensor([-1])])
            for s, item in enumerate(b.items):
                full = item.rollout.prompt_ids + item.rollout.ids
                want = [full[len(item.rollout.prompt_ids) + t - 1] for t in np.flatnonzero(item.mask)]
                own = b.segment_ids == s
                assert context[b.hidden_index[own]].tolist() == want
                assert b.position_ids[b.hidden_index[own]].tolist() == [
                    len(item.rollout.prompt_ids) + int(t) - 1 for t in np.flatnonzero(item.mask)
                ]


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_first_ratio_is_one(tmp_path, temperature):
    """P12, P14: both sides at the sampling temperature; raw ratios are logged before clipping."""
    result = fc.train("tandem", pair(), ROWS, reward, trainer(tmp_path, temperature=temperature).args)
    for row in result.log_history:
        assert abs(row["ratio/min"] - 1) < 1e-4 and abs(row["ratio/max"] - 1) < 1e-4
        assert 0.2 < row["tandem/senior_token_frac"] < 0.8


def test_reused_batches_keep_their_old_logprobs(tmp_path):
    """C09 and C54: old log-probs are those of the weights that wrote, and the log says which weights those were."""
    args = trainer(tmp_path, num_iterations=2, steps_per_generation=2, max_steps=8, learning_rate=1e-2).args
    rows = fc.train("tandem", pair(), ROWS, reward, args).log_history
    drift = [abs(r["ratio/max"] - 1) > 1e-3 or abs(r["ratio/min"] - 1) > 1e-3 for r in rows]
    assert drift == [False, True, True, True] * 2
    versions = [(r["policy_version_rollout"], r["policy_version_train"]) for r in rows]
    assert [a == b for a, b in versions] == [True, False, False, False] * 2
    assert len({a for a, _ in versions}) == 2


def test_a_batch_without_signal_still_steps_and_is_finite(tmp_path):
    """P17, P19: equal rewards give exactly zero gradients; AdamW's momentum moves on as with any zero gradient."""
    models = pair()
    args = trainer(tmp_path).args

    def flat_after_one(completions, trainer_state, **kwargs):
        return [float(len(set(c))) if trainer_state.global_step == 0 else 0.1 for c in completions]

    rows = fc.train("tandem", models, ROWS, flat_after_one, args).log_history
    assert [r["frac_reward_zero_std"] == 1.0 for r in rows] == [False, True, True]
    assert rows[1]["grad_norm"] == 0.0 and rows[1]["loss"] == 0.0
    assert rows[0]["policy_version_train"] < rows[1]["policy_version_train"] < rows[2]["policy_version_train"]


def test_abstained_and_truncated_rows_leave_the_loss(tmp_path):
    """P15, P16: None is no score; mask_truncated_completions drops rows that never ended."""
    t = trainer(tmp_path, mask_truncated_completions=True)
    rollouts = t.rollouts()
    rewards = np.arange(len(rollouts), dtype=float)
    rewards[1] = math.nan
    items = t.items(rollouts, rewards, torch.ones(len(rollouts)))
    assert not items[1].mask.any()
    assert all(i.mask.any() <= (i.rollout.finish == "eos") for i in items)
    assert {i.rollout.finish for i in items} == {"eos", "length"}


def test_kl_to_the_start(tmp_path):
    t = trainer(tmp_path, beta=0.1)
    rows = fc.train("tandem", pair(), ROWS, reward, t.args).log_history
    assert abs(rows[0]["kl"]) < 1e-9 and rows[-1]["kl"] > 1e-6


def test_author_mask_fails_closed():
    """P20: there is no rollout without authors, and no mask of a writer that did not take part."""
    with pytest.raises(ValueError, match="ids, author, logprob of lengths \\(2, 0, 2\\)"):
        Rollout([1], [2, 3], np.zeros(0, np.uint8), ("senior",), np.zeros(2, np.float32), "eos")
    r = Rollout([1], [2], np.zeros(1, np.uint8), ("policy",), np.zeros(1, np.float32), "eos")
    with pytest.raises(ValueError, match="got writers \\('policy',\\), need 'senior' in them"):
        r.mask("senior")
