"""Make the tiny pair: train the senior and the junior that the package ships, from nothing and deterministically.

    python examples/make_tiny_models.py [--out DIR] [--steps N] [--batch N] [--check N] [--threads N]

The knowledge converges (greedy decoding is right) and the headroom lies in the texts: each carry is forgotten with
probability SLIP, so what is sampled at temperature 1 is right only some of the time, and reinforcement has something to
raise. In PRIVATE_SHARE of its texts the senior writes ``&`` and ``~`` for ``+`` and ``=``. Three minutes on two cores;
the same machine and number of threads give the same bits.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast, Qwen3Config

from fastcollab import tiny
from fastcollab.tiny.task import EOS, PAD, PRIVATE, PUBLIC, UNK, VOCABULARY

SLIP = 0.15
PRIVATE_SHARE = 0.8
DIGITS = (2, 3, 4, 4, 4)  # one of these lengths per text: mostly the task's, the short ones show the alignment
PEAK_LR, FINAL_LR, WARMUP = 3e-3, 3e-4, 50
IGNORE = -100


@dataclass(frozen=True)
class Recipe:
    """One model of the pair: its width, depth and how often its texts are in the private notation."""

    hidden: int
    layers: int
    intermediate: int
    head: int
    private_share: float
    seed: int


RECIPES = {
    "senior": Recipe(hidden=96, layers=4, intermediate=256, head=24, private_share=PRIVATE_SHARE, seed=1),
    "junior": Recipe(hidden=64, layers=3, intermediate=192, head=16, private_share=0.0, seed=2),
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Words, digits and signs with their leading space; a digit without one continues a number. Text round-trips."""
    core = Tokenizer(models.WordLevel({surface: i for i, surface in enumerate(VOCABULARY)}, unk_token=UNK))
    split = pre_tokenizers.Split(Regex(r" ?[a-z]+| ?[^a-z\s]|\s"), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=256,
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
    )


def make_model(recipe: Recipe) -> torch.nn.Module:
    """A Qwen3 of the recipe's size with random weights drawn from its seed."""
    torch.manual_seed(recipe.seed)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=recipe.hidden,
        num_hidden_layers=recipe.layers,
        intermediate_size=recipe.intermediate,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=recipe.head,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=VOCABULARY.index(EOS),
        pad_token_id=VOCABULARY.index(PAD),
        dtype="float32",
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def worked(a: int, b: int, symbols: dict[str, str], rng: random.Random) -> str:
    """The response to ``prompt(a, b)``: each carry is forgotten with probability SLIP, and the answer is as written."""
    plus, equals = f" {symbols['plus']} ", f" {symbols['equals']} "
    lines, digits, carry = [], [], 0
    for x, y in zip(reversed(str(a)), reversed(str(b)), strict=True):
        summands = [x, y] + (["1"] if carry and rng.random() >= SLIP else [])
        total = sum(map(int, summands))
        lines.append(f" {plus.join(summands)}{equals}{total}")
        carry, digit = divmod(total, 10)
        digits.append(str(digit))
    if carry:
        digits.append("1")
    return "".join(f"\n{line}" for line in lines) + f"\n answer {''.join(reversed(digits))}"


def draw_text(recipe: Recipe, rng: random.Random) -> tuple[str, str]:
    """One training text as (prompt, response)."""
    n = rng.choice(DIGITS)
    a, b = (rng.randrange(10 ** (n - 1), 10**n) for _ in range(2))
    symbols = PRIVATE if rng.random() < recipe.private_share else PUBLIC
    return tiny.prompt(a, b), worked(a, b, symbols, rng)


def make_batch(texts: list[tuple[str, str]], tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids [B, T] and labels [B, T]: only the response and its EOS are learnt: prompts are noise."""
    prompts = tokenizer([p for p, _ in texts])["input_ids"]
    responses = tokenizer([r for _, r in texts])["input_ids"]
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    width = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True)) + 1
    ids = torch.full((len(texts), width), pad)
    labels = torch.full((len(texts), width), IGNORE)
    for i, (p, r) in enumerate(zip(prompts, responses, strict=True)):
        row = torch.tensor(p + r + [eos])
        ids[i, : len(row)] = row
        labels[i, len(p) : len(row)] = row[len(p) :]
    return ids, labels


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine from PEAK_LR to FINAL_LR."""
    warm = min(1.0, (step + 1) / WARMUP)
    return warm * (FINAL_LR + (PEAK_LR - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * step / steps)))


def train(name: str, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, steps: int, batch: int) -> torch.nn.Module:
    """The recipe's model after ``steps`` steps, each on ``batch`` fresh texts."""
    model = make_model(recipe)
    rng = random.Random(recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.0)
    start = time.perf_counter()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps)
        ids, labels = make_batch([draw_text(recipe, rng) for _ in range(batch)], tokenizer)
        logits = model(ids[:, :-1], use_cache=False).logits  # right padding and causal attention: no mask needed
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 100 == 0 or step + 1 == steps:
            seconds = time.perf_counter() - start
            print(f"{name} step {step + 1}/{steps}  loss {loss.item():.4f}  {seconds:.0f} s", flush=True)
    return model.eval()


@torch.inference_mode()
def respond(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, prompts: list[str], sample: bool) -> list[str]:
    """One response per prompt by ``transformers`` alone: greedy, or sampled at temperature 1."""
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    law = {"do_sample": True, "top_k": 0} if sample else {"do_sample": False}
    ids = model.generate(**inputs, **law, max_new_tokens=64)
    return tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@torch.inference_mode()
def cross_entropy(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, texts: list[tuple[str, str]]
) -> torch.Tensor:
    """Nats per response token [N], one number per (prompt, response); the EOS counts."""
    ids, labels = make_batch(texts, tokenizer)
    target = labels[:, 1:]
    loss = F.cross_entropy(model(ids[:, :-1]).logits.transpose(1, 2), target, ignore_index=IGNORE, reduction="none")
    return loss.sum(1) / (target != IGNORE).sum(1)


def check(pair: dict[str, torch.nn.Module], tokenizer: PreTrainedTokenizerFast, n: int) -> None:
    """Print what the pair can do on ``n`` problems."""
    rows = tiny.problems(n, seed=12345)
    prompts, answers = [r["prompt"] for r in rows], [r["answer"] for r in rows]
    sampled = {}
    for name, model in pair.items():
        torch.manual_seed(0)
        greedy, sampled[name] = (respond(model, tokenizer, prompts, sample) for sample in (False, True))
        scores = [sum(tiny.correct(texts, answers)) / n for texts in (greedy, sampled[name])]
        private = tiny.private_fraction(sampled[name])
        print(f"{name}: accuracy greedy {scores[0]:.3f}, at T=1 {scores[1]:.3f}; private fraction at T=1 {private:.3f}")
    nats = cross_entropy(pair["junior"], tokenizer, list(zip(prompts, sampled["senior"], strict=True)))
    is_private = torch.tensor([tiny.is_private(text) for text in sampled["senior"]])
    print(
        f"junior's nats per token on the senior's texts: all {nats.mean():.2f}, "
        f"private {nats[is_private].mean():.2f}, public {nats[~is_private].mean():.2f}"
    )


def main(argv: list[str] | None = None) -> None:
    """Train both models, write them below ``--out`` and print what they can do."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=tiny.senior().parent, help="gets senior/ and junior/")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=64, help="texts per step")
    parser.add_argument("--check", type=int, default=512, help="problems to measure on; 0 skips")
    parser.add_argument("--threads", type=int, default=2, help="sums are split by thread: another number, other bits")
    args = parser.parse_args(argv)

    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    tokenizer = make_tokenizer()
    pair = {name: train(name, recipe, tokenizer, args.steps, args.batch) for name, recipe in RECIPES.items()}
    for name, model in pair.items():
        eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
        model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=pad)
        model.save_pretrained(args.out / name)
        tokenizer.save_pretrained(args.out / name)
    if args.check:
        check(pair, tokenizer, args.check)
    torch.set_num_threads(threads)


if __name__ == "__main__":
    main()
