"""Co-RL in miniature: models with different misconceptions teach each other sums, and no label is anywhere.

    python examples/corl_arithmetic.py [--seeds 0 1 2] [--steps N] [--only TEXT ...] [--out DIR]

Each model is trained from nothing on worked additions and subtractions, and has one rule wrong, as school children have
(Brown and Burton 1978): "a" forgets the carry, "b" takes the smaller digit from the larger instead of borrowing, "c"
carries where there is nothing to carry, "a2" is as "a". A misconception shows in WRONG of the texts that it touches: on
such questions a model's majority is wrong, always in the same way, and right answers are there to be found. Then they
train on questions alone, by different kinds of label. Writes DIR/corl_arithmetic.json and DIR/corl_arithmetic.html.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
import warnings
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

import fastcollab as fc
from fastcollab.report import write_report

PAD, EOS = "<pad>", "<eos>"
VOCABULARY = (PAD, EOS, *"0123456789+-=,: ", "\\boxed", "{", "}")
WRONG = 0.65  # of the texts that a misconception touches
SHARE = {("+", True): 0.3, ("+", False): 0.3, ("-", True): 0.3, ("-", False): 0.1}  # of sign, carry or borrow
SLIP = 0.03  # a digit is off by one: noise that is nobody's habit
PEAK_LR, FINAL_LR, WARMUP = 3e-3, 3e-4, 50
MODELS = {"a": "forgets the carry", "b": "never borrows", "c": "always carries", "a2": "forgets the carry"}
CONDITIONS = {  # name -> (models, labels)
    "pair": (("a", "b"), "pair"),
    "ring": (("a", "b", "c"), "ring"),
    "pair of one kind": (("a", "a2"), "pair"),
    "own majority": (("a", "b"), "self"),
    "entropy": (("a", "b"), "entropy"),
    "random labels": (("a", "b"), "random"),
    "shuffled questions": (("a", "b"), "shuffled"),
    "right answers": (("a", "b"), "gold"),
}


# -- the task


def question(rng: random.Random) -> tuple[int, str, int]:
    """Two numbers of two digits with a sign, what is taken away the smaller; SHARE of each kind."""
    sign, crosses = rng.choices(list(SHARE), SHARE.values())[0]
    while True:
        a, b = sorted((rng.randrange(10, 100), rng.randrange(10, 100)), reverse=True)
        ones = a % 10 + b % 10 if sign == "+" else a % 10 - b % 10
        if (not 0 <= ones <= 9) == crosses:
            return a, sign, b


def touches(belief: str, a: int, sign: str, b: int) -> bool:
    """Whether a misconception makes a difference to a question."""
    ones = (a % 10 + b % 10) if sign == "+" else (a % 10 - b % 10)
    kind = {"forgets the carry": ones > 9, "never borrows": ones < 0, "always carries": 0 <= ones <= 9}
    return kind[belief] and (sign == "-") == (belief == "never borrows")


def worked(a: int, sign: str, b: int, belief: str | None, rng: random.Random | None = None) -> str:
    """The response: ones, tens, the answer in a box; ``belief`` is the misconception that it follows, if any."""
    wrong = belief is not None and touches(belief, a, sign, b)
    (a1, a0), (b1, b0) = divmod(a, 10), divmod(b, 10)

    def slip(digit: int) -> int:
        return (digit + rng.choice((1, 9))) % 10 if rng is not None and rng.random() < SLIP else digit

    if sign == "+":
        carry = int(a0 + b0 > 9) if not wrong else int(belief == "always carries")
        tens, ones = a1 + b1 + carry, slip((a0 + b0) % 10)
        steps = f"{a0}+{b0}={a0 + b0},{a1}+{b1}{'+1' * carry}={tens}"
    elif wrong:
        tens, ones = a1 - b1, slip(b0 - a0)
        steps = f"{b0}-{a0}={b0 - a0},{a1}-{b1}={tens}"
    else:
        borrow = int(a0 < b0)
        tens, ones = a1 - borrow - b1, slip(a0 + 10 * borrow - b0)
        steps = f"{a0 + 10 * borrow}-{b0}={a0 + 10 * borrow - b0},{a1}{'-1' * borrow}-{b1}={tens}"
    return f"{steps}:\\boxed{{{10 * tens + ones}}}"


def prompt(a: int, sign: str, b: int) -> str:
    return f"{a}{sign}{b}="


def questions(n: int, seed: int) -> list[dict[str, Any]]:
    """Rows with ``prompt`` and, for monitors and the control, ``answer``; each question once."""
    rng, rows = random.Random(seed), {}
    while len(rows) < n:
        a, sign, b = question(rng)
        rows[prompt(a, sign, b)] = str(a + b if sign == "+" else a - b)
    return [{"uid": text, "prompt": text, "answer": answer} for text, answer in rows.items()]


# -- the models


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token per character, and one for ``\\boxed``."""
    core = Tokenizer(WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=PAD))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"\\boxed|."), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=EOS, pad_token=PAD, padding_side="left",
                                   clean_up_tokenization_spaces=False)  # fmt: skip


def make_model(name: str) -> PreTrainedModel:
    """Three architectures with random weights; "a2" is "a" with another seed."""
    torch.manual_seed(sorted(MODELS).index(name))
    ids = dict(bos_token_id=None, eos_token_id=VOCABULARY.index(EOS), pad_token_id=VOCABULARY.index(PAD))
    size = dict(vocab_size=len(VOCABULARY), tie_word_embeddings=True, **ids)
    grouped = dict(hidden_size=80, intermediate_size=208, num_hidden_layers=3, num_attention_heads=4,
                   num_key_value_heads=2, head_dim=20, max_position_embeddings=64)  # fmt: skip
    config = {"a": LlamaConfig, "a2": LlamaConfig, "b": Qwen3Config}.get(name)
    if config is not None:
        return AutoModelForCausalLM.from_config(config(**size, **grouped), dtype=torch.float32)
    gpt2 = GPT2Config(**size, n_embd=80, n_layer=3, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    return AutoModelForCausalLM.from_config(gpt2, dtype=torch.float32)


def pretrain(name: str, tokenizer: PreTrainedTokenizerFast, steps: int, batch: int = 64) -> PreTrainedModel:
    """Supervised on fresh texts, WRONG of those that the model's misconception touches after it."""
    model, rng = make_model(name), random.Random(f"pretrain {name}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(steps):
        warm, turn = min(1.0, (step + 1) / WARMUP), math.cos(math.pi * step / steps)
        optimizer.param_groups[0]["lr"] = warm * (FINAL_LR + (PEAK_LR - FINAL_LR) * 0.5 * (1 + turn))
        rows = []
        for _ in range(batch):
            asked = question(rng)
            belief = MODELS[name] if rng.random() < WRONG else None
            rows.append((tokenizer(prompt(*asked))["input_ids"], tokenizer(worked(*asked, belief, rng))["input_ids"]))
        width = max(len(p) + len(r) for p, r in rows) + 1
        ids, labels = torch.zeros(batch, width, dtype=torch.int64), torch.full((batch, width), -100)
        for i, (p, r) in enumerate(rows):
            text = torch.tensor([*p, *r, tokenizer.eos_token_id])
            ids[i, : len(text)] = text
            labels[i, len(p) : len(text)] = text[len(p) :]
        logits = model(ids[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 200 == 0:
            print(f"{name} step {step + 1}/{steps}  loss {loss.item():.3f}", flush=True)
    return model.eval()


def pretrained(folder: Path, steps: int) -> dict[str, Path]:
    """Folders of the models, made once."""
    tokenizer, paths = make_tokenizer(), {name: folder / name for name in MODELS}
    for name, path in paths.items():
        if not (path / "config.json").exists():
            started = time.perf_counter()
            pretrain(name, tokenizer, steps).save_pretrained(path)
            tokenizer.save_pretrained(path)
            print(f"{name}: {time.perf_counter() - started:.0f} s")
    return paths


# -- the study


def run(condition: str, seed: int, paths: dict[str, Path], folder: Path, steps: int) -> dict[str, Any]:
    """One run: held-out accuracy by step and model, and the label-free diagnostics of its first and last steps."""
    names, labels = CONDITIONS[condition]
    args = fc.CoRLConfig(output_dir=str(folder), labels=labels, seed=seed, max_steps=steps, prompts_per_step=24,
                         num_generations=8, max_completion_length=32, learning_rate=1e-4, warmup_steps=5,
                         lr_scheduler_type="cosine", eval_steps=max(1, steps // 6), kv_memory="64MiB",
                         disable_tqdm=True)  # fmt: skip
    held_out = questions(2200, seed=1)[2000:2064]
    started = time.perf_counter()
    with warnings.catch_warnings(record=True) as alarms:
        warnings.simplefilter("always")
        result = fc.train("corl", {name: paths[name] for name in names}, questions(2000, seed=1), args=args,
                          eval_dataset=held_out)  # fmt: skip
    rows = [row for row in result.log_history if "reward" in row]
    evaluations = [row for row in result.log_history if "eval/selection_score" in row]
    shown = ("constancy", "answer_entropy", "majority_ratio", "label_rate", "label_acc", "eff_group")
    return {
        "condition": condition,
        "seed": seed,
        "seconds": time.perf_counter() - started,
        "steps": [row["step"] for row in evaluations],
        "accuracy": {name: [row[f"eval/{name}/accuracy"] for row in evaluations] for name in names},
        "majority": {name: [row[f"eval/{name}/majority"] for row in evaluations] for name in names},
        "selection_score": [row["eval/selection_score"] for row in evaluations],
        "diagnostics": {
            key: {name: [_mean(part, f"{name}/{key}") for part in (rows[:5], rows[-5:])] for name in names}
            for key in shown
        },
        "alarms": sorted({str(w.message) for w in alarms if "is not updated" in str(w.message)}),
    }


def _mean(rows: list[dict[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return round(mean(values), 4) if values else None


def start(paths: dict[str, Path], folder: Path) -> dict[str, float]:
    """Held-out accuracy before training: of a run of learning rate 0."""
    found = {}
    for names in (("a", "b"), ("a2", "c")):
        args = fc.CoRLConfig(output_dir=str(folder), max_steps=1, prompts_per_step=1, num_generations=8,
                             max_completion_length=32, learning_rate=0.0, kv_memory="64MiB",
                             disable_tqdm=True)  # fmt: skip
        held_out = questions(2200, seed=1)[2000:2064]
        row = fc.train("corl", {n: paths[n] for n in names}, questions(2000, seed=1), args=args,
                       eval_dataset=held_out).log_history[-1]  # fmt: skip
        found |= {name: row[f"eval/{name}/accuracy"] for name in names}
    return found


def report(found: dict[str, Any], path: Path) -> None:
    """A page: the table, and held-out accuracy by step, means over seeds and a condition's models."""
    curves, table = {}, []
    for condition, (names, _) in CONDITIONS.items():
        runs = [r for r in found["runs"] if r["condition"] == condition]
        if not runs:
            continue
        curve = [mean(r["accuracy"][n][i] for r in runs for n in names) for i in range(len(runs[0]["steps"]))]
        before = mean(found["start"][n] for n in names)
        points = zip([0, *runs[0]["steps"]], [before, *curve], strict=True)
        curves[condition] = [{"step": step, "accuracy": accuracy} for step, accuracy in points]
        ends = ", ".join(f"{mean(r['accuracy'][n][-1] for n in names):.2f}" for r in runs)
        cells = [condition, " + ".join(names), f"{before:.2f}", ends]
        cells.append(f"{mean(r['majority'][n][-1] for r in runs for n in names):.2f}")
        for key in ("label_acc", "answer_entropy"):
            pairs = [r["diagnostics"][key][n] for r in runs for n in names if None not in r["diagnostics"][key][n]]
            cells.append(" → ".join(f"{mean(side):.2f}" for side in zip(*pairs, strict=True)) if pairs else "–")
        table.append(cells)
    header = [
        "labels",
        "models",
        "accuracy before",
        "after, by seed",
        "majority after",
        "right labels",
        "entropy, nats",
    ]
    settings = {"steps": found["steps"], "threads": found["threads"], "task": __doc__.split("\n\n", 2)[2]}
    write_report(path, curves, {"header": header, "rows": table}, settings=settings)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pretrain", type=int, default=700, help="supervised steps of each model")
    parser.add_argument("--only", nargs="+", default=[""], help="conditions with one of these texts")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--work", type=Path, default=Path("runs/corl_arithmetic"), help="models and run folders")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    paths = pretrained(options.work / "models", options.pretrain)
    before = start(paths, options.work / "start")
    print("at the start: " + ", ".join(f"{name} {x:.2f}" for name, x in before.items()), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    results = []
    for seed in options.seeds:
        for condition in CONDITIONS:
            if not any(text in condition for text in options.only):
                continue
            folder = options.work / f"{condition.replace(' ', '-')}-{seed}"
            results.append(run(condition, seed, paths, folder, options.steps))
            r = results[-1]
            told = ", ".join(f"{n} {before[n]:.2f} -> {x[-1]:.2f}" for n, x in r["accuracy"].items())
            print(f"seed {seed}  {condition}: {told}  ({r['seconds']:.0f} s) {r['alarms']}", flush=True)
            found = {"start": before, "runs": results, "steps": options.steps, "threads": options.threads}
            (options.out / "corl_arithmetic.json").write_text(json.dumps(found, indent=1))
            report(found, options.out / "corl_arithmetic.html")


if __name__ == "__main__":
    main()
