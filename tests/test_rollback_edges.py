"""T15: cut, correct, resume at every place equals a fresh prefill; discarded text in the cache is never read wrong."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from test_rollback import LIMIT, SIZE, WRITTEN, Lab, both
from test_section6 import engine, policy
from tiny_models import VOCAB

import fastcollab as fc
from fastcollab import engine as engine_module
from fastcollab.sampling import Sampler
from fastcollab.schedules import Intervene
from fastcollab.verifiers import FunctionVerifier, Revise

EOS = 2  # of the tiny models


@both
@pytest.mark.parametrize(
    ("families", "prompt"), [(("qwen3",), 3), (("qwen3",), 5), (("gemma3_text", "gpt2"), 4)], ids=str
)
def test_every_cut_with_every_correction(families, prompt, scheduler):
    """Cuts to 3, 4, 5, … ids, from the bare prompt to nothing cut, each with 0 .. 9 forced ids: corrections that stay
    inside a block, end at its edge, cross one or two; two rows that share the prompt's tail block at each cut, and
    forks that share the cut one."""
    lab = Lab(families, scheduler, blocks=1500)
    text = lab.rng.integers(3, VOCAB, prompt)
    rows = {lab.add(text, 0): keep for keep in range(prompt, prompt + WRITTEN + 1) for _ in range(2)}
    lab.write(WRITTEN)
    lab.check()
    assert (sum(lab.scheduler.counters["copies"]) > 0) == ((prompt - 1) % SIZE > 0)  # the tail block was shared
    due = set()
    for row, keep in rows.items():
        lab.scheduler.truncate(row, keep)
        for k, each in enumerate([row] + [lab.fork(row) for _ in range(4)]):
            ids = lab.rng.integers(3, VOCAB, 2 * k + row % 2)
            lab.scheduler.append_forced(each, ids, k % len(families))
            due.add((each, keep + len(ids)))
    lab.write(2)
    assert due <= lab.check()
    lab.close()


@both
def test_every_cut_of_a_row_that_ended(scheduler):
    """EOS was written and the blocks were given back: the row goes on as if neither had been, unless EOS is kept."""
    lab = Lab(("qwen3", "llama"), scheduler)
    prompt, last = lab.rng.integers(3, VOCAB, 5), 5 + WRITTEN - 1
    draw = lab.sample

    def sample(m, logits, plan):
        ids, *rest = draw(m, logits, plan)
        ids = torch.where(ids == EOS, EOS + 1, ids)
        return torch.where(torch.from_numpy(plan.position) == WRITTEN - 1, EOS, ids), *rest

    lab.sample = sample
    rows = {}
    for keep in range(5, last + 2):
        row = lab.scheduler.add(prompt.astype(np.int32), keep, 0, LIMIT - 5, lab.policy, False)
        rows[row] = keep
    lab.rows += rows
    lab.write(WRITTEN)
    lab.check()
    assert lab.scheduler.unfinished() == 0 and all(lab.ids(row)[last] == EOS for row in rows)
    lab.sample = draw
    for m in range(2):
        assert lab.scheduler.free_blocks(m) == lab.engine.num_blocks[m]
    due, whole = set(), max(rows, key=rows.get)
    for row, keep in rows.items():
        lab.scheduler.truncate(row, keep)
        if row != whole:
            ids = lab.rng.integers(3, VOCAB, row % 6)
            lab.scheduler.append_forced(row, ids, row % 2)
            due.add((row, keep + len(ids)))
    assert lab.scheduler.unfinished() == len(rows) - 1
    lab.write(2, [row for row in rows if row != whole])
    assert due <= lab.check() and lab.ids(whole)[last] == EOS
    lab.close()


# through generate


class Recorder:
    """In the place of the engine's sampler: keeps the ids and logits of every draw, in order."""

    def __init__(self, monkeypatch, e):
        self.draws: dict[int, list[tuple[list[int], torch.Tensor]]] = {}

        def sampler(sampling):
            draw = Sampler(sampling)

            def record(logits, plan):
                for row, z in zip(plan.sample_rows.tolist(), logits, strict=True):
                    prompt, response, _ = e.scheduler.view(row)
                    self.draws.setdefault(row, []).append((prompt.tolist() + response.tolist(), z.clone()))
                return draw(logits, plan)

            return record

        monkeypatch.setattr(engine_module, "Sampler", sampler)

    @torch.no_grad()
    def check(self):
        """Every logit row equals a fresh prefill of the ids that it continues; returns how many there were."""
        count = 0
        for draws in self.draws.values():
            for k, (ids, _) in enumerate(draws):
                if k + 1 < len(draws) and draws[k + 1][0][: len(ids)] == ids:
                    continue  # a prefix of the next: one prefill serves both
                want = policy().module(torch.tensor([ids])).logits[0]
                run = [d for d in draws[: k + 1] if ids[: len(d[0])] == d[0]]
                for own, z in run:
                    torch.testing.assert_close(z, want[len(own) - 1], atol=1e-5, rtol=1e-5)
                count += len(run)
        self.draws = {}
        return count


CHUNK = 6
CUTS = [(e, m) for e in range(CHUNK) for m in (1, 4, 9)]


@both
def test_generate_at_every_cut_and_then_the_discarded_text(scheduler, monkeypatch):
    """Each prompt is cut twice, at its own step of the chunk and by a correction of its own length, two samples each;
    afterwards what they discarded is asked for as a prompt, in the memory that they have used."""
    e = engine(scheduler, kv_memory="1MiB", token_budget=64)
    recorder = Recorder(monkeypatch, e)
    prompts = [f"{'.' * (n % 4)}{n}?" for n in range(len(CUTS))]

    def number(prompt):
        return int(prompt.strip(".?"))

    def review(prompt, accepted, new):
        return Revise(min(CUTS[number(prompt)][0], len(new) - 1))

    def correct(prompt, accepted, new):
        return "C" * CUTS[number(prompt)][1]

    plan = Intervene(verifier=FunctionVerifier(review, correct), chunk=CHUNK, longest_chunk=CHUNK, max_tokens=16,
                     reserve=0, max_interventions=2, steps=re.compile("(?s).", re.A))  # fmt: skip
    found = e.generate(prompts, 2, [plan, plan], fc.SamplingParams(max_new_tokens=40), seed=1)
    assert recorder.check() > 60 * len(CUTS)
    logs = [log for r in found for log in r.interventions]
    assert {log.position for log in logs} >= set(range(CHUNK)) and {len(log.inserted) for log in logs} == {1, 4, 9}
    discarded = [r.prompt_ids + r.ids[: log.position] + list(log.dropped) for r in found for log in r.interventions]
    for limit in (1, 6):
        e.reset_stats()
        again = e.generate(discarded, 1, None, fc.SamplingParams(max_new_tokens=limit), seed=2)
        assert recorder.check() >= len(discarded) and len(again) == len(discarded)
        assert e.stats()["cached"] > 0


# discarded text as a prompt


@both
@pytest.mark.parametrize("ended", [False, True], ids=["running", "ended"])
@pytest.mark.parametrize("reused", [False, True], ids=["intact", "reused"])
def test_discarded_text_hits_only_what_still_holds_it(reused, ended, scheduler):
    """A row of 19 ids is cut to ``keep`` and writes on. A request for the 19 finds the whole blocks that were kept, and
    those behind them only where none between was written over and nobody has taken them since."""
    lab = Lab(("qwen3",), scheduler, blocks=24)
    for keep in range(5, 20):
        row = lab.add(lab.rng.integers(3, VOCAB, 5), 2 * keep)
        lab.write(WRITTEN, [row])
        old = lab.ids(row)
        lab.scheduler.truncate(row, keep)
        lab.scheduler.append_forced(row, [3 + (old[keep] - 2) % (VOCAB - 3)] if keep < 19 else [], 0)
        lab.write(19 - keep + 2, [row])
        assert keep == 19 or lab.ids(row)[: keep + 1] != old[: keep + 1]
        if ended:
            lab.scheduler.finish(row)
        for _ in range(2 * reused):  # other texts, twice all free blocks but a few: none keeps its content
            free = lab.scheduler.free_blocks(0)
            filler = lab.add(lab.rng.integers(3, VOCAB, SIZE * (free - 3)), 200 + 2 * keep)
            lab.write(1, [filler])
            assert lab.scheduler.free_blocks(0) <= 3
            lab.scheduler.finish(filler)
        lab.check()
        before = lab.scheduler.counters["cached"][0]
        request = lab.add(old, 100 + keep)
        lab.write(1, [request])
        assert (request, len(old)) in lab.check()
        untouched = keep % SIZE <= 1  # of the first discarded block; the last kept id is fed again, as it was
        want = 0 if ended and reused else 16 if untouched and not reused else min(16, keep // SIZE * SIZE)
        assert lab.scheduler.counters["cached"][0] - before == want, keep
        for each in (row, request):
            lab.scheduler.finish(each)
        lab.rows.clear()
