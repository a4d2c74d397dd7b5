"""The Triton kernels compiled offline for every target, no GPU needed: registers, spills, shared memory, size.

Each module of fastcollab.kernels lists its launches in ``offline_cases(target)``. A spill, or more shared memory than
the chip has, is a fault: a launch that would fail there or crawl.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from fastcollab.bench.harness import results_folder, table

# target -> (backend, architecture, warp size), shared memory of a block in bytes
TARGETS: dict[str, tuple[tuple[str, Any, int], int]] = {
    "sm_80": (("cuda", 80, 32), 163 << 10),
    "sm_90": (("cuda", 90, 32), 227 << 10),
    "sm_100": (("cuda", 100, 32), 227 << 10),
    "gfx942": (("hip", "gfx942", 64), 64 << 10),
}
TENSOR_MEMORY = 512  # columns, sm_100
Job = tuple[str, str, int]  # module, target, index in its offline_cases


def kernel_modules() -> list[str]:
    """Full names of the modules of fastcollab.kernels (private ones and ``offline`` aside)."""
    import fastcollab.kernels

    names = [found.name for found in pkgutil.iter_modules(fastcollab.kernels.__path__)]
    return [f"fastcollab.kernels.{name}" for name in sorted(names) if not name.startswith("_") and name != "offline"]


def _start_worker() -> None:
    os.environ.pop("TRITON_INTERPRET", None)  # under it ASTSource raises; triton reads it when a kernel is defined
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


@lru_cache
def _cases(module: str, target: str) -> list[Any]:
    make = getattr(importlib.import_module(module), "offline_cases", None)
    return make(target) if make else []


def describe(case: Any) -> dict[str, Any]:
    """What tells a compilation from the others of its kernel and target."""
    types = " ".join(kind for kind in case.signature.values() if kind != "constexpr")
    constants = {
        name: value if isinstance(value, (int, float, str, type(None))) else str(value)
        for name, value in case.constants.items()
    }
    return constants | {"types": types, "num_warps": case.num_warps, "num_stages": case.num_stages}


def _list(job: tuple[str, str]) -> list[dict[str, Any]]:
    module, target = job
    own = module.removeprefix("fastcollab.kernels.")
    return [
        {"kernel": f"{own}.{case.kernel.__name__}", "target": target, "config": describe(case)}
        for case in _cases(module, target)
    ]


def _aligned(job: Job) -> list[int]:
    """Which arguments a launch knows to be multiples of 16: tensors, and sizes but for those of do_not_specialize."""
    module, target, index = job
    case = _cases(module, target)[index]
    free = {p.name for p in case.kernel.params if p.do_not_specialize}
    return [
        i
        for i, (name, kind) in enumerate(case.signature.items())
        if kind.startswith("*") or (kind in ("i32", "i64") and name not in free)
    ]


def _compile(job: Job) -> dict[str, Any]:
    """Compile one case: as a launch with 16-byte aligned tensors and sizes in multiples of 16 would."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.errors import TritonError

    module, target, index = job
    case = _cases(module, target)[index]
    found = _list((module, target))[index]
    aligned = {(i,): [["tt.divisibility", 16]] for i in _aligned(job)}
    source = ASTSource(case.kernel, case.signature, case.constants, aligned)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    try:
        compiled = triton.compile(source, target=GPUTarget(*TARGETS[target][0]), options=options)
    except (TritonError, RuntimeError) as error:  # RuntimeError: a pass of the compiler failed
        return found | {"error": f"{type(error).__name__}: {error}"}
    read = _amd_resources(compiled.asm["amdgcn"]) if "amdgcn" in compiled.asm else _nvidia_resources(compiled.asm)
    binary = compiled.asm["hsaco" if "hsaco" in compiled.asm else "cubin"]
    found |= read | {"shared": compiled.metadata.shared, "binary_bytes": len(binary)}
    columns = getattr(compiled.metadata, "tmem_size", 0)
    if columns > TENSOR_MEMORY:
        found["error"] = f"tensor memory: {columns} columns, the chip has {TENSOR_MEMORY}"
    return found


def _amd_resources(assembly: str) -> dict[str, int]:
    """Vector registers (accumulation registers included), and registers that live in memory instead."""
    count = {name: int(value) for name, value in re.findall(r"\.(\w+_count):\s+(\d+)", assembly)}
    return {"registers": count["vgpr_count"], "spills": count["vgpr_spill_count"] + count["sgpr_spill_count"]}


def _nvidia_resources(asm: dict[str, Any]) -> dict[str, int]:
    """Registers of a thread and bytes of its stack, where spilled registers go."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = [(int(registers), int(stack)) for registers, stack in re.findall(r"REG:(\d+) STACK:(\d+)", said)]
    return {"registers": max(r for r, _ in usage), "spills": max(s for _, s in usage)}


def fault(entry: dict[str, Any]) -> str | None:
    """Why an entry must not be, or None."""
    if "error" in entry:
        return entry["error"]
    limit = TARGETS[entry["target"]][1]
    faults = [f"spills: got {entry['spills']}, need 0"] if entry["spills"] else []
    faults += [f"shared: got {entry['shared']} bytes, need <= {limit}"] if entry["shared"] > limit else []
    return "; ".join(faults) or None


def _pool(processes: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_start_worker)


def keys(modules: Sequence[str] | None = None, targets: Sequence[str] = tuple(TARGETS)) -> list[dict[str, Any]]:
    """{kernel, target, config} of everything that would be compiled; compiles nothing."""
    jobs = [(module, target) for module in (kernel_modules() if modules is None else modules) for target in targets]
    with _pool(1) as pool:
        return [key for found in pool.map(_list, jobs) for key in found]


def compile_all(modules: Sequence[str] | None = None, targets: Sequence[str] = tuple(TARGETS),
                processes: int | None = None) -> Iterator[dict[str, Any]]:  # fmt: skip
    """One entry a compilation, in the order of ``keys`` and as they come: with ``error`` where it failed.

    Raises: RuntimeError where a compiler crashed and took its process with it.
    """
    pairs = [(module, target) for module in (kernel_modules() if modules is None else modules) for target in targets]
    with _pool(processes or min(os.cpu_count() or 2, 8)) as pool:
        counts = [len(found) for found in pool.map(_list, pairs)]
        jobs = [(*pair, i) for pair, count in zip(pairs, counts, strict=True) for i in range(count)]
        try:
            yield from pool.map(_compile, jobs)
        except BrokenProcessPool as error:
            raise RuntimeError(f"a compiler crashed in one of {jobs}") from error


def show(entries: Sequence[dict[str, Any]]) -> str:
    """A line for each kernel and target: the worst of its configurations."""
    worst: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for entry in entries:
        worst.setdefault((entry["kernel"], entry["target"]), []).append(entry)
    lines = [
        [f"{kernel} {target}", str(len(found))]
        + [str(max(e.get(name, 0) for e in found)) for name in ("registers", "spills", "shared", "binary_bytes")]
        for (kernel, target), found in worst.items()
    ]
    return table(["kernel", "configs", "registers", "spills", "shared", "binary bytes"], lines)


def run(path: Path | None = None, only: str = "") -> int:
    """Compile everything, print each fault as it is found and the table, write the list.

    ``only`` compiles the modules whose name contains it, and writes nothing unless ``path`` is given.
    Returns: the exit status, 1 for a fault or for nothing to compile.
    """
    entries, faults = [], 0
    for entry in compile_all([module for module in kernel_modules() if only in module.rpartition(".")[2]]):
        entries.append(entry)
        if text := fault(entry):
            faults += 1
            print(f"{entry['kernel']} on {entry['target']} with {entry['config']}: {text}", file=sys.stderr, flush=True)
    print(show(entries))
    if path or not only:
        path = path or results_folder() / "kernels.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("[\n" + ",\n".join(json.dumps(entry) for entry in entries) + "\n]\n")
        print(f"\nwritten to {path}")
    if not entries:
        print("no kernel to compile in fastcollab.kernels", file=sys.stderr)
    return 1 if faults or not entries else 0
