r"""A formula in LaTeX or plain notation as a tree of tuples; bounded in length and depth.

Nodes: ("num", Fraction) · ("var", name) · ("const", "pi" | "e" | "i") · ("add", a, …) · ("mul", a, …) · ("neg", a) ·
("inv", a) · ("pow", a, b) · ("call", function, a, …). Chains are flat, so only nesting makes a tree deep.
"""

from __future__ import annotations

import re
from fractions import Fraction

LONGEST, DEEPEST = 600, 30  # characters; levels that no bracket shows, as in \sqrt\sqrt 2 or a^b^c
MOST_BITS = 4096  # of a number

TRIG = {"sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh"}
FUNCTIONS = TRIG | {"arcsin", "arccos", "arctan", "ln", "log", "exp"}
PLAIN = {"alpha", "beta", "gamma", "delta", "epsilon", "theta", "lambda", "rho", "sigma", "tau", "phi", "omega", "psi"}
GREEK = PLAIN | {"mu", "nu", "xi", "chi", "eta", "zeta", "kappa", "varphi"}  # these with a backslash only
WORDS = FUNCTIONS | PLAIN | {"pi", "sqrt"}
_NAME = re.compile("|".join(sorted(WORDS, key=len, reverse=True)) + "|[a-zA-Z]")
_TOKEN = re.compile(
    r"\s*(?:(?P<num>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE](?:\d+|[+-]\d\d+)(?![\d.a-zA-Z]))?)|(?P<cmd>\\[a-zA-Z]+)"
    r"|(?P<name>[a-zA-Z]+)|(?P<op>\*\*|[-+*/^()\[\]{}|!_]))\s*"
)
_OPERATORS = {"**": "^", r"\cdot": "*", r"\times": "*", r"\ast": "*", r"\div": "/"}
_CLOSING = {"(": ")", "[": "]", "{": "}", "|": "|", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
_CALLS = {"|": "abs", r"\lfloor": "floor", r"\lceil": "ceil"}
HALF = ("num", Fraction(1, 2))
END = " "  # the token after the last


class NotAFormula(ValueError):
    """The text is no formula, its value is undefined, or it is beyond the limits."""


def parse(text: str) -> tuple:
    """The tree of ``text``; raises :class:`NotAFormula`."""
    if len(text) > LONGEST:
        raise NotAFormula("too long")
    parser = _Parser(_tokens(text))
    tree = parser.sum()
    if parser.peek() != END:
        raise NotAFormula(f"unexpected {parser.peek()!r}")
    return tree


def number(text: str) -> Fraction:
    """A decimal or scientific literal, exactly."""
    mantissa, _, exponent = text.lower().partition("e")
    if exponent and (len(exponent) > 5 or abs(int(exponent)) > MOST_BITS // 4):
        raise NotAFormula("too large")
    value = Fraction(int(text)) if text.isdigit() else Fraction(mantissa)
    return value * Fraction(10) ** int(exponent) if exponent else value


def _tokens(text: str) -> list[str]:
    """Tokens tell their kind by their first character: a digit or point, a backslash, a letter, or an operator."""
    tokens, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise NotAFormula(f"unexpected {text[at]!r}")
        at = match.end()
        value = match[match.lastgroup]
        if match["name"]:
            tokens += ["\\" + w if len(w) > 1 else w for w in _NAME.findall(value)]
        else:
            tokens.append(_OPERATORS.get(value, value))
    return tokens


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.at, self.depth = [*tokens, END], 0, 0

    def peek(self) -> str:
        return self.tokens[self.at]

    def take(self, wanted: str = "") -> str:
        token = self.peek()
        if token == END or (wanted and token != wanted):
            raise NotAFormula(f"got {token!r}, need {wanted or 'more'!r}")
        self.at += 1
        return token

    def minus(self) -> bool:
        """Whether the signs that come next make a minus."""
        odd = False
        while self.peek() in "+-":
            odd ^= self.take() == "-"
        return odd

    def sum(self) -> tuple:
        terms = []
        while not terms or self.peek() in "+-":
            minus = self.minus()
            term = self.product()
            terms.append(("neg", term) if minus else term)
        return terms[0] if len(terms) == 1 else ("add", *terms)

    def product(self) -> tuple:
        factors = [self.power()]
        while (token := self.peek()) in "*/([{" or token[0] == "\\" or token.isalpha():
            if token in _CLOSING.values():
                break
            divide, minus = False, False
            if token in "*/":
                divide, minus = self.take() == "/", self.minus()
            factor = self.power()
            factor = ("inv", factor) if divide else factor
            factors.append(("neg", factor) if minus else factor)
        return factors[0] if len(factors) == 1 else ("mul", *factors)

    def power(self) -> tuple:
        base = self.atom()
        while self.peek() == "!":
            self.take()
            base = ("call", "factorial", base)
        if self.peek() != "^":
            return base
        self.take()
        minus = self.minus()
        exponent = self.deeper(self.power)
        return ("pow", base, ("neg", exponent) if minus else exponent)

    def deeper(self, rule) -> tuple:
        self.depth += 1
        if self.depth > DEEPEST:
            raise NotAFormula("too deep")
        tree = rule()
        self.depth -= 1
        return tree

    def group(self) -> tuple:
        opening = self.take()
        tree = self.deeper(self.sum)
        self.take(_CLOSING[opening])
        return ("call", _CALLS[opening], tree) if opening in _CALLS else tree

    def atom(self) -> tuple:
        token = self.peek()
        if token in _CLOSING:
            return self.group()
        self.take()
        if token[0] in ".0123456789":
            return self.mixed(number(token))
        if token[0] == "\\":
            return self.command(token[1:])
        if token.isalpha():
            return ("const", token) if token in "ei" and self.peek() != "_" else self.symbol(token)
        raise NotAFormula(f"got {token!r}, need a number, a symbol or a bracket")

    def mixed(self, whole: Fraction) -> tuple:
        r"""A number; 2\frac{1}{3} is one, 2\frac{x}{3} a product."""
        start = self.at
        if whole.denominator == 1 and self.peek() in (r"\frac", r"\dfrac", r"\tfrac"):
            _, above, (_, below) = self.atom()
            if above[0] == below[0] == "num" and below[1]:
                return ("num", whole + above[1] / below[1])
            self.at = start
        return ("num", whole)

    def argument(self, digit: bool = False) -> tuple:
        r"""What a command takes: {…} or one token; of a number one ``digit`` where asked, as in \frac12."""
        token = self.peek()
        if digit and token.isdigit() and len(token) > 1:
            self.tokens[self.at : self.at + 1] = list(token)
        if token[0].isdigit():
            return ("num", number(self.take()))
        return self.deeper(self.atom)

    def symbol(self, name: str) -> tuple:
        if self.peek() == "_":
            self.take()
            subscript = self.take()
            if subscript == "{":
                subscript = ""
                while self.peek() != "}":
                    subscript += self.take()
                self.take()
            name += "_" + subscript
        return ("var", name)

    def command(self, name: str) -> tuple:
        if name in ("frac", "dfrac", "tfrac", "cfrac"):
            return ("mul", self.argument(digit=True), ("inv", self.argument(digit=True)))
        if name in ("binom", "dbinom", "tbinom"):
            return ("call", "binom", self.argument(digit=True), self.argument(digit=True))
        if name == "pi":
            return ("const", "pi")
        if name == "sqrt":
            exponent = ("inv", self.group()) if self.peek() == "[" else HALF
            return ("pow", self.argument(), exponent)
        if name in FUNCTIONS:
            return self.function(name)
        if name in GREEK:
            return self.symbol("\\" + name)
        raise NotAFormula(f"an unknown command {name}")

    def function(self, name: str) -> tuple:
        base, power = (), None
        while self.peek() in "_^":
            if self.take() == "_":
                base = (self.argument(),)
            else:
                sign = self.minus()
                power = ("neg", self.argument()) if sign else self.argument()
        if name in TRIG and power in (("neg", ("num", 1)),):
            name, power = "arc" + name, None  # sin^{-1}
        if self.peek() in "([{":
            inner = self.group()
        else:  # sin 2x: up to the next sign, bracket or function
            factors = [self.deeper(self.power)]
            while self.peek().isalpha() or self.peek() == r"\pi":
                factors.append(self.power())
            inner = ("mul", *factors)
        call = ("call", name, inner, *base)
        return call if power is None else ("pow", call, power)
