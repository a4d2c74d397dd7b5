"""Two models write in turns: the engine against ``transformers``, tokens/s and what a hand-off costs.

All variants are greedy. So the engine's ids are a function of the authors alone, the peers can replay the authors that
the engine recorded, and that all of them write the same ids is checked in the run that is timed; sampled ids would
have to be forced upon the peers, at a cost that is not theirs. The prefix cache is off: a repeat would find its prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import fastcollab as fc
from fastcollab.bench import models, peers
from fastcollab.bench.harness import Floors, Timing, interleave, machine, measure_floors, save, table

WRITERS = ("senior", "junior")
ENGINE, DOUBLE, LOCKSTEP, FULL_HEAD = "engine", "engine, 2x rows", "(b) lockstep", "(b) lockstep, full head"
REPREFILL, SOLO, KEPT, ENGINE_SOLO = "(a) generate, re-prefill", "(c) generate, solo", "(d) generate, kept cache", "engine, solo"


@dataclass(frozen=True)
class Case:
    """One group of variants that are timed together."""

    rows: int
    prompt: int  # tokens a prompt
    rounds: int
    new_tokens: int = 64
    only: tuple[str, ...] = ()  # variants beside the engine; none: all


CASES = (
    Case(rows=1, prompt=32, rounds=9),
    Case(rows=8, prompt=32, rounds=5),
    Case(rows=32, prompt=32, rounds=3),
    Case(rows=8, prompt=256, rounds=3, only=(REPREFILL, LOCKSTEP, SOLO)),
)
LAGS, BATCHES = (1, 4, 16, 64), (1, 8, 32)


def pair() -> dict[str, PreTrainedModel]:
    return {name: models.random_model(seed) for seed, name in enumerate(WRITERS)}


def engine_of(pair: dict[str, PreTrainedModel]) -> fc.Engine:
    return fc.Engine(pair, prefix_cache=False)


def word_schedule(vocab: int = models.VOCAB) -> fc.Word:
    """A hand-off every word: each row draws its own authors, keyed by row and position."""
    return fc.Word(writers=WRITERS, p=0.5, boundaries=models.word_starts(vocab))


def greedy(new_tokens: int) -> fc.SamplingParams:
    return fc.SamplingParams(temperature=0.0, max_new_tokens=new_tokens, ignore_eos=True)


def variants(engine: fc.Engine, pair: dict[str, PreTrainedModel], case: Case, schedule: Any) -> tuple[dict[str, Callable[[], peers.Ids]], list]:
    """Name -> function that writes the case's rows and returns their ids; and the engine's rollouts, whose authors the peers replay."""
    sampling = greedy(case.new_tokens)
    vocab = engine.vocab_size
    prompts = models.random_prompts(case.rows, case.prompt, vocab)
    more = prompts + models.random_prompts(case.rows, case.prompt, vocab, seed=1)

    def write(texts: peers.Ids, plan: Any) -> list:
        return engine.generate(texts, schedule=plan, sampling=sampling)

    rollouts = write(prompts, schedule)
    authors = [r.author.tolist() for r in rollouts]
    both, senior = [pair[w] for w in WRITERS], pair[WRITERS[0]]
    found: dict[str, Callable[[], peers.Ids]] = {
        ENGINE: lambda: [r.ids for r in write(prompts, schedule)],
        DOUBLE: lambda: [r.ids for r in write(more, schedule)],
        REPREFILL: lambda: peers.reprefill(both, prompts, authors),
        LOCKSTEP: lambda: peers.lockstep(both, prompts, authors),
        FULL_HEAD: lambda: peers.lockstep(both, prompts, authors, own_head=False),
        KEPT: lambda: peers.kept_cache(both, prompts, authors),
        SOLO: lambda: peers.solo(senior, prompts, case.new_tokens),
        ENGINE_SOLO: lambda: [r.ids for r in write(prompts, fc.Solo(WRITERS[0]))],
    }
    if case.rows > 1:
        del found[KEPT]
    kept = {name: f for name, f in found.items() if not case.only or name in (ENGINE, *case.only)}
    return kept, rollouts


def floor_s(pair: dict[str, PreTrainedModel], case: Case, floors: Floors) -> float:
    """Least seconds for the case: every model reads every token, one of them speaks it, weights are read once a step."""
    flops = sum(models.read_flops(m) for m in pair.values()) + models.head_flops(pair[WRITERS[0]])
    step = floors.forward_s(models.weight_bytes(pair[WRITERS[0]]), case.rows * flops)
    return step * case.new_tokens + floors.forward_s(0, case.rows * case.prompt * (flops - models.head_flops(pair[WRITERS[0]])))


def run_case(engine: fc.Engine, pair: dict[str, PreTrainedModel], case: Case, floors: Floors) -> dict[str, Any]:
    """Times one case, each variant having run once before, and says how many rows of each are the engine's."""
    calls, rollouts = variants(engine, pair, case, word_schedule())
    want = {False: [r.ids for r in rollouts]}
    if ENGINE_SOLO in calls:
        want[True] = calls[ENGINE_SOLO]()
    equal = {}
    for name, call in calls.items():
        got, ids = call(), want.get(name in (SOLO, ENGINE_SOLO))
        equal[name] = None if ids is None else sum(a == b for a, b in zip(got, ids, strict=name != DOUBLE))
    engine.reset_stats()
    timings = interleave(calls, case.rounds, slow_s=8.0)
    stats = engine.stats()
    turns = sum(len(r.ids) / len(run_starts(r)) for r in rollouts) / len(rollouts)
    tokens = case.rows * case.new_tokens
    base = timings[ENGINE]
    out: dict[str, Any] = {
        "rows": case.rows, "prompt": case.prompt, "new_tokens": case.new_tokens, "mean_turn": turns,
        "occupancy": {w: stats[w]["occupancy"] for w in WRITERS}, "floor_tokens_per_s": tokens / floor_s(pair, case, floors),
        "variants": {},
    }  # fmt: skip
    for name, timing in timings.items():
        wrote = tokens * (2 if name == DOUBLE else 1)
        out["variants"][name] = {
            "tokens_per_s": wrote / timing.wall,
            "engine_x": wrote_ratio(base, tokens, timing, wrote, "wall"),
            "engine_cpu_x": wrote_ratio(base, tokens, timing, wrote, "cpu"),
            "rows_equal": equal[name],
            **timing.to_dict(),
        }
    return out


def wrote_ratio(base: Timing, base_tokens: int, other: Timing, other_tokens: int, clock: str) -> float:
    """Tokens per second of ``base`` over those of ``other``."""
    return (base_tokens / getattr(base, clock)) / (other_tokens / getattr(other, clock))


def run_starts(rollout: Any) -> list[int]:
    """Response positions at which the author changes, the first included."""
    author = rollout.author
    return [t for t in range(len(author)) if t == 0 or author[t] != author[t - 1]]


def show_case(result: dict[str, Any]) -> str:
    rows, lock = [], result["variants"].get(LOCKSTEP)
    for name, v in result["variants"].items():
        count = result["rows"]
        rows.append([
            name, f"{v['tokens_per_s']:.0f}", f"{v['tokens_per_s'] / lock['tokens_per_s']:.2f}", f"{v['engine_x']:.2f}",
            f"{v['engine_cpu_x']:.2f}", "-" if v["rows_equal"] is None else f"{v['rows_equal']}/{count}", str(len(v["walls_s"])),
        ])  # fmt: skip
    occupancy = " / ".join(f"{v:.1f}" for v in result["occupancy"].values())
    title = (
        f"\nrows {result['rows']}, prompt {result['prompt']}, {result['new_tokens']} new tokens, mean turn {result['mean_turn']:.1f} tokens; "
        f"floor {result['floor_tokens_per_s']:.0f} tok/s; rows a forward {occupancy}\n"
    )
    return title + table(["variant", "tok/s", "÷ (b)", "engine ÷ it", "by CPU time", "rows equal", "runs"], rows)


def rollout(path: Path, quick: bool = False) -> None:
    """Tokens/s of the engine and its peers, one table a case; writes the section ``rollout``."""
    floors, both = measure_floors(), pair()
    print(f"{machine()}\nfloors: {floors.read_gb_s:.1f} GB/s read, {floors.gemm_gflop_s:.0f} GFLOP/s GEMM")
    engine, results = engine_of(both), []
    for case in CASES[:2] if quick else CASES:
        results.append(run_case(engine, both, case, floors))
        print(show_case(results[-1]), flush=True)
        save("rollout", {"floors": vars(floors), "cases": results}, path)


# -- what a hand-off costs


def handoff_seconds(engine: fc.Engine, rows: int, lag: int) -> list[float]:
    """Seconds from the giver's last token to the receiver's first, of each row and hand-off, all rows changing together.

    Turns of ``lag`` tokens: the receiver ingests these and its own last token. The first hand-off, which ingests the
    prompt too, is left out.
    """
    handoffs = 2 + max(1, 8 // lag)
    before = len(engine.scheduler.latencies)
    engine.generate(models.random_prompts(rows, 32, engine.vocab_size), schedule=fc.Chunk(lag, writers=WRITERS),
                    sampling=greedy(handoffs * lag + 1))  # fmt: skip
    return list(engine.scheduler.latencies)[before + rows :]


def decode_seconds(engine: fc.Engine, rows: int, steps: int = 24) -> list[float]:
    """Seconds of one decode step of either model, prompts of the middle of the hand-off runs: a long run less a short one."""
    prompts = models.random_prompts(rows, 96, engine.vocab_size)
    found = []
    for writer in WRITERS:
        walls = []
        for new_tokens in (1, steps + 1):
            engine.reset_stats()
            engine.generate(prompts, schedule=fc.Solo(writer), sampling=greedy(new_tokens))
            walls.append(engine.stats()["wall_s"])
        found.append((walls[1] - walls[0]) / steps)
    return found


def handoff(path: Path, quick: bool = False) -> None:
    """Latency of a hand-off over one decode step, by lag and batch; writes the section ``handoff``."""
    floors, both = measure_floors(), pair()
    engine, cells = engine_of(both), []
    senior = both[WRITERS[0]]
    for rows in BATCHES[:2] if quick else BATCHES:
        samples: dict[int, list[float]] = {lag: [] for lag in (0, *LAGS)}  # 0: decode steps
        calls = {"decode": lambda rows=rows: samples[0].extend(decode_seconds(engine, rows))}
        for lag in LAGS:
            calls[str(lag)] = lambda rows=rows, lag=lag: samples[lag].extend(handoff_seconds(engine, rows, lag))
        for call in calls.values():
            call()
        for values in samples.values():
            values.clear()
        interleave(calls, {1: 5, 8: 3}.get(rows, 2))
        step = torch.tensor(samples[0]).median().item()
        for lag in LAGS:
            latency = torch.tensor(samples[lag]).median().item()
            flops = rows * ((lag + 1) * models.read_flops(senior) + models.head_flops(senior))
            floor = floors.forward_s(models.weight_bytes(senior), flops)
            cells.append({"rows": rows, "lag": lag, "latency_ms": latency * 1e3, "decode_ms": step * 1e3, "steps": latency / step,
                          "floor_x": latency / floor})  # fmt: skip
    save("handoff", {"floors": vars(floors), "cells": cells}, path)
    lines = [[f"{c['rows']} rows, lag {c['lag']}", f"{c['latency_ms']:.1f}", f"{c['decode_ms']:.1f}", f"{c['steps']:.2f}", f"{c['steps'] / c['lag']:.2f}",
              f"{c['floor_x']:.2f}"] for c in cells]  # fmt: skip
    print("\nhand-off: from the giver's last token to the receiver's first")
    print(table(["", "ms", "decode ms", "÷ decode step", "÷ lag steps", "÷ floor"], lines), flush=True)
