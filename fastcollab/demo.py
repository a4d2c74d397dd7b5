"""The demo: Tandem RL and its GRPO control on the tiny pair, from one start, and what came of it in a table."""

from __future__ import annotations

import argparse
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from fastcollab import tiny
from fastcollab.config import GRPOConfig, SamplingParams, TandemConfig
from fastcollab.engine import Engine
from fastcollab.evaluation import evaluate, legibility
from fastcollab.report import Sample, sample_of, write_report
from fastcollab.run_folder import save_inputs
from fastcollab.schedules import Solo, Word
from fastcollab.trainer import TrainResult, train
from fastcollab.types import Rollout

COLUMNS = ("start", "Tandem", "GRPO")
SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=64)


def settings(method: str, out: Path, steps: int, seed: int) -> TandemConfig | GRPOConfig:
    config = {"tandem": TandemConfig, "grpo": GRPOConfig}[method]
    return config(
        output_dir=str(out),
        max_steps=steps,
        prompts_per_step=16,
        num_generations=8,
        max_completion_length=SAMPLING.max_new_tokens,
        learning_rate=1.5e-4,
        warmup_steps=5,
        kv_memory="256MiB",
        seed=seed,
        logging_steps=10,
    )


def measure(senior: Any, junior: Any, tokenizer: Any, problems: list[dict], seed: int) -> tuple[dict, list[Rollout]]:
    """Solo and team accuracy at T = 1, private fraction, legibility, and the engine's figures; and team rollouts."""
    engine = Engine({"senior": senior, "junior": junior}, tokenizer, kv_memory="256MiB")
    prompts, answers = [p["prompt"] for p in problems], [p["answer"] for p in problems]

    def score(rollouts: list[Rollout]) -> np.ndarray:
        return np.array(tiny.correct([r.text for r in rollouts], [answers[r.group] for r in rollouts]))

    solo, alone = evaluate(engine, prompts, score, Solo("senior"), SAMPLING, n=4, seed=seed)
    engine.reset_stats()
    team, together = evaluate(engine, prompts, score, Word(), SAMPLING, n=4, seed=seed)
    stats = engine.stats()
    row = {
        "solo accuracy": solo["reward"],
        "team accuracy": team["reward"],
        "private fraction": tiny.private_fraction([r.text for r in alone]),
        "legibility, nats": legibility(engine.models["junior"], alone, engine.vocab_size),
        "senior token share": sum(int(r.mask("senior").sum()) for r in together) / sum(len(r.ids) for r in together),
        "team tokens/s": stats["tokens_per_s"],
        "hand-offs": stats["handoffs"],
        "hand-off latency, ms": stats["handoff_latency_ms"],
    }
    return row, together


FORMAT = {
    "solo accuracy": "{:.3f}",
    "team accuracy": "{:.3f}",
    "private fraction": "{:.2f}",
    "legibility, nats": "{:.2f}",
    "senior token share": "{:.2f}",
    "team tokens/s": "{:,.0f}",
    "hand-offs": "{:,}",
    "hand-off latency, ms": "{:.2f}",
}


def samples(rollouts: list[Rollout], tokenizer: Any, problems: list[dict], count: int = 3) -> list[Sample]:
    """The first sample of a few prompts."""
    chosen = [r for r in rollouts if r.sample == 0][:count]
    rewards = tiny.correct([r.text for r in chosen], [problems[r.group]["answer"] for r in chosen])
    return [sample_of(r, tokenizer, problems[r.group]["prompt"], w) for r, w in zip(chosen, rewards, strict=True)]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="fastcollab demo", description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    options = parser.parse_args(argv)
    transformers_logging.disable_progress_bar()
    console = Console()
    tokenizer = AutoTokenizer.from_pretrained(tiny.senior())
    senior, junior = (AutoModelForCausalLM.from_pretrained(path) for path in (tiny.senior(), tiny.junior()))
    training = tiny.problems(16 * options.steps, seed=options.seed + 1)
    held_out = tiny.problems(64, seed=options.seed + 10_000)
    console.print(
        f"Two models write additions together: a senior of {senior.num_parameters():,} parameters, with a private "
        f"notation (& for +, ~ for =), and a junior of {junior.num_parameters():,} that never saw it.\n"
    )
    table = {"start": measure(senior, junior, tokenizer, held_out, options.seed)}

    started = perf_counter()
    runs: dict[str, TrainResult] = {}
    for name, method in (("Tandem", "tandem"), ("GRPO", "grpo")):
        out = options.out if method == "tandem" else options.out / method
        models = {"senior": tiny.senior(), "junior": tiny.junior()} if method == "tandem" else {"policy": tiny.senior()}
        args = settings(method, out, options.steps, options.seed)
        runs[name] = train(method, models, training, tiny.correct, args)
        trained = next(iter(runs[name].models.values()))
        table[name] = measure(trained, junior, tokenizer, held_out, options.seed)
    seconds = perf_counter() - started

    title = "64 held-out additions, 4 samples each, T = 1"
    shown = Table(title=title, title_justify="left", caption=f"{options.steps} steps each, {seconds:.0f} s in all")
    shown.add_column("")
    cells = [[k] + [f.format(table[c][0][k]) for c in COLUMNS] for k, f in FORMAT.items()]
    for column in COLUMNS:
        shown.add_column(column, justify="right")
    for row in cells:
        shown.add_row(*row)
    console.print(shown)
    shown_samples = {c: samples(table[c][1], tokenizer, held_out) for c in COLUMNS}
    config = {"name": "Tandem"} | settings("tandem", options.out, options.steps, options.seed).to_dict()
    figures = {"title": title, "header": ["", *COLUMNS], "rows": cells}
    save_inputs(options.out, figures, shown_samples, config)
    histories = {name: run.log_history for name, run in runs.items()}
    console.print(f"Report: {write_report(options.out / 'report.html', histories, figures, shown_samples, config)}")


if __name__ == "__main__":
    main()
