"""Evaluation against plain counting and plain forwards, and the schedules and prompts that it shares with training."""

from __future__ import annotations

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from tiny_models import VOCAB, tiny_model
from transformers import AutoTokenizer

import fastcollab as fc
from fastcollab import tiny
from fastcollab.engine import native_scheduler
from fastcollab.evaluation import evaluate, legibility, pass_at_k
from fastcollab.model import Model
from fastcollab.types import Rollout

SCHEDULERS = ["python", "native"] if native_scheduler else ["python"]
MIB = "4MiB"
NEWLINE, ANSWER = 3, 5  # ids of the tiny tokenizer: "\n" and " answer"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(tiny.senior())


def config(tmp_path, **changes):
    settings = dict(prompts_per_step=2, num_generations=2, max_completion_length=8, max_steps=1)
    return fc.TandemConfig(str(tmp_path), **settings, kv_memory=MIB, disable_tqdm=True, **changes)


def variety(completion_ids, **kwargs):
    return [len(set(ids)) for ids in completion_ids]


# -- pass@k and the evaluation row


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_hit(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        hits = [any(i < c for i in chosen) for chosen in itertools.combinations(range(n), k)]
        assert pass_at_k(n, c, k) == pytest.approx(sum(hits) / len(hits), abs=1e-12)


def test_pass_at_k_golden_values():
    """Chen et al. 2021: n - c < k is certain; k = 1 is c / n; else 1 - C(n - c, k) / C(n, k)."""
    assert pass_at_k(5, 3, 3) == 1.0 and pass_at_k(5, 0, 5) == 0.0
    assert pass_at_k(5, 2, 3) == pytest.approx(0.9) and pass_at_k(10, 3, 5) == pytest.approx(1 - 21 / 252)
    assert pass_at_k(10, 4, 1) == pytest.approx(0.4)
    for k in (0, 6):
        with pytest.raises(ValueError, match=f"k: got {k}, need in 1..5"):
            pass_at_k(5, 2, k)


def test_the_evaluation_row_counts_prompts_not_samples():
    """Reward is a mean over the samples that have one; pass@n asks for one solved sample of a prompt's own n."""
    engine = fc.Engine({"m": tiny_model("qwen3")}, kv_memory=MIB)
    rewards = np.array([[1.0, 0.0, 0.0], [0.5, 0.99, 0.0], [np.nan, 1.0, 2.0], [0.0, np.nan, 0.25]])
    asked = []

    def score(rollouts):
        asked.append([(r.group, r.sample) for r in rollouts])
        return rewards.ravel()

    sampling = fc.SamplingParams(max_new_tokens=6)
    row, rollouts = evaluate(engine, [[5], [6], [7], [8]], score, fc.Solo("m"), sampling, n=3)
    assert asked == [list(itertools.product(range(4), range(3)))]
    assert row["pass@3"] == 0.5 and row["reward"] == pytest.approx(np.nansum(rewards) / 10)
    assert row["mean_length"] == sum(len(r.ids) for r in rollouts) / 12
    assert row["clipped_ratio"] == sum(len(r.ids) == 6 and r.ids[-1] != 2 for r in rollouts) / 12


# -- legibility


def written(rng, prompt, length, finish, group):
    ids = rng.integers(3, VOCAB, length).tolist()
    if finish == "eos":
        ids[-1] = 2
    return Rollout(prompt, ids, np.zeros(length, np.uint8), ("w",), np.zeros(length, np.float32), finish, group=group)


def plain_legibility(module, rollouts):
    """Mean over responses of the mean cross-entropy of their tokens but EOS, by one plain forward each."""
    means = []
    for r in rollouts:
        scored = len(r.ids) - (r.finish == "eos")
        ids = torch.tensor([r.prompt_ids + r.ids])
        with torch.no_grad():
            logp = module(ids).logits[0].log_softmax(-1)
        if scored:
            means.append(-np.mean([float(logp[len(r.prompt_ids) + t - 1, r.ids[t]]) for t in range(scored)]))
    return float(np.mean(means))


@pytest.mark.parametrize("budget", [1, 40, 16384])
def test_legibility_equals_a_plain_forward(budget):
    """Temperature 1, EOS not scored, responses weigh alike; rollouts of two calls may share group numbers."""
    module = tiny_model("qwen3")
    plain, rng = copy.deepcopy(module), np.random.default_rng(0)
    first = [written(rng, [5, 6, 7], n, end, 0) for n, end in ((9, "eos"), (4, "length"), (1, "eos"), (2, "stop"))]
    first += [written(rng, [8, 9], n, end, 1) for n, end in ((1, "length"), (7, "eos"))]
    second = [written(rng, [31, 32, 33], n, end, 0) for n, end in ((6, "eos"), (3, "length"))]
    second += [written(rng, [8, 9, 10, 11], 5, "length", 1)]
    reader = Model("reader", module)
    for rollouts in (first, second, first + second, second + first, first[:1] + second[:1] + first[1:2]):
        want = plain_legibility(plain, rollouts)
        assert legibility(reader, rollouts, VOCAB, budget) == pytest.approx(want, abs=1e-5)
    nothing = first[2:3]
    assert nothing[0].ids == [2] and math.isnan(legibility(reader, nothing, VOCAB, budget))


def test_the_logged_legibility_is_the_juniors_at_temperature_one(tmp_path):
    """Whatever the temperature of the run, which the evaluation samples at."""
    models = {"senior": tiny_model("qwen3"), "junior": tiny_model("llama", seed=1)}
    plain = copy.deepcopy(models)
    rows = [{"prompt": [3 + i, 4, 5]} for i in range(4)]
    args = config(tmp_path, temperature=0.5, learning_rate=0.0, schedule=fc.Alternate())
    got = fc.train("tandem", models, rows, variety, args, eval_dataset=rows).log_history[-1]
    engine = fc.Engine(plain, kv_memory=MIB)
    solo = engine.generate([r["prompt"] for r in rows], schedule=fc.Solo("senior"), sampling=args.sampling)
    assert got["eval/solo/reward"] == pytest.approx(np.mean([len(set(r.ids)) for r in solo]))
    assert got["eval/legibility/junior"] == pytest.approx(plain_legibility(plain["junior"], solo), abs=1e-5)
    assert "eval/legibility/senior" not in got


# -- schedules that evaluation uses


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_paragraph_hands_off_after_each_separator_and_nowhere_else(tokenizer, scheduler):
    """The first writer starts; the token that contains the separator is still its author's; then the next writes."""
    models = {name: tiny_model("qwen3", seed=i, vocab_size=31) for i, name in enumerate("abc")}
    engine = fc.Engine(models, tokenizer, kv_memory=MIB, scheduler=scheduler)
    sampling = fc.SamplingParams(temperature=2.0, max_new_tokens=40, ignore_eos=True)
    for writers in (("a", "b"), ("b", "c", "a")):
        schedule = fc.Paragraph(writers, separator="\n")
        rollouts = engine.generate([[4, 12], [7]], n=6, schedule=schedule, sampling=sampling)
        for r in rollouts:
            before = np.cumsum([0] + [i == NEWLINE for i in r.ids[:-1]])
            assert r.writers == writers and r.author.tolist() == (before % len(writers)).tolist()
            positions = [0] + [t + 1 for t, i in enumerate(r.ids[:-1]) if i == NEWLINE]
            assert [d.position for d in r.draws] == positions
            assert [d.reason for d in r.draws] == ["start"] + ["boundary"] * (len(positions) - 1)
        assert max(len(r.draws) for r in rollouts) > len(writers)  # the cycle closes


def test_paragraph_of_the_tiny_pair_takes_turns_by_line(tokenizer):
    engine = fc.Engine({"senior": tiny.senior(), "junior": tiny.junior()}, kv_memory=MIB)
    prompts = [row["prompt"] for row in tiny.problems(4, seed=0)]
    schedule = fc.Paragraph(separator="\n")
    for r in engine.generate(prompts, schedule=schedule, sampling=fc.SamplingParams(0.0, max_new_tokens=64)):
        lines = r.text.split("\n")
        assert len(lines) > 4
        for k, line in enumerate(lines[1:], 1):
            own = [i for t, i in enumerate(r.ids) if r.ids[:t].count(NEWLINE) == k]
            assert tokenizer.decode(own, skip_special_tokens=True) in (line, line + "\n")
            authors = {int(a) for t, a in enumerate(r.author) if r.ids[:t].count(NEWLINE) == k}
            assert authors == {k % 2}
    with pytest.raises(ValueError, match=r"separator: got '\\n\\n', which no token of this vocabulary contains"):
        engine.generate(prompts, schedule=fc.Paragraph())


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_who_begins(scheduler):
    """``first`` names the first author, and only that one; without it the first is drawn; Solo is one writer."""
    models = {"senior": tiny_model("qwen3"), "junior": tiny_model("qwen3", seed=1)}
    engine = fc.Engine(models, kv_memory=MIB, scheduler=scheduler)
    words, sampling = list(range(10, VOCAB, 3)), fc.SamplingParams(max_new_tokens=12, ignore_eos=True)

    def run(schedule):
        return engine.generate([[5, 6], [7]], n=8, schedule=schedule, sampling=sampling)

    for k, first in enumerate(("senior", "junior")):
        for schedule in (fc.Word(boundaries=words, max_gap=4, first=first), fc.Chunk(3, first=first)):
            rollouts = run(schedule)
            assert {r.author[0] for r in rollouts} == {k} and {tuple(r.draws[0]) for r in rollouts} == {(0, "start", k)}
            assert {d.writer for r in rollouts for d in r.draws[1:]} == {0, 1}
        alone = run(fc.Solo(first))
        assert all(r.writers == (first,) and not r.author.any() and len(r.draws) == 1 for r in alone)
        single = fc.Engine({first: models[first]}, kv_memory=MIB, scheduler=scheduler)
        assert [r.ids for r in alone] == [
            r.ids for r in single.generate([[5, 6], [7]], n=8, sampling=sampling, schedule=fc.Solo(first))
        ]
    assert {r.author[0] for r in run(fc.Word(boundaries=words, max_gap=4))} == {0, 1}
    for schedule in (fc.Word(boundaries=words, first="nobody"), fc.Chunk(3, first="nobody")):
        with pytest.raises(ValueError, match="first: got 'nobody', need one of"):
            run(schedule)


# -- prompts


@pytest.mark.parametrize("flag", [None, True, False])
def test_chat_template_kwargs_reach_training_and_evaluation(tmp_path, tokenizer, flag, monkeypatch):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if flag %} answer{% endif %}"
    seen, generate = [], fc.Engine.generate

    def spy(self, *args, **kwargs):
        rollouts = generate(self, *args, **kwargs)
        seen.append(rollouts)
        return rollouts

    monkeypatch.setattr(fc.Engine, "generate", spy)
    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in tiny.problems(4, seed=0)]
    args = config(tmp_path, chat_template_kwargs=None if flag is None else {"flag": flag})
    models = {"senior": tiny.senior(), "junior": tiny.junior()}
    fc.train("tandem", models, rows, variety, args, processing_class=tokenizer, eval_dataset=rows)
    assert [len(rollouts) for rollouts in seen] == [4, 4, 4]  # a step; solo and team
    prompts = {tuple(tokenizer(r["prompt"][0]["content"])["input_ids"]) + (ANSWER,) * bool(flag) for r in rows}
    for rollouts in seen:
        assert {tuple(r.prompt_ids) for r in rollouts} <= prompts
    assert {tuple(r.prompt_ids) for r in seen[1]} == prompts
