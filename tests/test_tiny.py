"""The tiny pair: its tokenizer, its task and reward, what the shipped weights can do, and how they are made."""

from __future__ import annotations

import importlib.util
import math
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastcollab import tiny
from fastcollab.tiny.task import EOS, PRIVATE, PUBLIC, VOCABULARY

RIGHT = "\n 1 + 0 = 1\n 1 + 9 = 10\n 3 + 8 + 1 = 12\n 7 + 7 + 1 = 15\n answer 15201"


@pytest.fixture(scope="module")
def maker():
    path = Path(__file__).parents[1] / "examples" / "make_tiny_models.py"
    spec = importlib.util.spec_from_file_location("make_tiny_models", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(tiny.senior())


@pytest.fixture(scope="module")
def pair():
    return {name: AutoModelForCausalLM.from_pretrained(getattr(tiny, name)()) for name in ("senior", "junior")}


@pytest.fixture(scope="module")
def sampled(maker, pair, tokenizer):
    """128 problems and what each model samples for them at T=1, as (rows, name -> texts)."""
    rows = tiny.problems(128, seed=7)
    torch.manual_seed(0)
    prompts = [row["prompt"] for row in rows]
    return rows, {name: maker.respond(model, tokenizer, prompts, sample=True) for name, model in pair.items()}


def test_tokenizer_round_trips_and_marks_words_with_a_leading_space(tokenizer):
    text = "add 7311 + 7890 :" + RIGHT.replace("3 +", "3 &").replace("= 12", "~ 12") + EOS
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.convert_ids_to_tokens(ids[:12]) == "add Ġ7 3 1 1 Ġ+ Ġ7 8 9 0 Ġ: Ċ".split()
    assert ids[-1] == tokenizer.eos_token_id
    assert tuple(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))) == VOCABULARY


def test_tokenizer_of_the_junior_is_the_senior_s(tokenizer):
    junior = AutoTokenizer.from_pretrained(tiny.junior())
    assert junior.get_vocab() == tokenizer.get_vocab()
    assert junior(RIGHT)["input_ids"] == tokenizer(RIGHT)["input_ids"]


def test_a_text_outside_the_alphabet_becomes_unk_and_a_chat_its_contents(tokenizer):
    assert tokenizer("é")["input_ids"] == [tokenizer.unk_token_id]
    chat = [{"role": "user", "content": tiny.prompt(12, 34)}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == "add 12 + 34 :"


@pytest.mark.parametrize("digits", [2, 3, 4])
def test_problems_are_fixed_by_the_seed_and_true(digits):
    rows = tiny.problems(50, seed=3, digits=digits)
    assert rows == tiny.problems(50, seed=3, digits=digits)
    assert rows[:20] == tiny.problems(20, seed=3, digits=digits)
    assert rows != tiny.problems(50, seed=4, digits=digits)
    for row in rows:
        word, a, plus, b, colon = row["prompt"].split(" ")
        assert (word, plus, colon) == ("add", "+", ":") and len(a) == len(b) == digits
        assert row["answer"] == str(int(a) + int(b))


def test_problems_refuse_what_the_pair_cannot_do():
    with pytest.raises(ValueError, match=r"digits: got 5, need 2, 3 or 4"):
        tiny.problems(1, seed=0, digits=5)
    with pytest.raises(ValueError, match=r"n: got 0, need >= 1"):
        tiny.problems(0, seed=0)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (RIGHT, 1.0),
        (RIGHT + EOS, 1.0),
        (RIGHT.replace("+", "&").replace("=", "~"), 1.0),
        ("\n answer 15201", 1.0),
        ("\n answer 1 5 201", 1.0),
        ("\n answer 15201\n answer 15200", 0.0),
        ("\n answer 5201", 0.0),
        ("\n answer 015201", 0.0),
        ("\n answer 15201 7", 0.0),
        ("\n answer 15201 = 1", 0.0),
        ("\n answer  15201", 0.0),
        ("\nanswer 15201", 0.0),
        ("\n answer", 0.0),
        (RIGHT + "\n", 0.0),
        ("\n 7 + 7 + 1 = 15201", 0.0),
        ("15201", 0.0),
        ("", 0.0),
    ],
)
def test_correct(text, reward):
    assert tiny.correct([text], ["15201"], prompt=["unused"], authors=[None]) == [reward]


def test_correct_refuses_unequal_lengths():
    with pytest.raises(ValueError, match="answer: got 1 rows, need 2"):
        tiny.correct(["a", "b"], ["1"])


def test_private_fraction_counts_symbols():
    assert tiny.private_fraction(RIGHT) == 0.0 and not tiny.is_private(RIGHT)
    assert tiny.private_fraction(" 1 & 0 ~ 1\n 1 & 9 = 10") == 0.75
    assert tiny.is_private(" 1 & 0 ~ 1\n 1 & 9 = 10") and not tiny.is_private(" 1 & 0 = 1")
    assert tiny.private_fraction([" 1 & 0 ~ 1", " 1 + 0 = 1", " 1 + 0 = 1"]) == pytest.approx(1 / 3)
    assert math.isnan(tiny.private_fraction(" answer 12")) and not tiny.is_private("")


def test_written_private_fraction_counts_one_writer_s_symbols(tokenizer):
    def rollout(text, senior):
        ids, senior = tokenizer(text)["input_ids"], np.array(senior, bool)
        return SimpleNamespace(ids=ids, mask=lambda writer: senior if writer == "senior" else ~senior)

    rollouts = [rollout(" 1 & 0 = 1", [1, 1, 0, 0, 1]), rollout(" 2 + 0 ~ 2", [0, 1, 0, 1, 0])]
    assert tiny.written_private_fraction(rollouts) == pytest.approx(2 / 3)
    assert tiny.written_private_fraction(rollouts, "junior") == 0.0
    assert math.isnan(tiny.written_private_fraction([rollout(" 1", [1])]))


@pytest.mark.parametrize("name", ["senior", "junior"])
@pytest.mark.parametrize(("digits", "ending"), [(4, ""), (4, "\n"), (3, ""), (2, "")])
def test_greedy_is_right_with_and_without_the_newline(maker, pair, tokenizer, name, digits, ending):
    rows = tiny.problems(32, seed=11, digits=digits)
    texts = maker.respond(pair[name], tokenizer, [row["prompt"] + ending for row in rows], sample=False)
    texts = [ending + text for text in texts]
    assert all(text.startswith("\n ") for text in texts)
    assert sum(tiny.correct(texts, [row["answer"] for row in rows])) / len(rows) >= 0.95


@pytest.mark.parametrize("name", ["senior", "junior"])
def test_sampled_accuracy_has_headroom(sampled, name):
    rows, texts = sampled
    accuracy = np.mean(tiny.correct(texts[name], [row["answer"] for row in rows]))
    assert 0.6 <= accuracy <= 0.9


def test_only_the_senior_writes_privately(sampled):
    _, texts = sampled
    assert 0.7 <= tiny.private_fraction(texts["senior"]) <= 0.9
    assert tiny.private_fraction(texts["junior"]) == 0.0
    assert 0.7 <= np.mean([tiny.is_private(text) for text in texts["senior"]]) <= 0.9


def test_the_junior_reads_the_public_texts_and_not_the_private_ones(maker, pair, tokenizer, sampled):
    rows, texts = sampled
    written = [(row["prompt"], text) for row, text in zip(rows, texts["senior"], strict=True)]
    nats = maker.cross_entropy(pair["junior"], tokenizer, written).numpy()
    private = np.array([tiny.is_private(text) for _, text in written])
    assert nats[private].mean() > 5.0
    assert nats[~private].mean() < 0.2


def test_training_texts_forget_carries_and_stay_consistent(maker):
    rng, forgotten = random.Random(0), []
    for _ in range(2000):
        *lines, answer = [line.split() for line in maker.worked(999, 999, PUBLIC, rng).split("\n")[1:]]
        for line in lines:
            assert sum(int(word) for word in line[:-1] if word.isdigit()) == int(line[-1])
        forgotten += ["1" not in line[:-1] for line in lines[1:]]  # 9 + 9 always carries
        assert answer == ["answer", "1" + "".join(line[-1][-1] for line in reversed(lines))]
    assert abs(np.mean(forgotten) - maker.SLIP) < 0.02  # 3.5 sigma of 4000 draws
    assert maker.worked(12, 34, PRIVATE, rng) == "\n 2 & 4 ~ 6\n 1 & 3 ~ 4\n answer 46"


def test_making_the_pair_twice_gives_the_same_bits(maker, tmp_path, capsys):
    threads = torch.get_num_threads()
    for run, check in (("a", "0"), ("b", "4")):
        size = ["--steps", "3", "--batch", "4", "--threads", "1"]
        maker.main(["--out", str(tmp_path / run), *size, "--check", check])
    assert "accuracy greedy 0.000" in capsys.readouterr().out
    assert torch.get_num_threads() == threads
    for name in ("senior", "junior"):
        files = sorted(path.name for path in (tmp_path / "a" / name).iterdir())
        assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(files)
        assert files == sorted(path.name for path in getattr(tiny, name)().iterdir())
        for file in files:
            assert (tmp_path / "a" / name / file).read_bytes() == (tmp_path / "b" / name / file).read_bytes()
