"""The trainer: what a step computes, against plain loops; the invariants of Tandem; what is written."""

from __future__ import annotations

import copy
import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from tiny_models import VOCAB, tiny_model
from transformers import AutoModelForCausalLM, TrainerCallback

import fastcollab as fc
from fastcollab import tiny
from fastcollab.advantages import group_advantages
from fastcollab.packing import Item, micro_batches
from fastcollab.trainer import Trainer
from fastcollab.types import Rollout

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
    t.optimizer.register_step_pre_hook(
        lambda *_: taken.update({n: p.grad.clone() for n, p in t.policy.module.named_parameters()})
    )
    t.args = dataclasses.replace(t.args, max_grad_norm=0.0)
    for group in t.optimizer.param_groups:
        group["lr"] = 0.0
    t.update(items)
    return taken


def weights(module):
    return {n: p.detach().clone() for n, p in module.named_parameters()}


def equal(a, b):
    return all(torch.equal(a[n], b[n]) for n in a)


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


def test_run_writes_metrics_and_a_loadable_model(tmp_path):
    """P27: the tiny pair end to end; the folder loads bitwise equal, metrics.jsonl has a row per optimiser step."""
    args = config(
        fc.TandemConfig, tmp_path, prompts_per_step=2, max_completion_length=40, eval_steps=2, learning_rate=1e-4
    )
    problems = tiny.problems(8, seed=0)
    models = {"senior": tiny.senior(), "junior": tiny.junior()}
    result = fc.train("tandem", models, problems, tiny.correct, args, eval_dataset=problems[:4])
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == result.log_history
    steps = [r for r in rows if "reward" in r]
    assert [r["step"] for r in steps] == [1, 2, 3]
    needed = {
        "reward_std",
        "grad_norm",
        "loss",
        "tandem/senior_token_frac",
        "handoff/latency_ms",
        "rewards/correct/mean",
    }
    assert needed <= steps[0].keys() and steps[0]["handoff/count"] > 0
    evaluations = [r for r in rows if "reward" not in r]
    assert [r["step"] for r in evaluations] == [2, 3]
    assert {"eval/solo/reward", "eval/team/reward", "eval/legibility/junior"} <= evaluations[0].keys()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "senior")
    assert equal(weights(loaded), weights(result.models["senior"]))
    assert not equal(weights(loaded), weights(AutoModelForCausalLM.from_pretrained(tiny.senior())))
    frozen = AutoModelForCausalLM.from_pretrained(tiny.junior())
    assert equal(weights(result.models["junior"]), weights(frozen))


def test_two_runs_are_identical(tmp_path):
    runs = [fc.train("tandem", pair(), ROWS, reward, trainer(tmp_path / str(i)).args) for i in range(2)]
    assert equal(weights(runs[0].models["senior"]), weights(runs[1].models["senior"]))


def test_lora_senior_with_its_own_base_as_junior(tmp_path):
    """One set of base weights: the adapter trains, the base stays, and the junior is the base."""
    peft = pytest.importorskip("peft", reason="the extra 'peft' is not installed")
    base = tiny_model("llama")
    before = weights(base)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=True)
    args = trainer(tmp_path, learning_rate=1e-2).args
    result = fc.train("tandem", {"senior": base, "junior": "base"}, ROWS, reward, args, peft_config=lora)
    after = {
        n.replace("base_model.model.", "").replace(".base_layer", ""): p
        for n, p in result.models["senior"].named_parameters()
    }
    assert all(torch.equal(after[n], p) for n, p in before.items())
    assert any(p.any() for n, p in after.items() if "lora_B" in n)
    loaded = peft.PeftModel.from_pretrained(tiny_model("llama"), tmp_path / "senior")
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(loaded(ids).logits, result.models["senior"].eval()(ids).logits)


def test_bad_input_names_what_is_needed(tmp_path):
    args = trainer(tmp_path).args
    cases = [
        (lambda: fc.train("ppo", pair(), ROWS, reward, args), "method: got 'ppo', need grpo or tandem"),
        (lambda: fc.train("tandem", {"policy": None}, ROWS, reward, args), "need 'senior' and 'junior'"),
        (lambda: fc.train("grpo", pair(), ROWS, reward, args), "args: got 'TandemConfig', need GRPOConfig"),
        (
            lambda: fc.train("tandem", pair(), [{"prompts": "x"}], reward, args),
            "columns \\['prompts'\\], need 'prompt'",
        ),
        (lambda: fc.train("tandem", pair(), ROWS, lambda completions, **k: [1.0], args), "'<lambda>': got 1, need 12"),
        (lambda: fc.TandemConfig(top_p=0.9, num_iterations=2), "need 0, 1, 0 where a batch is reused"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


def test_trainer_callbacks_see_rows_and_can_stop(tmp_path):
    """transformers' TrainerCallback and plain functions; a failing forward is no callback's business."""
    seen, rows = [], []

    class Watch(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append((state.global_step, logs["reward"], args.learning_rate, kwargs["model"] is not None))

        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2

        def on_train_end(self, args, state, control, **kwargs):
            seen.append("end")

    args = trainer(tmp_path).args
    result = fc.train("tandem", pair(), ROWS, reward, args, callbacks=[Watch(), rows.append])
    assert [s[0] for s in seen[:-1]] == [1, 2] and seen[-1] == "end" and seen[0][2:] == (args.learning_rate, True)
    assert rows == result.log_history and len(rows) == 2


@pytest.mark.parametrize("lora", [False, True])
def test_resume_is_bitwise(tmp_path, lora):
    """P26: 4 steps with a checkpoint at 2 equal 2 steps and a resumed 2, in weights and in every metric but times."""
    config = {}
    if lora:
        peft = pytest.importorskip("peft", reason="the extra 'peft' is not installed")
        config["peft_config"] = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    changes = dict(save_steps=2, learning_rate=1e-2, lr_scheduler_type="cosine", warmup_steps=1)

    def run(folder, steps, resume=False):
        torch.manual_seed(0)  # LoRA's initial weights
        args = trainer(tmp_path / folder, max_steps=4, save_total_limit=1, **changes).args

        def stop(row):
            if row["step"] == steps:
                raise KeyboardInterrupt

        callbacks = [stop] if steps < 4 else []
        return fc.train(
            "tandem", pair(), ROWS, reward, args, callbacks=callbacks, resume_from_checkpoint=resume, **config
        )

    whole = run("whole", 4)
    with pytest.raises(KeyboardInterrupt):
        run("cut", 3)  # dies in step 3; what counts is the checkpoint of step 2
    assert [p.name for p in (tmp_path / "cut").glob("checkpoint-*")] == ["checkpoint-2"]
    resumed = run("cut", 4, resume=True)
    assert equal(weights(resumed.models["senior"]), weights(whole.models["senior"]))
    timed = ("_s/", "time", "latency")
    for a, b in zip(whole.log_history, resumed.log_history, strict=True):
        assert {k: v for k, v in a.items() if not any(t in k for t in timed) and "version" not in k} == {
            k: v for k, v in b.items() if not any(t in k for t in timed) and "version" not in k
        }
    assert [p.name for p in (tmp_path / "cut").glob("checkpoint-*")] == ["checkpoint-4"]


def test_one_module_in_two_roles_is_refused(tmp_path):
    model = tiny_model("qwen3")
    with pytest.raises(ValueError, match="models: got one module as 'senior' and 'junior', need two, or 'base'"):
        trainer(tmp_path, models={"senior": model, "junior": model})
    with pytest.raises(ValueError, match="resume_from_checkpoint: got True and no complete checkpoint"):
        fc.train("tandem", pair(), ROWS, reward, trainer(tmp_path).args, resume_from_checkpoint=True)


def test_sixteen_bit_weights_are_not_trained_in_place(tmp_path):
    """An AdamW step of 1e-6 is below half an ulp of most bf16 weights: refused for a module, avoided for a path."""
    with pytest.raises(ValueError, match="policy: got 'trainable parameters of .torch.bfloat16.', need float32"):
        fc.train("grpo", {"policy": tiny_model("qwen3").bfloat16()}, ROWS, reward, config(fc.GRPOConfig, tmp_path))
    tiny_model("qwen3").bfloat16().save_pretrained(tmp_path / "half")
    args = config(fc.GRPOConfig, tmp_path / "out", learning_rate=1e-6, max_steps=1)
    trained = fc.train("grpo", {"policy": str(tmp_path / "half")}, ROWS, reward, args).models["policy"]
    start = weights(tiny_model("qwen3").bfloat16().float())
    moved = sum(int((p != start[n]).sum()) for n, p in trained.named_parameters())
    assert trained.dtype == torch.float32 and moved > 0.9 * trained.num_parameters()


def test_a_fresh_run_spares_the_checkpoints_of_another(tmp_path):
    args = trainer(tmp_path, save_steps=2, max_steps=2).args
    fc.train("tandem", pair(), ROWS, reward, args)
    with pytest.raises(ValueError, match="with checkpoint-2 of an earlier run, need an empty folder or resume"):
        fc.train("tandem", pair(), ROWS, reward, args)


def test_no_checkpoint_holds_a_half_used_batch(tmp_path):
    """Stopped after 3 of 4 steps of a batch pair: what is saved is the end of the first batch."""
    args = trainer(tmp_path, save_steps=1, max_steps=4, steps_per_generation=2).args

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 3

    result = fc.train("tandem", pair(), ROWS, reward, args, callbacks=[Stop()])
    assert len(result.log_history) == 3
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


def test_a_column_of_few_rows_reaches_every_batch(tmp_path):
    """P28: a column that the first row lacks is None there; a misspelt parameter is an error before anything runs."""
    seen = []

    def look(completions, target, **kwargs):
        seen.extend(target)
        return [float(len(set(c))) for c in completions]

    rows = [{"prompt": [3, 4]}, {"prompt": [4, 5], "target": 7}]
    args = trainer(tmp_path, prompts_per_step=1, max_steps=2).args
    fc.train("tandem", pair(), rows, look, args)
    assert sorted(map(str, set(seen))) == ["7", "None"]
    with pytest.raises(ValueError, match="got parameter 'targt'.*nearest: 'target'"):
        Trainer("tandem", pair(), rows, lambda completions, targt: [], args, None, None, None, ())


def test_a_batch_without_any_score_is_still_a_step(tmp_path):
    ended = []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            ended.append(state.global_step)

    args = trainer(tmp_path, max_steps=2).args
    rows = fc.train(
        "tandem", pair(), ROWS, lambda completions, **k: [None] * len(completions), args, callbacks=[Watch()]
    )
    assert ended == [1, 2] and all(r["reward"] is None and r["completions/masked_ratio"] == 1 for r in rows.log_history)


def test_truncated_sampling_is_announced_or_refused():
    """P13 and spec row 17."""
    with pytest.warns(UserWarning, match="rollouts are truncated, the loss is that of the whole law"):
        fc.GRPOConfig(top_p=0.9)
    for changes in ({"beta": 0.1}, {"num_iterations": 2}, {"steps_per_generation": 2}):
        with pytest.raises(ValueError, match="got \\(0, 0.9, 0.0\\), need 0, 1, 0"):
            fc.GRPOConfig(top_p=0.9, **changes)
    with pytest.raises(
        ValueError, match="denominator: got \"'response' with loss_type 'grpo'\", need loss_type 'dapo'"
    ):
        fc.TandemConfig(denominator="response", loss_type="grpo")
    with pytest.raises(ValueError, match="p, max_gap: got \\(0.9, 32\\), need none beside a schedule"):
        fc.TandemConfig(p=0.9, schedule=fc.Word())
    assert fc.GRPOConfig(scale_rewards=True).scale_rewards == "group"


def test_completions_and_extra_columns_are_logged(tmp_path):
    def scored(completions, log_extra, log_metric, **kwargs):
        log_extra("length", [len(c) for c in completions])
        log_metric("longest", max(len(c) for c in completions))
        return [float(len(set(c))) for c in completions]

    args = trainer(tmp_path, log_completions=True, logging_steps=2).args
    rows = fc.train("tandem", pair(), ROWS, scored, args).log_history
    lines = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert len(lines) == 12 and all(line["step"] == 2 and line["length"] == len(line["completion"]) for line in lines)
    assert all("longest" in r and 0 < r["entropy"] < math.log(VOCAB) + 1e-6 for r in rows)
