"""MInTRL in miniature: one step that the policy almost never takes, and a verifier that takes it now and then.

    python examples/mintrl_arithmetic.py [--seeds 0 1 2] [--steps N] [--only TEXT ...] [--jobs N] [--out DIR]

The policy is trained from nothing on worked subtractions of four digits. Where a column needs a borrow it writes the
difference of the digits, as school children do (Brown and Burton 1978); all else it does right. It has read the step
"borrow," and goes on from it rightly, but in its loss that token hardly counted: it writes it once in thousands of
answers. Three in four training questions need one borrow. The verifier works the question out, finds the first step of
a draft that differs and writes the right one, two tokens; the policy does the rest. Interventions stop after INTERVENE
of the run. Tuned on seed 0, one run each: learning rates (MInTRL-Const 2e-4 to 6e-4, supervised 3e-4 to 2e-3), beta
(0.02, 0.1: the same within noise), how rare the step is; GRPO and PMD-mean on three seeds at 1e-4 and 3e-4, the better.

Columns: external tokens are a share of the reviewed rollouts; the policy's include what was cut; accuracy is without a
verifier, on held-out questions that need a borrow (where interventions stop, and after the run) and on others ("no
borrow"); log-prob is that of "borrow" where it is right. Writes DIR/mintrl_arithmetic.json and .html.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import re
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

import fastcollab as fc
from fastcollab.report import sample_of, write_report
from fastcollab.schedules import Intervene
from fastcollab.verifiers import FunctionVerifier, Keep, Revise

PAD, EOS = "<pad>", "<eos>"
VOCABULARY = (PAD, EOS, *"0123456789-=,:", "borrow", "\\boxed", "{", "}")
HARD = 0.7  # of the texts that the policy is made from: a column needs a borrow
READ = 0.5  # of those have the step "borrow"; the others do without
WEIGHT = 0.008  # of that token in the loss: it is read, what follows is learnt, itself it hardly is
EASY = 0.25  # of the questions of all arms' training need no borrow
PEAK_LR, FINAL_LR, WARMUP = 3e-3, 3e-4, 50
PROMPTS, GENERATIONS, LENGTH = 8, 16, 48  # of each update of every arm: the policy writes as much in all of them
LEARNING_RATE, BETA = 3e-4, 0.02
STEPS = 80
INTERVENE = 0.6  # of the run
REVIEWS = dict(chunk=8, longest_chunk=LENGTH, max_reviews=6, max_interventions=2, reserve=2)
STEP = 2  # tokens of the correction "borrow,"
SHOWN = ("external_share_micro", "resume_success", "rescue_hard", "interventions")  # on the page, of FIGURES
FIGURES = (*SHOWN, "control/reward", "reviewed/reward", "lift", "sign_flip_rate", "logprob/external", "kappa")
WHOLE = 64  # tokens of a correction that may be the whole answer
ARMS = {  # name -> (method, its settings beside the shared ones)
    "GRPO": ("grpo", dict(learning_rate=1e-4)),
    "PMD-mean": ("mintrl", dict(num_controls=GENERATIONS)),
    "MInTRL-Proxy": ("mintrl", dict(anchor="proxy", max_correction_tokens=STEP)),
    "MInTRL-Const": ("mintrl", dict(anchor="const", max_correction_tokens=STEP)),
    "SFT, as many external tokens": ("sft", dict(budget=("external",), rate=3e-4)),
    "SFT, as many tokens": ("sft", dict(budget=("external", "policy"), rate=1e-3)),
}
SWEEP = {  # of MInTRL-Const, whose correction is the right solution from the wrong step on, cut at so many tokens
    "one token": dict(max_correction_tokens=1),
    "the step and a line": dict(max_correction_tokens=9),
    "the rest of the answer": dict(max_correction_tokens=WHOLE),
    "the whole answer": dict(max_correction_tokens=WHOLE, whole=True),
}


# -- the task


def question(rng: random.Random, hard: bool) -> tuple[str, str]:
    """A subtraction of two numbers of four digits, one column of which needs a borrow (none, if not ``hard``)."""
    while True:
        a, b = (rng.randrange(1000, 10000) for _ in range(2))
        borrows, borrow = 0, 0
        for p in range(4):
            borrow = int(a // 10**p % 10 - borrow < b // 10**p % 10)
            borrows += borrow
        if borrows == hard and a - b >= 1000:
            return f"{a}-{b}=", str(a - b)


def questions(n: int, seed: int, hard: bool = True) -> list[dict[str, str]]:
    """Rows with ``prompt`` and ``answer``; each question once."""
    rng, rows = random.Random(seed), {}
    while len(rows) < n:
        asked, answer = question(rng, hard)
        rows[asked] = answer
    return [{"uid": asked, "prompt": asked, "answer": answer} for asked, answer in rows.items()]


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
            steps += [f"{x}-{y}=borrow", f"{x + 10}-{y}={x + 10 - y}"]
            borrow = 1
        else:
            steps.append(f"{x}-{y}={y - x}")
        digits = steps[-1].rpartition("=")[2] + digits
    return f"{','.join(steps)}:\\boxed{{{digits}}}"


def correct(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    return [float(text.endswith(f"\\boxed{{{right}}}")) for text, right in zip(completions, answer, strict=True)]


def make_verifier(whole: bool = False) -> FunctionVerifier:
    """Finds the first step of a draft that the right solution has not, and writes on from there what it has; with
    ``whole`` it replaces every draft."""

    def review(prompt: str, accepted: tuple[str, ...], new: tuple[str, ...]) -> Keep | Revise:
        right = worked(prompt)
        if whole and not accepted:
            return Revise(0)
        for i in range(len(new)):
            if not right.startswith("".join(accepted + new[: i + 1])):
                return Revise(i)
        return Keep()

    def fix(prompt: str, accepted: tuple[str, ...], dropped: tuple[str, ...]) -> str | None:
        right, stands = worked(prompt), "".join(accepted)
        return right.removeprefix(stands) if right.startswith(stands) else None

    return FunctionVerifier(review, fix)


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


def loss_of(model: PreTrainedModel, rows: list[tuple[list[int], list[int], list[float]]]) -> torch.Tensor:
    """Mean cross-entropy of the responses; rows are (prompt ids, response ids, weight of each of these)."""
    width = max(len(p) + len(r) for p, r, _ in rows)
    ids, weights = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width)
    for i, (p, r, weight) in enumerate(rows):
        ids[i, : len(p) + len(r)] = torch.tensor(p + r)
        weights[i, len(p) : len(p) + len(r)] = torch.tensor(weight)
    logits = model(ids[:, :-1], use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return (loss * weights[:, 1:].flatten()).sum() / weights.sum()


def encoded(tokenizer: Any, asked: str, text: str, borrow: float = 1.0) -> tuple[list[int], list[int], list[float]]:
    """A row of ``loss_of``; ``borrow`` is the weight of that token."""
    p, r = tokenizer(asked)["input_ids"], [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    return p, r, [borrow if VOCABULARY[i] == "borrow" else 1.0 for i in r]


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
            rows.append(encoded(tokenizer, asked, worked(asked, rng.random() < READ), WEIGHT))
        loss = loss_of(model, rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 100 == 0:
            print(f"policy {seed} step {step + 1}/{steps}  loss {loss.item():.3f}", flush=True)
    return model.eval()


def pretrained(folder: Path, steps: int, seed: int) -> Path:
    """Folder of the policy of a seed, made once."""
    torch.set_num_threads(1)
    path = folder / f"policy-{seed}"
    if not (path / "config.json").exists():
        started, tokenizer = time.perf_counter(), make_tokenizer()
        pretrain(tokenizer, seed, steps).save_pretrained(path)
        tokenizer.save_pretrained(path)
        print(f"policy {seed}: {time.perf_counter() - started:.0f} s", flush=True)
    return path


# -- the study


def train_questions() -> list[dict[str, str]]:
    easy = round(4000 * EASY)
    return questions(4000 - easy, seed=1) + questions(256 + easy, seed=2, hard=False)[256:]


def held_out(hard: bool = True) -> list[dict[str, str]]:
    """256 questions, none of them in the training: hard ones, or ones without a borrow."""
    return questions(256, seed=3) if hard else questions(256, seed=2, hard=False)


def measure(model: Any) -> dict[str, float]:
    """Accuracy alone at temperature 1 on both kinds of held-out questions; log-prob of "borrow" where it is right."""
    tokenizer, found = make_tokenizer(), {}
    engine = fc.Engine({"policy": model}, tokenizer, kv_memory="64MiB")
    sampling = fc.SamplingParams(max_new_tokens=LENGTH)
    for name, rows in (("hard", held_out()), ("easy", held_out(hard=False))):
        rollouts = engine.generate([r["prompt"] for r in rows], n=4, sampling=sampling, seed=7)
        found[name] = mean(correct([r.text for r in rollouts], [rows[r.group]["answer"] for r in rollouts]))
    borrow, module, said = VOCABULARY.index("borrow"), engine.models["policy"].module, []
    with torch.no_grad():
        for row in held_out():
            p, r, _ = encoded(tokenizer, row["prompt"], worked(row["prompt"]))
            logits = module(torch.tensor([p + r]), use_cache=False).logits[0, len(p) + r.index(borrow) - 1]
            said.append(float(torch.log_softmax(logits, -1)[borrow]))
    return found | {"borrow_logprob": mean(said), "borrow_prob": mean(map(math.exp, said))}


def run(name: str, seed: int, path: Path, folder: Path, steps: int) -> dict[str, Any]:
    """One arm of reinforcement learning: held-out accuracy by step, tokens by who wrote them, the figures of MInTRL."""
    method, changes = ARMS[name] if name in ARMS else ("mintrl", dict(anchor="const") | SWEEP[name])
    changes, models = dict(changes), {"policy": path}
    settings = dict(output_dir=str(folder), seed=seed, max_steps=steps, prompts_per_step=PROMPTS,
                    num_generations=GENERATIONS, max_completion_length=LENGTH, learning_rate=LEARNING_RATE,
                    warmup_steps=5, eval_steps=max(1, steps // 15), kv_memory="64MiB", disable_tqdm=True)  # fmt: skip
    if method == "mintrl":
        models["verifier"] = make_verifier(changes.pop("whole", False))
        limit = changes.get("max_correction_tokens", STEP)
        settings |= dict(num_controls=GENERATIONS // 2, beta=BETA, intervention_updates=round(INTERVENE * steps),
                         steps=re.compile("[=,]"), external_share=None, **REVIEWS)  # fmt: skip
        if limit == WHOLE:  # then the answer is given away, and is meant to be
            settings["leaks"] = lambda text, row: False
    args = (fc.GRPOConfig if method == "grpo" else fc.MInTRLConfig)(**settings | changes)
    started = time.perf_counter()
    with warnings.catch_warnings(record=True) as alarms:
        warnings.simplefilter("always")
        result = fc.train(method, models, train_questions(), correct, args, eval_dataset=held_out())
    rows = [row for row in result.log_history if "num_tokens" in row]
    return {
        "arm": name,
        "seed": seed,
        "seconds": time.perf_counter() - started,
        "curve": [(row["step"], row["eval/solo/reward"]) for row in result.log_history if "eval/solo/reward" in row],
        "tokens": _tokens(rows),
        "reward": [row["reward"] and round(row["reward"], 4) for row in rows],
        "figures": {k: [(x := row.get(f"mintrl/{k}")) and round(x, 4) for row in rows] for k in FIGURES},
        "alarms": sorted({str(w.message) for w in alarms}),
        "after": measure(result.models["policy"]),
    }


def _tokens(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Tokens of a run: those trained on, by writer, and those that the policy wrote and the verifier cut."""
    total, external, dropped = sum(row["num_tokens"] for row in rows), 0.0, 0.0
    for row in rows:
        share = row.get("mintrl/external_share_batch") or 0.0
        external += share * row["num_tokens"]
        lost = row.get("mintrl/dropped_share") or 0.0
        if share:
            dropped += lost / (1 - lost) * share * row["num_tokens"] / row["mintrl/external_share_micro"]
    return {"policy": round(total - external), "external": round(external), "dropped": round(dropped)}


def tune(name: str, seed: int, path: Path, tokens: int, steps: int) -> dict[str, Any]:
    """Supervised on the verifier's whole solutions of the training questions, in passes over them, until ``tokens`` of
    response have been read; at most ``steps`` updates, of 8 solutions at least."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), make_tokenizer()
    rows = [encoded(tokenizer, q["prompt"], worked(q["prompt"])) for q in train_questions()]
    random.Random(seed).shuffle(rows)
    count = round(tokens / mean(len(r) for _, r, _ in rows))
    size = max(8, math.ceil(count / steps))
    batches = [[rows[j % len(rows)] for j in range(i, min(i + size, count))] for i in range(0, count, size)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=ARMS[name][1]["rate"], betas=(0.9, 0.95), weight_decay=0.0)
    curve, started, asked = [], time.perf_counter(), held_out()
    for step, batch in enumerate(batches, 1):
        loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % max(1, steps // 15) == 0 or step == len(batches):
            engine = fc.Engine({"policy": model}, tokenizer, kv_memory="64MiB")
            said = engine.generate(
                [q["prompt"] for q in asked], sampling=fc.SamplingParams(max_new_tokens=LENGTH), seed=seed
            )
            curve.append((step, mean(correct([r.text for r in said], [q["answer"] for q in asked]))))
    external = sum(len(r) for batch in batches for _, r, _ in batch)
    return {
        "arm": name,
        "seed": seed,
        "seconds": time.perf_counter() - started,
        "curve": curve,
        "tokens": {"policy": 0, "external": external, "dropped": 0},
        "after": measure(model),
    }


def task(name: str, seed: int, path: Path, work: Path, steps: int, tokens: int | None) -> dict[str, Any]:
    torch.set_num_threads(1)
    folder = work / f"{re.sub('[^A-Za-z]+', '-', name)}-{seed}"
    return run(name, seed, path, folder, steps) if tokens is None else tune(name, seed, path, tokens, steps)


def reviewed(path: Path, count: int = 3) -> list[Any]:
    """A few rollouts of the policy at the start under the verifier, as the report shows them."""
    rows, sampling = held_out()[:count], fc.SamplingParams(max_new_tokens=LENGTH)
    engine = fc.Engine({"policy": path}, kv_memory="64MiB")
    plan = Intervene(verifier=make_verifier(), max_tokens=STEP, steps=re.compile("[=,]"), **REVIEWS)
    found = engine.generate([r["prompt"] for r in rows], schedule=plan, sampling=sampling)
    right = correct([r.text for r in found], [r["answer"] for r in rows])
    return [sample_of(r, engine.tokenizer, rows[r.group]["prompt"], x) for r, x in zip(found, right, strict=True)]


def report(found: dict[str, Any], path: Path) -> None:
    """A page: the table of arms and levels, and held-out accuracy by step, means over the seeds."""
    curves, table = {}, []
    for name in [*ARMS, *SWEEP]:
        if not (runs := [r for r in found["runs"] if r["arm"] == name]):
            continue
        start = [found["start"][str(r["seed"])] for r in runs]
        if name in ARMS:
            points = [[(0, mean(s["hard"] for s in start))], *zip(*(r["curve"] for r in runs), strict=True)]
            curve = {p[0][0]: {"accuracy": mean(a for _, a in p)} for p in points}
            for key in SHOWN if "figures" in runs[0] else ():
                for step, values in enumerate(zip(*(r["figures"][key] for r in runs), strict=True), 1):
                    if None not in values:
                        curve.setdefault(step, {})[f"mintrl/{key}"] = mean(values)
            curves[name] = [{"step": step} | row for step, row in sorted(curve.items())]
        table.append([name if name in ARMS else f"Const: {name}", *_cells(runs, start, found["steps"])])
    header = "arm|external share|external tokens|policy's tokens|at the stop|after, by seed|no borrow|log-prob"
    settings = {"steps": found["steps"], "seconds": found["seconds"], "task": __doc__.split("\n\n", 2)[2]}
    write_report(
        path, curves, {"header": header.split("|"), "rows": table}, {"at the start": found["reviewed"]}, settings
    )


def _cells(runs: list[dict[str, Any]], start: list[dict[str, float]], steps: int) -> list[str]:
    shares = [x for r in runs for x in r.get("figures", {}).get("external_share_micro", []) if x is not None]
    stop = INTERVENE * steps
    at_stop = [max((s, a) for s, a in r["curve"] if s <= stop)[1] for r in runs if shares]
    return [
        f"{mean(shares):.3f}" if shares else "–",
        f"{mean(r['tokens']['external'] for r in runs):,.0f}",
        f"{mean(r['tokens']['policy'] + r['tokens']['dropped'] for r in runs):,.0f}",
        f"{mean(at_stop):.2f}" if at_stop else "–",
        ", ".join(f"{r['after']['hard']:.2f}" for r in runs),
        " → ".join(f"{mean(x):.2f}" for x in ([s["easy"] for s in start], [r["after"]["easy"] for r in runs])),
        " → ".join(f"{mean(s['borrow_logprob'] for s in side):.1f}" for side in (start, [r["after"] for r in runs])),
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="a policy of its own for each")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--pretrain", type=int, default=500, help="supervised steps of each policy")
    parser.add_argument("--only", nargs="+", default=[""], help="arms with one of these texts")
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--work", type=Path, default=Path("runs/mintrl_arithmetic"), help="policies and run folders")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    arms = [name for name in [*ARMS, *SWEEP] if any(text in name for text in options.only)]
    started, results = time.perf_counter(), []
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        made = pool.map(partial(pretrained, options.work, options.pretrain), options.seeds)
        paths = dict(zip(options.seeds, made, strict=True))
        start = dict(zip(map(str, options.seeds), pool.map(measure, paths.values()), strict=True))
        drafts = pool.submit(reviewed, paths[options.seeds[0]]).result()
        for seed, figures in start.items():
            print(f"policy {seed} at the start: {figures}", flush=True)
        for is_tuned in (False, True):
            # the supervised arms read as many tokens as MInTRL-Const's runs have, in the mean
            const, waiting = [r["tokens"] for r in results if r["arm"] == "MInTRL-Const"], []
            if is_tuned and not const:
                break
            for seed in options.seeds:
                for name in arms:
                    kinds = ARMS[name][1].get("budget", ()) if name in ARMS else ()
                    if bool(kinds) == is_tuned:
                        budget = round(mean(sum(t[kind] for kind in kinds) for t in const)) if kinds else None
                        waiting.append(pool.submit(task, name, seed, paths[seed], options.work, options.steps, budget))
            for future in as_completed(waiting):
                results.append(r := future.result())
                told = f"{r['after']['hard']:.3f}, no borrow {r['after']['easy']:.3f}, {r['tokens']}"
                print(f"seed {r['seed']}  {r['arm']}: {told}  ({r['seconds']:.0f} s) {r.get('alarms', '')}", flush=True)
                results.sort(key=lambda r: (r["seed"], [*ARMS, *SWEEP].index(r["arm"])))
                found = {"start": start, "steps": options.steps, "seconds": round(time.perf_counter() - started)}
                found |= {"reviewed": drafts, "runs": results}
                (options.out / "mintrl_arithmetic.json").write_text(json.dumps(found))
                report(found, options.out / "mintrl_arithmetic.html")


if __name__ == "__main__":
    main()
