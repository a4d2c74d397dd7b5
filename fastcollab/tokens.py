"""Tokens: prompts to ids, ids to text, the boundary set, stop strings. Ids never pass through text and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fastcollab.config import require

SPACES = ("Ġ", "▁", " ")  # byte-level BPE, SentencePiece, plain


def encode_prompt(tokenizer: Any, prompt: Any, index: int, chat_template_kwargs: dict | None = None) -> list[int]:
    """Ids of one prompt: list[int] as it is, str by the tokenizer, list of messages by its chat template.

    A chat template writes its own BOS, so nothing is added to it. ``index`` names the prompt in errors.
    """
    name = f"prompt {index}"
    if isinstance(prompt, (list, tuple, np.ndarray)) and len(prompt) and isinstance(prompt[0], (int, np.integer)):
        return [int(i) for i in prompt]
    if isinstance(prompt, (list, tuple)) and len(prompt) and isinstance(prompt[0], dict):
        _need_tokenizer(tokenizer, name, "messages")
        text = tokenizer.apply_chat_template(
            list(prompt), tokenize=False, add_generation_prompt=True, **(chat_template_kwargs or {})
        )
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    elif isinstance(prompt, str):
        _need_tokenizer(tokenizer, name, "text")
        bos = getattr(tokenizer, "bos_token", None)
        rendered = bool(bos) and prompt.startswith(bos)  # by a chat template, which wrote its own BOS
        ids = tokenizer(prompt, add_special_tokens=not rendered)["input_ids"]
        eos = getattr(tokenizer, "eos_token_id", None)
        if ids and eos is not None and ids[-1] == eos and not prompt.endswith(tokenizer.eos_token):
            ids = ids[:-1]  # some tokenizers close every text; a prompt is open
    else:
        raise ValueError(f"{name}: got {prompt!r}, need text, messages or ids, not empty")
    require(len(ids) > 0, name, prompt, "at least one token")
    return ids


def _need_tokenizer(tokenizer: Any, name: str, kind: str) -> None:
    if tokenizer is None:
        raise ValueError(f"{name}: got {kind} and no tokenizer, need tokenizer= or prompts as ids")


def surfaces(tokenizer: Any, vocab_size: int) -> list[str | None]:
    """Surface of each id below ``vocab_size`` as the vocabulary writes it; None for special and unused ids."""
    special = set(tokenizer.all_special_ids)
    table: list[str | None] = [None] * vocab_size
    for surface, i in tokenizer.get_vocab().items():
        if i < vocab_size and i not in special:
            table[i] = surface
    return table


def word_boundaries(tokenizer: Any, vocab_size: int) -> np.ndarray:
    """uint8 [vocab_size]: ids that open a word, i.e. whose surface starts with ``Ġ``, ``▁`` or a space (tandem 2.2).

    Newlines, digits and punctuation without a leading space are no boundaries. Raises ValueError if none is found.
    """
    table = surfaces(tokenizer, vocab_size)
    mask = np.array([s is not None and s.startswith(SPACES) for s in table], np.uint8)
    if not mask.any():  # another mark for the space: look at what is written
        mask = np.array(
            [s is not None and tokenizer.decode([i]).startswith(" ") for i, s in enumerate(table)], np.uint8
        )
    if not mask.any():
        raise ValueError(f"boundaries: got a vocabulary of {vocab_size} without a leading space, need boundaries=")
    return mask


def containing(tokenizer: Any, vocab_size: int, text: str) -> np.ndarray:
    """uint8 [vocab_size]: ids whose decoded text contains ``text``. Raises ValueError if none does."""
    table = surfaces(tokenizer, vocab_size)
    mask = np.array([s is not None and text in tokenizer.decode([i]) for i, s in enumerate(table)], np.uint8)
    if not mask.any():
        raise ValueError(f"separator: got {text!r}, which no token of this vocabulary contains, need another")
    return mask


def decode(tokenizer: Any, ids: Sequence[int], skip_special_tokens: bool = True) -> str | None:
    if tokenizer is None:
        return None
    return tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


def check_same_vocabulary(tokenizers: dict[str, Any]) -> None:
    """Raise ValueError unless all (name -> tokenizer) have one vocabulary: ids cross between the models."""
    if len(tokenizers) < 2:
        return
    (first, a), *rest = tokenizers.items()
    va = a.get_vocab()
    for name, b in rest:
        vb = b.get_vocab()
        if va != vb:
            token = next(t for t in sorted(va.keys() | vb.keys()) if va.get(t) != vb.get(t))
            raise ValueError(
                f"models: got unequal vocabularies ({first}: {len(va)} tokens, {name}: {len(vb)}; {token!r} is "
                f"{va.get(token)} in one and {vb.get(token)} in the other), need one shared vocabulary"
            )


class StopStrings:
    """Finds the token that completes a stop string: the row keeps it, and its text ends where the string begins.

    ``decode`` maps ids to text. A string of c characters spans at most c tokens that write, so only a window of ids
    is decoded per token.
    """

    def __init__(self, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self.stops, self.decode = tuple(stops), decode
        self.window = 2 * max(map(len, self.stops)) + 4  # twice: tokens of a multi-byte character write nothing alone

    def first_hit(self, ids: Sequence[int], start: int = 0) -> int | None:
        """Number of ids to keep, looking at tokens from ``start`` on (earlier ones were fed before), or None."""
        for t in range(start, len(ids)):
            tail = self.decode(ids[max(0, t + 1 - self.window) : t + 1])
            if any(s in tail for s in self.stops):
                return t + 1
        return None

    def cut(self, text: str) -> str:
        """``text`` up to the earliest stop string."""
        return text[: min((text.index(s) for s in self.stops if s in text), default=len(text))]
