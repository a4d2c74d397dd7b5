"""Progress: a live line per run on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from fastcollab.transcript import transcript
from fastcollab.types import Rollout

COLOURS = ("cyan", "magenta", "yellow", "green", "blue")  # by index of the writer
SHOWN = (  # column, key, format
    ("reward", "reward", "{:.3f}"),
    ("std", "reward_std", "{:.3f}"),
    ("grad", "grad_norm", "{:.2f}"),
    ("senior", "tandem/senior_token_frac", "{:.2f}"),
    ("external", "mintrl/external_share_micro", "{:.3f}"),
    ("tok/s", "tokens_per_s/rollout", "{:,.0f}"),
)


def summary(row: dict[str, Any]) -> str:
    """The figures that tell whether a step works: not the loss, which is 0 on-policy by construction."""
    return "  ".join(f"{name} {form.format(row[key])}" for name, key, form in SHOWN if row.get(key) is not None)


def coloured(rollout: Rollout, tokenizer: Any, marks: bool = False) -> Text:
    """The response in its authors' colours, dropped text struck through; ``marks`` say it without styles."""
    text = Text()
    for piece in transcript(rollout, tokenizer):
        if piece.kind == "dropped":
            text.append(f"[-{piece.text}-]" if marks else piece.text, style="strike bright_black")
        else:
            style = COLOURS[rollout.writers.index(piece.writer) % len(COLOURS)]
            text.append(f"{{+{piece.text}+}}" if marks and piece.kind else piece.text, style=style)
    return text


class Progress:
    """Context manager around a run of ``total`` steps; ``step(row)`` after each."""

    def __init__(self, total: int, enabled: bool = True, label: str = "train", every: int = 10) -> None:
        self.total, self.enabled, self.label, self.every = total, enabled, label, every
        self.console = Console()
        self.bar: Bar | None = None

    def __enter__(self) -> Progress:
        if self.enabled and self.console.is_terminal:
            columns = (BarColumn(24), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[row]}"))
            self.bar = Bar(TextColumn("{task.description}"), *columns, console=self.console)
            self.task = self.bar.add_task(self.label, total=self.total, row="")
            self.bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def step(self, row: dict[str, Any]) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=row["step"], row=summary(row))
        elif self.enabled and (row["step"] % self.every == 0 or row["step"] in (1, self.total)):
            line = f"{self.label} {row['step']}/{self.total}  {summary(row)}"
            self.console.print(line, highlight=False, soft_wrap=True)

    def completions(self, rollouts: Sequence[Rollout], tokenizer: Any) -> None:
        """Print a few responses, coloured by author."""
        if self.enabled and tokenizer is not None:
            for rollout in rollouts:
                self.console.print(coloured(rollout, tokenizer, marks=self.console.color_system is None))
