"""Two models write in turns: tokens/s of the engine against ``transformers``, a hand-off every word.

All variants are greedy. So the ids are a function of the authors alone, the peers can replay the authors that the
engine recorded, and that all of them write the same ids is checked before they are timed; sampled ids would have to be
forced upon the peers, at a cost that is not theirs. The prefix cache is off: a repeat would find its own prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

import fastcollab as fc
from fastcollab.bench import models, peers
from fastcollab.bench.harness import Floors, headline, interleave, measure_floors, save, table

WRITERS = ("senior", "junior")
ENGINE, DOUBLE, ENGINE_SOLO = "engine", "engine, 2x rows", "engine, solo"
REPREFILL, LOCKSTEP = "(a) generate, re-prefill", "(b) lockstep"
SOLO, KEPT = "(c) generate, solo", "(d) generate, kept cache"
MOST_S = 10.0  # for the repeats of one variant

Pair = dict[str, PreTrainedModel]


@dataclass(frozen=True)
class Case:
    """One group of variants that are timed together."""

    rows: int
    prompt: int  # tokens a prompt
    rounds: int
    new_tokens: int = 64
    only: tuple[str, ...] = ()  # variants beside the engine; none: all


CASES = (
    Case(rows=1, prompt=32, rounds=5),
    Case(rows=8, prompt=32, rounds=4),
    Case(rows=32, prompt=32, rounds=3),
    Case(rows=8, prompt=256, rounds=3, only=(DOUBLE, REPREFILL, LOCKSTEP, SOLO)),
)


def pair(device: str = "cpu") -> Pair:
    return {name: models.random_model(seed).to(device) for seed, name in enumerate(WRITERS)}


def engine_of(pair: Pair) -> fc.Engine:
    return fc.Engine(pair, prefix_cache=False)


def word_schedule(vocab: int) -> fc.Word:
    """A hand-off every word: each row draws its own authors, keyed by row and position."""
    return fc.Word(writers=WRITERS, p=0.5, boundaries=models.word_starts(vocab))


def greedy(new_tokens: int) -> fc.SamplingParams:
    return fc.SamplingParams(temperature=0.0, max_new_tokens=new_tokens, ignore_eos=True)


def variants(engine: fc.Engine, pair: Pair, case: Case) -> tuple[dict[str, Callable[[], peers.Ids]], list[fc.Rollout]]:
    """Name -> function that writes the case's rows and returns their ids; and the engine's rollouts to be replayed."""
    vocab = engine.vocab_size
    prompts = models.random_prompts(case.rows, case.prompt, vocab)
    more = prompts + models.random_prompts(case.rows, case.prompt, vocab, seed=1)
    words, alone = word_schedule(vocab), fc.Solo(WRITERS[0])

    def write(texts: peers.Ids, schedule: Any) -> peers.Ids:
        return [r.ids for r in engine.generate(texts, schedule=schedule, sampling=greedy(case.new_tokens))]

    rollouts = engine.generate(prompts, schedule=words, sampling=greedy(case.new_tokens))
    both, authors = [pair[w] for w in WRITERS], [r.author.tolist() for r in rollouts]
    found: dict[str, Callable[[], peers.Ids]] = {
        ENGINE: partial(write, prompts, words),
        DOUBLE: partial(write, more, words),
        REPREFILL: partial(peers.reprefill, both, prompts, authors),
        LOCKSTEP: partial(peers.lockstep, both, prompts, authors),
        KEPT: partial(peers.kept_cache, both, prompts, authors),
        SOLO: partial(peers.solo, both[0], prompts, case.new_tokens),
        ENGINE_SOLO: partial(write, prompts, alone),
    }
    if case.rows > 1:
        del found[KEPT]
    return {n: f for n, f in found.items() if not case.only or n in (ENGINE, *case.only)}, rollouts


def floor_s(pair: Pair, case: Case, floors: Floors) -> float:
    """Least seconds for a case: both models read every token, one speaks it, a step reads one model's weights once."""
    senior = pair[WRITERS[0]]
    read, head = sum(map(models.read_flops, pair.values())), models.head_flops(senior)
    prefill = floors.forward_s(0, case.rows * case.prompt * read)
    return prefill + case.new_tokens * floors.forward_s(models.weight_bytes(senior), case.rows * (read + head))


def turns(rollout: fc.Rollout) -> int:
    """Runs of one author."""
    return 1 + int((rollout.author[1:] != rollout.author[:-1]).sum())


def run_case(engine: fc.Engine, pair: Pair, case: Case, floors: Floors) -> dict[str, Any]:
    """Runs each variant once to warm it up and to compare its ids with the engine's, then times them interleaved."""
    calls, rollouts = variants(engine, pair, case)
    engine.reset_stats()
    first = {name: call() for name, call in calls.items() if name == ENGINE}
    occupancy = {w: engine.stats()[w]["occupancy"] for w in WRITERS}
    first |= {name: call() for name, call in calls.items() if name != ENGINE}
    equal = {}
    for name, ids in first.items():
        want = first.get(ENGINE_SOLO) if name in (SOLO, ENGINE_SOLO) else first[ENGINE]
        equal[name] = None if want is None else sum(map(list.__eq__, ids, want))
    timings = interleave(calls, case.rounds, MOST_S)
    tokens = {name: case.rows * case.new_tokens * (2 if name == DOUBLE else 1) for name in calls}
    speed = {name: tokens[name] / t.wall for name, t in timings.items()}
    by_cpu = {name: tokens[name] / t.cpu for name, t in timings.items()}
    return {
        "rows": case.rows,
        "prompt": case.prompt,
        "new_tokens": case.new_tokens,
        "mean_turn": sum(len(r.ids) for r in rollouts) / sum(map(turns, rollouts)),
        "rows_a_forward": occupancy,
        "floor_tokens_per_s": tokens[ENGINE] / floor_s(pair, case, floors),
        "variants": {
            name: {
                "tokens_per_s": speed[name],
                "engine_x": speed[ENGINE] / speed[name],
                "engine_cpu_x": by_cpu[ENGINE] / by_cpu[name],
                "double_x": speed[DOUBLE] / speed[name] if DOUBLE in speed else None,
                "rows_equal": equal[name],
                **timing.to_dict(),
            }
            for name, timing in timings.items()
        },
    }


def show_case(result: dict[str, Any]) -> str:
    """The table of one case. ``engine ÷`` is how many times as fast as that variant the engine is, at equal rows."""
    lines = []
    for name, v in result["variants"].items():
        equal = "-" if v["rows_equal"] is None else f"{v['rows_equal']}/{result['rows']}"
        double = "-" if v["double_x"] is None else f"{v['double_x']:.2f}"
        numbers = [f"{v['tokens_per_s']:.0f}", f"{v['engine_x']:.2f}", f"{v['engine_cpu_x']:.2f}", double]
        lines.append([name, *numbers, equal, str(len(v["walls_s"]))])
    occupancy = " / ".join(f"{v:.1f}" for v in result["rows_a_forward"].values())
    title = (
        f"\n{result['rows']} rows, prompt {result['prompt']}, {result['new_tokens']} new tokens, "
        f"mean turn {result['mean_turn']:.1f} tokens; floor {result['floor_tokens_per_s']:.0f} tok/s; "
        f"rows a forward {occupancy}\n"
    )
    head = ["variant", "tok/s", "engine ÷", "by CPU time", "engine 2x rows ÷", "rows equal", "runs"]
    return title + table(head, lines)


def run(path: Path, quick: bool = False, device: str = "cpu") -> None:
    """Prints one table a case and writes the section ``rollout``."""
    floors, both = measure_floors(device), pair(device)
    engine, results = engine_of(both), []
    print(headline(floors), flush=True)
    for case in CASES[:2] if quick else CASES:
        results.append(run_case(engine, both, case, floors))
        print(show_case(results[-1]), flush=True)
    save("rollout", {"floors": vars(floors), "cases": results}, path)
