"""Checkpoints: a folder per saved step, complete or absent, with a Hugging Face folder of the trained model inside.

``output_dir/checkpoint-<step>/``: ``<policy>/`` (``from_pretrained`` loads it), ``optimizer.pt`` (optimiser, learning
rate), ``trainer_state.json`` (step, data cursor), ``args.json``, and an empty ``COMPLETE`` written last. Random numbers
need no state: they are keyed by step and prompt.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from fastcollab.model import Model


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
    root: Path, step: int, model: Model, tokenizer: Any, optimizer, schedule, state: dict, args: dict
) -> Path:
    """Write ``root/checkpoint-<step>``; ``state`` and ``args`` are JSON-ready."""
    folder = root / f"checkpoint-{step}"
    part = root / f"checkpoint-{step}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    save_model(model, tokenizer, part / model.name)
    torch.save({"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, part / "optimizer.pt")
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


def load_checkpoint(folder: Path, model: Model, optimizer, schedule) -> dict:
    """Put weights, optimiser and learning rate back; returns ``trainer_state.json``."""
    load_weights(model, folder / model.name)
    saved = torch.load(folder / "optimizer.pt", weights_only=True, map_location=model.device)
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    return json.loads((folder / "trainer_state.json").read_text())


def prune(root: Path, limit: int | None) -> None:
    """Delete the oldest complete checkpoints beyond ``limit`` (None keeps all)."""
    for folder in checkpoints(root)[:-limit] if limit else []:
        shutil.rmtree(folder)
