"""Whole runs: what is written, resumed, refused and told to callbacks."""

from __future__ import annotations

import json
import math

import pytest
import torch
from tiny_models import VOCAB, tiny_model
from training import ROWS, config, equal, pair, reward, trainer, weights
from transformers import AutoModelForCausalLM, TrainerCallback

import fastcollab as fc
from fastcollab import tiny
from fastcollab.trainer import Trainer


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


def test_a_failing_reward_or_verifier_loses_nothing(tmp_path):
    """The updates before it are saved; resumed, the run is one that never failed and had a checkpoint there."""

    def run(folder, fails=(), resume=False, save_steps=3):
        calls = []

        def shaky(**kwargs):
            calls.append(1)
            if len(calls) in fails:
                raise ConnectionError("the judge is down")
            return reward(**kwargs)

        args = trainer(tmp_path / folder, max_steps=4, save_steps=save_steps, learning_rate=1e-2).args
        return fc.train("tandem", pair(), ROWS, shaky, args, resume_from_checkpoint=resume)

    whole = run("whole", save_steps=2)
    with pytest.raises(RuntimeError, match="the judge is down"):
        run("cut", fails=(3,))
    assert [p.name for p in (tmp_path / "cut").glob("checkpoint-*")] == ["checkpoint-2"]
    assert equal(weights(run("cut", resume=True).models["senior"]), weights(whole.models["senior"]))
    with pytest.raises(RuntimeError):
        run("at once", fails=(1,))
    assert not list((tmp_path / "at once").glob("checkpoint-*"))


def test_broken_weights_push_no_good_checkpoint_out(tmp_path):
    args = trainer(tmp_path, max_steps=4, save_steps=2, save_total_limit=1).args
    models = pair()

    def break_at_three(row):
        if row["step"] == 3:
            with torch.no_grad():
                next(models["senior"].parameters()).fill_(torch.nan)

    with pytest.raises(FloatingPointError):
        fc.train("tandem", models, ROWS, reward, args, callbacks=[break_at_three])
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


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
    for line in lines:  # without a tokenizer ids stand for text
        assert " ".join(text.strip() for _, text, _ in line["authors"]) == " ".join(map(str, line["completion"]))
        assert sum(n for *_, n in line["authors"]) == len(line["completion"]) and "interventions" not in line
        assert {writer for writer, *_ in line["authors"]} <= {"senior", "junior"}
    assert all("longest" in r and 0 < r["entropy"] < math.log(VOCAB) + 1e-6 for r in rows)


def test_what_is_logged_of_a_batch_outlives_an_evaluation(tmp_path):
    """A batch of two steps with an evaluation after the first: the second row's extras are still the batch's."""

    def scored(completions, log_extra, **kwargs):
        log_extra("length", [len(c) for c in completions])
        return [float(len(c) % 2) for c in completions]

    args = config(fc.GRPOConfig, tmp_path, max_steps=2, prompts_per_step=2, steps_per_generation=2, eval_steps=1,
                  logging_steps=1, log_completions=True)  # fmt: skip
    fc.train("grpo", {"policy": tiny_model("qwen3")}, ROWS, scored, args, eval_dataset=ROWS[:1])
    rows = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * 16 and all(row["length"] == len(row["completion"]) for row in rows)
