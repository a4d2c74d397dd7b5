"""What a hand-off costs: from the giver's last token to the receiver's first, over one decode step of the receiver."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

import fastcollab as fc
from fastcollab.bench import models, rollout
from fastcollab.bench.harness import Floors, headline, interleave, measure_floors, save, table

LAGS, ROWS = (1, 4, 16, 64), (1, 8, 32)
ROUNDS = {1: 6, 8: 3, 32: 2}
DECODES = 4  # decode steps in each of the receiver's turns
MOST_S = 8.0  # for the repeats of one lag
PROMPT = 32
HANDOFFS = {1: 6, 4: 4, 16: 3, 64: 2}


class Stopwatch:
    """A schedule's callable: one plan of writers for all rows together, and the time at which each position was asked.

    The engine asks right after the previous token of the row is in, so ``spent[t]`` is what token t took.
    """

    def __init__(self, writers: list[int]) -> None:
        self.writers = writers
        self.asked: dict[int, np.ndarray] = {}

    def __call__(self, prompt: np.ndarray, ids: np.ndarray, author: np.ndarray) -> int:
        if len(ids) not in self.asked:
            self.asked[len(ids)] = np.array([perf_counter(), process_time()])
        return self.writers[len(ids)]

    @property
    def spent(self) -> np.ndarray:
        """[tokens - 1, 2]: seconds by the clock, and of CPU time."""
        return np.diff([self.asked[t] for t in range(len(self.asked))], axis=0)


def plan(lag: int, handoffs: int) -> tuple[list[int], list[int], list[int]]:
    """Writers by position (receiver 0, giver 1); the positions of the receiver's first tokens; of its decode steps.

    The receiver opens, so that it has read the prompt, and a hand-off of lag k ingests its own last token and k more.
    """
    writers, first, decodes = [0], [], []
    for _ in range(handoffs):
        writers += [1] * lag
        first.append(len(writers))
        decodes += range(len(writers) + 1, len(writers) + 1 + DECODES)
        writers += [0] * (1 + DECODES)
    return [*writers, 0], first, decodes  # the last token's end is not seen


def measure(engine: fc.Engine, rows: int, lag: int) -> tuple[np.ndarray, np.ndarray]:
    """What each hand-off of ``lag`` tokens in all rows together took, and each decode step between: [n, 2] seconds."""
    writers, first, decodes = plan(lag, HANDOFFS[lag])
    watch = Stopwatch(writers)
    prompts = models.random_prompts(rows, PROMPT, engine.vocab_size)
    schedule = fc.Call(watch, writers=rollout.WRITERS)
    engine.generate(prompts, schedule=schedule, sampling=rollout.greedy(len(writers)))
    return watch.spent[first], watch.spent[decodes]


def run_rows(engine: fc.Engine, pair: rollout.Pair, rows: int, floors: Floors) -> list[dict[str, Any]]:
    """One line of the table for each lag, all lags interleaved; medians over all rounds, decode steps over all lags."""
    samples: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {lag: [] for lag in LAGS}

    def once(lag: int) -> None:
        samples[lag].append(measure(engine, rows, lag))

    calls: dict[str, Callable[[], None]] = {str(lag): partial(once, lag) for lag in LAGS}
    for call in calls.values():
        call()
    for found in samples.values():
        found.clear()
    interleave(calls, ROUNDS[rows], MOST_S)
    decode = np.median(np.concatenate([d for found in samples.values() for _, d in found]), axis=0)
    receiver = pair[rollout.WRITERS[0]]
    lines = []
    for lag, found in samples.items():
        latency = np.median(np.concatenate([h for h, _ in found]), axis=0)
        flops = rows * ((lag + 1) * models.read_flops(receiver) + models.head_flops(receiver))
        lines.append({
            "rows": rows,
            "lag": lag,
            "latency_s": latency[0].item(),
            "decode_s": decode[0].item(),
            "steps": (latency / decode)[0].item(),
            "cpu_steps": (latency / decode)[1].item(),
            "floor_s": floors.forward_s(models.weight_bytes(receiver), flops),
        })  # fmt: skip
    return lines


def show(lines: list[dict[str, Any]]) -> str:
    """The table. ``÷ lag steps`` is what ingesting costs beside writing the same tokens."""
    cells = [
        [
            f"{v['rows']} rows, lag {v['lag']}",
            f"{v['latency_s'] * 1e3:.1f}",
            f"{v['decode_s'] * 1e3:.1f}",
            f"{v['steps']:.2f}",
            f"{v['cpu_steps']:.2f}",
            f"{v['steps'] / v['lag']:.2f}",
            f"{v['latency_s'] / v['floor_s']:.2f}",
        ]
        for v in lines
    ]
    return table(["hand-off", "ms", "decode ms", "÷ decode step", "by CPU time", "÷ lag steps", "÷ floor"], cells)


def run(path: Path, quick: bool = False, device: str = "cpu") -> None:
    """Prints the latency table and writes the section ``handoff``."""
    floors, pair = measure_floors(device), rollout.pair(device)
    print(headline(floors), flush=True)
    engine = rollout.engine_of(pair)
    lines = [line for rows in (ROWS[:2] if quick else ROWS) for line in run_rows(engine, pair, rows, floors)]
    print(f"\n{show(lines)}", flush=True)
    save("handoff", {"floors": vars(floors), "lines": lines}, path)
