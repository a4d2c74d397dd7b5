"""The rollout and hand-off benches as pytest-benchmark entries: ``pytest bench``. Not part of ``make test``."""

from __future__ import annotations

import numpy as np
import pytest

from fastcollab.bench import handoff, rollout

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
