"""Parity: how the published Co-RL code (commit ff476f0) reads answers; its other choices are ``config.PARITY``.

It votes by strings, pays by mathematical equality and takes the last number where there is no box (corl spec 2.3, 8.1).
The strings are cleaned less than theirs, whose cleaner also deletes variables, and equality is :mod:`grading`'s.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from fastcollab import grading

NAME = "corl-ff476f0"
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_PHRASE = re.compile(r"answer is:?\s*([^\n]+?)\.?\s*(?:\n|$)", re.IGNORECASE)
_NOISE = re.compile(r"\\left|\\right|\\[,;!]|[\s$]|\\%|%|\^\{?\\circ\}?")


def answer(text: str) -> str | None:
    """The string that votes: of the last box, else of "answer is …", else the last number; None without any."""
    found = grading.extract(text)
    if found is None and (phrases := _PHRASE.findall(text)):
        found = phrases[-1]
    if found is None and (numbers := _NUMBER.findall(text)):
        found = numbers[-1]
    return _clean(found or "")


def gold(text: str) -> str | None:
    """The string of a right answer, which the data hold bare or boxed."""
    return _clean(grading.extract(text) or text)


def _clean(text: str) -> str | None:
    string = _NOISE.sub("", text).replace("dfrac", "frac").replace("tfrac", "frac")
    return {"0.5": r"\frac{1}{2}"}.get(string, string) or None


def reward(said: str | None, scores: Mapping[str, float]) -> float:
    """The best that ``scores`` pays an answer that equals ``said`` as mathematics; 0 without one."""
    return max((float(score) for key, score in scores.items() if grading.equal(said, key)), default=0.0)
