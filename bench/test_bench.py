"""The benches as pytest-benchmark entries: ``pytest bench``. Not part of ``make test``."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastcollab.bench import handoff, harness, op_cases, ops, rollout

NAMES = (rollout.ENGINE, rollout.DOUBLE, rollout.REPREFILL, rollout.LOCKSTEP, rollout.SOLO)


@pytest.fixture(scope="module")
def pair():
    return rollout.pair()


@pytest.fixture(scope="module")
def engine(pair):
    return rollout.engine_of(pair)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", handoff.ROWS)
def test_rollout(benchmark, engine, pair, rows, name):
    """64 tokens a row, a hand-off every word."""
    calls, _ = rollout.variants(engine, pair, rollout.Case(rows, prompt=32, rounds=1))
    benchmark.group = f"rollout, {rows} rows"
    benchmark.extra_info["tokens"] = 64 * rows * (2 if name == rollout.DOUBLE else 1)
    benchmark.pedantic(calls[name], rounds=2, warmup_rounds=1)


@pytest.mark.parametrize("lag", handoff.LAGS)
@pytest.mark.parametrize("rows", handoff.ROWS)
def test_handoff(benchmark, engine, rows, lag):
    """The whole run is timed; ``extra_info`` holds the latency of a hand-off, in ms and in decode steps."""
    benchmark.group = f"hand-off, {rows} rows"
    run = benchmark.pedantic(handoff.measure, args=(engine, rows, lag), rounds=1, warmup_rounds=1)
    latency, step = (np.median(spent[:, 0]).item() for spent in run)
    benchmark.extra_info.update(latency_ms=1e3 * latency, decode_steps=latency / step)


@pytest.mark.parametrize("case", op_cases.CASES, ids=lambda case: f"{case.op} {case.label}")
def test_operator(benchmark, case):
    """Our own variant of the last phase, checked before it is timed; ``python -m fastcollab.bench ops`` compares."""
    if reason := ops.absent(case.op):
        pytest.skip(reason)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    *_, problem = ops.problems(case.sized(True), device)
    benchmark.group = f"{case.op}, {problem.phase}"
    problem.calls = dict([next(iter(problem.calls.items()))])
    ops.check(problem)
    (call,) = problem.calls.values()
    benchmark.pedantic(lambda: harness.timed(call, device), rounds=3)
