"""The canonical key of an answer: its kind, then an exact form of what it says (corl spec 8.3)."""

from __future__ import annotations

import re
from collections.abc import Hashable
from fractions import Fraction
from functools import lru_cache

from fastcollab.config import require
from fastcollab.grading.clean import WRAPPER, before_unit, clean, closes_last, split, unwrap
from fastcollab.grading.expression import PLAIN, WORDS, NotAFormula, number, parse
from fastcollab.grading.value import has_symbols, order_key, ratio_key, value_key

KINDS = ("math", "choice", "number", "text")
LONGEST, DEEPEST = 1000, 30  # characters of an answer; its brackets

_NUMBER = re.compile(r"([+-]?)(?:(\d{1,3}(?:,\d{3})+)|(\d+))?(\.\d*)?")
_MIXED = re.compile(r"([+-]?) ?(\d+) +(\d+) ?/ ?(\d+)")
_REPEATING = re.compile(r"([+-]?)(\d*)\.(\d*)\\overline\{(\d+)\}")
_BASE = re.compile(r"(\d[0-9a-zA-Z]*|[0-9A-Z]*\d[0-9A-Z]*)_(?:\{(\d+)\}|(\d+))")
_SYMBOL = re.compile(rf"(?:\\[a-zA-Z]+|[a-zA-Z]|{'|'.join(PLAIN)})(?:_(?:\{{\w+\}}|[a-zA-Z]|\d+))?(?:\([a-zA-Z]\))?")
_NAMED = {
    "": None, r"\emptyset": ("set",), r"\{\}": ("set",), "nosolution": ("set",), "nosolutions": ("set",),
    "dne": ("text", "undefined"), "doesnotexist": ("text", "undefined"), "undefined": ("text", "undefined"),
    r"\mathbb{r}": "all", "allrealnumbers": "all", "allreals": "all",
}  # fmt: skip
_INFINITY = {r"\infty": 1, r"+\infty": 1, r"-\infty": -1, "infty": 1, "-infty": -1}
_SHORT_WORDS = {"yes", "no", "odd", "all", "one", "two", "six", "ten", "red"}
_JOINED = re.compile(r"[\s,]*(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])\s*")
_OR = re.compile(r"(?<![a-zA-Z\\])or(?![a-zA-Z])|\\cup(?![a-zA-Z])")
_LESS = re.compile(r"\\(?:leq?(?:slant)?|geq?(?:slant)?|lt|gt)(?![a-zA-Z])")
_ORDER = re.compile(r"(<=|>=|<|>)")
_SIGNS = re.compile(r"\\(?:pm|mp)(?![a-zA-Z])")
_IN = re.compile(r"\\in(?![a-zA-Z])")
_MATRIX = re.compile(r"\\begin\{([a-zA-Z]*matrix|array)\}(?:\{[lcr| ]*\})?(.*)\\end\{\1\}", re.S)
_LETTER = re.compile(r"\(?([A-Za-z])\)?(?:[.:)]?|[.:)] .*)", re.S)
_AMOUNT = re.compile(r"([+-]?[\d.,]*\d)(?: [a-zA-Z .]*)?")


def equal(a: str | None, b: str | None, kind: str = "math") -> bool:
    """Whether two answers are the same; one that is absent or empty equals nothing. Else an equivalence relation."""
    if a is None or b is None:
        return False
    return (own := key(a, kind)) is not None and own == key(b, kind)


def key(answer: str, kind: str = "math") -> Hashable:
    r"""The canonical key of an answer: equal answers have equal keys, whatever their form. None for an empty one.

    ``kind``: "math" (numbers, expressions, sets, intervals, tuples, matrices, equations, words), "choice" (a letter,
    bare or as ``(C)``, ``C. …``), "number" (words behind it are a unit, whatever they are) or "text" (letters with case
    and spaces folded). What can't be read, or is longer than ``LONGEST``, is ("raw", text) and equals itself only.
    Never raises for a string; time and size are bounded.
    """
    require(isinstance(answer, str), "answer", answer, "a string (an absent answer has no key)")
    require(kind in KINDS, "kind", kind, " or ".join(KINDS))
    if len(answer) > LONGEST:
        return ("raw", answer)
    return _key(answer, kind)


@lru_cache(maxsize=16384)
def _key(answer: str, kind: str) -> Hashable:
    text = clean(answer)
    if kind == "text":
        text = unwrap(text).casefold()
        return ("text", text) if text else None
    if kind == "choice" and (letter := _LETTER.fullmatch(unwrap(text))):
        return ("choice", letter[1].upper())
    if kind == "number" and (amount := _AMOUNT.fullmatch(unwrap(text))):
        text = amount[1]
    try:
        return _read(text) if unwrap(text) else None
    except NotAFormula:
        return ("raw", re.sub(r"\s*(\W)\s*", r"\1", unwrap(text)))


def _read(text: str) -> tuple:
    """The key of a cleaned answer, or of one member of it. Raises :class:`NotAFormula`."""
    if (plain := _plain(text)) is not None:
        return plain
    before = before_unit(text)
    if before is not None and _is_constant(before):
        return _plain(before) or value_key(parse(before))
    name, rest = map(str.strip, text.split("=", 1)) if "=" in text else ("", "")
    if _is_symbol(name) and (plain := _plain(before_unit(rest) or rest)) is not None:
        return plain  # before lists: x = 1,000 is none
    if text[:1] in r"([\{" and _depth(text) > DEEPEST:
        raise NotAFormula("too deep")
    name = unwrap(text).replace(" ", "")
    if name.casefold() in _NAMED:
        if (named := _NAMED[name.casefold()]) is None:
            raise NotAFormula("nothing")
        return _union([(False, _end(r"-\infty"), _end(r"\infty"), False)]) if named == "all" else named
    if name in _INFINITY:
        return ("infinity", _INFINITY[name])
    for form in (_ranges, _collection, _matrix, _equation):
        found = form(text)
        if found is not None:
            return found
    if _is_words(words := unwrap(text)):
        return ("text", words.casefold().rstrip("."))
    return value_key(parse(unwrap(text)))


def _depth(text: str) -> int:
    depth = most = 0
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        most = max(most, depth)
    return most


def _is_constant(text: str) -> bool:
    try:
        return not has_symbols(parse(text))
    except NotAFormula:
        return bool(_plain(text))


def _plain(text: str) -> tuple | None:
    """A number in figures, thousands in groups of three. (A member of a list or tuple has no comma left.)"""
    found = _NUMBER.fullmatch(text)
    if found and text[-1:].isdigit():
        return _number(number(text.replace(",", "").lstrip("+-")), found[1])
    if found := _MIXED.fullmatch(text):
        sign, whole, p, q = found.groups()
        return _number(int(whole) + Fraction(int(p), int(q)), sign) if int(q) else None
    if found := _REPEATING.fullmatch(text):
        sign, whole, first, period = found.groups()
        tail = Fraction(int(period), 10 ** len(period) - 1) / 10 ** len(first)
        return _number(number(f"{whole or 0}.{first or 0}") + tail, sign)
    if found := _BASE.fullmatch(text.replace(" ", "")):
        return ("base", found[1].casefold(), int(found[2] or found[3]))
    return None


def _number(x: Fraction, sign: str = "") -> tuple:
    x = -x if sign == "-" else x
    return ("num", x.numerator, x.denominator)


def _is_words(text: str) -> bool:
    words = [w.strip(".,:!?'\"") for w in text.replace("-", " ").split()]
    if not words or not all(w.isalpha() for w in words):
        return False
    long = any(len(w) > 3 and not _is_formula(w) or len(w) > 2 and w.istitle() for w in words)
    return long or _SHORT_WORDS.issuperset(w.casefold() for w in words)


def _is_formula(word: str) -> bool:
    rests = ("", "x", "y", "z", "pi", "theta")
    return any(word.startswith(name) and word[len(name) :] in rests for name in WORDS)


def _is_symbol(text: str) -> bool:
    r"""Of one quantity: a letter or Greek word, perhaps with a subscript or argument; a word; what \text{…} names."""
    name = unwrap(text)
    if WRAPPER.fullmatch(text.strip()):
        return name.replace(" ", "").isalpha()
    return bool(_SYMBOL.fullmatch(name)) or name.isalpha() and _is_words(name)


# -- intervals


def _ranges(text: str) -> tuple | None:
    """Intervals and inequalities, joined by "or" or a union sign; (a, b) alone is a point."""
    parts = [part.strip() for part in _OR.split(text)]
    found = [_interval(part, len(parts) == 1) or _inequality(part) for part in parts]
    return None if None in found else _union(found)


def _interval(text: str, alone: bool) -> tuple | None:
    """(closed, low, high, closed) with ends as :func:`_end` gives them."""
    if not (len(text) > 2 and text[0] in "([" and text[-1] in ")]" and closes_last(text)):
        return None
    ends = split(text[1:-1])
    is_open = text[0] == "(" and text[-1] == ")"
    if len(ends) != 2 or alone and is_open and not any(end.replace(" ", "") in _INFINITY for end in ends):
        return None
    return (text[0] == "[", *map(_end, ends), text[-1] == "]")


def _inequality(text: str) -> tuple | None:
    plain = _LESS.sub(lambda m: ("<" if m[0][1] == "l" else ">") + ("=" if m[0][2] == "e" else ""), text)
    sides = [side.strip() for side in _ORDER.split(plain)]
    if len(sides) == 1:
        return None
    if sides[1][0] == ">":
        sides = [side.translate({60: 62, 62: 60}) if i % 2 else side for i, side in enumerate(sides)][::-1]
    if any(sign[0] == ">" for sign in sides[1::2]):
        raise NotAFormula("an inequality that turns")
    if len(sides) == 3 and _is_symbol(sides[0]):
        return (False, _end(r"-\infty"), _end(sides[2]), "=" in sides[1])
    if len(sides) == 3 and _is_symbol(sides[2]):
        return ("=" in sides[1], _end(sides[0]), _end(r"\infty"), False)
    if len(sides) == 5 and _is_symbol(sides[2]):
        return ("=" in sides[1], _end(sides[0]), _end(sides[4]), "=" in sides[3])
    raise NotAFormula("an inequality of another form")


def _end(text: str) -> tuple:
    """(place in the order, key) of an interval's end."""
    sign = _INFINITY.get(text.replace(" ", ""))
    if sign is not None:
        return (sign * float("inf"), ("infinity", sign))
    tree = parse(unwrap(text))
    return (order_key(tree), value_key(tree))


def _union(parts: list[tuple]) -> tuple:
    """Sorted; intervals that overlap or touch are one. An open one is written as a point (a, b), and has its key."""
    merged: list[list] = []
    for closed, low, high, ends_closed in sorted(parts, key=lambda p: (p[1][0], not p[0])):
        if low[0] > high[0]:
            raise NotAFormula("an interval that ends before it begins")
        last = merged[-1] if merged else None
        if last and (low[0] < last[2][0] or low[0] == last[2][0] and (closed or last[3])):
            if (high[0], ends_closed) > (last[2][0], last[3]):
                last[2], last[3] = high, ends_closed
        else:
            merged.append([closed, low, high, ends_closed])
    if len(merged) == 1 and not any((merged[0][0], merged[0][3])):
        low, high = merged[0][1][1], merged[0][2][1]
        if "infinity" not in (low[0], high[0]):
            return ("tuple", low, high)
    return ("interval", *((c, low[1], high[1], d) for c, low, high, d in merged))


# -- several answers


def _collection(text: str) -> tuple | None:
    if text.startswith(r"\{") and text.endswith(r"\}") and closes_last(text[1:]):
        return _set(split(text[2:-2]))
    if text.startswith(r"\langle") and text.endswith(r"\rangle"):
        return ("tuple", *map(_read, split(text[7:-7])))
    if text[:1] in "([" and closes_last(text):
        parts = split(text[1:-1])
        return ("tuple", *map(_read, parts)) if len(parts) > 1 else None
    parts = split(_JOINED.sub(",", text))
    if len(parts) > 1:
        sides = [part.partition("=") for part in parts]
        names = {left.strip() for left, _, _ in sides}
        if len(names) == len(parts) and all(map(_is_symbol, names)) and all(sign for _, sign, _ in sides):
            return ("tuple", *(_read(right.strip()) for _, _, right in sorted(sides)))  # x = 1, y = 2
        return _set(parts)
    if _SIGNS.search(text) and "=" not in text:
        signs = {"p": "+", "m": "-"}  # of \pm and \mp: the first letter's, then the second's
        return _set([_SIGNS.sub(lambda m, k=k: signs[m[0][k]], text).strip() for k in (1, 2)])
    return None


def _set(parts: list[str]) -> tuple:
    r"""The members in the order of their keys; both values of a member with \pm are members."""
    keys: list[tuple] = []
    for part in parts:
        found = _read(part)
        keys += found[1:] if _SIGNS.search(part) and found[0] == "set" else [found]
    return ("set", *sorted(keys, key=repr))


def _matrix(text: str) -> tuple | None:
    found = _MATRIX.fullmatch(text)
    if found is None:
        return None
    rows = [row for row in found[2].split(r"\\") if row.strip()]
    return ("matrix", *(tuple(_read(cell.strip()) for cell in row.split("&")) for row in rows))


def _equation(text: str) -> tuple | None:
    member = _IN.split(text)
    if len(member) == 2 and _is_symbol(member[0]):
        return _read(member[1].strip())
    sides = [side.strip() for side in text.split("=")]
    if len(sides) == 1:
        return None
    left, right = unwrap(sides[0]), sides[-1]
    named = split(left[1:-1]) if left[:1] == "(" and closes_last(left) else [sides[0]]
    if all(map(_is_symbol, named)):
        return _read(right)
    if len(sides) > 2:
        raise NotAFormula("a chain of equations")
    if _is_symbol(right):
        return _read(sides[0])
    return ("equation", *ratio_key(("add", parse(left), ("neg", parse(unwrap(right))))))
