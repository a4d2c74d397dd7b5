"""What carries no meaning in an answer, taken off before it is read."""

from __future__ import annotations

import re

_PLAIN = {"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "≤": r"\le ", "≥": r"\ge ",
          "∞": r"\infty ", "±": r"\pm ", "°": r"^\circ ", "√": r"\sqrt ", "²": "^2", "³": "^3", "½": r"\frac{1}{2}",
          "∪": r"\cup ", "∈": r"\in ", "∅": r"\emptyset ", "\u00a0": " ", "\u2009": " ", r"\lbrace": r"\{",
          r"\rbrace": r"\}", r"\lvert": "|", r"\rvert": "|", r"\varnothing": r"\emptyset "}  # fmt: skip
_PLAIN_RE = re.compile("|".join(re.escape(k) + "(?![a-zA-Z])" * (k[0] == "\\" and k[1:].isalpha()) for k in _PLAIN))
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\[,;:!])(?=\d{3}(?!\d))")
_NOTHING = re.compile(
    r"\\!|\\(?:left|right|displaystyle|limits|[bB]igg?[lr]?)(?![a-zA-Z])|(?<!\\)\\[()\[\]%$]|[$%€£¥]"
    r"|(?:\^\{\s*\\circ\s*\}|\^?\s*\\(?:circ|degree)(?![a-zA-Z]))(?:\s*[CF](?![a-zA-Z]))?"
)
_SPACE = re.compile(r"(?<!\\)\\[,;:> ]|\\q?quad(?![a-zA-Z])|~|\\hspace\{[^{}]*\}")
_WRAP = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}"
WRAPPER = re.compile(_WRAP)
_JOIN = re.compile(r"\\(?:text|textrm|mathrm|mbox)\s*\{\s*,?\s*(and|or)\s*\}")
_KNOWN = (
    "cm mm km kg mg lbs? oz ft in inch(?:es)? feet foot yards? miles? mph met(?:er|re)s? grams? lit(?:er|re)s? hours? "
    "hrs? min(?:ute)?s? sec(?:ond)?s? days? weeks? months? years? dollars? cents? percent degrees? rad(?:ian)?s? "
    "units? square cubic sq people ways points times per"
).replace(" ", "|")
_UNIT = re.compile(
    rf"\s*(?:{_WRAP}|(?<![a-zA-Z\\])(?:(?:{_KNOWN})(?![a-zA-Z])[ ./]*){{1,6}})\s*(?:\^\s*(?:\{{-?\d\}}|-?\d))?$", re.I
)


def clean(answer: str) -> str:
    r"""The answer without dollar signs, sizes, spacing macros, percent, degree and currency signs, a final period."""
    text = _PLAIN_RE.sub(lambda m: _PLAIN[m[0]], answer)
    text = _THOUSANDS.sub("", text).replace("{,}", ",")
    text = _JOIN.sub(r" \1 ", _SPACE.sub(" ", _NOTHING.sub("", text))).replace(";", ",").strip()
    while True:
        before = text
        if text.endswith((".", ",")) and not text.endswith(".."):
            text = text[:-1].rstrip()
        if outer := WRAPPER.fullmatch(text):
            text = outer[1].strip()
        if text[:1] == "{" and closes_last(text):
            text = text[1:-1].strip()
        if text == before:
            return text


def unwrap(text: str) -> str:
    r"""``\text{…}`` and its kind without the command, single spaces."""
    return " ".join(WRAPPER.sub(r" \1 ", text).split())


def before_unit(text: str) -> str | None:
    r"""What stands before a unit at the end, ``\text{…}`` or known words with an exponent; None where there is none."""
    found = _UNIT.search(text)
    return text[: found.start()] or None if found else None


def closes_last(text: str) -> bool:
    """Whether the bracket that ``text`` begins with is closed by its last character."""
    depth = 0
    for at, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if depth == 0:
            return at == len(text) - 1
    return False


def split(text: str, at: str = ",") -> list[str]:
    """The parts between top-level separators; brackets of every kind nest."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if c == at and depth <= 0:
            parts.append(text[start:i].strip())
            start = i + 1
    return [*parts, text[start:].strip()]
