"""Grading on random input: forms of one expression have one key, other values have other keys, nothing raises."""

from __future__ import annotations

import random
from fractions import Fraction
from math import prod

from fastcollab.grading import equal, extract, key

# A node is a Fraction, a symbol, or ("+" | "*", nodes), ("/", a, b), ("^", a, n), ("√", a). Oracle: exact values.
PLACES = [
    {"x": Fraction(7, 3), "y": Fraction(-11, 5), "n": Fraction(13)},
    {"x": Fraction(-2, 9), "y": Fraction(17, 4), "n": Fraction(5, 3)},
]


def draw(rng: random.Random, depth: int, roots: bool):
    kind = rng.choice("##xx" if depth == 0 else "+++**/^√" if roots else "+++**/^")
    if kind == "#":
        return Fraction(rng.randint(0, 20), rng.choice([1, 1, 1, 2, 4, 5, 3, 7]))
    if kind == "x":
        return rng.choice("xyn")
    if kind in "+*":
        return (kind, [draw(rng, depth - 1, roots) for _ in range(rng.randint(2, 3))])
    if kind == "/":
        return ("/", draw(rng, depth - 1, roots), draw(rng, depth - 1, roots))
    if kind == "^":
        return ("^", draw(rng, depth - 1, roots), rng.randint(1, 3))
    return ("√", draw(rng, depth - 1, roots))


def value(tree, place):
    if isinstance(tree, Fraction):
        return tree
    if isinstance(tree, str):
        return place[tree]
    if tree[0] == "+":
        return sum(value(t, place) for t in tree[1])
    if tree[0] == "*":
        return prod(value(t, place) for t in tree[1])
    return value(tree[1], place) / value(tree[2], place) if tree[0] == "/" else value(tree[1], place) ** tree[2]


def rewrite(tree, rng):
    """Another form of the same: terms in another order, products of sums multiplied out, powers and roots unfolded."""
    if isinstance(tree, Fraction) and rng.random() < 0.1:
        return ("/", Fraction(3 * tree.numerator), Fraction(3 * tree.denominator))
    if not isinstance(tree, tuple):
        return tree
    kind = tree[0]
    if kind in "+*":
        parts = [rewrite(t, rng) for t in rng.sample(tree[1], len(tree[1]))]
        if kind == "*" and len(parts) == 2 and isinstance(parts[1], tuple) and parts[1][0] == "+":
            return ("+", [("*", [parts[0], t]) for t in parts[1][1]])
        return (kind, parts)
    if kind == "/":
        above, below = rewrite(tree[1], rng), rewrite(tree[2], rng)
        return ("*", [above, ("/", Fraction(1), below)]) if rng.random() < 0.5 else ("/", above, below)
    if kind == "^":
        return ("*", [rewrite(tree[1], rng)] * tree[2]) if tree[2] > 1 else rewrite(tree[1], rng)
    inner = rewrite(tree[1], rng)
    return ("/", inner, ("√", inner)) if rng.random() < 0.5 else ("√", ("*", [Fraction(1, 4), inner, Fraction(4)]))


def write(tree, rng) -> str:
    """The tree as text, in LaTeX or plainly, in one of many spellings."""
    if isinstance(tree, Fraction):
        p, q = tree.numerator, tree.denominator
        decimal = q in (1, 2, 4, 5) and rng.random() < 0.3
        if decimal:
            return f"{float(tree):g}" + rng.choice(["", "0" if q > 1 else ".0"])
        return str(p) if q == 1 else rng.choice([rf"\frac{{{p}}}{{{q}}}", f"({p}/{q})", rf"\dfrac{{{p}}}{{{q}}}"])
    if isinstance(tree, str):
        return tree
    space = rng.choice(["", " ", r"\,", "  "])
    if tree[0] == "+":
        return f"{space}+{space}".join(write(t, rng) for t in tree[1])
    if tree[0] == "*":
        parts = [bracketed(t, rng) for t in tree[1]]
        text = parts[0]
        for part in parts[1:]:
            touching = part[0] in "(xyn" or part[:5] == r"\left" or part[:5] == r"\sqrt"
            text += rng.choice(["", " "] if touching else [r"\cdot ", "*", r" \times "]) + part
        return text
    if tree[0] == "/":
        if rng.random() < 0.6:
            return rf"\frac{{{write(tree[1], rng)}}}{{{space}{write(tree[2], rng)}}}"
        return f"{group(tree[1], rng)}{space}/{space}{group(tree[2], rng)}"
    if tree[0] == "^":
        return group(tree[1], rng) + rng.choice([f"^{tree[2]}", f"^{{{tree[2]}}}", f"**{tree[2]}"]) + " "
    return rf"\sqrt{{{write(tree[1], rng)}}}" if rng.random() < 0.7 else f"sqrt({write(tree[1], rng)})"


def bracketed(tree, rng) -> str:
    simple = tree.denominator == 1 if isinstance(tree, Fraction) else isinstance(tree, str) or tree[0] == "√"
    return write(tree, rng) if simple else group(tree, rng)


def group(tree, rng) -> str:
    left, right = rng.choice([("(", ")"), (r"\left(", r"\right)")])
    return left + write(tree, rng) + right


def test_ten_thousand_expressions():
    """10,000 expressions, each in two forms: one key exactly where the oracle has one value. (Reflexive, symmetric and
    transitive follow: ``equal`` compares keys.)"""
    rng = random.Random(0)
    values: dict = {}  # key -> oracle's value
    keys: dict = {}
    count = unread = 0
    while count < 7000:
        tree = draw(rng, rng.choice([0, 1, 1, 2]), roots=False)
        try:
            want = tuple(value(tree, place) for place in PLACES)
        except ZeroDivisionError:
            continue
        count += 1
        first, second = write(tree, rng), write(rewrite(tree, rng), rng)
        own = key(first)
        assert own == key(second), (first, second)
        unread += own[0] == "raw"
        assert values.setdefault(own, want) == want, first
        assert keys.setdefault(want, own) == own, first
    assert unread == 0 and len(keys) > 2000


def test_expressions_with_roots():
    rng = random.Random(1)
    read = 0
    for _ in range(3000):
        tree = draw(rng, rng.choice([1, 1, 2]), roots=True)
        first, second = write(tree, rng), write(rewrite(tree, rng), rng)
        own, other = key(first), key(second)
        if "raw" not in (own[0], other[0]):  # a division by 0, which a rewrite may hide or bring in
            read += 1
            assert own == other, (first, second)
            assert read % 10 or not equal(first, f"({first})+1")
    assert read > 2800


PIECES = [
    "\\", "{", "}", "(", ")", "[", "]", ",", ";", "^", "_", "=", "<", "|", "&", "$", "%", "\n", "\x00", "é", "·", "²",
    "٣", "1", "23", "0.5", "x", "e", "i", " and ", " or ", "cm", "word", r"\frac", r"\sqrt", r"\text{", r"\pm",
    r"\mp", r"\cup", r"\in ", r"\le", r"\boxed", r"\infty", r"\left", r"\right.", r"\{", r"\}", r"\log_", r"\sin",
    r"\pi", r"\lfloor", r"\rfloor", "!", "**", "/", "-", r"\begin{pmatrix}", r"\end{pmatrix}", r"\\", r"\binom",
    r"\overline{", r"^\circ", r"\,", "e9", ".",
]  # fmt: skip


def test_no_string_raises():
    """Nor does a key depend on what was read before, and each answer that is not empty equals itself."""
    rng = random.Random(2)
    kinds = ("math", "choice", "number", "text")
    for n in range(12000):
        text = "".join(rng.choices(PIECES, k=rng.randint(1, 9)))
        if n % 10 == 0:
            text = "".join(map(chr, rng.choices(range(0xD7FF), k=8)))
        kind = kinds[n % 4]
        own = key(text, kind)
        hash(own), repr(own)
        assert own is None or equal(text, text, kind)
        extract(text)
        extract(rf"\boxed{{{text}")
