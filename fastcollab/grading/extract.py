"""The answer in a response: what its last closed box holds."""

from __future__ import annotations

import re

from fastcollab.grading.clean import clean, unwrap

WINDOW = 100_000  # characters at the end of a response that are searched
_MARK = re.compile(r"(?P<box>(?:\\boxed|\\fbox)(?![a-zA-Z])|(?<![\\a-zA-Z])boxed(?= *\{))|\\.|[{}]", re.S)
_BARE = re.compile(r" *(?:(-?\d+(?:\.\d+)?)|(-?[a-zA-Z])(?= *(?:[.$\\]|$)))")


def extract(text: str) -> str | None:
    r"""The content of the last closed, non-empty ``\boxed{…}`` or ``\fbox{…}``, braces balanced; else None.

    ``\boxed 7`` and ``boxed{7}`` count too. Of nested boxes the inner one counts. An unclosed box at the end is passed
    over: an earlier closed one still stands, as it would if the text had been cut before it. There is no fall-back to
    the last number of the text. Give the response alone: a box in the prompt is not an answer.
    """
    text = text[-WINDOW:]
    boxes: list[tuple[int, str]] = []  # where it begins, content
    opened: list[int | None] = []  # the braces that are open: where its content begins for a box's, else None
    box_brace = None
    for mark in _MARK.finditer(text):
        sign, at = mark[0], mark.start()
        if mark["box"]:
            inside = mark.end()
            while text.startswith(" ", inside) and inside - mark.end() < 9:
                inside += 1
            if text.startswith("{", inside):
                box_brace = inside
            elif bare := _BARE.match(text, mark.end()):
                boxes.append((mark.end(), bare[1] or bare[2]))
        elif sign == "{":
            opened.append(at + 1 if at == box_brace else None)
        elif sign == "}" and opened and (start := opened.pop()) is not None:
            boxes.append((start, text[start:at]))
    for _, content in sorted(boxes, reverse=True):
        if unwrap(clean(content[:1000])):
            return content.strip()
    return None
