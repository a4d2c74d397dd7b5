"""The bench's baselines write exactly what the engine writes, and the harness times, floors and saves as it says."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
import torch

from fastcollab.bench import corl, handoff, harness, mintrl, models, peers, rollout

VOCAB = 97


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Models as small as these spend their time at thread barriers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def pair():
    shape = dict(vocab=VOCAB, hidden=32, layers=2, heads=2, kv_heads=1)
    return {name: models.random_model(seed, **shape) for seed, name in enumerate(rollout.WRITERS)}


@pytest.fixture(scope="module")
def engine(pair):
    return rollout.engine_of(pair)


def write(engine, prompts, schedule=None):
    return engine.generate(prompts, schedule=schedule or rollout.word_schedule(VOCAB), sampling=rollout.greedy(20))


@pytest.fixture(scope="module")
def ragged():
    """Prompts of different lengths: every peer has to pad, mask and shift positions."""
    return [models.random_prompts(1, length, VOCAB, seed=length)[0] for length in (3, 11, 7, 1, 6)]


def test_peers_write_the_engines_ids(engine, pair, ragged):
    rollouts = write(engine, ragged)
    authors, want = [r.author.tolist() for r in rollouts], [r.ids for r in rollouts]
    both = list(pair.values())
    assert len({tuple(a) for a in authors}) == len(authors)  # rows on their own turns
    assert sum(0 < sum(a) < len(a) for a in authors) >= 4  # both models speak in most of them
    assert peers.lockstep(both, ragged, authors) == want
    assert peers.reprefill(both, ragged, authors) == want
    for prompt, author, ids in zip(ragged, authors, want, strict=True):
        assert peers.kept_cache(both, [prompt], [author]) == [ids]
    assert peers.solo(both[0], ragged, 20) == [r.ids for r in write(engine, ragged, rollout.fc.Solo("senior"))] != want


def test_peers_take_rows_of_different_length(pair, ragged):
    authors = [[0, 0, 1], [1], [0, 1, 0, 1, 1], [0, 0], [1, 0, 1]]
    both = list(pair.values())
    got = peers.lockstep(both, ragged, authors)
    assert [len(ids) for ids in got] == [3, 1, 5, 2, 3]
    assert got == peers.reprefill(both, ragged, authors)
    for prompt, author, ids in zip(ragged, authors, got, strict=True):
        assert peers.kept_cache(both, [prompt], [author]) == [ids]


def test_kept_cache_refuses_a_batch(pair):
    with pytest.raises(ValueError, match="prompts: got 2, need 1"):
        peers.kept_cache(list(pair.values()), [[1], [2]], [[0], [0]])


@pytest.mark.parametrize(("start", "want"), [(0, 2), (1, 1), (2, 1), (3, 3), (5, 1)])
def test_run_length(start, want):
    assert peers.run_length([0, 0, 1, 0, 0, 0], start) == want


def test_case_reports_every_variant(engine, pair):
    floors = harness.Floors(10.0, 100.0)
    case = rollout.Case(rows=2, prompt=5, rounds=1, new_tokens=12)
    result = rollout.run_case(engine, pair, case, floors)
    for name, variant in result["variants"].items():
        assert variant["rows_equal"] == 2, name
        assert variant["tokens_per_s"] == pytest.approx((48 if name == rollout.DOUBLE else 24) / variant["wall_s"])
    assert result["variants"][rollout.ENGINE]["engine_x"] == 1
    assert 1 <= result["mean_turn"] <= 12
    assert rollout.LOCKSTEP in rollout.show_case(result)


def test_turns():
    rollout_of = rollout.fc.Rollout
    authors = np.array([1, 1, 0, 1, 0, 0], np.uint8)
    assert rollout.turns(rollout_of([1], [2] * 6, authors, rollout.WRITERS, np.zeros(6, np.float32), "length")) == 4


def test_handoff_plan():
    """Lag 3, twice: the receiver's first tokens are at 4 and 12, and the rest of its turns are decode steps."""
    writers, first, decodes = handoff.plan(lag=3, handoffs=2)
    assert writers == [0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    assert first == [4, 12] and decodes == [5, 6, 7, 8, 13, 14, 15, 16]
    assert all(writers[t - 1] == 1 and writers[t] == 0 for t in first)
    assert all(writers[t - 1] == 0 and writers[t] == 0 for t in decodes)


def test_handoff_is_one_forward_of_all_rows(engine):
    engine.reset_stats()
    handoffs, decodes = handoff.measure(engine, rows=3, lag=4)
    writers = handoff.plan(4, handoff.HANDOFFS[4])[0]
    assert len(handoffs) == handoff.HANDOFFS[4] and len(decodes) == handoff.DECODES * len(handoffs)
    assert handoffs[:, 0].min() > 0 and decodes[:, 0].min() > 0
    assert engine.stats()["forwards"] == len(writers)  # a hand-off adds no forward of its own


def test_handoff_table(engine, pair, monkeypatch):
    monkeypatch.setattr(handoff, "ROUNDS", {2: 1})
    monkeypatch.setattr(handoff, "LAGS", (1, 4))
    lines = handoff.run_rows(engine, pair, 2, harness.Floors(1e6, 100.0))
    assert [v["lag"] for v in lines] == [1, 4]
    head = VOCAB * 32
    body = sum(p.numel() for p in pair["senior"].parameters()) - head
    assert lines[1]["floor_s"] * 100e9 == pytest.approx(2 * 2 * (5 * body + head))  # 2 rows, 2 flops, 4 + 1 tokens
    assert "2 rows, lag 4" in handoff.show(lines)


def test_interleave_counts_rounds_and_rests_slow_variants():
    calls = []
    variants = {
        "a": lambda: calls.append("a"),
        "b": lambda: calls.append("b"),
        "slow": lambda: (calls.append("slow"), time.sleep(0.02)),
    }
    timings = harness.interleave(variants, rounds=3, most_s=0.01)
    assert calls == ["a", "b", "slow", "b", "a", "a", "b"]
    assert [len(timings[k].walls) for k in variants] == [3, 3, 1]
    assert timings["slow"].wall >= 0.02 > timings["slow"].cpu
    assert len(harness.interleave({"slow": variants["slow"]}, 3, most_s=0.01, least=2)["slow"].walls) == 2


def test_timing_is_the_median():
    timing = harness.Timing([3.0, 1.0, 9.0], [1.0, 2.0, 4.0])
    assert timing.to_dict() == {"wall_s": 3.0, "cpu_s": 2.0, "walls_s": [3.0, 1.0, 9.0]}


def test_floor_is_the_longer_of_bytes_and_flops():
    floors = harness.Floors(read_gb_s=10, gemm_gflop_s=100)
    assert floors.forward_s(1e10, 1e9) == pytest.approx(1.0)
    assert floors.forward_s(1e9, 1e12) == pytest.approx(10.0)
    tensor_cores = harness.Floors(read_gb_s=10, gemm_gflop_s=100, bf16_gflop_s=1000)
    assert tensor_cores.forward_s(1e9, 1e12, torch.bfloat16) == pytest.approx(1.0)
    assert tensor_cores.forward_s(1e9, 1e12) == pytest.approx(10.0)


def test_floors_are_measured():
    floors = harness.measure_floors(repeats=1)
    assert 0.1 < floors.read_gb_s < 1e4 and 0.1 < floors.gemm_gflop_s < 1e6 and floors.bf16_gflop_s == 0


def test_results_are_named_after_the_device(monkeypatch):
    monkeypatch.setattr(harness, "cpu_name", lambda: "Intel(R) Xeon(R) CPU @ 2.20GHz")
    monkeypatch.setattr(harness.os, "cpu_count", lambda: 4)
    assert harness.default_path().name == "intel-xeon-cpu-2-20ghz-4.json"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert harness.default_path("cuda").name == "nvidia-h200.json"
    assert harness.default_path().parent.name in ("results", "bench-results")


def test_headline_names_floors_and_warns_on_a_busy_machine(monkeypatch):
    for load, busy in ((0.1, False), (3.0, True)):
        monkeypatch.setattr(harness.os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        text = harness.headline(harness.Floors(12.34, 56.7))
        assert "12.3 GB/s" in text and "57 GFLOP/s" in text and ("busy machine" in text) == busy


def test_save_replaces_one_section(tmp_path):
    path = tmp_path / "new" / "m.json"
    harness.save("one", {"x": 1.23456789}, path)
    harness.save("two", {"x": [2.0]}, path)
    harness.save("one", {"y": 3}, path)
    found = json.loads(path.read_text())
    assert found["one"]["y"] == 3 and "x" not in found["one"] and found["two"]["x"] == [2.0]
    assert found["two"]["machine"]["threads"] == torch.get_num_threads()


def test_table_lines_up():
    lines = harness.table(["name", "v"], [["a", "1.25"], ["long name", "3"]]).splitlines()
    assert lines == ["name          v", "---------  ----", "a          1.25", "long name     3"]


def test_corl_measures_equal_work(monkeypatch):
    """Every model of the cohort and the solo policy write as many rollouts to as many prompts."""
    small = dict(prompts_per_step=2, num_generations=2, max_completion_length=6, kv_memory="8MiB")
    monkeypatch.setattr(corl, "SETTINGS", corl.SETTINGS | small)
    monkeypatch.setattr(corl, "MODELS", (2,))
    (line,) = corl.measure("cpu", rounds=2)
    assert line["models"] == 2 and line["runs"] == 2 and 0 < line["voting_share"] < 1
    assert line["of_solo_steps"] == pytest.approx(line["step_s"] / (2 * line["solo_step_s"]))
    assert corl.grade("add 1 + 2 : 3\n answer 12") == corl.grading.key("12") and corl.grade("12") is None


@pytest.fixture(scope="module")
def reviewed():
    """A run of each variant of a small case, and what they wrote."""
    tokens = mintrl.tokenizer()
    case = mintrl.Case(rows=6, new_tokens=120, rounds=1, prompt=7, chunk=24, max_tokens=8)
    both = [mintrl.writer(seed, tokens, hidden=64, layers=2, heads=2, kv_heads=1) for seed in (0, 1)]
    with torch.no_grad():
        for weight in [w for model in both for w in model.model.layers.parameters() if w.dim() == 2]:
            weight.mul_(4)  # else models this small repeat one word
    runs = mintrl.Runs(case, *both)
    runs.script.every = 2
    runs.loop.learn = lambda rollouts: None  # the loop finds the ends of chunks by itself
    return runs, {name: call() for name, call in runs.calls().items()}


def test_mintrl_writes_texts_that_cross_as_they_are(reviewed):
    """What the models write is encoded as it was written, so that the verifier reads each token once."""
    runs, ids = reviewed
    for row in ids[mintrl.REVIEWED]:
        assert runs.tokens(runs.tokens.decode(row))["input_ids"] == row


def test_mintrl_loop_writes_what_the_engine_writes(reviewed):
    runs, ids = reviewed
    assert ids[mintrl.REVIEWED] == ids[mintrl.REPREFILL] != ids[mintrl.SOLO]
    found = dict(runs.loop.lengths)
    assert ids[mintrl.REPREFILL] == runs.reprefill() and found == runs.loop.lengths  # it knows where chunks end
    mintrl.Reprefill.learn(runs.loop, runs.rollouts)
    assert found == runs.loop.lengths  # as the engine found them
    assert all(len(row) == 120 for found in ids.values() for row in found)
    assert runs.loop.engine.stats()["cached"] == runs.loop.verifier.engine.stats()["cached"] == 0


def test_mintrl_figures_are_counts_of_the_rollouts(reviewed):
    runs, _ = reviewed
    found = runs.figures()
    runs.solo()  # which uses the same engine
    assert runs.figures() == found
    logs = [cut for r in runs.rollouts for cut in r.interventions]
    assert found["interventions"] == len(logs) >= 3 and found["outcomes"]["intervention"] == len(logs)
    assert found["external_share"] == pytest.approx(sum(len(cut.inserted) for cut in logs) / 720)
    dropped = sum(len(cut.dropped) for cut in logs)
    assert found["dropped_share"] == pytest.approx(dropped / (720 + dropped)) and dropped > 0


def test_mintrl_script_spares_the_verifier_no_choice():
    """The model chooses between KEEP and REVISE at every review; where the script revises, a number as well."""
    tokens = mintrl.tokenizer()
    script = mintrl.Script(tokens, every=2)
    request = mintrl.Request("task", (), ("one\n\n", "two\n\n", "three"), {"row": 1})
    keep, revise = script(request), script(request)  # row 1 is revised at its reviews 1, 3, ...
    assert set(keep.values()) == {mintrl.Keep()} and set(revise.values()) == {mintrl.Revise(1)}
    real = mintrl.verifiers.verdict_choices(tokens, request, tokens.eos_token_id)
    first = {ids[0] for ids in real}
    assert len(first) == 2 and first == {ids[0] for ids in keep} == {ids[0] for ids in revise}
    for start in first:
        assert len([ids for ids in revise if ids[0] == start]) == 3 and len([k for k in keep if k[0] == start]) == 1
    assert set(real) > set(keep)
