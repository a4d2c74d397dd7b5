"""fastcollab: train language models that write, judge and teach together."""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_HOME = {
    "Engine": "engine",
    "train": "trainer",
    "TrainResult": "types",
    "SamplingParams": "config",
    "TrainConfig": "config",
    "GRPOConfig": "config",
    "TandemConfig": "config",
    "CoRLConfig": "config",
    "MInTRLConfig": "config",
    "Rollout": "types",
    "Solo": "schedules",
    "Intervene": "schedules",
    "Word": "schedules",
    "Bernoulli": "schedules",
    "Chunk": "schedules",
    "Alternate": "schedules",
    "Paragraph": "schedules",
    "Call": "schedules",
    "FunctionVerifier": "verifiers",
    "Keep": "verifiers",
    "Revise": "verifiers",
    "Template": "verifiers",
    "HTTPVerifier": "http_verifier",
    "ModelVerifier": "model_verifier",
    "UnsupportedModelError": "attention",
    "evaluate": "evaluation",
    "legibility": "evaluation",
    "pass_at_k": "evaluation",
}
_MODULES = ("grading", "rewards", "ops", "losses", "tiny", "kernels", "bench", "report")
__all__ = sorted(_HOME)


def __getattr__(name: str):
    """Public names load their module at first use, so ``import fastcollab`` costs nothing and needs no extension."""
    if name in _HOME:
        value = getattr(importlib.import_module(f"fastcollab.{_HOME[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"fastcollab.{name}")
    else:
        raise AttributeError(f"module 'fastcollab' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__) | set(_MODULES))
