"""The offline compiler catches planted faults, and bench/results/kernels.json lists what the code does now."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter

import pytest

from fastcollab.bench import harness, kernels
from fastcollab.ops import dispatch

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def listed():
    """What would be compiled now."""
    return kernels.keys()


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_planted_faults_are_caught(target, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # as in the tests of the kernels; compiling needs it off
    right, spills, shared, broken = kernels.compile_all(["planted_kernels"], [target])
    assert kernels.fault(right) is None and right["registers"] > 0 and right["binary_bytes"] > 1000
    assert right["kernel"] == "planted_kernels.double" and right["target"] == target
    assert right["config"] == {"BLOCK": 1024, "types": "*fp32 *fp32 i64", "num_warps": 4, "num_stages": 2}
    assert spills["spills"] > 0 and "spills: got" in kernels.fault(spills) and "shared" not in kernels.fault(spills)
    assert "shared: got" in kernels.fault(shared) and shared["shared"] > kernels.TARGETS[target][1]
    assert "CompilationError" in kernels.fault(broken)
    assert kernels.keys(["planted_kernels"], [target])[1] == {k: spills[k] for k in ("kernel", "target", "config")}


@pytest.mark.parametrize(("target", "limit"), [("sm_80", 163), ("sm_90", 227), ("sm_100", 227), ("gfx942", 64)])
def test_shared_memory_has_a_limit(target, limit):
    entry = {"kernel": "k", "target": target, "spills": 0, "shared": limit * 1024}
    assert kernels.fault(entry) is None
    assert kernels.fault(entry | {"shared": limit * 1024 + 1}) == (
        f"shared: got {limit * 1024 + 1} bytes, need <= {limit * 1024}"
    )


AMD = """
    .agpr_count: 3
    .sgpr_count: 40
    .sgpr_spill_count: {}
    .vgpr_count: 130
    .vgpr_spill_count: {}
"""


@pytest.mark.parametrize(("scalar", "vector"), [(0, 0), (2, 0), (0, 5)])
def test_amd_spills_of_both_kinds_count(scalar, vector):
    assert kernels._amd_resources(AMD.format(scalar, vector)) == {"registers": 130, "spills": scalar + vector}


@pytest.mark.parametrize("spills", [0, 8])
def test_run_writes_the_list_and_fails_for_a_fault(spills, tmp_path, monkeypatch, capsys):
    entry = {"kernel": "m.k", "target": "sm_90", "config": {"BLOCK": 64}}
    entry |= {"registers": 40, "spills": spills, "shared": 512, "binary_bytes": 6000}
    monkeypatch.setattr(kernels, "compile_all", lambda modules: [entry])
    assert kernels.run(tmp_path / "new" / "kernels.json") == (1 if spills else 0)
    assert json.loads((tmp_path / "new" / "kernels.json").read_text()) == [entry]
    said = capsys.readouterr()
    monkeypatch.setattr(kernels, "results_folder", lambda: tmp_path)
    assert kernels.run(only="k") == (1 if spills else 0) and not (tmp_path / "kernels.json").exists()
    assert "m.k sm_90" in said.out and ("spills: got 8, need 0" in said.err) == bool(spills)


def test_sizes_that_a_launch_does_not_specialise_are_not_taken_for_aligned():
    case = ("fastcollab.kernels.paged_attention", "sm_90", 1)  # merge_pieces: five tensors, then rows, splits, window
    with kernels._pool(1) as pool:
        assert pool.submit(kernels._aligned, case).result() == [0, 1, 2, 3, 4]


def test_launches_of_two_dtypes_and_without_pieces_are_listed(listed):
    configs = [entry["config"] for entry in listed]
    for name in ("WIDEN", "MERGE"):
        assert {config[name] for config in configs if name in config} == {True, False}, name


def test_nothing_to_compile_is_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "compile_all", lambda modules: [])
    assert kernels.run(tmp_path / "kernels.json") == 1


def test_results_are_of_these_kernels(listed):
    """Else run ``fastcollab bench kernels``."""
    recorded = json.loads((harness.results_folder() / "kernels.json").read_text())
    assert [{k: entry[k] for k in ("kernel", "target", "config")} for entry in recorded] == listed
    assert not [entry for entry in recorded if kernels.fault(entry)]


def test_every_triton_operator_is_listed_for_every_target(listed):
    found = {(entry["kernel"].split(".")[0], entry["target"]) for entry in listed}
    there = [op for op in dispatch.OPS if importlib.util.find_spec(f"fastcollab.kernels.{op}")]
    assert {(op, target) for op in there for target in kernels.TARGETS} <= found
    names = [json.dumps(entry) for entry in listed]
    assert len(names) == len(set(names))  # two of one name could not be told apart


def test_one_kernel_of_each_module_compiles(listed):
    """The last that it lists, mostly a small one; ``fastcollab bench kernels``, part of .ci/run, compiles them all."""
    counts = Counter(entry["kernel"].split(".")[0] for entry in listed if entry["target"] == "sm_90")
    jobs = [(f"fastcollab.kernels.{module}", "sm_90", count - 1) for module, count in counts.items()]
    with kernels._pool(1) as pool:
        assert [kernels.fault(entry) for entry in pool.map(kernels._compile, jobs)] == [None] * len(jobs)
