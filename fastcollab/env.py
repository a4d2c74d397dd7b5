"""The environment: versions, devices, who computes each operator and why not another, the scheduler, the compilers."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

PACKAGES = ("torch", "transformers", "triton", "numpy", "safetensors", "peft")


def describe() -> dict[str, str]:
    """Name -> what is found; of a part that is absent, the reason. Imports torch and transformers."""
    with warnings.catch_warnings():  # what these warn of is reported below
        warnings.simplefilter("ignore")
        import torch

        from fastcollab import __file__, __version__, engine, ops

    report = {"fastcollab": f"{__version__} in {Path(__file__).parent}"}
    report["python"] = f"{platform.python_version()} ({sys.executable}) on {platform.platform()}"
    report |= {name: _version(name) for name in PACKAGES}
    report["cpu"] = f"{os.cpu_count()} cores, {torch.get_num_threads()} torch threads"
    report["cuda"] = _cuda(torch)
    report |= _operators(ops.impl_report())
    report["scheduler"] = _scheduler(engine)
    report["c++ compiler"] = _compiler([os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"])
    report["nvcc"] = _compiler([str(Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda", "bin", "nvcc")), "nvcc"])
    return report


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cuda(torch) -> str:
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        return f"no device ({built})"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{torch.version.cuda}: {', '.join(names)}"


def _operators(report: dict[str, object]) -> dict[str, str]:
    """``ops.impl_report`` in lines: per operator who computes it on each device; then what is absent, and why."""
    lines = {
        f"op {name}": ", ".join(f"{impl} on {device}" for device, impl in chosen.items())
        for name, chosen in report.items()
        if isinstance(chosen, dict)
    }
    for impl in ("native", "triton"):
        lines[f"ops {impl}"] = "present" if report[impl] is None else f"absent: {report[impl]}"
    if report["forced"]:
        others = ", ".join(report["unforced"])
        lines["ops forced"] = f"{report['forced']} (FASTCOLLAB_IMPL or use_impl)"
        lines["ops forced"] += f", but no such version exists of {others}" if others else ""
    return lines


def _scheduler(engine) -> str:
    if engine.NATIVE_ABSENT:
        return f"python: {engine.NATIVE_ABSENT}"
    return "python: FASTCOLLAB_IMPL=reference" if os.environ.get("FASTCOLLAB_IMPL") == "reference" else "native"


def _compiler(names: list[str]) -> str:
    """The first of ``names`` on PATH and its version line."""
    for name in names:
        command = shlex.split(name)
        found = shutil.which(command[0])
        if found:
            said = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False).stdout
            lines = said.splitlines() or [""]
            return f"{found}: {next((line for line in lines if 'release' in line), lines[0]).strip()}"  # nvcc, others
    return f"none ({', '.join(names)})"
