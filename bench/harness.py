"""The harness: interleaved timing, medians, the machine's floors measured in the same run, tables and JSON."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers


@dataclass
class Timing:
    """Seconds of the repeats of one variant: by the clock, and of CPU time over all threads."""

    walls: list[float] = field(default_factory=list)
    cpus: list[float] = field(default_factory=list)

    @property
    def wall(self) -> float:
        return median(self.walls)

    @property
    def cpu(self) -> float:
        return median(self.cpus)

    def to_dict(self) -> dict[str, Any]:
        return {"wall_s": self.wall, "cpu_s": self.cpu, "walls_s": self.walls}


def timed(call: Callable[[], Any], device: torch.device | str = "cpu") -> tuple[float, float]:
    """Seconds of one call, by the clock (on a GPU by its events) and of CPU time."""
    if torch.device(device).type != "cuda":
        cpu, wall = time.process_time(), time.perf_counter()
        call()
        return time.perf_counter() - wall, time.process_time() - cpu
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    cpu = time.process_time()
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1e3, time.process_time() - cpu


def interleave(variants: Mapping[str, Callable[[], Any]], rounds: int, most_s: float = float("inf"),
               device: torch.device | str = "cpu", least: int = 1) -> dict[str, Timing]:  # fmt: skip
    """Time every variant once a round, each round starting one variant later, so that drift of the host hits all alike.

    Nothing is warmed up here: call each variant once before. A variant that has had ``most_s`` seconds and ``least``
    repeats rests, which bounds the run on a slow or busy machine.
    """
    timings = {name: Timing() for name in variants}
    names = list(variants)
    for r in range(rounds):
        start = r % len(names)
        for name in names[start:] + names[:start]:
            timing = timings[name]
            if sum(timing.walls) >= most_s and len(timing.walls) >= least:
                continue
            wall, cpu = timed(variants[name], device)
            timing.walls.append(wall)
            timing.cpus.append(cpu)
    return timings


def extra_memory(call: Callable[[], Any], device: torch.device | str = "cpu") -> int | None:
    """Most bytes held at once during a call, beyond what was held before and beyond the tensors that it returns.

    On a CPU by the peak of the resident set, which Linux resets on request; None where it does not.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        torch.cuda.synchronize(device)
        return max(torch.cuda.max_memory_allocated(device) - before - tensor_bytes(result), 0)
    if not os.access("/proc/self/clear_refs", os.W_OK):
        return None
    ctypes.CDLL(None).malloc_trim(0)  # freed pages that glibc keeps would hide what the call takes
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident_bytes("VmRSS")
    result = call()
    return max(_resident_bytes("VmHWM") - before - tensor_bytes(result), 0)


def _resident_bytes(name: str) -> int:
    return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


def tensor_bytes(result: Any) -> int:
    """Of all tensors in nested tuples, lists and dicts."""
    if isinstance(result, torch.Tensor):
        return result.nbytes
    inner = result.values() if isinstance(result, dict) else result if isinstance(result, (tuple, list)) else ()
    return sum(map(tensor_bytes, inner))


@dataclass(frozen=True)
class Floors:
    """What the device can do at this moment; a CPU with torch's current number of threads."""

    read_gb_s: float  # DRAM read bandwidth; of a GPU the bandwidth of a copy, read and written
    gemm_gflop_s: float  # fp32 matrix product
    bf16_gflop_s: float = 0.0  # bf16 matrix product; 0: not measured

    def forward_s(self, weight_bytes: float, flops: float, dtype: torch.dtype = torch.float32) -> float:
        """Least seconds of one forward: its weights read once, or its arithmetic, whichever takes longer."""
        rate = max(self.gemm_gflop_s, self.bf16_gflop_s) if dtype == torch.bfloat16 else self.gemm_gflop_s
        return max(weight_bytes / (self.read_gb_s * 1e9), flops / (rate * 1e9))


def measure_floors(device: torch.device | str = "cpu", repeats: int = 5) -> Floors:
    """The best of some reads of 256 MiB (far beyond the caches) and of some products; on a GPU larger ones."""
    is_cuda = torch.device(device).type == "cuda"

    def gemm(dtype: torch.dtype, m: int, k: int, n: int) -> float:
        a, b = (torch.randn(shape, device=device).to(dtype) for shape in ((m, k), (k, n)))
        return 2 * m * k * n / best(partial(torch.mm, a, b, out=a.new_empty(m, n))) / 1e9

    def best(call: Callable[[], Any]) -> float:
        return min(timed(call, device)[0] for _ in range(repeats))

    data = torch.ones(1 << 28 if is_cuda else 1 << 26, device=device)
    if is_cuda:
        copy = torch.empty_like(data)
        sizes = (8192, 8192, 8192)
        read = 2 * data.nbytes / best(lambda: copy.copy_(data)) / 1e9
        return Floors(read, gemm(torch.float32, *sizes), gemm(torch.bfloat16, *sizes))
    return Floors(data.nbytes / best(data.sum) / 1e9, gemm(torch.float32, 1024, 1024, 4096))


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """What a figure depends on beside the code, and the load of the other processes."""
    return {
        "cpu": cpu_name(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "load": list(os.getloadavg()),
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }


def headline(floors: Floors) -> str:
    """The machine in a line, its floors, and a warning where other processes hold the cores."""
    m = machine()
    bf16 = f", {floors.bf16_gflop_s:.0f} in bf16" if floors.bf16_gflop_s else ""
    devices = f"{m['gpu']}, {m['cpu']}" if m["gpu"] else m["cpu"]
    lines = [
        f"{devices}: {m['threads']} threads of {m['cores']}, load {m['load'][0]:.1f}",
        f"torch {m['torch']}, transformers {m['transformers']}",
        f"floors: {floors.read_gb_s:.1f} GB/s read, {floors.gemm_gflop_s:.0f} GFLOP/s fp32 product{bf16}",
    ]
    if m["load"][0] > 0.5:
        lines.append("busy machine: threads that wait for one another distort both clocks; try OMP_NUM_THREADS=1")
    return "\n".join(lines)


def results_folder() -> Path:
    """``bench/results`` in a checkout, ``bench-results`` where the package is installed."""
    here = Path(__file__).resolve().parent
    return here / "results" if (here.parent / "pyproject.toml").exists() else Path("bench-results")


def default_path(device: torch.device | str = "cpu") -> Path:
    """``<machine>.json`` in the folder of results: the GPU's name, or the CPU's and its number of cores."""
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else ""
    name = name or f"{re.sub(r'[(](r|tm)[)]', '', cpu_name().lower())}-{os.cpu_count()}"
    return results_folder() / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"


def save(section: str, result: dict[str, Any], path: Path) -> None:
    """Replace one section of the JSON file, with the machine it was measured on; the other sections stay."""
    path.parent.mkdir(parents=True, exist_ok=True)
    everything = json.loads(path.read_text()) if path.exists() else {}
    everything[section] = {"machine": machine(), **result}
    path.write_text(json.dumps(_rounded(everything), indent=1) + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, (list, tuple)) else value


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lines of a text table; the first column is set left, the others right."""
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        return "  ".join([cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))])

    return "\n".join([line(head), "  ".join("-" * w for w in widths), *map(line, rows)])
