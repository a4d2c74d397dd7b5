"""Co-RL's loop: what does not decide the result, what is refused, what each kind of label trains on."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from tiny_models import tiny_model
from training import equal, weights

import fastcollab as fc
from fastcollab.ballots import Ballot
from fastcollab.cohort import Cohort
from fastcollab.config import PARITY
from fastcollab.exchange import ExchangeError, LocalExchange

ROWS = [{"uid": f"q{i}", "prompt": [3 + i, 4, 5 + i], "other": [4 + i, 7], "answer": str(i % 3)} for i in range(6)]
UNLIKE = ("time", "tokens_per_s", "policy_version")  # metrics that two equal runs need not share


def grade(text):
    """The answer of a response without a tokenizer: its first id modulo 3, none where the second is below 5."""
    ids = [int(i) for i in text.split()]
    return None if len(ids) > 1 and ids[1] < 5 else str(ids[0] % 3)


def models(names="ab"):
    return {name: tiny_model("qwen3", seed=i) for i, name in enumerate(names)}


def config(tmp_path, **changes):
    settings = dict(
        output_dir=str(tmp_path), prompts_per_step=3, num_generations=4, max_completion_length=6, max_steps=2
    )
    settings |= dict(learning_rate=1e-3, kv_memory="8MiB", disable_tqdm=True, grader=grade, alarms=False)
    return fc.CoRLConfig(**settings | changes)


def train(tmp_path, cohort=None, resume=False, rows=ROWS, **changes):
    """(weights by model, lines of the label log, rows of metrics without times)."""
    result = fc.train("corl", cohort or models(), rows, args=config(tmp_path, **changes), resume_from_checkpoint=resume)
    log = [json.loads(line) for line in (tmp_path / "labels.jsonl").read_text().splitlines()]
    history = [{k: v for k, v in row.items() if not any(x in k for x in UNLIKE)} for row in result.log_history]
    return {name: weights(model) for name, model in result.models.items()}, log, history


def same(one, two):
    return one[0].keys() == two[0].keys() and all(equal(one[0][n], two[0][n]) for n in one[0]) and one[1:] == two[1:]


# -- what does not decide the result


def test_one_seed_gives_one_run_whatever_the_order_of_the_models(tmp_path):
    first = train(tmp_path / "a", models("abc"))
    moved = {name: model for name, model in reversed(models("abc").items())}
    assert same(first, train(tmp_path / "b", moved))
    assert not same(first, train(tmp_path / "c", models("abc"), seed=1))
    assert any(row["a/grad_norm"] > 0 for row in first[2])


def test_the_order_in_which_models_share_the_device_does_not_matter(tmp_path, monkeypatch):
    first = train(tmp_path / "a", models("abc"))
    made = Cohort.__init__

    def backwards(self, *args):
        made(self, *args)
        self.voters = dict(reversed(self.voters.items()))
        self.names = self.names[::-1]

    monkeypatch.setattr(Cohort, "__init__", backwards)
    got = train(tmp_path / "b", models("abc"))
    assert all(equal(first[0][n], got[0][n]) for n in "abc")
    assert first[1] == [json.loads(json.dumps(line, sort_keys=True)) for line in got[1]]


@pytest.mark.parametrize("tie", ["abstain", "peer_assist", "logprob"])
def test_the_order_of_rollouts_does_not_matter(tmp_path, monkeypatch, tie):
    first = train(tmp_path / "a", tie=tie)
    taken = Cohort.publish

    def shuffled(self, uids):
        ballots = taken(self, uids)
        rng = np.random.default_rng(0)
        for key, b in ballots.items():
            order = rng.permutation(b.num_votes)
            keys, logprobs = ([x[i] for i in order] for x in (b.keys, b.logprobs))
            ballots[key] = dataclasses.replace(b, keys=tuple(keys), logprobs=tuple(logprobs))
        return ballots

    monkeypatch.setattr(Cohort, "publish", shuffled)
    got = train(tmp_path / "b", tie=tie)
    assert all(equal(first[0][n], got[0][n]) for n in "ab")


def test_right_answers_in_the_data_change_nothing(tmp_path):
    """They are monitored, and reach neither labels nor rewards."""
    with_gold = train(tmp_path / "a")
    without = train(tmp_path / "b", rows=[{k: v for k, v in row.items() if k != "answer"} for row in ROWS])
    assert all(equal(with_gold[0][n], without[0][n]) for n in "ab") and with_gold[1] == without[1]
    assert "a/label_acc" in with_gold[2][0] and "a/label_acc" not in without[2][0]


def test_equal_models_write_different_rollouts(tmp_path):
    """C22's fault: two models of one seed would answer alike, and a pair would be one model with itself."""
    cohort = Cohort({n: tiny_model("qwen3") for n in "ab"}, ROWS, config(tmp_path))
    for voter in cohort.voters.values():
        voter.answer(cohort.rows, 0, 4, cohort.args)
    a, b = (cohort.voters[n].rollouts for n in "ab")
    assert sum(x.ids == y.ids for x, y in zip(a, b, strict=True)) < len(a) / 4


# -- what a step trains on


def test_the_gradient_is_that_of_a_plain_loop(tmp_path):
    """b's majority labels a; rewards, advantages and the clipped loss at ratio 1 by hand, from whole logits."""
    cohort = Cohort(models(), ROWS, config(tmp_path, max_grad_norm=0.0))
    rows = cohort.rows[:3]
    for voter in cohort.voters.values():
        voter.answer(rows, 0, 4, cohort.args)
    uids = [row["uid"] for row in rows]
    ballots = cohort.publish(uids)
    labels = cohort.labels(0, uids, cohort.students, ballots)
    taken, model = {}, cohort.models["a"].module
    cohort.learners["a"].optimizer.register_step_pre_hook(
        lambda *_: taken.update({n: p.grad.clone() for n, p in model.named_parameters()})
    )
    for group in cohort.learners["a"].optimizer.param_groups:
        group["lr"] = 0.0
    cohort.update("a", {name: cohort.rewards(name, rows, labels) for name in "ab"})

    losses, tokens = [], 0
    for group in range(3):
        own = [r for r in cohort.voters["a"].rollouts if r.group == group]
        theirs = [grade(" ".join(map(str, r.ids))) for r in cohort.voters["b"].rollouts if r.group == group]
        counts = sorted(((theirs.count(k), k) for k in set(theirs) - {None}), reverse=True)
        if not counts or counts[0][0] < 2 or (len(counts) > 1 and counts[1][0] == counts[0][0]):
            continue
        r = torch.tensor([float(grade(" ".join(map(str, x.ids))) == counts[0][1]) for x in own])
        if r.max() == r.min():
            continue
        for x, advantage in zip(own, (r - r.mean()) / (r.std() + 1e-4), strict=True):
            logits = model(torch.tensor([x.prompt_ids + x.ids])).logits[0, len(x.prompt_ids) - 1 : -1]
            logprob = logits.log_softmax(-1).gather(1, torch.tensor(x.ids)[:, None])
            losses.append(-(advantage * logprob).sum())
            tokens += len(x.ids)
    assert tokens > 0
    model.zero_grad()
    (torch.stack(losses).sum() / tokens).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(taken[name], p.grad, rtol=1e-3, atol=1e-6)


KINDS = ["self", "ema", "soft", "random", "shuffled", "gold", "self_certainty", "entropy", "peer_likelihood"]


@pytest.mark.parametrize("labels", KINDS)
def test_every_kind_of_label_trains(tmp_path, labels):
    if labels == "peer_likelihood":
        with pytest.raises(ValueError, match="tokenizer of 'b': got None, need one, to read the texts of others"):
            train(tmp_path, labels=labels)
        return
    before = {name: weights(model) for name, model in models().items()}
    after, log, history = train(tmp_path, labels=labels)
    assert any(not equal(before[n], after[n]) for n in "ab")
    assert len(log) == 6 and all(line["labels"].keys() == {"a", "b"} for line in log)
    assert {"a@ema", "b@ema"} <= set(log[0]["ballots"]) if labels == "ema" else set(log[0]["ballots"]) == {"a", "b"}


@pytest.mark.parametrize("labels", ["ring", "majority", "union", "weighted"])
def test_three_models(tmp_path, labels):
    _, log, history = train(tmp_path, models("abc"), labels=labels)
    assert all(line["labels"].keys() == set("abc") for line in log)
    assert {f"agree/{pair}" for pair in ("a,b", "a,c", "b,c")} <= set(history[0])


def test_views(tmp_path):
    """Each model's own wording; and with labels "views" both wordings of one model, each the other's teacher."""
    _, log, _ = train(tmp_path / "a", views={"b": "other"})
    assert {n: b["view"] for n, b in log[0]["ballots"].items()} == {"a": "prompt", "b": "other"}
    _, log, _ = train(tmp_path / "b", labels="views", views={"a": "other", "b": "other"})
    assert log[0]["labels"]["a"]["teachers"] == [["a@other", 0]]
    assert log[0]["labels"]["b@other"]["teachers"] == [["b", 0]]


def test_more_votes_than_trained_rollouts(tmp_path):
    _, log, history = train(tmp_path, num_votes=7)
    assert all(len(b["keys"]) == 7 for line in log for b in line["ballots"].values())
    assert all(len(x["rewards"]) == 4 for line in log for x in line["labels"].values())
    assert history[0]["a/num_tokens"] > history[0]["a/trained_tokens"]


def test_the_teacher_follows_its_model(tmp_path):
    cohort = Cohort(models(), ROWS, config(tmp_path, labels="ema", ema=(0.5, 1.0), learning_rate=0.1))
    start, teacher = weights(cohort.models["a"].module), cohort.teachers["a@ema"]
    with torch.no_grad():
        for p in cohort.models["a"].module.parameters():
            p.add_(1.0)
    version = teacher.model.version
    teacher.follow(0.5)  # alpha: 1 - 0.5 * (1 + 0) / 2 = 0.75
    for name, p in teacher.model.module.named_parameters():
        torch.testing.assert_close(p, start[name] + 0.25)
    assert teacher.model.version > version and teacher.alpha(0.0) == 0.5 and teacher.alpha(1.0) == 1.0


def test_parity_sets_every_choice_of_the_published_code(tmp_path):
    args = config(tmp_path, parity="corl-ff476f0")
    assert {name: getattr(args, name) for name in PARITY["corl-ff476f0"]} == PARITY["corl-ff476f0"]
    _, log, history = train(tmp_path, parity="corl-ff476f0")
    assert all(r is not None for line in log for x in line["labels"].values() for r in x["rewards"])
    assert history[0]["a/trained_tokens"] == history[0]["a/num_tokens"]  # groups without signal count


# -- checkpoints


@pytest.mark.parametrize("changes", [{}, {"labels": "ema"}], ids=["pair", "ema"])
def test_resume_is_bitwise(tmp_path, changes):
    whole = train(tmp_path / "a", max_steps=4, save_steps=2, **changes)
    train(tmp_path / "b", max_steps=4, save_steps=2, **changes)
    for name in ("metrics.jsonl", "labels.jsonl"):  # as after a crash at step 3
        lines = (tmp_path / "b" / name).read_text().splitlines(keepends=True)
        (tmp_path / "b" / name).write_text("".join(lines[: 3 * len(lines) // 4]))
    resumed = train(tmp_path / "b", resume=str(tmp_path / "b" / "checkpoint-2"), max_steps=4, save_steps=2, **changes)
    assert same(whole, resumed)
    loaded = type(tiny_model("qwen3")).from_pretrained(tmp_path / "a" / "b")
    assert equal(weights(loaded), whole[0]["b"])


def test_a_checkpoint_belongs_to_its_questions(tmp_path):
    train(tmp_path, save_steps=2)
    with pytest.raises(ValueError, match="checkpoint of run: got .*, need .*: these data and seed"):
        train(tmp_path, resume=True, rows=ROWS[:5])
    with pytest.raises(ValueError, match="optimisers of .*, need those of"):
        train(tmp_path, models("abc"), resume=True)


# -- alarms


def test_a_model_whose_alarm_is_raised_votes_and_is_not_updated(tmp_path):
    cohort = Cohort(models(), ROWS, config(tmp_path, alarms=True, max_steps=2))
    cohort.alarms.raised["a"] = "by hand"
    before = {name: weights(cohort.models[name].module) for name in "ab"}
    result = cohort.run()
    assert equal(before["a"], weights(result.models["a"])) and not equal(before["b"], weights(result.models["b"]))
    assert [row["a/paused"] for row in result.log_history] == [1.0, 1.0]
    assert len(cohort.voters["a"].rollouts) == 12


# -- faults at the exchange


class Faulty(LocalExchange):
    """Changes b's first ballot of step 1."""

    def __init__(self, change):
        super().__init__("", {})
        self.change = change

    def publish(self, step, uid, ballot):
        if (step, ballot.voter) == (1, "b"):
            for given in self.change(step, uid, ballot):
                super().publish(*given)
        else:
            super().publish(step, uid, ballot)


FAULTS = {
    "missing": (lambda step, uid, b: [], r"got none from \['b'\], need one from each voter"),
    "wrong uid": (lambda s, u, b: [(s, u, dataclasses.replace(b, uid="q9"))], "got uid 'q9', need"),
    "wrong view": (lambda s, u, b: [(s, u, dataclasses.replace(b, view="other"))], "got view 'other', need 'prompt'"),
    "wrong run": (lambda s, u, b: [(s, u, dataclasses.replace(b, run="x"))], "got run 'x', need"),
    "late": (lambda s, u, b: [(0, u, dataclasses.replace(b, step=0))], "got a late ballot, need step 1 or later"),
    "stale": (lambda s, u, b: [(s, u, dataclasses.replace(b, version=-1))], "got version -1, need 0 or later"),
    "contradiction": (
        lambda s, u, b: [(s, u, b), (s, u, dataclasses.replace(b, keys=("'9'",) * 4))],
        "got a second one that differs",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_ballot_is_an_error_and_nothing_is_trained_on_it(tmp_path, fault):
    change, message = FAULTS[fault]
    cohort = Cohort(models(), ROWS, config(tmp_path), exchange=(exchange := Faulty(change)))
    exchange.run, exchange.views = cohort.run_id, cohort.views
    seen = []
    cohort.callbacks.functions.append(lambda row: seen.append({n: weights(cohort.models[n].module) for n in "ab"}))
    with pytest.raises(ExchangeError, match=message):
        cohort.run()
    assert len(seen) == 1 and cohort.step == 1
    assert all(equal(seen[0][n], weights(cohort.models[n].module)) for n in "ab")
    assert {line["step"] for line in map(json.loads, (tmp_path / "labels.jsonl").read_text().splitlines())} == {0}


def test_a_ballot_that_comes_twice_counts_once(tmp_path):
    once = train(tmp_path / "a")
    twice = Cohort(models(), ROWS, config(tmp_path / "b"), exchange=(exchange := Faulty(lambda *b: [b, b])))
    exchange.run, exchange.views = twice.run_id, twice.views
    result = twice.run()
    assert all(equal(once[0][n], weights(result.models[n])) for n in "ab")


# -- bad input


BAD = {
    "reward_funcs": ({"reward_funcs": len}, "reward_funcs: got <built-in function len>, need none for method 'corl'"),
    "names": ({"models": {"a@b": None}}, "models: got \\['a@b'\\], need at least one, names without '@' and ','"),
    "one model": ({"models": models("a")}, "models of Ring: got 1, need >= 2"),
    "labels": ({"labels": "pear"}, "labels: got 'pear', need pair, ring"),
    "pair of three": ({"models": models("abc"), "labels": "pair"}, "models of Pair: got 3, need 2"),
    "votes": ({"num_votes": 2}, "num_votes: got 2, need None or >= 4"),
    "view": ({"views": {"a": "colour"}}, "views: got 'colour', need a column of the data"),
    "views of whom": ({"views": {"c": "other"}}, "views: got \\['c'\\], need names among \\['a', 'b'\\]"),
    "gap": (
        {"views": {"a": "other"}, "rows": [*ROWS, {**ROWS[0], "uid": "q8", "other": None}]},
        "views: got \"none for \\['q8'\\]\", need a text in each of",
    ),
    "uids": ({"rows": [*ROWS, ROWS[0]]}, "uid: got \\['q0'\\], need one per question"),
    "gold": ({"labels": "gold", "rows": [{"prompt": [3, 4]}]}, "column 'answer': got None, need the right answers"),
    "too long": (
        {"rows": [{"prompt": [3] * 5000}]},
        "questions: got '0 of 1: all are too long for a model'",
    ),
    "config": ({"args": fc.GRPOConfig()}, "args: got 'GRPOConfig', need CoRLConfig for method 'corl'"),
    "passes": ({"num_iterations": 2}, "num_iterations, steps_per_generation: got \\(2, 1\\), need 1, 1 for method"),
    "parity": ({"parity": "corl"}, "parity: got 'corl', need None or corl-ff476f0"),
    "beta": ({"beta": 0.1}, "denominator: got 'active', need 'all' with beta > 0"),
}


@pytest.mark.parametrize("fault", BAD)
@pytest.mark.filterwarnings("ignore:1 of 1 questions are too long")
def test_bad_input_is_one_sentence(tmp_path, fault):
    changes, message = BAD[fault]
    changes = dict(changes)
    given = changes.pop("models", None) or models()
    rows, funcs = changes.pop("rows", ROWS), changes.pop("reward_funcs", None)
    with pytest.raises(ValueError, match=message):
        fc.train("corl", given, rows, funcs, changes.pop("args", None) or config(tmp_path, **changes))


def test_a_question_that_a_model_cannot_read_is_left_out_for_all(tmp_path):
    with pytest.warns(UserWarning, match="1 of 7 questions are too long for a model and are left out"):
        _, log, _ = train(tmp_path, rows=[*ROWS, {"uid": "q9", "prompt": [3] * 5000}], max_steps=3)
    assert "q9" not in {line["uid"] for line in log}


def test_evaluation_scores_without_and_with_right_answers(tmp_path):
    args = config(tmp_path, eval_steps=1, max_steps=1)
    row = fc.train("corl", models(), ROWS, args=args, eval_dataset=ROWS).log_history[-1]
    assert 0 <= row["eval/a/accuracy"] <= 1 and 0 <= row["eval/b/majority"] <= 1 and row["eval/selection_score"] >= 0
    assert not math.isnan(row["eval/selection_score"])


def test_ballots_hold_no_text_of_the_question():
    """All that crosses between models is listed here: a new field would be a new channel."""
    assert {f.name for f in dataclasses.fields(Ballot)} == {
        "run", "step", "uid", "voter", "view", "version", "keys", "logprobs"}  # fmt: skip
