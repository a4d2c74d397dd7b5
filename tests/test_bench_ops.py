"""The operator bench: every case agrees with its baselines, a wrong variant stops it, and memory is what it says."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from fastcollab import ops as operators
from fastcollab.bench import __main__ as command
from fastcollab.bench import harness, op_baselines, op_cases, op_decode, op_train, ops

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEAD, LOSS = {"N": 24, "D": 32, "V": 301}, {"B": 3, "T": 17}
CACHE = {"rows": 3, "cached": 37, "heads": 4, "kv_heads": 2, "width": 16}
SMALL = {
    "linear_logprob": HEAD,
    "linear_policy_loss": HEAD,
    "policy_loss": LOSS,
    "advantage_regression": LOSS,
    "paged_attention": CACHE,
    "handoff": CACHE,
    "packed_attention": {"G": 3, "prompt": 13, "completion": 5, "heads": 4, "kv_heads": 2, "width": 16},
    "sample": {"rows": 3, "V": 99},
    "copy_blocks": {"pools": 3, "blocks": 9, "pairs": 2, "kv_heads": 2, "width": 8},
}
FLOORS = harness.Floors(10.0, 100.0)


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    """torch.compile takes seconds for each variant."""
    monkeypatch.setattr(op_baselines, "_no_compiler", lambda device: "not in this test")


def small(case: op_cases.Case) -> op_cases.Case:
    return replace(case, shape=case.shape | SMALL[case.op])


def problems(op: str, device: torch.device = CPU, **changes) -> list[op_cases.Problem]:
    case = replace(next(case for case in op_cases.CASES if case.op == op), **changes)
    return list(ops.problems(small(case), device))


@pytest.mark.parametrize("case", op_cases.CASES, ids=lambda case: f"{case.op}, {case.label}")
def test_all_variants_of_a_case_agree(case):
    if reason := ops.absent(case.op):
        pytest.skip(reason)
    found = list(ops.problems(small(case), DEVICE))
    for problem in found:
        result = ops.measure(problem, FLOORS, DEVICE, most_s=0.0)
        ours, *others = result["variants"].values()
        assert others and ours["ours_x"] == 1 and ours["runs"] == 2
        assert all(v["wall_s"] > 0 and v["gb_s"] == pytest.approx(problem.bytes / v["wall_s"] / 1e9)
                   for v in result["variants"].values())  # fmt: skip
        assert result["floor_s"] == FLOORS.forward_s(problem.bytes, problem.flops) > 0
        text = ops.show(result)
        assert all(name in text for name in [*result["variants"], *result["absent"], case.op])
    training = op_train.__name__ == ops.BUILDERS[case.op].__module__
    assert [p.phase for p in found][-1] == ("forward + backward" if training else "forward")


def test_the_bench_does_not_speak_while_wrong(monkeypatch):
    right = operators.linear_logprob
    monkeypatch.setattr(operators, "linear_logprob", lambda *args: (right(*args)[0] + 1e-2, None))
    forward = problems("linear_logprob")[0]
    monkeypatch.setattr(harness, "interleave", lambda *args: pytest.fail("timed"))
    with pytest.raises(RuntimeError, match="fastcollab: got an error of .* in linear_logprob forward, N=.* <= 1e-05"):
        ops.measure(forward, FLOORS, CPU, 0.0)


def test_ours_is_exact_with_16_bit_weights_and_a_peer_need_not_be(monkeypatch):
    right, off = operators.linear_logprob, 1 + 2e-5
    monkeypatch.setattr(operators, "linear_logprob", lambda *args: (off * right(*args)[0], None))
    with pytest.raises(RuntimeError, match="fastcollab: got an error of 2e-05 .*bfloat16, need <= 1e-05"):
        ops.check(problems("linear_logprob", dtype=torch.bfloat16)[0])
    monkeypatch.setattr(operators, "linear_logprob", right)
    forward = problems("linear_logprob", dtype=torch.bfloat16)[0]
    errors = ops.check(forward)
    assert errors["fastcollab"] < 1e-5 < errors["eager"] < 5e-2


def test_a_peer_far_too_slow_is_called_once(monkeypatch):
    now, called, missing = 0.0, [], {"x": "not installed"}

    def problem(seconds, answer=1.0):
        """Variants that take the seconds of their first call, and later those of the others."""

        def call(name):
            nonlocal now
            called.append(name)
            now += seconds[name][0 if called.count(name) == 1 else -1]
            return torch.full((1,), answer)

        calls = {name: partial(call, name) for name in seconds}
        return op_cases.Problem(op_cases.CASES[0], "forward", 1.0, 1.0, lambda: [torch.ones(1)], calls, missing)

    monkeypatch.setattr(harness, "time", SimpleNamespace(perf_counter=lambda: now, process_time=lambda: now))
    seconds = {"fastcollab": [5], "fastcollab, unshared": [40], "near": [12], "far": [41.2], "torch.compile": [300, 6],
               "CCE": [90, 20], "Liger": [12]}  # fmt: skip
    result = ops.measure(problem(seconds), FLOORS, CPU, most_s=0.0)
    assert result["absent"] == missing | {"far": "41.2 s at its one call, 8.2 x ours: not timed again",
                                          "CCE": "20.0 s at its one call, 4.0 x ours: not timed again"}  # fmt: skip
    assert missing == {"x": "not installed"}  # shared with the next phase
    assert list(result["variants"]) == [name for name in seconds if name not in ("far", "CCE")]
    counts = {name: called.count(name) for name in seconds}  # 1 check, 1 for memory, 2 rounds
    assert counts == dict.fromkeys(seconds, 4) | {"far": 1, "CCE": 2, "torch.compile": 5}
    assert "far: 41.2 s" in ops.show(result)
    assert len(ops.measure(problem({"fastcollab": [2], "far": [9.9]}), FLOORS, CPU, 0.0)["variants"]) == 2
    with pytest.raises(RuntimeError, match="far: got an error"):
        ops.check(problem({"far": [100]}, answer=0.0))


@pytest.mark.parametrize(("op", "name", "output"), [
    ("linear_logprob", "row chunks", 2), ("policy_loss", "eager", 1), ("policy_loss", "eager", 2),
    ("advantage_regression", "eager", 2), ("packed_attention", "SDPA, unshared", 3), ("sample", "Gumbel argmax", 1),
    ("copy_blocks", "index_copy_", 0), ("handoff", "fastcollab, lag 16", 0),
])  # fmt: skip
def test_a_wrong_output_is_seen_in_every_place(op, name, output):
    """The last phase with one output of one variant off by a percent: gradients and metrics are compared as well."""
    problem = problems(op)[-1]
    call = problem.calls[name]

    def wrong():
        result = call()
        if op == "copy_blocks":
            return None  # what it wrote is spoiled below
        if op in ("policy_loss", "advantage_regression"):
            values, metrics = result
            parts = [*values, metrics]
        else:
            parts = [result] if isinstance(result, torch.Tensor) else list(result)
        off = parts[output]
        parts[output] = [1.01 * x for x in off] if isinstance(off, list) else 1.01 * off
        if op in ("policy_loss", "advantage_regression"):
            return tuple(parts[:-1]), parts[-1]
        return parts[0] if isinstance(result, torch.Tensor) else tuple(parts)

    problem.calls[name] = wrong
    if op == "copy_blocks":
        view = problem.view[name]
        problem.view[name] = lambda result: [1.01 * x for x in view(result)]
        problem.tolerance = 1e-3
    with pytest.raises(RuntimeError, match=f"{name}: got an error"):
        ops.check(problem)


def test_error_is_relative_and_infinite_for_nonsense():
    want = torch.tensor([2.0, -4.0])
    assert ops.error_of([want + 1], [want]) == pytest.approx(0.25)
    assert ops.error_of([want, None], [want, want]) == 0
    assert ops.error_of([torch.tensor([0.5])], [torch.zeros(1)]) == 0.5
    assert ops.error_of([None], [want]) is None
    for bad in (torch.tensor([2.0, torch.nan]), torch.zeros(3), torch.tensor([2.0, torch.inf])):
        assert ops.error_of([bad], [want]) == float("inf")


def test_labels_tell_cases_apart():
    labels = [(case.op, case.label) for case in op_cases.CASES]
    assert len(set(labels)) == len(labels)
    assert {case.op for case in op_cases.CASES} == set(operators.dispatch.OPS) | {"handoff"} == set(ops.BUILDERS)
    head = op_cases.CASES[0]
    assert (head.label, head.sized(True).label) == ("N=2048 D=1024 V=151936 float32", "N=512 D=1024 V=32768 float32")
    assert head.sized(False) is head


def test_least_work():
    forward, both = problems("linear_logprob", dtype=torch.bfloat16)
    assert (forward.flops, both.flops) == (2 * 24 * 32 * 301, 6 * 24 * 32 * 301)
    assert (forward.bytes, both.bytes) == (2 * 32 * (24 + 301), 4 * 32 * (24 + 301))
    paged = problems("paged_attention")[0]
    assert paged.bytes == 2 * 4 * 3 * 38 * 2 * 16 and paged.flops == 4 * 3 * 38 * 4 * 16
    packed = problems("packed_attention")[0]
    pairs = sum(range(1, 14)) + 3 * sum(13 + i for i in range(1, 6))
    assert packed.flops == 4 * 4 * 16 * pairs


def test_a_step_continues_each_row():
    """Lag 5 beside two decode rows: the new tokens' slots follow the cached ones in the row's own pages."""
    cache = op_decode.Cache(small(next(c for c in op_cases.CASES if c.op == "handoff")), CPU)
    step = cache.step([1, 1, 5])
    assert step.indptr.tolist() == [0, 1, 2, 7] and step.kv_len.tolist() == [38, 38, 42]
    pages = cache.table[2]
    assert step.slots[2:].tolist() == [int(pages[p // 16]) * 16 + p % 16 for p in range(37, 42)]
    assert cache.read_bytes([1, 1, 5]) == 2 * 4 * (3 * 37 + 7) * 2 * 16
    assert sorted(cache.table.flatten().tolist()) == list(range(cache.table.numel())) != cache.table.flatten().tolist()


def test_packings_hold_the_same_tokens():
    shared, unshared, index = op_train._packings(2, 3, 2)
    assert index.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 5, 6]
    assert (shared.num_tokens, unshared.num_tokens) == (7, 10)
    assert shared.start.tolist() == [0, 3, 5] and shared.prefix_length.tolist() == [0, 3, 3]


def test_extra_memory_leaves_out_what_is_returned():
    def call():
        temporary = torch.ones(16 << 20, device=DEVICE)  # 64 MiB
        return {"result": [temporary[: 4 << 20] + 1, None]}  # 16 MiB

    call()
    extra = harness.extra_memory(call, DEVICE)
    assert extra is None or 60 << 20 < extra < 72 << 20
    assert harness.tensor_bytes(call()) == 16 << 20


def test_only_replaces_its_own_results(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness, "measure_floors", lambda device: FLOORS)
    monkeypatch.setattr(ops, "CASES", tuple(small(c) for c in op_cases.CASES if c.op in ("sample", "copy_blocks")))
    monkeypatch.setattr(ops, "MOST_S", 0.0)
    path = tmp_path / "m.json"
    ops.run(path)
    before = json.loads(path.read_text())["ops"]["problems"]
    assert [p["op"] for p in before] == ["sample", "sample", "copy_blocks"]
    ops.run(path, only="sample rows=3 V=99 top_k=50")
    after = json.loads(path.read_text())["ops"]["problems"]
    assert [p["op"] for p in after] == ["sample", "copy_blocks", "sample"] and after[:2] == [before[0], before[2]]
    assert after[2]["case"] == before[1]["case"]
    assert "sample native" in capsys.readouterr().out or operators.NATIVE_ABSENT


def test_an_operator_that_is_absent_is_skipped_with_its_reason(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness, "measure_floors", lambda device: FLOORS)
    monkeypatch.delattr(operators, "copy_blocks")
    ops.run(tmp_path / "m.json", only="copy_blocks")
    assert "copy_blocks: skipped, fastcollab.ops has no copy_blocks" in capsys.readouterr().out


def test_the_command_hands_on_its_arguments(monkeypatch, tmp_path):
    calls = []
    for name in ("ops", "rollout", "handoff", "corl", "mintrl", "kernels"):
        module = getattr(command, name)
        monkeypatch.setattr(module, "run", lambda *args, name=name: calls.append((name, *args)) or 7)
    out = tmp_path / "x.json"
    assert command.main(["ops", "--quick", "--device", "cpu", "--only", "head", "--out", str(out)]) == 0
    assert command.main(["kernels", "--out", str(out)]) == 7
    assert command.main(["all", "--device", "cpu", "--out", str(out)]) == 0
    assert calls == [("ops", out, True, "cpu", "head"), ("kernels", out, ""), ("ops", out, False, "cpu", ""),
                     *((name, out, False, "cpu") for name in ("rollout", "handoff", "corl", "mintrl"))]  # fmt: skip
