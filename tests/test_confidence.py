"""Rewards by confidence against whole logits; texts that cross between tokenizers; parity's answers; bnpo's mean."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from test_ballots import ballot
from tiny_models import tiny_model
from tokenizers import Tokenizer, models
from training import equal, weights
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import fastcollab as fc
from fastcollab import parity
from fastcollab.advantages import bnpo_weights
from fastcollab.cohort import Cohort
from fastcollab.confidence import FLOOR, own_confidence, peer_likelihood
from fastcollab.diagnostics import gold_metrics
from fastcollab.grading import extract
from fastcollab.labels import Label
from fastcollab.voters import gold_key, make_grader

CASES = {c["id"]: c for c in json.loads((Path(__file__).parent / "cases.json").read_text())}
CHARACTERS = ["<s>", "</s>", *"0123456789+=?\\{}bdeox"]
WORDS = ["<|end|>", *CHARACTERS[2:], "bo", "box", "10", "12"]  # another vocabulary, other ids for the same text


def tokenizer(vocabulary, merges, eos):
    table = {token: i for i, token in enumerate(vocabulary)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(table, merges)), eos_token=eos, pad_token=eos)


def characters():
    return tokenizer(CHARACTERS, [], "</s>")


def words():
    return tokenizer(WORDS, [("b", "o"), ("bo", "x"), ("1", "0"), ("1", "2")], "<|end|>")


def llama(seed=0):
    torch.manual_seed(seed)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8)
    config = LlamaConfig(vocab_size=len(CHARACTERS), num_key_value_heads=2, initializer_range=0.2, **sizes)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 0, 1, 1
    return LlamaForCausalLM(config).eval()


def gpt2(seed=1):
    torch.manual_seed(seed)
    sizes = dict(n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2)
    return GPT2LMHeadModel(GPT2Config(vocab_size=len(WORDS), bos_token_id=0, eos_token_id=0, **sizes)).eval()


ROWS = [{"prompt": f"1{i}+12=?", "answer": str(22 + i)} for i in range(4)]


def config(tmp_path, **changes):
    settings = dict(
        output_dir=str(tmp_path), prompts_per_step=2, num_generations=4, max_completion_length=8, max_steps=2
    )
    settings |= dict(learning_rate=1e-3, kv_memory="4MiB", disable_tqdm=True, alarms=False, min_votes=1)
    return fc.CoRLConfig(**settings | changes)


def pair():
    return {"models": {"l": llama(), "g": gpt2()}, "processing_class": {"l": characters(), "g": words()}}


def grade(text):
    return len(text) % 2


@pytest.mark.parametrize("labels", ["pair", "soft", "peer_likelihood"])
def test_two_architectures_with_different_tokenizers_train_together(tmp_path, labels):
    before = {"l": weights(llama()), "g": weights(gpt2())}
    result = fc.train(
        "corl", train_dataset=ROWS, args=config(tmp_path, labels=labels, grader=grade, tie="first"), **pair()
    )
    assert all(not equal(before[n], weights(result.models[n])) for n in "lg")
    log = [json.loads(line) for line in (tmp_path / "labels.jsonl").read_text().splitlines()]
    assert len(log) == 4 and all(line["ballots"].keys() == {"l", "g"} for line in log)
    assert type(gpt2()).from_pretrained(tmp_path / "g").config.model_type == "gpt2"


def answered(tmp_path, **changes):
    given = pair()
    cohort = Cohort(given["models"], ROWS, config(tmp_path, grader=grade, **changes), None, given["processing_class"])
    for voter in cohort.voters.values():
        voter.answer(cohort.rows, 0, 4, cohort.args)
    return cohort


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_own_confidence_is_that_of_whole_logits(tmp_path, temperature, cap, monkeypatch):
    cohort = answered(tmp_path, temperature=temperature)
    voter = cohort.voters["l"]
    if cap:
        made = voter.model.head
        monkeypatch.setattr(voter.model, "head", lambda: made()._replace(softcap=cap))
    certainty, entropy = own_confidence(voter, cohort.args)
    for i, r in enumerate(voter.rollouts):
        logits = voter.model.module(torch.tensor([r.prompt_ids + r.ids])).logits[0, len(r.prompt_ids) - 1 : -1].double()
        logits = (logits if cap is None else cap * torch.tanh(logits / cap)) / temperature
        p = logits.log_softmax(-1)
        assert certainty[i] == pytest.approx(float((-math.log(len(CHARACTERS)) - p.mean(-1)).mean()), abs=1e-4)
        assert entropy[i] == pytest.approx(float(-(p.exp() * p).sum(-1).mean()), abs=1e-4)


def test_confidence_ranks_rollouts_as_it_says(tmp_path):
    """The two kinds are not images of one another: they order rollouts differently (corl spec V9)."""
    cohort = answered(tmp_path)
    certainty, entropy = own_confidence(cohort.voters["g"], cohort.args)
    assert list(certainty.argsort()) != list((-entropy).argsort())


def test_peer_likelihood_reads_the_text_in_its_own_tokens(tmp_path):
    cohort = answered(tmp_path)
    writer, peer = cohort.voters["l"], cohort.voters["g"]
    got = peer_likelihood(peer, writer, cohort.rows, cohort.args)
    for i, r in enumerate(writer.rollouts):
        ids = words()(writer.text(r), add_special_tokens=False)["input_ids"]
        prompt = words()(cohort.rows[r.group]["prompt"])["input_ids"]
        if not ids:
            assert math.isnan(got[i])
            continue
        logprob = peer.model.module(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        want = logprob.gather(1, torch.tensor(ids)[:, None]).clamp(min=FLOOR).mean()
        assert got[i] == pytest.approx(float(want), abs=1e-4)
    assert any(len(words()(writer.text(r))["input_ids"]) != len(r.ids) for r in writer.rollouts)


# -- keys


def test_c44_a_box_in_the_prompt_is_never_read(tmp_path):
    case, given = CASES["C44"], pair()
    assert case["expected"]["prompt_box"] == "never used"
    rows = [{"prompt": case["input"]["prompt_containing_box"]}]
    cohort = Cohort(given["models"], rows, config(tmp_path, prompts_per_step=1), None, given["processing_class"])
    for voter in cohort.voters.values():
        voter.answer(cohort.rows, 0, 4, cohort.args)
        asked = voter.engine.tokenizer.decode(voter.rollouts[0].prompt_ids).replace(" ", "")
        assert extract(asked + voter.text(voter.rollouts[0])) == "42"  # were it read too
        assert voter.keys == [None] * 4


EQUAL = [
    (1, 1.0, True, Fraction(1)), (0.5, Fraction(1, 2)), (0, -0.0, False), (frozenset({0, 8}), frozenset({8, 0})),
    (("a", 1, None), ("a", 1.0, None)), (frozenset({(1, frozenset({2, 3}))}), frozenset({(1.0, frozenset({3, 2}))})),
    ("1",), ("None",), ((1,),), (("1",),), ((),), (frozenset(),), ((None,),), (10**400,), (1e300, int(1e300)), ("'\"",),
    (np.float64(0.25), 0.25), ("x", np.str_("x")),
]  # fmt: skip


def test_equal_keys_of_a_users_grader_are_one_answer():
    texts = [{make_grader(lambda text, key=key: key)("") for key in keys} for keys in EQUAL]
    assert all(len(found) == 1 for found in texts) and len(set.union(*texts)) == len(EQUAL)
    assert [make_grader(lambda text, key=key: key)("") for key in (None, "")] == [None, None]
    assert [gold_key(answer, lambda text: None) for answer in (8, "8", 8.0)] == ["8", "'8'", "8"]


@pytest.mark.parametrize("key", [object(), math.nan, math.inf, [1], (1, {2}), b"1", 1j])
def test_keys_that_cannot_be_compared_are_refused(key):
    kind = type(key[1] if isinstance(key, tuple) else key).__name__
    with pytest.raises(ValueError, match=f"key of an answer: got {kind} .*, need a str, bool, int, finite float"):
        make_grader(lambda text: key)("")


# -- parity


@pytest.mark.parametrize(
    "text, string",
    [
        (r"so \boxed{\dfrac{3}{4}}", r"\frac{3}{4}"),
        (r"\boxed{1} then \boxed{ 37.5\% }", "37.5"),
        ("The answer is 12.", "12"),
        ("about 17 (cut off", "17"),
        ("it is 0.5", r"\frac{1}{2}"),
        ("nothing", None),
    ],
)
def test_parity_reads_answers_as_strings(text, string):
    assert parity.answer(text) == string


def test_parity_votes_by_string_and_pays_by_equality(tmp_path):
    assert parity.answer(r"\boxed{0.25}") != parity.answer(r"\boxed{\frac{1}{4}}")
    assert parity.reward("0.25", {r"\frac{1}{4}": 1.0}) == 1.0 and parity.reward("0.25", {"0.26": 1.0}) == 0.0
    assert parity.reward(None, {"1": 1.0}) == 0.0 and parity.reward("1", {}) == 0.0
    soft = {r"\frac{1}{4}": 0.25, "0.250": 0.5, "7": 0.125}  # of the keys that are equal the best paid
    assert [parity.reward(said, soft) for said in (".25", "7.0", "8")] == [0.5, 0.125, 0.0]


@pytest.mark.parametrize("labels, paid", [("soft", {0.25, 0.75}), ("union", {1.0})])
def test_parity_pays_soft_and_union_labels(tmp_path, labels, paid):
    cohort = Cohort({n: tiny_model("qwen3") for n in "abc"}, [{"prompt": [3]}], parity_of(tmp_path, labels=labels))
    uid, said = cohort.rows[0]["uid"], {"a": "1 2 3 4", "b": "1.0 2.0 1.0 1.0", "c": "2 2 2 2"}
    for name, keys in said.items():
        cohort.voters[name].keys = keys.split()
    scores = {"soft": {"1.0": 0.75, "2.0": 0.25}, "union": {"1.0": 1.0, "2": 1.0}}[labels]
    rewards = cohort.rewards("a", cohort.rows, {("a", uid): Label(scores)})
    assert set(rewards.ravel()) == paid | {0.0}


def parity_of(tmp_path, **changes):
    return fc.CoRLConfig(
        output_dir=str(tmp_path), prompts_per_step=1, num_generations=4, kv_memory="4MiB", parity=parity.NAME, **changes
    )


@pytest.mark.parametrize(
    "answer, string",
    [(r"\frac{1}{4}", r"\frac{1}{4}"), ("(1,2)", "(1,2)"), ("[1,3)", "[1,3)"), ("x^2 + 1", "x^2+1"),
     (0.5, r"\frac{1}{2}"), ("no solution", "nosolution"), (r"so \boxed{\dfrac34}", r"\frac34"), ("12", "12"),
     (" ", None)],
)  # fmt: skip
def test_a_right_answer_under_parity_is_read_whole(answer, string):
    """It is bare in the data: the phrases and the last number are for responses."""
    assert gold_key(answer, parity.NAME) == string


def test_parity_compares_with_the_right_answers_as_mathematics(tmp_path):
    """Votes are strings: 0.25 is not 1/4 among them, and both are right."""
    cohort = Cohort(pair()["models"], [{"prompt": "1"}], parity_of(tmp_path), None, pair()["processing_class"])
    ballots = {
        (n, "0"): ballot(keys, voter=n) for n, keys in {"l": ["0.25"] * 3 + ["7"], "g": [r"\frac{1}{4}"] * 4}.items()
    }
    labels = {(n, "0"): Label({k: 1.0}, k) for n, k in {"l": r"\frac{1}{4}", "g": "0.25"}.items()}
    rewards = {"l": np.array([[1.0, 1, 1, 0]]), "g": np.ones((1, 4))}
    row = gold_metrics(["0"], ["g", "l"], ballots, labels, rewards, {"0": ".25"}, cohort.same)
    assert {row[f"{n}/{m}"] for n in "gl" for m in ("vote_acc", "label_acc", "reward_acc")} == {1.0}
    assert row["double_fault/g,l"] == 0.0


def test_parity_evaluates_as_mathematics(tmp_path, monkeypatch):
    monkeypatch.setattr("fastcollab.voters.make_grader", lambda grader: lambda text: "0.25")
    args, rows = parity_of(tmp_path, max_completion_length=2, max_steps=1), [{"prompt": "1", "answer": ".25"}]
    given = pair()
    row = fc.train("corl", train_dataset=rows, eval_dataset=rows, args=args, **given).log_history[-1]
    assert row["eval/l/accuracy"] == row["eval/g/majority"] == 1.0


def test_bnpo_is_the_mean_over_micro_batches_of_their_token_means():
    loss, tokens = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0]), torch.tensor([3, 1, 2, 2, 5])  # sums over tokens
    want = ((loss[0] + loss[1]) / 4 + (loss[2] + loss[3]) / 4 + loss[4] / 5) / 3
    assert float((loss * bnpo_weights(tokens, 2)).sum() / tokens.sum()) == pytest.approx(float(want))
    assert torch.allclose(bnpo_weights(tokens, 8), torch.ones(5, dtype=torch.float64))
    with pytest.raises(ValueError, match="rows: got 0, need >= 1"):
        bnpo_weights(tokens, 0)


def test_lora_models_train_whatever_their_order(tmp_path):
    peft = pytest.importorskip("peft")

    def run(folder, names):
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        models = {name: tiny_model("qwen3", seed=int(name)) for name in names}
        rows = [{"uid": i, "prompt": [3 + i, 4]} for i in range(4)]
        args = config(folder, grader=lambda text: int(text.split()[0]) % 3)
        result = fc.train("corl", models, rows, args=args, peft_config=lora)
        return {n: {k: v for k, v in weights(m).items() if "lora" in k} for n, m in result.models.items()}

    one, two = run(tmp_path / "a", "01"), run(tmp_path / "b", "10")
    assert all(equal(one[n], two[n]) and one[n] for n in "01")


def test_a_peer_scores_what_it_has_room_for(tmp_path):
    """Texts longer than the peer's positions are cut, and one that leaves it no token has no score."""
    given = pair()
    given["models"]["g"] = GPT2LMHeadModel(
        GPT2Config(vocab_size=len(WORDS), bos_token_id=0, eos_token_id=0, n_embd=32, n_layer=1, n_head=4, n_positions=9)
    ).eval()
    args = config(tmp_path, grader=grade, max_completion_length=16)
    cohort = Cohort(given["models"], ROWS, args, None, given["processing_class"])
    writer, peer = cohort.voters["l"], cohort.voters["g"]
    writer.answer(cohort.rows, 0, 4, args)
    assert any(len(words()(writer.text(r))["input_ids"]) > 9 for r in writer.rollouts)
    assert np.isfinite(peer_likelihood(peer, writer, cohort.rows, args)).any()
