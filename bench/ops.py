"""The operators beside what people use today: time, rates, memory, × baseline; nothing is timed before it is right."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastcollab import ops
from fastcollab.bench import harness, op_decode, op_train
from fastcollab.bench.harness import Floors
from fastcollab.bench.op_cases import CASES, OURS, Case, Outputs, Problem

ROUNDS, LEAST_ROUNDS = 50, 2
MOST_S = 5.0  # for the repeats of one variant
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # of the truth's largest value
OUR_LOGPROB_TOLERANCE = 1e-5  # whatever the weight's dtype: sums are fp32
SLOW_S, SLOW_X = 10.0, 2.5  # a peer that takes longer than both, the second relative to ours, is called once
COMPILED = ("torch.compile", "CCE", "Liger")  # their first call compiles
BUILDERS = {
    "linear_logprob": op_train.linear_logprob,
    "linear_policy_loss": op_train.linear_policy_loss,
    "policy_loss": op_train.policy_loss,
    "advantage_regression": op_train.advantage_regression,
    "packed_attention": op_train.packed_attention,
    "paged_attention": op_decode.paged_attention,
    "handoff": op_decode.handoff,
    "sample": op_decode.sample,
    "copy_blocks": op_decode.copy_blocks,
}


def problems(case: Case, device: torch.device) -> Iterator[Problem]:
    """The phases of a case, on inputs drawn from one seed."""
    torch.manual_seed(0)
    yield from BUILDERS[case.op](case, device)


def absent(op: str) -> str | None:
    """Why an operator's cases can't run, or None."""
    name = "paged_attention" if op == "handoff" else op
    return None if hasattr(ops, name) else f"fastcollab.ops has no {name}"


def error_of(got: Outputs, want: Outputs) -> float | None:
    """The largest difference over the largest value that was wanted (absolute where that is 0), of all outputs.

    None where nothing is compared.
    """
    pairs = [(mine, true) for mine, true in zip(got, want, strict=True) if mine is not None]
    return max((_difference(mine, true) / (float(true.abs().max()) or 1.0) for mine, true in pairs), default=None)


def _difference(got: Tensor, want: Tensor) -> float:
    if got.shape != want.shape or not bool(got.isfinite().all()):
        return float("inf")
    return float((got.to(want.dtype) - want).abs().max())


def _once(call: Callable[[], Any], device: torch.device | str) -> tuple[Any, float]:
    """What a call returns, and its seconds."""
    results = []
    wall, _ = harness.timed(lambda: results.append(call()), device)
    return results[0], wall


def check(problem: Problem, device: torch.device | str = "cpu") -> dict[str, float | None]:
    """Call every variant once, which also warms it up, and compare it with the truth: the errors by name.

    A variant out of memory and a peer far too slow to be timed become absent.
    Raises: RuntimeError for a variant that is wrong.
    """
    truth = problem.truth()
    errors, ours_s = {}, None

    def drop(name: str, reason: str) -> None:
        del problem.calls[name]
        problem.absent = problem.absent | {name: reason}  # the other phase has the same dict

    for name, call in list(problem.calls.items()):
        try:
            result, wall = _once(call, device)
            ours_s = wall if ours_s is None else ours_s  # the first is ours
            is_peer, most_s = not name.startswith(OURS), max(SLOW_S, SLOW_X * ours_s)
            if is_peer and name in COMPILED and wall > most_s:
                result, wall = _once(call, device)
            errors[name] = error_of(problem.outputs(name, result), truth)
            del result
        except torch.OutOfMemoryError:
            drop(name, "out of memory")
            continue
        tolerance = problem.tolerance or TOLERANCE[problem.case.dtype]
        if not is_peer and (problem.case.op, problem.phase) == ("linear_logprob", "forward"):
            tolerance = OUR_LOGPROB_TOLERANCE
        if is_peer and wall > most_s:
            drop(name, f"{wall:.1f} s at its one call, {wall / ours_s:.1f} x ours: not timed again")
        if errors[name] is not None and not errors[name] <= tolerance:
            where = f"{problem.case.op} {problem.phase}, {problem.case.label}"
            raise RuntimeError(f"{name}: got an error of {errors[name]:.2g} in {where}, need <= {tolerance:g}")
    return errors


def measure(problem: Problem, floors: Floors, device: torch.device, most_s: float) -> dict[str, Any]:
    """Check, then memory, then time, interleaved."""
    errors = check(problem, device)
    gc.collect()
    memory = {name: harness.extra_memory(call, device) for name, call in problem.calls.items()}
    timings = harness.interleave(problem.calls, ROUNDS, most_s, device, LEAST_ROUNDS)
    first = timings[next(iter(problem.calls))]
    least = floors.forward_s(problem.bytes, problem.flops, problem.case.dtype)
    return {
        "op": problem.case.op,
        "case": problem.case.label,
        "phase": problem.phase,
        "flops": problem.flops,
        "bytes": problem.bytes,
        "floor_s": least,
        "variants": {
            name: {
                "wall_s": timing.wall,
                "cpu_s": timing.cpu,
                "runs": len(timing.walls),
                "ours_x": timing.wall / first.wall,
                "ours_cpu_x": timing.cpu / first.cpu,
                "gb_s": problem.bytes / timing.wall / 1e9,
                "gflop_s": problem.flops / timing.wall / 1e9,
                "floor_x": timing.wall / least,
                "extra_bytes": memory[name],
                "error": errors[name],
            }
            for name, timing in timings.items()
        },
        "absent": problem.absent,
    }


def show(result: dict[str, Any]) -> str:
    """The table of one problem. ``× ours`` is how many times as long as the first line a variant takes."""
    lines = []
    for name, v in result["variants"].items():
        extra = "-" if v["extra_bytes"] is None else f"{v['extra_bytes'] / 2**20:.0f}"
        rate = f"{v['gflop_s']:.0f}" if result["flops"] else "-"
        error = "-" if v["error"] is None else f"{v['error']:.0e}"
        numbers = [f"{v['wall_s'] * 1e3:.3f}", f"{v['gb_s']:.1f}", rate, extra]
        numbers += [f"{v['ours_x']:.2f}", f"{v['ours_cpu_x']:.2f}", f"{v['floor_x']:.2f}", error]
        lines.append([name, *numbers, str(v["runs"])])
    head = ["variant", "ms", "GB/s", "GFLOP/s", "extra MiB", "× ours", "by CPU time", "÷ floor", "error", "runs"]
    absent = "".join(f"\n{name}: {reason}" for name, reason in result["absent"].items())
    title = f"\n{result['op']}, {result['phase']}: {result['case']}; floor {result['floor_s'] * 1e3:.3f} ms\n"
    return title + harness.table(head, lines) + absent


def run(path: Path, quick: bool = False, device: torch.device | str = "cpu", only: str = "") -> None:
    """Prints one table a problem and writes the section ``ops``; with ``only``, its entries alone are replaced."""
    device, floors = torch.device(device), harness.measure_floors(device)
    print(harness.headline(floors), flush=True)
    print("ops: " + ", ".join(f"{op} {chosen}" for op, chosen in _chosen(device).items()), flush=True)
    results = []
    for case in CASES:
        case = case.sized(quick)
        if only not in f"{case.op} {case.label}":
            continue
        if reason := absent(case.op):
            print(f"\n{case.op}: skipped, {reason}")
            continue
        for problem in problems(case, device):
            results.append(measure(problem, floors, device, MOST_S))
            print(show(results[-1]), flush=True)
            harness.save("ops", {"floors": vars(floors), "problems": _merged(path, results, only)}, path)


def _chosen(device: torch.device) -> dict[str, str]:
    return {op: who[device.type] for op, who in ops.impl_report().items() if isinstance(who, dict)}


def _merged(path: Path, results: list[dict[str, Any]], only: str) -> list[dict[str, Any]]:
    """The new results, after those of an earlier run that ``only`` leaves alone."""
    old = json.loads(path.read_text()).get("ops", {}).get("problems", []) if only and path.exists() else []
    new = {(r["op"], r["case"], r["phase"]) for r in results}
    return [r for r in old if (r["op"], r["case"], r["phase"]) not in new] + results
