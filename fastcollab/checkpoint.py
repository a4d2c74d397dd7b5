"""Checkpoints: a folder per saved step, complete or absent, with a Hugging Face folder of each saved model inside.

``output_dir/checkpoint-<step>/``: ``<model>/`` (``from_pretrained`` loads it), ``optimizer.pt`` (per trained model its
optimiser and learning rate), ``trainer_state.json`` (step, data cursor), ``args.json``, and an empty ``COMPLETE``
written last. Random numbers need no state: they are keyed by step and prompt.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from fastcollab.model import Model


class Learner(Protocol):
    """What is saved of a trained model."""

    model: Model
    optimizer: torch.optim.Optimizer
    lr_schedule: torch.optim.lr_scheduler.LRScheduler


def save_model(model: Model, tokenizer: Any, folder: Path) -> None:
    """A Hugging Face folder (adapter files for a LoRA model), moved into place when it is whole."""
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    (model.peft or model.module).save_pretrained(part)
    if tokenizer is not None:
        tokenizer.save_pretrained(part)
    if folder.exists():
        shutil.rmtree(folder)
    part.rename(folder)


def load_weights(model: Model, folder: Path) -> None:
    """Copy the weights of a folder that ``save_model`` wrote into the model, bit for bit."""
    if model.peft is not None:
        from peft import load_peft_weights, set_peft_model_state_dict

        set_peft_model_state_dict(model.peft, load_peft_weights(folder, device=str(model.device)))
    else:
        saved = type(model.module).from_pretrained(folder, dtype=model.dtype)
        model.module.load_state_dict(saved.state_dict())
    model.bump()


def save_checkpoint(
    root: Path,
    step: int,
    learners: Mapping[str, Learner],
    tokenizers: Mapping[str, Any],
    state: dict,
    args: dict,
    frozen: Mapping[str, Model] | None = None,
) -> Path:
    """Write ``root/checkpoint-<step>``; ``state`` and ``args`` are JSON-ready, ``frozen`` models have no optimiser."""
    folder = root / f"checkpoint-{step}"
    part = root / f"checkpoint-{step}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for name, model in {**{n: x.model for n, x in learners.items()}, **(frozen or {})}.items():
        save_model(model, tokenizers.get(name), part / name)
    optimisers = {
        name: {"optimizer": x.optimizer.state_dict(), "schedule": x.lr_schedule.state_dict()}
        for name, x in learners.items()
    }
    torch.save(optimisers, part / "optimizer.pt")
    (part / "trainer_state.json").write_text(json.dumps({"step": step} | state, indent=1))
    (part / "args.json").write_text(json.dumps(args, indent=1, default=str))
    (part / "COMPLETE").touch()
    if folder.exists():
        shutil.rmtree(folder)
    part.rename(folder)
    return folder


def find_checkpoint(root: Path, resume: bool | str | Path) -> Path:
    """The folder to resume from: ``resume`` itself, or with True the newest complete one under ``root``."""
    if resume is not True:
        folder = Path(resume)
        if not (folder / "COMPLETE").exists():
            raise ValueError(f"resume_from_checkpoint: got {str(folder)!r}, need a checkpoint folder with COMPLETE")
        return folder
    found = checkpoints(root)
    if not found:
        raise ValueError(f"resume_from_checkpoint: got True and no complete checkpoint under {str(root)!r}, need one")
    return found[-1]


def checkpoints(root: Path) -> list[Path]:
    """The complete checkpoints under ``root``, the oldest first."""
    found = [p for p in root.glob("checkpoint-*") if (p / "COMPLETE").exists() and p.suffix != ".part"]
    return sorted(found, key=lambda p: int(p.name.rpartition("-")[2]))


def load_checkpoint(folder: Path, learners: Mapping[str, Learner], frozen: Mapping[str, Model] | None = None) -> dict:
    """Put weights, optimisers and learning rates back; returns ``trainer_state.json``."""
    device = next(iter(learners.values())).model.device
    saved = torch.load(folder / "optimizer.pt", weights_only=True, map_location=device)
    if set(saved) != set(learners):
        raise ValueError(f"checkpoint {folder}: got optimisers of {sorted(saved)}, need those of {sorted(learners)}")
    for name, learner in learners.items():
        load_weights(learner.model, folder / name)
        learner.optimizer.load_state_dict(saved[name]["optimizer"])
        learner.lr_schedule.load_state_dict(saved[name]["schedule"])
    for name, model in (frozen or {}).items():
        load_weights(model, folder / name)
    return json.loads((folder / "trainer_state.json").read_text())


def prune(root: Path, limit: int | None) -> None:
    """Delete the oldest complete checkpoints beyond ``limit`` (None keeps all)."""
    for folder in checkpoints(root)[:-limit] if limit else []:
        shutil.rmtree(folder)
