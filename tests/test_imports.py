"""The architecture as a test: imports go one way, few files know the compiled parts, no file grows out of hand."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = """
config types
tiny data tokens reference questions
steps grading ballots transcript
corrections
verifiers
http_verifier
parity labels exchange
diagnostics
kernels
ops
attention
probe packing
model pools
sampling
schedules
blocks
scheduler
reviews
engine
model_verifier scoring voters
confidence
jail wire
code_judge
sandbox
code_rewards
rewards
advantages losses optim intervention_metrics steering
objective
learner
checkpoint
methods
progress callbacks evaluation
run_log
cohort
trainer
report_style report_svg report run_folder run_config env
demo bench
cli
"""
RANK = {name: i for i, line in enumerate(LAYERS.strip().splitlines()) for name in line.split()}
SAME_LAYER = {("tiny", "task"), ("report", "report_svg"), ("report", "report_style"), ("run_folder", "report")}
OWNERS = {"_C": ("ops",), "kernels": ("ops", "bench"), "_scheduler": ("engine",)}  # who may import it
LONGEST = {"tests": 480}  # lines; other folders: 420
LONGER = {"fastcollab/scheduler.py": 480}  # one state machine, the oracle of the C++ one

PACKAGES = {"fastcollab": "fastcollab", "fastcollab.kernels": "kernels", "fastcollab.bench": "bench"}
SOURCES = {
    ".".join((package, *path.relative_to(ROOT / folder).with_suffix("").parts)).removesuffix(".__init__"): path
    for package, folder in PACKAGES.items()
    for path in sorted((ROOT / folder).rglob("*.py"))
}
MODULES = set(SOURCES) | {f"fastcollab.{name}" for name in OWNERS}


def unit(module: str) -> str:
    """The part that is ordered: ``fastcollab.methods.tandem`` belongs to ``methods``."""
    return module.split(".")[1] if "." in module else ""


def imported(module: str, source: str, is_package: bool) -> set[str]:
    """Modules of fastcollab that ``source`` imports, at the top or inside functions, by statement or import_module."""
    found = set()
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join(filter(None, (*parents[: len(parents) - node.level + 1], base)))
            whole = {f"{base}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else base for name in whole}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            found |= {text.value.rstrip(".") for text in ast.walk(node) if isinstance(text, ast.Constant)}
    return {name for name in found if name.startswith("fastcollab.")}


def violations(module: str, source: str, is_package: bool = False) -> list[str]:
    own, found = unit(module), []
    if own not in RANK:
        return [f"{module}: place {own!r} in LAYERS"]
    for other in sorted(imported(module, source, is_package)):
        part = unit(other)
        if part == own:
            continue
        if part in OWNERS and own not in OWNERS[part]:
            found.append(f"{module} imports {other}: {' and '.join(OWNERS[part])} alone may")
        if part not in OWNERS and (own, part) not in SAME_LAYER and RANK.get(part, 99) >= RANK[own]:
            found.append(f"{module} imports {other}: not before it in LAYERS")
    if own != "ops" and re.search(r"torch\.ops\.fastcollab", source):
        found.append(f"{module} calls torch.ops.fastcollab: ops alone may")
    return found


@pytest.mark.parametrize("module", [m for m in SOURCES if "." in m])
def test_imports_go_one_way(module):
    path = SOURCES[module]
    assert not violations(module, path.read_text(encoding="utf-8"), path.name == "__init__.py")


FORMS = [
    "from fastcollab.{} import x",
    "from fastcollab import {}",
    "import fastcollab.{}",
    "def f():\n    from fastcollab import {}",
    "importlib.import_module('fastcollab.{}')",
    "importlib.import_module(f'fastcollab.{}.{{name}}')",
    "from .{} import x",
    "from . import {}",
]


@pytest.mark.parametrize("form", FORMS)
def test_the_order_is_enforced(form):
    """The check sees every form of import, so that a passing tree means something."""
    upward = "fastcollab.tokens imports fastcollab.engine: not before it in LAYERS"
    assert violations("fastcollab.tokens", form.format("engine")) == [upward]
    assert not violations("fastcollab.trainer", form.format("engine"))
    for part, owners in OWNERS.items():
        assert violations("fastcollab.trainer", form.format(part)) == [
            f"fastcollab.trainer imports fastcollab.{part}: {' and '.join(owners)} alone may"
        ]
        for owner in owners:
            assert not violations(f"fastcollab.{owner}", form.format(part))


def test_the_check_sees_parents_operators_and_new_modules():
    assert violations("fastcollab.methods.tandem", "from ..trainer import x")[0].endswith("not before it in LAYERS")
    assert violations("fastcollab.engine", "torch.ops.fastcollab.sample(x)")
    assert violations("fastcollab.unheard_of", "") == ["fastcollab.unheard_of: place 'unheard_of' in LAYERS"]


def test_every_module_that_the_order_names_exists():
    assert set(RANK) == {unit(module) for module in SOURCES if "." in module}


@pytest.mark.parametrize("folder", ["fastcollab", "kernels", "bench", "tests", "examples", "csrc"])
def test_files_stay_short(folder):
    paths = [p for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".cpp", ".h", ".cu", ".cuh")]
    assert paths
    lengths = {str(p.relative_to(ROOT)): len(p.read_text(encoding="utf-8").splitlines()) for p in paths}
    limit = LONGEST.get(folder, 420)
    assert {name: n for name, n in lengths.items() if n > LONGER.get(name, limit)} == {}


def run_python(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT, env=os.environ | env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_works_with_triton_blocked_and_is_light():
    """P31: triton is never needed at import; and what needs no torch does not load it."""
    light = "fastcollab, fastcollab.cli, fastcollab.report, fastcollab.run_config, fastcollab.tiny"
    heavy = "fastcollab.Engine, fastcollab.train, fastcollab.ops, fastcollab.evaluate, fastcollab.losses"
    said = run_python(
        f"import sys; sys.modules['triton'] = None\nimport {light}\n"
        f"print('torch' in sys.modules, 'transformers' in sys.modules)\n"
        f"{heavy}\nprint(fastcollab.ops.impl_report()['triton'])"
    )
    assert said.splitlines() == ["False False", "triton is not installed"]
