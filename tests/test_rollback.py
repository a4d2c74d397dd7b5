"""Rollback with real models: logits after any truncate, forced append and fork equal those of a fresh prefill."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch
from tiny_models import VOCAB, tiny_model

import fastcollab as fc
from fastcollab.engine import native_scheduler
from fastcollab.model import Model
from fastcollab.pools import bytes_per_block
from fastcollab.sampling import Sampler
from fastcollab.schedules import Call

SCHEDULERS = ["python", "native"] if native_scheduler else ["python"]
FAMILIES = ["qwen3", "llama", "gemma3_text", "gpt2"]  # Gemma's window is 8 tokens
TEAMS = [(f,) for f in FAMILIES] + [("qwen3", "llama"), ("gemma3_text", "gpt2")]
SIZE = 4  # tokens of a block
LIMIT = 96  # tokens of a row
WRITTEN = 14  # tokens a row writes before it is cut
both = pytest.mark.parametrize("scheduler", SCHEDULERS)


class Lab:
    """Rows of an engine, driven forward by forward; every logit row that it computes is kept, to be checked later."""

    def __init__(self, families, scheduler, blocks=600, budget=256, prefix_cache=True):
        models = {f"m{i}": Model(f, tiny_model(f, seed=i)) for i, f in enumerate(families)}
        self.plain = [copy.deepcopy(m.module) for m in models.values()]
        memory = blocks * sum(bytes_per_block(m.layers, SIZE, m.dtype) for m in models.values())
        self.engine = fc.Engine(models, None, None, memory, SIZE, budget, prefix_cache, scheduler)
        for pools in self.engine.pools:
            for pool in pools.k + pools.v:
                pool.fill_(float("nan"))  # a page that is read before it is written shows
        self.scheduler, self.rng = self.engine.scheduler, np.random.default_rng(0)
        self.policy = self.engine._policy(Call(lambda *_: 0, tuple(models)))
        self.seen: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}  # (row, length of its ids) -> model, logits
        self.rows: list[int] = []

    def add(self, prompt, group):
        ids = np.asarray(prompt, np.int32)
        self.rows.append(self.scheduler.add(ids, 1000 + len(self.rows), group, LIMIT - len(prompt), self.policy, True))
        return self.rows[-1]

    def fork(self, row):
        self.rows.append(self.scheduler.fork(row, 2000 + len(self.rows)))
        return self.rows[-1]

    def ids(self, row):
        prompt, response, _ = self.scheduler.view(row)
        return prompt.tolist() + response.tolist()

    def write(self, tokens, rows=None):
        """Runs until all rows, or ``rows``, have ``tokens`` more; authors are drawn anew at each token."""
        goal = {row: len(self.ids(row)) + tokens for row in (self.rows if rows is None else rows)}
        while any(len(self.ids(row)) < length for row, length in goal.items()):
            for row in self.scheduler.asking():
                self.scheduler.set_author(row, int(self.rng.integers(len(self.plain))))
            for m in self.scheduler.next_models():
                plan = self.scheduler.plan(m)
                if len(plan.rows):
                    break
            ids, logprob, _ = self.engine._forward(m, plan, partial(self.sample, m))
            self.scheduler.commit(m, ids.numpy(), logprob.numpy(), 1.0)

    def sample(self, m, logits, plan):
        """In the place of the engine's sampler."""
        for row, z in zip(plan.sample_rows.tolist(), logits, strict=True):
            self.seen[row, len(self.ids(row))] = (m, z.clone())
        return Sampler(fc.SamplingParams())(logits, plan)

    @torch.no_grad()
    def check(self):
        """Compares all logits since the last check with a fresh prefill by the untouched models; returns their keys."""
        keys, self.seen, seen = set(self.seen), {}, self.seen
        for row in sorted({row for row, _ in keys}):
            ids, own = torch.tensor([self.ids(row)]), [n for r, n in keys if r == row]
            want = [module(ids).logits[0] for module in self.plain]
            for n in own:
                m, logits = seen[row, n]
                torch.testing.assert_close(logits, want[m][n - 1], atol=1e-5, rtol=1e-5)
        return keys

    def close(self):
        """Ends all rows; every block of every model must be free again."""
        for row in self.rows:
            self.scheduler.finish(row)
        assert [self.scheduler.free_blocks(m) for m in range(len(self.plain))] == self.engine.num_blocks


def cuts(prompt):
    """Lengths to cut a row to: the bare prompt, one more, an edge of a block, beside it, inside one, nothing cut."""
    edge = (prompt // SIZE + 1) * SIZE
    return sorted({prompt, prompt + 1, edge, edge + 1, edge + SIZE, edge + SIZE + 3, prompt + WRITTEN})


def started(lab):
    """Rows whose prompts end inside a block, at its edge, and past the window, each with a length to cut it to."""
    plans = {}
    for group, length in enumerate((3, 8, 13)):
        prompt = lab.rng.integers(3, VOCAB, length)
        plans |= {lab.add(prompt, group): keep for keep in cuts(length)}
    lab.write(WRITTEN)
    assert len(lab.check()) >= len(plans) * WRITTEN
    return plans


def team(families):
    return pytest.param(families, id="+".join(families))


@both
@pytest.mark.parametrize("families", [team(t) for t in TEAMS])
def test_after_a_cut_and_forced_ids_logits_are_those_of_a_prefill(families, scheduler):
    lab = Lab(families, scheduler)
    plans = started(lab)
    before = {row: lab.ids(row) for row in plans}
    for row, keep in plans.items():
        held = lab.scheduler.row_kv_len(row)
        lab.scheduler.truncate(row, keep)
        assert lab.scheduler.row_kv_len(row) == [min(n, keep - 1) for n in held]
        assert lab.ids(row) == before[row][:keep]
    lab.write(3)
    assert {(row, keep) for row, keep in plans.items()} <= lab.check()

    forced = {}
    for k, (row, keep) in enumerate(plans.items()):  # 0 .. 9 foreign ids: none, part of a block, more than two
        lab.scheduler.truncate(row, keep)
        ids = lab.rng.integers(3, VOCAB, k % 10)
        lab.scheduler.append_forced(row, ids, k % len(families))
        forced[row] = keep + len(ids)
        assert lab.ids(row) == before[row][:keep] + ids.tolist()
    lab.write(6)
    assert set(forced.items()) <= lab.check()
    lab.close()


@both
@pytest.mark.parametrize("families", [team(t) for t in TEAMS])
def test_forks_share_their_past_and_nothing_else(families, scheduler):
    """A fork and its source, cut to different lengths inside shared blocks, write different texts."""
    lab = Lab(families, scheduler)
    pairs = {}
    for k, (row, keep) in enumerate(started(lab).items()):
        pairs[row] = other = lab.fork(row)
        assert lab.ids(other) == lab.ids(row)
        assert lab.scheduler.row_table(other, 0) == lab.scheduler.row_table(row, 0)
        lab.scheduler.truncate(row, keep)
        if k % 3:
            lab.scheduler.truncate(other, len(lab.ids(other)) - k % 10)
            lab.scheduler.append_forced(other, np.array([7, 8, 9]), 0)
    next_up = {(row, len(lab.ids(row))) for row in lab.rows}
    lab.write(6)
    assert next_up <= lab.check()
    assert all(lab.ids(row) != lab.ids(other) for row, other in pairs.items())
    lab.close()


@both
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("families", [team(("gemma3_text",)), team(("qwen3", "gpt2"))])
def test_any_program_of_cuts_forks_and_forced_ids(families, prefix_cache, scheduler):
    """In memory so tight that rows are preempted; new rows continue what others wrote, out of the prefix cache."""
    lab = Lab(families, scheduler, blocks=32, budget=24, prefix_cache=prefix_cache)
    rng = lab.rng
    for length in (2, 5, 8, 12):
        lab.add(rng.integers(3, VOCAB, length), length)
    for turn in range(6):
        lab.write(int(rng.integers(2, 6)), lab.rows[:1])
        lab.check()
        for row in list(lab.rows):
            prompt, response, _ = lab.scheduler.view(row)
            if rng.random() < 0.5:
                lab.scheduler.truncate(row, len(prompt) + int(rng.integers(len(response) + 1)))
            if rng.random() < 0.4:
                ids = rng.integers(3, VOCAB, int(rng.integers(1, 7)))
                lab.scheduler.append_forced(row, ids, int(rng.integers(len(families))))
            if len(lab.rows) < 9 and rng.random() < 0.4:
                lab.fork(row)
        if turn % 2:
            lab.add(lab.ids(lab.rows[turn % 4]), 100 + turn)
    for row in list(lab.rows):
        lab.write(2, [row])
        assert (row, len(lab.ids(row)) - 1) in lab.check()
        lab.scheduler.finish(row)
        lab.rows.remove(row)
    counters = lab.scheduler.counters
    assert sum(counters["preemptions"]) > 0 and sum(counters["copies"]) > 0
    assert (sum(counters["cached"]) > 0) == prefix_cache
    lab.close()
