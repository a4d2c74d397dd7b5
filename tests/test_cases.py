"""Public fault classes (cases.json) that belong to no single module's tests."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import tiny_model
from training import config

import fastcollab as fc
from fastcollab.scheduler import CYCLE, Scheduler

ROOT = Path(__file__).parent.parent
CASES = {c["id"]: c for c in json.loads((Path(__file__).parent / "cases.json").read_text())}


def test_c16_positions_count_real_tokens():
    """P6: there is no padding to count; after a truncation positions go on from the kept length."""
    case, want = CASES["C16"]["input"], CASES["C16"]["expected"]
    row = [t for t, real in zip(case["row"], case["mask"], strict=True) if real]
    scheduler = Scheduler([4], 2)
    policy = scheduler.add_policy(CYCLE, [0], first=0)
    i = scheduler.add(row[:1], 0, 0, 4, policy)
    positions = []
    W, P = torch.tensor(case["W"], dtype=torch.float64), torch.tensor(case["P"], dtype=torch.float64)

    def feed(token):
        plan = scheduler.plan(0)
        positions.extend(plan.position_ids.tolist())
        logits = W[plan.input_ids[-1]] + P[plan.position_ids[-1]]
        logprob = logits.log_softmax(-1)[token].item()
        scheduler.commit(0, [token], [logprob])
        return logprob

    assert [feed(t) for t in row[1:]] == pytest.approx(want["logp_of_tokens_0_and_2"], abs=CASES["C16"]["tolerance"])
    first = feed(0)
    scheduler.truncate(i, 3)
    assert feed(0) == first
    assert positions == [*want["position_ids_unmasked"], want["position_ids_unmasked"][-1]]


def test_c22_streams_are_distinct_and_reproducible():
    """2 models of the same weights, 2 seeds, 3 prompts, 4 samples: 48 different rows, whatever the ranks."""
    case, want = CASES["C22"]["input"], CASES["C22"]["expected"]
    model = tiny_model("qwen3", vocab_size=100)
    engine = fc.Engine({"a": model, "b": copy.deepcopy(model)}, kv_memory="4MiB")
    hot = fc.SamplingParams(temperature=500.0, max_new_tokens=32, ignore_eos=True)  # uniform, but for rounding
    prompts = [[7, 8], [9, 10], [7, 8]][: case["prompts"]]  # two of the prompts are the same text

    def streams(seed, ranks=1):
        """(model, rank, prompt, sample): a model's stream is named by its seed, a rank holds a share of the prompts."""
        rows = {}
        for m, name in enumerate(("a", "b")):
            for rank in range(ranks):
                own = list(range(rank, len(prompts), ranks))
                uids = [f"prompt {i}" for i in own]
                args = dict(n=case["samples"], schedule=fc.Solo(name), sampling=hot)
                args |= dict(seed=2 * seed + m, step=case["step"])
                for r in engine.generate([prompts[i] for i in own], uids=uids, **args):
                    rows[m, own[r.group], r.sample] = tuple(r.ids)
        return rows

    first, second = (streams(seed) for seed in case["base_seeds"])
    everything = [*first.values(), *second.values()]
    assert len(set(everything)) == len(everything) == want["distinct_streams_per_seed"]
    assert streams(case["base_seeds"][0]) == first  # reproduced
    assert streams(case["base_seeds"][0], ranks=case["ranks"]) == first  # resharding changes nothing
    assert all(first[k] != second[k] for k in first)


def test_c28_no_bos_and_no_eos_inside_a_context():
    """P4: a context grows by the ids that were written, whoever wrote them; its positions are its own count."""
    segments = [s[1:] for s in CASES["C28"]["input"]["segments_encoded_with_bos"]]
    scheduler = Scheduler([8, 8], 4)
    policy = scheduler.add_policy(CYCLE, [0, 1], max_gap=1, first=0, eos=(2,))
    row = scheduler.add([CASES["C28"]["input"]["B_bos"]], 0, 0, 8, policy)
    fed = []
    for turn, (token,) in enumerate(segments):
        plan = scheduler.plan(turn % 2)
        fed.append((plan.input_ids.tolist(), plan.position_ids.tolist()))
        scheduler.commit(turn % 2, [token], [0.0])
    want = CASES["C28"]["expected"]
    prompt, ids, _ = scheduler.view(row)
    assert [*prompt.tolist(), *ids.tolist()] == want["B_context"] and want["B_context"].count(1) == want["count_of_bos"]
    assert fed[1] == ([1, 10], [0, 1])  # the second model: all of it once, positions from 0
    assert list(range(4)) == want["B_position_ids"]


def test_c54_off_policy_steps_are_known_and_keep_their_old_logprobs(tmp_path):
    """No setting can split a generation unevenly: batches are whole optimiser steps. Which of them are off-policy (all
    but the first of each generation) is in the log, and exactly these see ratios other than 1."""
    case = CASES["C54"]["input"]
    size = case["micro_batches_per_generation"]
    for bad in ({"gradient_accumulation_steps": case["accumulation"]}, {"generation_batch_size": 6}):
        with pytest.raises(TypeError, match="unexpected keyword"):
            fc.GRPOConfig(num_generations=case["bad"]["group_size"], **bad)
    changes = dict(prompts_per_step=1, steps_per_generation=size, max_steps=case["micro_batches_run"])
    rows = [{"prompt": [3 + i, 4]} for i in range(size)]
    args = config(fc.GRPOConfig, tmp_path, learning_rate=1e-2, **changes)
    score = lambda completions, **kwargs: [float(len(set(c))) for c in completions]  # noqa: E731
    log = fc.train("grpo", {"policy": tiny_model("qwen3")}, rows, score, args).log_history
    stale = [r["step"] for r in log if r["policy_version_train"] != r["policy_version_rollout"]]
    assert stale == [step for step in range(1, case["micro_batches_run"] + 1) if (step - 1) % size]
    drifted = [r["step"] for r in log if abs(r.get("ratio/mean", 1) - 1) > 1e-6 or r.get("ratio/max", 1) - 1 > 1e-4]
    assert set(drifted) <= set(stale) and len(drifted) > len(stale) / 2


LOSS = """
import sys, json, warnings
sys.modules.update(json.loads(sys.argv[2]))  # None blocks an import
warnings.simplefilter("always")
import torch
import fastcollab
from fastcollab.losses import policy_loss
from fastcollab import engine, ops
lengths, token = json.loads(sys.argv[1])
ids = torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)])
value = torch.tensor([0.1 * (i + 1) + 0.01 * t for i, n in enumerate(lengths) for t in range(n)])
ones = torch.ones(len(lengths))  # fp32: fp64 is always the reference's
loss, _ = policy_loss(-value, -value, ones, ids >= 0, ids, form="reinforce", aggregation="token-mean")
print(json.dumps([float(loss), ops.impl_report()["native"], engine.NATIVE_ABSENT, ops.impl_report()["triton"]]))
"""


@pytest.mark.parametrize("environment", ["no compiler", "no triton", "repository root", "no extension"])
def test_c57_a_loss_wherever_it_is_installed(environment, tmp_path):
    """P29-P31: no build tool, no triton, the source folder as working directory, or no extension: the same loss."""
    case = CASES["C57"]
    env, blocked, cwd = dict(os.environ), {}, tmp_path
    if environment == "no compiler":
        env["PATH"] = str(tmp_path)
    elif environment == "no triton":
        env["CUDA_VISIBLE_DEVICES"], blocked = "", {"triton": None}
    elif environment == "repository root":
        cwd = ROOT
    else:
        blocked = {"fastcollab._C": None, "fastcollab._scheduler": None}
    lengths = CASES["C05"]["input"]["lengths"]
    command = [sys.executable, "-c", LOSS, json.dumps([lengths, 0]), json.dumps(blocked)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env)
    assert done.returncode == 0, done.stderr
    loss, native, scheduler, triton = json.loads(done.stdout)
    assert loss == pytest.approx(case["expected"]["result"], abs=1e-7)
    if environment == "no extension":
        said = [line for line in done.stderr.splitlines() if "UserWarning: fastcollab" in line]
        assert native and scheduler and len(said) == 1 and "in plain torch and Python" in said[0] and native in said[0]
    if environment == "no triton":
        assert triton == "triton is not installed"
    assert np.isfinite(loss)
