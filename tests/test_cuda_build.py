"""Every CUDA source compiles for every architecture of the wheel, and no kernel of them spills a register."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("fastcollab_setup", ROOT / "setup.py")
setup = importlib.util.module_from_spec(spec)
spec.loader.exec_module(setup)
NVCC = setup.find_nvcc()
pytestmark = pytest.mark.skipif(NVCC is None, reason="nvcc is not on PATH")
REPORT = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<arch>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?:[^\n]*?(?P<shared>\d+) bytes smem)?",
    re.DOTALL,
)

SPILLING = """
__global__ void __launch_bounds__(1024) spill(float* p) {
  float x[96];
  #pragma unroll
  for (int i = 0; i < 96; ++i) x[i] = p[i * 1024 + threadIdx.x];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 96; ++i) p[(95 - i) * 1024 + threadIdx.x] = x[i] * x[(i + 1) % 96];
}
"""


def resources(source: Path, folder: Path) -> list[dict]:
    """What ptxas reports of each kernel and architecture: stack, spill stores and loads, registers, shared bytes."""
    archs = [flag for arch in setup.CUDA_ARCHS if "code=sm_" in arch for flag in ("-gencode", arch)]
    command = [NVCC, *archs, *setup.NVCC_FLAGS, "-Xptxas", "-v", "-c", str(source), "-o", str(folder / "kernel.o")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "): warning" not in done.stderr, done.stderr
    found = [match.groupdict() for match in REPORT.finditer(done.stderr)]
    assert len(found) == done.stderr.count("Compiling entry function")
    return [{k: v if k in ("name", "arch") else int(v or 0) for k, v in kernel.items()} for kernel in found]


@pytest.mark.parametrize("source", setup.sources("csrc/cuda/*.cu"))
def test_cuda_sources_compile_without_spills(source, tmp_path):
    kernels = resources(ROOT / source, tmp_path)
    assert {kernel["arch"] for kernel in kernels} == {"sm_80", "sm_90"}
    for kernel in kernels:
        assert kernel["stack"] == kernel["stores"] == kernel["loads"] == 0, kernel
        assert kernel["registers"] * 1024 <= 65536 or Path(source).stem != "sample", kernel  # one block fits
        assert kernel["shared"] <= 48 * 1024, kernel


def test_the_check_sees_a_spill(tmp_path):
    source = tmp_path / "spill.cu"
    source.write_text(SPILLING)
    assert all(kernel["stores"] > 0 and kernel["loads"] > 0 for kernel in resources(source, tmp_path))
