"""The install: symbols of the compiled modules; no compiler, a broken module, no triton."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastcollab import ops

ROOT = Path(__file__).parent.parent
native = pytest.mark.skipif(ops.NATIVE_ABSENT is not None, reason=str(ops.NATIVE_ABSENT))
needs_nm = pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not on PATH")


def imported(library: str | Path) -> set[str]:
    out = subprocess.run(["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True)
    return {line.split()[-1].split("@")[0] for line in out.stdout.splitlines()}


def mangled(names: set[str]) -> list[str]:
    """C++ names of at::, c10:: or torch::, the ones that change from one torch to the next."""
    return [name for name in names if name.startswith("_Z") and re.search(r"N[KVO]*(2at|3c10|5torch)", name)]


def origin(module: str) -> str:
    return importlib.util.find_spec(module).origin


@native
@needs_nm
def test_the_operators_import_only_the_stable_abi_of_2_11():
    python_library = Path(torch.__file__).parent / "lib/libtorch_python.so"
    assert mangled(imported(python_library))  # the check sees such names where they are
    names = imported(origin("fastcollab._C"))
    assert not mangled(names)
    lines = (Path(__file__).parent / "torch_2_11_symbols.txt").read_text().splitlines()
    known = {line for line in lines if not line.startswith("#")}
    stable = {name for name in names if name.startswith(("torch_", "aoti_"))}
    assert len(stable) > 20 and stable <= known
    assert "torch_library_set_python_module" not in known  # new in 2.13: the list is 2.11's
    assert not any(name.startswith(("cuda", "cu")) for name in names)  # cudart is inside, the driver is not needed


@needs_nm
def test_the_scheduler_knows_no_torch():
    if importlib.util.find_spec("fastcollab._scheduler") is None:
        pytest.skip("fastcollab._scheduler is not built")
    names = imported(origin("fastcollab._scheduler"))
    assert not mangled(names) and not any(name.startswith(("torch_", "aoti_")) for name in names)


@native
def test_cuda_code_loads_without_a_gpu():
    if not torch._C._dispatch_has_kernel_for_dispatch_key("fastcollab::copy_blocks", "CUDA"):
        pytest.skip("built without nvcc")
    assert ops.dispatch.absent("native", "copy_blocks", "cuda", (torch.float16,)) is None
    assert ops.dispatch.absent("native", "sample", "cuda", (torch.bfloat16,)) is None
    with ops.use_impl("native"):
        assert ops.dispatch.choose("sample", torch.device("cuda"), torch.float32)[0] == "native"
    lack = "fastcollab._C has no paged_attention for cuda"
    assert ops.dispatch.absent("native", "paged_attention", "cuda", (torch.float32,)) == lack


SIMULATION = """
import importlib.machinery, importlib.util, os, sys, tempfile, warnings
import torch

sys.modules["triton"] = None  # import triton raises, as where it is not installed
folder = tempfile.mkdtemp()
broken = {"empty": b"", "garbage": b"not a library at all" * 100}
for name, content in broken.items():
    with open(f"{folder}/{name}.so", "wb") as file:
        file.write(content)
open(f"{folder}/old.py", "w").close()  # loads, but registers no operator


class Finder:
    def __init__(self, path):
        self.path = path

    def find_spec(self, name, path=None, target=None):
        if name == "fastcollab._C":
            return importlib.util.spec_from_file_location(name, self.path)


def fresh_import(path):
    for name in [name for name in sys.modules if name.split(".")[0] == "fastcollab"]:
        del sys.modules[name]
    finder = Finder(path)
    sys.meta_path.insert(0, finder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import fastcollab
        from fastcollab import ops
    sys.meta_path.remove(finder)
    return ops, [str(w.message) for w in caught if "fastcollab" in str(w.message)]


expected = {"empty.so": "does not load", "garbage.so": "does not load", "old.py": "lacks paged_attention"}
for file, reason in expected.items():
    ops, messages = fresh_import(f"{folder}/{file}")
    assert len(messages) == 1 and reason in messages[0], (file, messages)
    assert ops.impl_report()["native"] and "triton is not installed" == ops.impl_report()["triton"]
    one = torch.ones(1)
    law = (one, one.int(), one, one * 0, one.long(), one.int(), one.int())
    assert int(ops.sample(torch.tensor([[0.0, 5.0]]), *law)[0]) == 1
    try:
        with ops.use_impl("native"):
            ops.sample(torch.zeros(1, 2), *law)
    except RuntimeError as error:
        assert reason in str(error) and "sample: got the forced implementation 'native'" in str(error), error
    else:
        raise AssertionError("a forced implementation that is absent must raise")

os.environ["FASTCOLLAB_IMPL"] = "gpu"
try:
    fresh_import(f"{folder}/old.py")
except ValueError as error:
    assert "FASTCOLLAB_IMPL: got 'gpu', need reference or native or triton" in str(error), error
else:
    raise AssertionError("an unknown implementation must raise")
print("simulated")
"""


def test_a_broken_module_counts_as_absent_and_triton_may_be_missing():
    done = subprocess.run([sys.executable, "-c", SIMULATION], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.strip() == "simulated", done.stderr


def build(folder: Path, **environment: str) -> subprocess.CompletedProcess:
    env = {**os.environ, **environment}
    command = [sys.executable, "setup.py", "--quiet", "build", "--build-base", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)


def test_without_a_compiler_the_build_is_pure_python(tmp_path):
    done = build(tmp_path, CXX="no-such-compiler")
    assert done.returncode == 0, done.stderr
    assert "no C++ compiler (no-such-compiler) on PATH: fastcollab is installed as pure Python" in done.stderr
    package = tmp_path / "lib/fastcollab"
    assert not list(tmp_path.rglob("*.so"))
    assert (package / "ops/dispatch.py").exists() and (package / "reference/random.py").exists()
    assert (package / "kernels/__init__.py").exists() and not (tmp_path / "lib/kernels").exists()


def test_the_compiler_is_looked_for_by_name(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("fastcollab_setup", ROOT / "setup.py")
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    tool = tmp_path / "clang++"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert setup.find_compiler() == "clang++"
    monkeypatch.setenv("CXX", f"{tool} -m64")
    assert setup.find_compiler() == f"{tool} -m64"
    monkeypatch.setenv("CXX", "g++-99")
    assert setup.find_compiler() is None
    monkeypatch.setenv("FASTCOLLAB_CUDA", "0")
    assert setup.find_nvcc() is None
