"""What co-training costs: a Co-RL step of N equal models beside N solo GRPO steps, and what voting takes of it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

import fastcollab as fc
from fastcollab import grading
from fastcollab.advantages import group_advantages
from fastcollab.bench.harness import Timing, headline, interleave, measure_floors, save, table
from fastcollab.cohort import Cohort
from fastcollab.trainer import Trainer

MODELS = (2, 3)
ROUNDS, QUICK_ROUNDS = 20, 3
SETTINGS = dict(prompts_per_step=16, num_generations=8, max_completion_length=48, learning_rate=0.0, kv_memory="128MiB",
                disable_tqdm=True)  # fmt: skip


def grade(text: str) -> Any:
    """The key of the tiny task's answer, by the mathematical grader."""
    head, found, answer = text.strip().rpartition(" answer ")
    return grading.key(answer) if found else None


def correct(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    return [float(grade(text) == grading.key(right)) for text, right in zip(completions, answer, strict=True)]


def cohort_step(names: str, folder: str, device: str) -> Callable[[], dict[str, Any]]:
    """A Co-RL step of equal models; learning rate 0 keeps every step alike."""
    args = fc.CoRLConfig(output_dir=folder, grader=grade, device=device, alarms=False, labels="ring", **SETTINGS)
    cohort = Cohort({name: fc.tiny.senior() for name in names}, fc.tiny.problems(512, seed=1), args)
    cohort.label_sink = open(Path(folder) / f"{names}.jsonl", "w")
    return cohort.train_step


def solo_step(folder: str, device: str) -> Callable[[], Any]:
    """A GRPO step of one such model on such a batch."""
    args = fc.GRPOConfig(output_dir=folder, device=device, **SETTINGS)
    rows = fc.tiny.problems(512, seed=1)
    trainer = Trainer("grpo", {"policy": fc.tiny.senior()}, rows, correct, args, None, None, None, ())

    def step() -> None:
        rollouts = trainer.rollouts()
        rewards, _ = trainer.rewards(rollouts)
        advantage, _ = group_advantages(torch.from_numpy(rewards), [r.group for r in rollouts])
        trainer.update(trainer.items(rollouts, rewards, advantage))
        trainer.step += 1

    return step


def measure(device: str, rounds: int) -> list[dict[str, Any]]:
    """A line for each number of models; all interleaved with the solo step."""
    with tempfile.TemporaryDirectory() as folder:
        solo = solo_step(folder, device)
        steps = {n: cohort_step("abc"[:n], folder, device) for n in MODELS}
        rows: dict[int, list[dict[str, Any]]] = {n: [] for n in MODELS}
        calls: dict[str, Callable[[], Any]] = {"solo": solo}
        calls |= {str(n): (lambda n=n: rows[n].append(steps[n]())) for n in MODELS}
        for call in calls.values():
            call()
        for found in rows.values():
            found.clear()
        timings = interleave(calls, rounds, device=device)
    return [_line(n, timings, rows[n]) for n in MODELS]


def _line(n: int, timings: dict[str, Timing], rows: list[dict[str, Any]]) -> dict[str, Any]:
    own, solo = timings[str(n)], timings["solo"]
    return {
        "models": n,
        "step_s": own.wall,
        "solo_step_s": solo.wall,
        "of_solo_steps": own.wall / (n * solo.wall),
        "of_solo_steps_by_cpu": own.cpu / (n * solo.cpu),
        "voting_share": median(row["time/vote"] / row["step_time"] for row in rows),
        "runs": len(rows),
    }


def run(path: Path, quick: bool = False, device: str = "cpu") -> None:
    """Prints the table and writes the section ``corl``."""
    floors = measure_floors(device)
    print(headline(floors), flush=True)
    lines = measure(device, QUICK_ROUNDS if quick else ROUNDS)
    cells = [
        [f"{v['models']} models", f"{v['step_s']:.2f}", f"{v['solo_step_s']:.2f}", f"{v['of_solo_steps']:.3f}",
         f"{v['of_solo_steps_by_cpu']:.3f}", f"{v['voting_share']:.2%}", str(v["runs"])]
        for v in lines
    ]  # fmt: skip
    head = ["Co-RL", "step s", "solo GRPO step s", "÷ N solo steps", "by CPU time", "voting and grading", "runs"]
    print(f"\n{table(head, cells)}", flush=True)
    save("corl", {"floors": vars(floors), "lines": lines}, path)
