"""The rollout: what the engine returns and everything downstream reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np


class Draw(NamedTuple):
    """One decision about the author: it holds from response position ``position`` on."""

    position: int
    reason: str  # start | boundary | gap | call
    writer: int  # index into writers


class Intervention(NamedTuple):
    """A cut and what was put in its place (response position, ids taken away, ids put in)."""

    position: int
    dropped: tuple[int, ...]
    inserted: tuple[int, ...]


class Review(NamedTuple):
    """What one review came to, with ``position`` response tokens written.

    ``outcome``: keep | intervention | malformed | out_of_range (no verdict, or none that may be: kept) | why the
    correction was rejected (a reason of ``corrections.REASONS``, or cap).
    """

    position: int
    outcome: str


@dataclass
class Rollout:
    """One response to one prompt. ``len(ids) == len(author) == len(logprob)``, asserted here."""

    prompt_ids: list[int]
    ids: list[int]  # response tokens, EOS included, never re-encoded from text
    author: np.ndarray  # uint8 [len(ids)], an index into writers
    writers: tuple[str, ...]
    logprob: np.ndarray  # fp32 [len(ids)], the author's own, at the sampling temperature, before truncation
    finish: str  # eos | length | stop | abort
    draws: list[Draw] = field(default_factory=list)
    interventions: list[Intervention] = field(default_factory=list)
    reviews: list[Review] = field(default_factory=list)
    unread: int = 0  # tokens written behind a text under review and taken away with its cut; no part of ``dropped``
    text: str | None = None  # None without a tokenizer
    uid: int = 0  # what keys the draws, with sample
    group: int = 0  # index of the prompt in the call
    sample: int = 0  # index within the group
    seed: int = 0
    policy_version: int = 0
    kept_mass: np.ndarray | None = None  # fp32 [len(ids)] where top-k, top-p or min-p cut the law

    def __post_init__(self) -> None:
        lengths = (len(self.ids), len(self.author), len(self.logprob))
        if len(set(lengths)) != 1:
            where = f"rollout {self.group}/{self.sample}"
            raise ValueError(f"{where}: got ids, author, logprob of lengths {lengths}, need one length")

    @property
    def finish_author(self) -> str | None:
        """Name of the writer of the last token."""
        return self.writers[self.author[-1]] if len(self.author) else None

    def mask(self, writer: str) -> np.ndarray:
        """bool [len(ids)]: True where ``writer`` wrote. The one place where a loss mask is made."""
        if writer not in self.writers:
            raise ValueError(f"rollout {self.group}/{self.sample}: got writers {self.writers}, need {writer!r} in them")
        return self.author == self.writers.index(writer)


@dataclass
class TrainResult:
    """What ``train`` returns: the models (``PreTrainedModel``), and the rows that metrics.jsonl holds."""

    models: dict[str, Any]
    log_history: list[dict[str, Any]] = field(default_factory=list)
    output_dir: str = ""
