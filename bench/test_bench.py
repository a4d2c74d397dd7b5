"""The rollout and hand-off benches as pytest-benchmark entries: ``pytest bench``. Not part of ``make test``."""

from __future__ import annotations

import pytest

from fastcollab.bench import rollout

NAMES = (rollout.ENGINE, rollout.DOUBLE, rollout.REPREFILL, rollout.LOCKSTEP, rollout.SOLO)


@pytest.fixture(scope="module")
def pair():
    return rollout.pair()


@pytest.fixture(scope="module")
def engine(pair):
    return rollout.engine_of(pair)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", rollout.BATCHES)
def test_rollout(benchmark, engine, pair, rows, name):
    """64 tokens a row, a hand-off every word."""
    calls, _ = rollout.variants(engine, pair, rollout.Case(rows, prompt=32, rounds=1), rollout.word_schedule())
    benchmark.group = f"rollout, {rows} rows"
    benchmark.extra_info["tokens"] = 64 * rows * (2 if name == rollout.DOUBLE else 1)
    benchmark.pedantic(calls[name], rounds=2, warmup_rounds=1)


@pytest.mark.parametrize("lag", rollout.LAGS)
@pytest.mark.parametrize("rows", rollout.BATCHES)
def test_handoff(benchmark, engine, rows, lag):
    """Turns of ``lag`` tokens in all rows together; ``extra_info`` holds the latency of a hand-off over a decode step."""
    benchmark.group = f"hand-off, {rows} rows"
    seconds = benchmark.pedantic(rollout.handoff_seconds, args=(engine, rows, lag), rounds=1, warmup_rounds=1)
    steps = rollout.decode_seconds(engine, rows)
    benchmark.extra_info["latency_ms"] = 1e3 * sorted(seconds)[len(seconds) // 2]
    benchmark.extra_info["decode_steps"] = sorted(seconds)[len(seconds) // 2] / sorted(steps)[len(steps) // 2]
