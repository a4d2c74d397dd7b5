"""The log of a run: metrics.jsonl, a row per optimiser step or evaluation, and whoever listens to it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fastcollab.callbacks import Callbacks
from fastcollab.checkpoint import checkpoints, find_checkpoint
from fastcollab.config import TrainConfig
from fastcollab.progress import Progress
from fastcollab.transcript import entry
from fastcollab.types import Rollout


class RunLog:
    """Context manager around a run's steps; rows go to ``history``, the file, the callbacks and the progress line."""

    def __init__(self, args: TrainConfig, callbacks: Callbacks, total_steps: int, resume: bool | str | Path) -> None:
        """Raises ValueError for a folder that holds checkpoints of a run which is not resumed, or lacks the one named.

        ``checkpoint`` is the folder to resume from, or None.
        """
        self.folder, self.callbacks, self.history = Path(args.output_dir), callbacks, []
        self.folder.mkdir(parents=True, exist_ok=True)
        self.checkpoint = find_checkpoint(self.folder, resume) if resume else None
        found = [p.name for p in checkpoints(self.folder)]
        if found and not resume:
            need = "an empty folder or resume_from_checkpoint=True"
            raise ValueError(f"output_dir: got {args.output_dir!r} with {found[-1]} of an earlier run, need {need}")
        self.progress = Progress(total_steps, not args.disable_tqdm, args.output_dir, args.logging_steps)
        self.total_steps, self.step = total_steps, 0

    def rewind(self, step: int) -> None:
        """Go back to a checkpoint's step: later rows are dropped."""
        self.step = step
        self.history = keep_lines(self.folder / "metrics.jsonl", lambda row: row["step"] <= step)
        keep_lines(self.folder / "completions.jsonl", lambda row: row["step"] <= step)

    def __enter__(self) -> RunLog:
        self.callbacks.begin(self.total_steps, self.step)
        self.sink = open(self.folder / "metrics.jsonl", "a" if self.checkpoint else "w")
        if not self.checkpoint:  # those of an earlier run
            (self.folder / "completions.jsonl").unlink(missing_ok=True)
        self.progress.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.progress.__exit__(*error)
        self.sink.close()
        if error[0] is None:
            self.callbacks.end()

    def write(self, row: dict[str, Any], is_step: bool = True) -> dict[str, Any]:
        """The row as it was written, values that are not finite as None."""
        clean = {k: finite(v) for k, v in row.items()}
        self.history.append(clean)
        self.sink.write(json.dumps(clean, allow_nan=False) + "\n")
        self.sink.flush()
        self.callbacks.log(clean, row["step"], is_step)
        if is_step:
            self.progress.step(clean)
        return clean

    def completions(self, rollouts: Sequence[Rollout], tokenizer: Any, shown: int, facts: Sequence[dict]) -> None:
        """Append each rollout with its transcript and ``facts`` to completions.jsonl, and print ``shown`` of them,
        those with interventions first."""
        self.progress.completions(sorted(rollouts, key=lambda r: not r.interventions)[:shown], tokenizer)
        with open(self.folder / "completions.jsonl", "a") as sink:
            for r, fact in zip(rollouts, facts, strict=True):
                row = {"completion": r.text or r.ids} | entry(r, tokenizer) | fact
                sink.write(json.dumps(row, default=str) + "\n")


def finite(value: Any) -> Any:
    """The value as JSON has it: None for a number that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def keep_lines(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """The wanted rows of a JSONL file, which afterwards holds no others; [] where there is no file.

    A last line without its end, which a crash leaves, is dropped.
    """
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    rows = [row for row in map(json.loads, lines) if wanted(row)]
    part = path.with_name(path.name + ".part")
    part.write_text("".join(json.dumps(row) + "\n" for row in rows))
    part.replace(path)
    return rows
