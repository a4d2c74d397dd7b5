"""MInTRL in miniature: a step that the policy almost never takes, and a verifier that takes it a few times."""

from __future__ import annotations

import argparse
import math
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

import fastcollab as fc

PAD, EOS = "<pad>", "<eos>"
VOCABULARY = (PAD, EOS, *"0123456789-=,:", "borrow", "\\boxed", "{", "}")
HARD = 0.7  # of the texts that the policy is made from: a column needs a borrow
READ = 0.5  # of those have the step "borrow", which is read and not learnt: the rest of the text is
WRITTEN = 0.0005  # of those have it and it is learnt
DIGITS = 4
PEAK_LR, FINAL_LR, WARMUP = 3e-3, 3e-4, 50


# -- the task


def question(rng: random.Random, hard: bool) -> tuple[str, str]:
    """A subtraction of two numbers of DIGITS digits, one column of which needs a borrow (none, if not ``hard``)."""
    while True:
        a, b = (rng.randrange(10 ** (DIGITS - 1), 10**DIGITS) for _ in range(2))
        lacks, borrow = 0, 0
        for p in range(DIGITS):
            short = a // 10**p % 10 - borrow < b // 10**p % 10
            # a column that lacks only because of the borrow before it would be a second rule
            lacks, borrow = lacks + short, int(short)
        if lacks == hard and a - b >= 10 ** (DIGITS - 1):
            return f"{a}-{b}=", str(a - b)


def worked(prompt: str, borrows: bool = True) -> str:
    """The response: column by column from the ones, the answer in a box; without ``borrows`` the smaller digit is
    taken from the larger where a column lacks (Brown and Burton 1978)."""
    a, b = prompt.rstrip("=").split("-")
    steps, digits, borrow = [], "", 0
    for x, y in zip(map(int, a[::-1]), map(int, b[::-1]), strict=True):
        if x - borrow >= y:
            steps.append(f"{x}{'-1' * borrow}-{y}={x - borrow - y}")
            borrow = 0
        elif borrows:
            steps += ["borrow", f"{x + 10}-{y}={x + 10 - y}"]
            borrow = 1
        else:
            steps.append(f"{y}-{x}={y - x}")
        digits = steps[-1].rpartition("=")[2] + digits
    return f"{','.join(steps)}:\\boxed{{{digits}}}"


# -- the policy


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token per character, and one each for ``borrow`` and ``\\boxed``."""
    core = Tokenizer(WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=PAD))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"borrow|\\boxed|."), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=EOS, pad_token=PAD, padding_side="left",
                                   clean_up_tokenization_spaces=False)  # fmt: skip


def make_model(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    ids = dict(bos_token_id=None, eos_token_id=VOCABULARY.index(EOS), pad_token_id=VOCABULARY.index(PAD))
    config = Qwen3Config(vocab_size=len(VOCABULARY), tie_word_embeddings=True, hidden_size=80, intermediate_size=208,
                         num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=20,
                         max_position_embeddings=96, **ids)  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def loss_of(model: PreTrainedModel, rows: list[tuple[list[int], list[int], list[bool]]]) -> torch.Tensor:
    """Mean cross-entropy of the responses; rows are (prompt ids, response ids, which of these are learnt)."""
    width = max(len(p) + len(r) for p, r, _ in rows)
    ids, labels = torch.zeros(len(rows), width, dtype=torch.int64), torch.full((len(rows), width), -100)
    for i, (p, r, learnt) in enumerate(rows):
        ids[i, : len(p) + len(r)] = torch.tensor(p + r)
        labels[i, len(p) : len(p) + len(r)] = torch.tensor([t if k else -100 for t, k in zip(r, learnt, strict=True)])
    logits = model(ids[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def encoded(tokenizer: Any, asked: str, text: str, skip: str | None = None) -> tuple[list[int], list[int], list[bool]]:
    p, r = tokenizer(asked)["input_ids"], [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    return p, r, [VOCABULARY[i] != skip for i in r]


def pretrain(tokenizer: Any, seed: int, steps: int, batch: int = 64) -> PreTrainedModel:
    """Supervised on fresh texts, with the habit of never borrowing."""
    model, rng = make_model(seed), random.Random(f"pretrain {seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(steps):
        warm, turn = min(1.0, (step + 1) / WARMUP), math.cos(math.pi * step / steps)
        optimizer.param_groups[0]["lr"] = warm * (FINAL_LR + (PEAK_LR - FINAL_LR) * 0.5 * (1 + turn))
        rows = []
        for _ in range(batch):
            asked, _ = question(rng, rng.random() < HARD)
            u = rng.random()
            skip = "borrow" if u < READ else None
            rows.append(encoded(tokenizer, asked, worked(asked, u < READ + WRITTEN), skip))
        loss = loss_of(model, rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 100 == 0:
            print(f"policy {seed} step {step + 1}/{steps}  loss {loss.item():.3f}", flush=True)
    return model.eval()
