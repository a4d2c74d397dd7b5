"""Corrections: what a verifier writes becomes ids to append, or is rejected by name (mintrl 6.7–6.18).

Text crosses between vocabularies, ids within one; both pass the same rules, in the order of ``CorrectionRules``.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastcollab.config import require
from fastcollab.grading import equal, extract
from fastcollab.steps import Steps, size

REASONS = ("unanswered", "noop", "encoding", "leak", "room")  # why a correction was rejected
Leaks = Callable[[str, Mapping[str, Any]], bool]

_MARKS = (
    r"<\|[^<>|\s]{1,40}\|>|<｜[^<>｜\s]{1,40}｜>|</?s>|<(?:bos|eos|pad|unk)>|<(?:start|end)_of_turn>"
    r"|\[/?INST\]|<</?SYS>>"
)
MARKERS = re.compile(_MARKS)  # EOS and chat markers of the usual chat formats
_SENTENCE_END = re.compile(r"(?:[.!?…][\"'”’)\]*]*(?=\s|$)|[。！？][”’）」]*|\n)\s*")
_NO_TEXT = re.compile("[\ud800-\udfff]")  # half a character, as JSON can hold it
_BLANK_START = re.compile(r"(?:[^\S\n]*\n)+")


@dataclass(frozen=True)
class Correction:
    """Ids of the policy's vocabulary to append to the kept text; none and a ``reason`` of REASONS if rejected."""

    ids: tuple[int, ...]
    text: str  # what they write; of a rejected one what was left when it was
    reason: str | None = None


def gives_answer(text: str, row: Mapping[str, Any], column: str = "answer") -> bool:
    """Whether ``text`` alone boxes the row's answer (mintrl 2.7). False for a row without one."""
    said, answer = extract(text), row.get(column)
    return said is not None and answer is not None and equal(said, extract(str(answer)) or str(answer))


@dataclass(frozen=True)
class CorrectionRules:
    """``rules(raw, kept, dropped, room, row) -> Correction``; ``steps`` belongs to the policy's tokenizer."""

    steps: Steps
    max_tokens: int  # H: ids of a correction, a separator before it included
    reserve: int = 16  # ids that must still fit behind it
    leaks: Leaks = gives_answer
    stop_ids: tuple[int, ...] = ()  # EOS ids beside the tokenizer's special ones

    def __post_init__(self) -> None:
        require(self.max_tokens >= 1, "max_tokens", self.max_tokens, ">= 1")
        require(self.reserve >= 0, "reserve", self.reserve, ">= 0")
        require(callable(self.leaks), "leaks", self.leaks, "a function (text, row) -> bool")

    def __call__(
        self,
        raw: str | Sequence[int] | None,
        kept: Sequence[int],
        dropped: Sequence[int],
        room: int,
        row: Mapping[str, Any] | None = None,
    ) -> Correction:
        """``raw``: what the verifier wrote, as text or as ids of the policy's vocabulary; None: it did not answer.

        ``kept``: the response before the cut. ``dropped``: the chunk behind it. ``room``: ids that the response may
        still grow by, counted from the cut. Give one id more than ``max_tokens`` where writing was stopped there.
        """
        if raw is None:
            return Correction((), "", "unanswered")
        require(isinstance(raw, (str, list, tuple)), "correction", raw, "text, a list of ids, or None")
        ids = self._from_text(raw, kept) if isinstance(raw, str) else self._from_ids(raw, kept)
        if ids is None:
            return Correction((), str(raw), "encoding")
        ends = (n for n, i in enumerate(ids) if i in self.stop_ids)  # one that is no special token has a text (6.9)
        ids = self._within_limit(ids[: next(ends, len(ids))])
        text = self.steps.text(ids)
        reason = None
        if not text.strip() or self._repeats(ids, text, dropped):  # 6.8
            reason = "noop"
        elif self.leaks(text, row or {}):  # 6.10
            reason = "leak"
        elif len(ids) + self.reserve > room:  # 6.13
            reason = "room"
        return Correction(() if reason else tuple(ids), text, reason)

    def _from_text(self, raw: str, kept: Sequence[int]) -> list[int] | None:
        """Ids of the correction and its separator, encoded on their own; None if they do not write it (6.17)."""
        begin, end = self._body(raw, kept)
        if not (text := raw[begin:end]).strip():
            return []
        if _NO_TEXT.search(text):
            return None
        for form in (text, unicodedata.normalize("NFC", text)):
            if (ids := self._encode(self._separator(kept) + form)) is not None:
                return ids
        return None

    def _encode(self, text: str) -> list[int] | None:
        """Ids that write exactly ``text``, no special one among them; None if there are none."""
        for before in ("", "\n"):  # behind a newline where a tokenizer puts a dummy space before every text
            ids = self.steps.tokenizer(before + text, add_special_tokens=False)["input_ids"]
            for skip in range(3 if before else 1):
                if self.steps.written(ids[skip:]) == text.encode():
                    return ids[skip:]
        return None

    def _from_ids(self, raw: Sequence[int], kept: Sequence[int]) -> list[int] | None:
        """``raw`` without special ids and what else does not belong, its separator encoded before it."""
        ids = [int(i) for i in raw]
        special = {*self.steps.tokenizer.all_special_ids, *self.stop_ids}
        first = next((n for n, i in enumerate(ids) if i not in special), len(ids))
        last = next((n for n in range(first, len(ids)) if ids[n] in special), len(ids))
        ids = ids[first:last]
        text, offsets = self.steps.escaped(ids), self.steps.offsets(ids)
        begin, end = (bisect_right(offsets, size(text[:at])) - 1 for at in self._body(text, kept))
        ids = ids[begin:end]
        separator = self._encode(self._separator(kept)) if ids else []
        return None if separator is None else separator + ids

    def _body(self, text: str, kept: Sequence[int]) -> tuple[int, int]:
        """Where the correction proper begins and ends in ``text``: between chat markers (6.9), without the blank
        lines, in prose without any whitespace, that the separator before it stands for (6.18)."""
        begin, marks = 0, self._markers()
        while mark := re.compile(rf"\s*(?:{marks})(?:\s*(?:assistant|model)(?=\s*[\n<]))?").match(text, begin):
            begin = mark.end()
        found = re.compile(marks).search(text, begin)
        end = found.start() if found else len(text)
        if begin or kept:
            blank = re.compile(r"\s*") if self.steps.kind == "text" else _BLANK_START
            begin = m.end() if (m := blank.match(text, begin, end)) else begin
        return begin, end

    def _markers(self) -> str:
        return "|".join([_MARKS, *map(re.escape, self.steps.tokenizer.all_special_tokens)])

    def _separator(self, kept: Sequence[int]) -> str:
        """What is missing at the end of ``kept`` of the separator that a step begins behind (6.18)."""
        text, separator = self.steps.text(kept), self.steps.separator
        if not text.strip() or self.steps.ends_step(kept):
            return ""
        return separator[next(n for n in range(len(separator), -1, -1) if text.endswith(separator[:n])) :]

    def _within_limit(self, ids: list[int]) -> list[int]:
        """At most ``max_tokens``, up to the last end of a step or sentence, and whole characters (6.7)."""
        if len(ids) <= self.max_tokens:
            return ids[: self.steps.cut(ids, len(self.steps.written(ids)))]
        text, limit = self.steps.escaped(ids), self.steps.offsets(ids)[self.max_tokens]
        ends = {*(m.end() for m in _SENTENCE_END.finditer(text)), *self.steps.boundary(text)}
        cuts = [self.steps.cut(ids, at) for end in ends if (at := size(text[:end])) <= limit]
        best = max((n for n in cuts if n <= self.max_tokens and self.steps.text(ids[:n]).strip()), default=0)
        return ids[:best] if best else self._within_limit(ids[: self.max_tokens])

    def _repeats(self, ids: list[int], text: str, dropped: Sequence[int]) -> bool:
        """Whether the dropped ids or their text begin with the correction, at a word's end (6.8)."""
        old, new = self.steps.text(dropped).strip(), text.strip()
        inside_word = new[-1:].isalnum() and old[len(new) : len(new) + 1].isalnum()
        return list(dropped[: len(ids)]) == ids or old.startswith(new) and not inside_word
