"""Schedules: who writes the next token. Each is data; the scheduler runs it.

``kind`` is how an author is chosen (draw, cycle, call), ``boundary`` and ``max_gap`` are when.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastcollab.config import require
from fastcollab.corrections import gives_answer
from fastcollab.steps import Steps
from fastcollab.tokens import containing, word_boundaries

DRAW, CYCLE, ASK = 0, 1, 2


@dataclass(frozen=True)
class Schedule:
    """Base: ``writers`` are model names; ``policy`` turns the schedule into the scheduler's arguments."""

    writers: tuple[str, ...]

    def __post_init__(self) -> None:
        writers = (self.writers,) if isinstance(self.writers, str) else tuple(self.writers)
        ok = 1 <= len(writers) <= 255 and len(set(writers)) == len(writers)
        require(ok, "writers", self.writers, "1..255 different names")
        object.__setattr__(self, "writers", writers)
        for name in ("p", "boundaries"):  # hashable: the engine keeps one policy per schedule
            value = getattr(self, name, None)
            if value is not None and not isinstance(value, (int, float)):
                object.__setattr__(self, name, tuple(value))

    @property
    def speakers(self) -> tuple[str, ...]:
        """The model that each writer speaks through."""
        return self.writers

    @property
    def key(self) -> Any:
        """What the arguments of ``policy`` follow from: the engine keeps one policy for each."""
        return self

    def policy(self, tokenizer: Any, vocab_size: int) -> dict[str, Any]:
        """Arguments of ``Scheduler.add_policy`` but for ``models`` and ``eos``."""
        raise NotImplementedError

    def _first(self, first: str | None) -> int:
        require(first is None or first in self.writers, "first", first, f"one of {self.writers}")
        return -1 if first is None else self.writers.index(first)


@dataclass(frozen=True)
class Solo(Schedule):
    """One writer writes alone."""

    writers: tuple[str, ...] | str = ("policy",)

    def policy(self, tokenizer, vocab_size):
        require(len(self.writers) == 1, "Solo writers", self.writers, "one name")
        return dict(kind=CYCLE, first=0)


def _cumulative(p: float | Sequence[float], writers: Sequence[str]) -> tuple[float, ...]:
    probabilities = [p, 1 - p] if isinstance(p, (int, float)) else list(p)
    ok = len(probabilities) == len(writers) and min(probabilities) >= 0 and abs(sum(probabilities) - 1) < 1e-6
    require(ok, "p", p, f"probabilities of {len(writers)} writers that sum to 1")
    return tuple(np.cumsum(probabilities).tolist())


@dataclass(frozen=True)
class Word(Schedule):
    """Tandem's schedule (arXiv 2606.28166; spec 2.2): a memoryless redraw after each token that opens a word.

    The token that opens a word is still the outgoing author's. ``max_gap`` tokens without a boundary force a draw.
    """

    writers: tuple[str, ...] = ("senior", "junior")
    p: float | tuple[float, ...] = 0.5  # of the first writer, or of each
    max_gap: int = 32
    boundaries: Any = None  # ids; None derives them from the tokenizer
    first: str | None = None  # None draws the first author too

    def policy(self, tokenizer, vocab_size):
        require(self.max_gap >= 1, "max_gap", self.max_gap, ">= 1")
        if self.boundaries is not None:
            boundary = np.zeros(vocab_size, np.uint8)
            ids = np.asarray(self.boundaries, np.int64)
            ok = len(ids) > 0 and ids.min() >= 0 and ids.max() < vocab_size
            require(ok, "boundaries", self.boundaries[:8], f"ids in 0..{vocab_size - 1}, at least one")
            boundary[ids] = 1
        elif tokenizer is None:
            raise ValueError("boundaries: got None and no tokenizer, need boundaries= or tokenizer=")
        else:
            boundary = word_boundaries(tokenizer, vocab_size)
        cumulative, first = _cumulative(self.p, self.writers), self._first(self.first)
        return dict(kind=DRAW, cumulative=cumulative, boundary=boundary, max_gap=self.max_gap, first=first)


@dataclass(frozen=True)
class Bernoulli(Schedule):
    """A fresh draw at every token."""

    writers: tuple[str, ...] = ("senior", "junior")
    p: float | tuple[float, ...] = 0.5

    def policy(self, tokenizer, vocab_size):
        return dict(kind=DRAW, cumulative=_cumulative(self.p, self.writers), max_gap=1)


@dataclass(frozen=True, init=False)
class Chunk(Schedule):
    """``n`` tokens each, in a cycle that is counted per row."""

    n: int = 1
    writers: tuple[str, ...] = ("senior", "junior")
    first: str | None = None  # None is the first writer

    def __init__(self, n: int, writers: Sequence[str] = ("senior", "junior"), first: str | None = None) -> None:
        for name, value in (("n", n), ("writers", writers), ("first", first)):
            object.__setattr__(self, name, value)
        self.__post_init__()

    def policy(self, tokenizer, vocab_size):
        require(self.n >= 1, "Chunk n", self.n, ">= 1")
        return dict(kind=CYCLE, max_gap=self.n, first=max(0, self._first(self.first)))


@dataclass(frozen=True)
class Alternate(Schedule):
    """Each token by the next writer."""

    writers: tuple[str, ...] = ("senior", "junior")

    def policy(self, tokenizer, vocab_size):
        return dict(kind=CYCLE, max_gap=1, first=0)


@dataclass(frozen=True)
class Paragraph(Schedule):
    """For evaluation (tandem 3.3): the next writer after each token that contains ``separator``; the first starts."""

    writers: tuple[str, ...] = ("senior", "junior")
    separator: str = "\n\n"

    def policy(self, tokenizer, vocab_size):
        if tokenizer is None:
            raise ValueError("Paragraph: got no tokenizer, need tokenizer= to find the separator")
        return dict(kind=CYCLE, boundary=containing(tokenizer, vocab_size, self.separator), first=0)


@dataclass(frozen=True, init=False)
class Call(Schedule):
    """``choose(prompt_ids, ids, author) -> index of the next writer``, asked before every token."""

    choose: Callable[[np.ndarray, np.ndarray, np.ndarray], int] = None
    writers: tuple[str, ...] = ("senior", "junior")

    def __init__(self, choose: Callable, writers: Sequence[str] = ("senior", "junior")) -> None:
        object.__setattr__(self, "choose", choose)
        object.__setattr__(self, "writers", writers)
        self.__post_init__()

    def policy(self, tokenizer, vocab_size):
        return dict(kind=ASK)


@dataclass(frozen=True, eq=False)
class Intervene(Schedule):
    """MInTRL's schedule (arXiv 2609.12419; spec 2.2): a verifier reviews each chunk and may cut it at a wrong step.

    ``writers``: the model that writes, and the name under which the verifier's tokens are credited. A chunk has at
    least ``chunk`` tokens and ends where a step does, at the latest after ``longest_chunk`` (by up to a chunk more:
    rows are looked at once a chunk). Budgets are per rollout. ``steps`` says what a step is
    (:class:`fastcollab.steps.Steps` or its ``boundary``), ``verifier`` is a :class:`fastcollab.verifiers.Verifier`.
    Where it is ``optimistic`` a row writes on while its verdict is out (spec 5.6), at the price of
    :attr:`Rollout.unread`; what it comes to is the same.
    """

    writers: tuple[str, ...] = ("policy", "verifier")
    verifier: Any = None
    chunk: int = 64
    longest_chunk: int = 256
    max_reviews: int = 8  # R
    max_interventions: int = 4  # N
    max_tokens: int = 32  # H, of one correction
    reserve: int = 16  # tokens that must still fit behind a correction
    cap: float = 1.0  # largest part of the rollout's limit that corrections may fill
    rollback: str = "chunk"  # what may be cut: the new chunk, or "deep": back to just after the last correction (6.3)
    steps: Any = "text"
    leaks: Callable = gives_answer
    optimistic: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(self.writers) == 2, "Intervene writers", self.writers, "the writer's name and the verifier's")
        methods = all(callable(getattr(self.verifier, name, None)) for name in ("review", "correct"))
        require(methods, "verifier", self.verifier, "an object with review and correct")
        for name in ("chunk", "max_tokens"):
            require(getattr(self, name) >= 1, name, getattr(self, name), ">= 1")
        for name in ("max_reviews", "max_interventions", "reserve"):
            require(getattr(self, name) >= 0, name, getattr(self, name), ">= 0")
        require(self.longest_chunk >= self.chunk, "longest_chunk", self.longest_chunk, f">= {self.chunk}, chunk")
        require(0 <= self.cap <= 1, "cap", self.cap, "in [0, 1]")
        require(self.rollback in ("chunk", "deep"), "rollback", self.rollback, "chunk or deep")

    __eq__, __hash__ = object.__eq__, object.__hash__  # not the base's, which would compare the writers alone

    @property
    def speakers(self):
        return (self.writers[0], self.writers[0])

    @property
    def key(self):
        return (Intervene, self.speakers, self.chunk, self.steps)  # without the verifier, which may be unloaded

    def made_steps(self, tokenizer: Any) -> Steps:
        return self.steps if isinstance(self.steps, Steps) else Steps(tokenizer, self.steps)

    def policy(self, tokenizer, vocab_size):
        if tokenizer is None:
            raise ValueError("Intervene: got no tokenizer, need tokenizer= to find the steps")
        boundary = np.zeros(vocab_size, np.uint8)
        may_end = self.made_steps(tokenizer).may_end[:vocab_size]
        boundary[: len(may_end)] = may_end
        return dict(kind=ASK, boundary=boundary, max_gap=self.chunk)
