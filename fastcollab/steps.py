"""Steps: what a step of a draft is and where a cut falls, by the bytes of the generated ids (mintrl 2.2, 6.5, 6.6).

Ids are never encoded again: each id writes bytes, a step begins at a byte, and the cut is an edge between two ids.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from fastcollab.config import require
from fastcollab.tokens import decode, surfaces

Boundary = Callable[[str], Iterable[int]]  # text -> offsets of characters where a step begins, len(text) among them

_BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n)+")
_FENCED = re.compile(r"^ {0,3}(```+|~~~+)[^`\n]*\n(?:.*?^ {0,3}\1[`~]*[^\S\n]*(\n|\Z)|.*)", re.M | re.S)
_RAW_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class Step(NamedTuple):
    start: int  # index into the ids that were split: a cut keeps ids[:start]
    text: str  # its separator included


def blank_lines(text: str) -> list[int]:
    """A step begins after blank lines."""
    return [m.end() for m in _BLANK_LINES.finditer(text)]


def code_fences(text: str) -> list[int]:
    """A fenced block is a step, whatever blank lines it holds (an open one reaches to the end); text around it splits
    at blank lines."""
    blocks = list(_FENCED.finditer(text))
    begins, ends = [m.start() for m in blocks], [-1, *(m.end() for m in blocks)]
    outside = [at for at in blank_lines(text) if at > ends[bisect_left(begins, at)]]
    return sorted({*outside, *(m.start() for m in blocks), *(m.end() for m in blocks if m[2] is not None)})


BOUNDARIES: dict[str, Boundary] = {"text": blank_lines, "code": code_fences}


_READ: WeakKeyDictionary[Any, tuple[Any, list[bytes]]] = WeakKeyDictionary()


def token_bytes(tokenizer: Any) -> list[bytes]:
    """What each id writes inside a text, by id; nothing for special and unused ids. Read once: 1 s for 150,000 ids."""
    state = (len(tokenizer), sorted(tokenizer.all_special_ids))  # what may change of one
    if _READ.get(tokenizer, (None,))[0] != state:
        _READ[tokenizer] = state, _token_bytes(tokenizer)
    return _READ[tokenizer][1]


def _token_bytes(tokenizer: Any) -> list[bytes]:
    table = surfaces(tokenizer, 1 + max(tokenizer.get_vocab().values()))
    if "ByteLevel" in str(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", "")):
        alphabet = _byte_alphabet()  # a surface with any other character stands for itself, as in the decoder
        known = [all(c in alphabet for c in s or "") for s in table]
        return [b"".join(alphabet[c] for c in s or "") if k else s.encode() for s, k in zip(table, known, strict=True)]
    anchor = next((i for i, s in enumerate(table) if s and decode(tokenizer, [i]).strip()), None)
    require(anchor is not None, "tokenizer", f"{len(table)} ids that write nothing", "one that writes text")
    skip = len(decode(tokenizer, [anchor]))  # decoders drop the space before a first word: look at each id as a second
    written = []
    for i, s in enumerate(table):
        raw = _RAW_BYTE.fullmatch(s or "")
        text = "" if s is None or raw else decode(tokenizer, [anchor, i])[skip:]
        written.append(bytes([int(raw[1], 16)]) if raw else text.encode())
    return written


def _byte_alphabet() -> dict[str, bytes]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): bytes([b]) for b in plain} | {chr(256 + n): bytes([b]) for n, b in enumerate(others)}


def size(text: str) -> int:
    """Bytes that wrote ``text``, be they UTF-8 or not."""
    return len(text.encode("utf-8", "surrogateescape"))


class Steps:
    """Splits drafts of one tokenizer. ``boundary``: "text" (blank lines), "code" (code fences), a compiled pattern (a
    step begins after each match) or a function ``text -> offsets of characters where steps begin``.

    ``separator`` is what a correction puts before itself where the kept text ends inside a step.
    """

    def __init__(
        self, tokenizer: Any, boundary: str | re.Pattern | Boundary = "text", separator: str | None = None
    ) -> None:
        known = boundary in BOUNDARIES if isinstance(boundary, str) else True
        ok = known and (isinstance(boundary, (str, re.Pattern)) or callable(boundary))
        require(ok, "boundary", boundary, "'text', 'code', a compiled pattern or a function of the text")
        self.kind = boundary if isinstance(boundary, str) else "own"
        self.separator = ("\n\n" if self.kind == "text" else "\n") if separator is None else separator
        if isinstance(boundary, re.Pattern):
            self.boundary: Boundary = lambda text: [m.end() for m in boundary.finditer(text)]
        else:
            self.boundary = BOUNDARIES[boundary] if known and self.kind != "own" else boundary
        self.tokenizer, self.bytes = tokenizer, token_bytes(tokenizer)
        # uint8 [V]: ids that can complete a step, so that ``ends_step`` need not be asked after every token
        self.may_end = np.array([self.kind == "own" or b"\n" in b for b in self.bytes], np.uint8)

    def written(self, ids: Sequence[int]) -> bytes:
        V = len(self.bytes)
        if len(ids) and not 0 <= min(ids) <= max(ids) < V:
            raise ValueError(f"ids: got {[i for i in ids if not 0 <= i < V][:8]}, need in 0..{V - 1}")
        return b"".join(map(self.bytes.__getitem__, ids))

    def text(self, ids: Sequence[int]) -> str:
        """What ``ids`` write; bytes that are no UTF-8 as U+FFFD."""
        return self.written(ids).decode("utf-8", "replace")

    def escaped(self, ids: Sequence[int]) -> str:
        """What ``ids`` write, without loss: ``size(steps.escaped(ids)) == len(steps.written(ids))``."""
        return self.written(ids).decode("utf-8", "surrogateescape")

    def offsets(self, ids: Sequence[int]) -> list[int]:
        """Byte where each id begins, and where the last ends: [len(ids) + 1]."""
        return list(accumulate(map(len, map(self.bytes.__getitem__, ids)), initial=0))

    def split(self, ids: Sequence[int], start: int = 0) -> list[Step]:
        """Steps of the chunk ``ids[start:]``, at least one; what stands before it is context (a fence may be open).

        The first begins at ``start``, wherever the text before ended. Starts never fall, and lie below ``len(ids)``;
        two are equal where one id writes the end of one step and the whole next. Texts join to the text of the chunk.
        """
        require(0 <= start < len(ids), "start", start, f"in 0..{len(ids) - 1}: a chunk of at least one token")
        data, offsets = self.written(ids), self.offsets(ids)
        begins = [offsets[start]]
        for at in self._boundaries(data):
            if at > begins[-1] and data[begins[-1] : at].strip() and data[at:].strip():
                begins.append(at)  # a piece of whitespace only is part of the step beside it
        cuts = [start, *(self._edge(data, offsets, at, start) for at in begins[1:])]
        pieces = zip(begins, [*begins[1:], len(data)], strict=True)
        return [Step(cut, data[a:b].decode("utf-8", "replace")) for cut, (a, b) in zip(cuts, pieces, strict=True)]

    def ends_step(self, ids: Sequence[int]) -> bool:
        """Whether the text of ``ids`` ends where a step does, whitespace after it aside."""
        data = self.written(ids)
        ends = self._boundaries(data)
        return bool(ends) and not data[ends[-1] :].strip()

    def cut(self, ids: Sequence[int], at: int) -> int:
        """Number of ids to keep for the first ``at`` bytes: a token edge that is a code point's too (6.6).

        An id that straddles the byte stays if it writes only whitespace beyond it.
        """
        require(at >= 0, "at", at, ">= 0")
        data = self.written(ids)
        return self._edge(data, self.offsets(ids), min(at, len(data)), 0)

    def _boundaries(self, data: bytes) -> list[int]:
        """Bytes where steps begin, in order."""
        text = data.decode("utf-8", "surrogateescape")
        found, at, last = [], 0, 0
        for char in sorted(set(self.boundary(text))):
            require(0 <= char <= len(text), "boundary", char, f"offsets in 0..{len(text)}")
            at, last = at + size(text[last:char]), char
            found.append(at)
        return found

    def _edge(self, data: bytes, offsets: list[int], at: int, low: int) -> int:
        edge = bisect_left(offsets, at)
        if data[at : offsets[edge]].strip():
            edge -= 1
        while edge > low and _splits_character(data, offsets[edge]):
            edge -= 1
        return edge


def _splits_character(data: bytes, at: int) -> bool:
    """Whether a UTF-8 character begins before ``at`` and goes on, or was to go on, behind it."""
    if at < len(data) and data[at] & 0xC0 != 0x80:
        return False
    for back in range(1, min(3, at) + 1):
        byte = data[at - back]
        if byte & 0xC0 != 0x80:
            return back < (4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1)
    return False
