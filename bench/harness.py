"""The harness: interleaved timing, medians, the machine's floors measured in the same run, tables and JSON."""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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


def interleave(variants: Mapping[str, Callable[[], Any]], rounds: int,
               most_s: float = float("inf")) -> dict[str, Timing]:  # fmt: skip
    """Time every variant once a round, each round starting one variant later, so that drift of the host hits all alike.

    Nothing is warmed up here: call each variant once before. A variant that has had ``most_s`` seconds rests, which
    bounds the run on a slow or busy machine: each variant takes at most that and one repeat more.
    """
    timings = {name: Timing() for name in variants}
    names = list(variants)
    for r in range(rounds):
        start = r % len(names)
        for name in names[start:] + names[:start]:
            timing = timings[name]
            if sum(timing.walls) >= most_s:
                continue
            cpu, wall = time.process_time(), time.perf_counter()
            variants[name]()
            timing.walls.append(time.perf_counter() - wall)
            timing.cpus.append(time.process_time() - cpu)
    return timings


@dataclass(frozen=True)
class Floors:
    """What the machine can do at this moment, with torch's current number of threads."""

    read_gb_s: float  # DRAM read bandwidth
    gemm_gflop_s: float  # fp32 matrix product

    def forward_s(self, weight_bytes: float, flops: float) -> float:
        """Least seconds of one forward: its weights read once, or its arithmetic, whichever takes longer."""
        return max(weight_bytes / (self.read_gb_s * 1e9), flops / (self.gemm_gflop_s * 1e9))


def measure_floors(repeats: int = 5) -> Floors:
    """The best of some reads of 256 MiB (far beyond the caches) and of some fp32 products 1024 x 1024 x 4096."""
    data = torch.ones(1 << 26)
    a, b, out = torch.randn(1024, 1024), torch.randn(1024, 4096), torch.empty(1024, 4096)

    def best(call: Callable[[], Any]) -> float:
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    read = data.nbytes / best(data.sum) / 1e9
    gemm = 2 * 1024 * 1024 * 4096 / best(lambda: torch.mm(a, b, out=out)) / 1e9
    return Floors(read, gemm)


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """What a figure depends on beside the code, and the load of the other processes."""
    return {
        "cpu": cpu_name(),
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
    lines = [
        f"{m['cpu']}: {m['threads']} threads of {m['cores']}, load {m['load'][0]:.1f}",
        f"torch {m['torch']}, transformers {m['transformers']}",
        f"floors: {floors.read_gb_s:.1f} GB/s read, {floors.gemm_gflop_s:.0f} GFLOP/s fp32 product",
    ]
    if m["load"][0] > 0.5:
        lines.append("busy machine: threads that wait for one another distort both clocks; try OMP_NUM_THREADS=1")
    return "\n".join(lines)


def default_path() -> Path:
    """``bench/results/<machine>.json`` in a checkout, ``bench-results/<machine>.json`` where it is installed."""
    here = Path(__file__).resolve().parent
    folder = here / "results" if (here.parent / "pyproject.toml").exists() else Path("bench-results")
    name = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", cpu_name().lower())).strip("-")
    return folder / f"{name}-{os.cpu_count()}.json"


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
