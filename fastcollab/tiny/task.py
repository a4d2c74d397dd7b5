"""The task of the tiny pair: worked addition, its prompts, its reward and the share of private notation.

The prompt is ``add 7311 + 7890 :`` and the response begins with the newline:

    add 7311 + 7890 :
     1 + 0 = 1
     1 + 9 = 10
     3 + 8 + 1 = 12
     7 + 7 + 1 = 15
     answer 15201

Units come first, and a carry is written as a third summand. ``&`` and ``~`` are the senior's private ``+`` and ``=``.
A prompt that already ends in the newline is continued as well.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from typing import Any

EOS, PAD, UNK = "<eos>", "<pad>", "<unk>"
PUBLIC = {"plus": "+", "equals": "="}
PRIVATE = {"plus": "&", "equals": "~"}

# Surfaces in id order, as the tokenizer stores them: Ġ is a leading space, Ċ a newline.
VOCABULARY = (
    *(EOS, PAD, UNK, "Ċ", "add", "Ġanswer", "Ġ:", "Ġ+", "Ġ=", "Ġ&", "Ġ~"),
    *(f"Ġ{d}" for d in range(10)),
    *(str(d) for d in range(10)),
)

_PUBLIC_IDS = frozenset(VOCABULARY.index("Ġ" + s) for s in PUBLIC.values())
_PRIVATE_IDS = frozenset(VOCABULARY.index("Ġ" + s) for s in PRIVATE.values())
_ANSWER = re.compile(r" answer((?: ?[0-9])+)")


def prompt(a: int, b: int) -> str:
    """The prompt of one addition. The models know summands of equal length, 2 to 4 digits."""
    return f"add {a} + {b} :"


def problems(n: int, seed: int, digits: int = 4) -> list[dict[str, str]]:
    """``n`` rows ``{"prompt", "answer"}`` with summands uniform over the numbers of that many digits."""
    if n < 1:
        raise ValueError(f"n: got {n}, need >= 1")
    if digits not in (2, 3, 4):
        raise ValueError(f"digits: got {digits}, need 2, 3 or 4 (what the tiny pair was trained on)")
    rng = random.Random(seed)
    rows = []
    for _ in range(n):
        a, b = (rng.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
        rows.append({"prompt": prompt(a, b), "answer": str(a + b)})
    return rows


def correct(completions: Sequence[str], answer: Sequence[str], **kwargs: Any) -> list[float]:
    """Reward function: 1.0 where the last line is `` answer`` and the digits of the sum, otherwise 0.0.

    Spaces between the digits are allowed (a digit exists with and without one); any other text in the last line, a
    missing or a wrong answer score 0.0. ``kwargs`` takes the dataset's other columns and is not read.
    """
    if len(completions) != len(answer):
        raise ValueError(f"answer: got {len(answer)} rows, need {len(completions)}, one per completion")
    rewards = []
    for text, total in zip(completions, answer, strict=True):
        match = _ANSWER.fullmatch(text.removesuffix(EOS).rsplit("\n", 1)[-1])
        rewards.append(float(match is not None and match[1].replace(" ", "") == total))
    return rewards


def _share(private: int, public: int) -> float:
    return private / (private + public) if private + public else float("nan")


def private_fraction(texts: str | Iterable[str]) -> float:
    """Share of ``&`` and ``~`` among all ``& ~ + =`` of one response or, pooled, of several; NaN if there is none."""
    text = texts if isinstance(texts, str) else "".join(texts)
    return _share(sum(map(text.count, PRIVATE.values())), sum(map(text.count, PUBLIC.values())))


def is_private(text: str) -> bool:
    """True if more than half of the response's symbols are private."""
    return private_fraction(text) > 0.5


def written_private_fraction(rollouts: Iterable[Any], writer: str = "senior") -> float:
    """``private_fraction`` over the tokens that ``writer`` wrote, pooled; a rollout has ``ids``, ``mask(writer)``."""
    private = public = 0
    for rollout in rollouts:
        written = [token for token, own in zip(rollout.ids, rollout.mask(writer), strict=True) if own]
        private += sum(token in _PRIVATE_IDS for token in written)
        public += sum(token in _PUBLIC_IDS for token in written)
    return _share(private, public)
