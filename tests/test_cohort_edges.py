"""Co-RL at its edges: epochs, evaluation, what a checkpoint belongs to, what the logs hold, the loss's divisor."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from test_cohort import ROWS, config, models, same, train
from tiny_models import tiny_model

import fastcollab as fc
from fastcollab.ballots import Ballot
from fastcollab.cohort import Cohort
from fastcollab.diagnostics import cohort_metrics
from fastcollab.labels import Label

# -- the schedule, the evaluation, what surfaces before training


def test_a_question_comes_once_a_step_and_once_an_epoch(tmp_path):
    """Six questions, four a step: the two that are left of an epoch are dropped (corl spec section 6)."""
    _, log, _ = train(tmp_path, prompts_per_step=4, max_steps=-1, num_train_epochs=3)
    steps = [[line["uid"] for line in log if line["step"] == s] for s in range(3)]
    assert [len(set(uids)) for uids in steps] == [4, 4, 4] and len(log) == 12
    with pytest.raises(ValueError, match="prompts_per_step: got 7, need 1 to 6, the number of questions"):
        train(tmp_path, prompts_per_step=7)


def test_two_names_of_one_model_are_refused(tmp_path):
    model = tiny_model("qwen3")
    with pytest.raises(ValueError, match="models: got \"the same weights as 'a' and 'b'\", need weights of their own"):
        train(tmp_path, {"a": model, "b": model})


def test_evaluation_questions_are_checked_before_training(tmp_path):
    rows = [{"uid": "e", "prompt": [3, 4]}]  # no column "other"
    with pytest.raises(ValueError, match="views: got 'other', need a column of the data"):
        fc.train("corl", models(), ROWS, args=config(tmp_path, views={"b": "other"}), eval_dataset=rows)
    assert not (tmp_path / "metrics.jsonl").exists()
    train(tmp_path, eval_steps=1)  # and without any, there is nothing to evaluate


def test_an_unanswered_question_under_gold_labels_is_named_before_training(tmp_path):
    rows = [*ROWS, {"uid": "q9", "prompt": [3, 4], "other": [5]}]
    with pytest.raises(ValueError, match=r"column 'answer': got \"none for \['q9'\]\", need the right answers"):
        train(tmp_path, labels="gold", rows=rows)


def test_one_model_has_a_selection_score_only_with_a_second_view(tmp_path):
    views = dict(labels="views", views={"a": "other"})
    row = fc.train("corl", models("a"), ROWS, args=config(tmp_path / "a", **views), eval_dataset=ROWS).log_history[-1]
    assert 0 <= row["eval/selection_score"] <= 2
    row = fc.train("corl", models("a"), ROWS, args=config(tmp_path / "b", labels="self"), eval_dataset=ROWS)
    assert "eval/selection_score" not in row.log_history[-1] and "eval/a/accuracy" in row.log_history[-1]


def test_a_checkpoint_belongs_to_its_labels_and_texts(tmp_path):
    train(tmp_path, save_steps=2)
    with pytest.raises(ValueError, match="checkpoint's labels: got \"Pair .*, need SelfVote .*, as this run has"):
        train(tmp_path, resume=True, labels="self")
    with pytest.raises(ValueError, match="checkpoint of run"):  # the same names, other questions
        train(tmp_path, resume=True, rows=[row | {"prompt": [9, *row["prompt"]]} for row in ROWS])


def test_a_torn_last_line_does_not_keep_a_run_from_resuming(tmp_path):
    whole = train(tmp_path / "a", max_steps=4, save_steps=2)
    train(tmp_path / "b", max_steps=4, save_steps=2)
    for name in ("metrics.jsonl", "labels.jsonl"):
        text = (tmp_path / "b" / name).read_text()
        (tmp_path / "b" / name).write_text(text[:-40])
    assert same(whole, train(tmp_path / "b", resume=str(tmp_path / "b" / "checkpoint-2"), max_steps=4, save_steps=2))


def test_the_label_log_holds_what_the_metrics_are_made_of(tmp_path):
    cohort = Cohort(models(), ROWS, config(tmp_path))
    history = cohort.run().log_history
    for step, row in enumerate(history):
        lines = [line for line in map(json.loads, open(tmp_path / "labels.jsonl")) if line["step"] == step]
        uids = [line["uid"] for line in lines]
        ballots, labels = {}, {}
        for line in lines:
            for name, b in line["ballots"].items():
                keys = tuple(b["keys"])
                ballots[name, line["uid"]] = Ballot("", step, line["uid"], name, b["view"], b["version"], keys)
                labels[name, line["uid"]] = Label(line["labels"][name]["scores"])
        paid = {n: np.array([line["labels"][n]["rewards"] for line in lines], dtype=float) for n in "ab"}
        for key, value in cohort_metrics(uids, ["a", "b"], ballots, labels, paid).items():
            assert row[key] == (None if math.isnan(value) else pytest.approx(value)), key
        lengths = [n for line in lines for n in line["ballots"]["a"]["lengths"]]
        assert row["a/completions/mean_length"] == pytest.approx(np.mean(lengths))
        assert {f for line in lines for f in line["ballots"]["a"]["finish"]} <= {"eos", "length"}


def test_completions_are_written_for_every_model(tmp_path):
    train(tmp_path, log_completions=True, logging_steps=2)
    lines = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert len(lines) == 24 and {line["model"] for line in lines} == {"a", "b"} and {x["step"] for x in lines} == {2}


# -- what the loss divides by


def taken(cohort, rewards):
    """(advantages after weighting, the denominator) of one update of "a" under these rewards [prompts, G]."""
    seen = {}
    cohort.learners["a"].update = lambda items, n, step: seen.update(items=items, n=n) or {}
    for voter in cohort.voters.values():
        voter.answer(cohort.rows[:2], 0, 4, cohort.args)
    cohort.step_rows = cohort.rows[:2]
    cohort.update("a", {"a": np.array(rewards), "b": np.zeros((2, 4))})
    return seen["items"], seen["n"]


def test_an_active_group_counts_whole(tmp_path):
    """A rollout that has just its group's mean has no gradient, and still is a rollout of the mean over tokens."""
    items, n = taken(Cohort(models(), ROWS, config(tmp_path)), [[0, 0.5, 1, 0.5], [1, 1, 1, 1]])
    assert n == sum(len(i.rollout.ids) for i in items[:4]) and items[1].advantage == 0
    items, n = taken(Cohort(models(), ROWS, config(tmp_path, loss_type="grpo")), [[0, 0.5, 1, 0.5], [1, 1, 1, 1]])
    assert n == 4
    items, n = taken(Cohort(models(), ROWS, config(tmp_path, denominator="all")), [[0, 0.5, 1, 0.5], [1, 1, 1, 1]])
    assert n == sum(len(i.rollout.ids) for i in items)


@pytest.mark.parametrize("denominator, rollouts", [("active", 4), ("all", 8)])
def test_bnpo_gives_rollouts_of_any_length_one_weight(tmp_path, denominator, rollouts):
    """With a micro-batch of one rollout, the weight of its mean over tokens is one over their number."""
    args = config(tmp_path, loss_type="bnpo", denominator=denominator)
    items, n = taken(Cohort(models(), ROWS, args), [[0, 0, 1, 1], [1, 1, 1, 1]])
    plain = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    for i in items[:4]:
        assert abs(i.advantage) * len(i.rollout.ids) / n == pytest.approx(plain / rollouts, rel=1e-5)
