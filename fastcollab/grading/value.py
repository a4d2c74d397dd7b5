"""The value of a formula as a key: an exact fraction where it is rational, else thirty digits at fixed points.

Thirty digits of a constant, or of a formula at three points that are fixed by the names of its symbols, tell formulas
apart for all practical purposes, and formulas that are equal have the same ones whatever their form: no expansion, no
simplification, and sin(pi/6) x is x/2. Symbols stand for positive numbers, as school has it: sqrt(x^2) is x.
"""

from __future__ import annotations

import threading
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b
from math import ceil, comb, factorial, floor, isqrt
from typing import Any

from fastcollab.grading.expression import MOST_BITS, NotAFormula

DIGITS, WORKING = 30, 80
RANGES = ((1, 4), (4, 12), (16, 24))  # of a symbol at each point, in quarters: on both sides of small numbers
_local = threading.local()


def value_key(tree: tuple) -> tuple:
    """("num", p, q) or ("value", digits, …); raises :class:`NotAFormula` where it is undefined or too large."""
    if (x := rational(tree)) is not None:
        return ("num", x.numerator, x.denominator)
    values = _values(tree)
    if all(abs(v - values[0]) <= _mp().tiny for v in values) and (x := _fraction(values[0])) is not None:
        return ("num", x.numerator, x.denominator)
    return ("value", *map(_digits, values))


def ratio_key(tree: tuple) -> tuple:
    """The same for every multiple of a formula: the values at the points over the first."""
    first, *rest = _values(tree)
    if not rest or not first:
        raise NotAFormula("no symbol, or it is 0")
    return tuple(_digits(v / first) for v in rest)


def order_key(tree: tuple) -> int:
    """A number that sorts as the formula's value does; raises where that isn't one real number."""
    x = rational(tree)
    if x is None:
        v, *more = _values(tree)
        if more or v.imag:
            raise NotAFormula("not a real number")
        return int(_mp().nint(v.real * 10**40))
    return round(x * 10**40)


def has_symbols(tree: tuple) -> bool:
    return tree[0] == "var" or any(isinstance(t, tuple) and has_symbols(t) for t in tree[1:])


# -- exact


def rational(tree: tuple) -> Fraction | None:
    """The value, where arithmetic on fractions gives it; None where it doesn't."""
    kind = tree[0]
    if kind == "num":
        return tree[1]
    parts = [rational(t) for t in tree[1:] if isinstance(t, tuple)]
    if not parts or None in parts:
        return None
    x = parts[0]
    if kind == "neg":
        return -x
    if kind == "inv":
        if not x:
            raise NotAFormula("a division by 0")
        return 1 / x
    if kind == "pow":
        return _rational_power(*parts)
    if kind == "call":
        return _rational_call(tree[1], parts)
    for y in parts[1:]:
        x = _bounded(x + y if kind == "add" else x * y)
    return x


def _bounded(x: Fraction) -> Fraction:
    if max(x.numerator.bit_length(), x.denominator.bit_length()) > MOST_BITS:
        raise NotAFormula("too large")
    return x


def _rational_power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if not base and exponent <= 0:
        raise NotAFormula("0 to a power that is not positive")
    if exponent.denominator == 2 and base >= 0:
        p, q = isqrt(base.numerator), isqrt(base.denominator)
        if p * p == base.numerator and q * q == base.denominator:
            base, exponent = Fraction(p, q), Fraction(exponent.numerator)
    if exponent.denominator != 1:
        return None
    if abs(base) not in (0, 1):
        bits = max(base.numerator.bit_length(), base.denominator.bit_length()) - 1
        if abs(exponent) * max(1, bits) > MOST_BITS:
            raise NotAFormula("too large")
    else:
        exponent %= 2
        exponent += 2  # only its parity counts
    return _bounded(base ** int(exponent))


def _rational_call(function: str, parts: list[Fraction]) -> Fraction | None:
    x, whole = parts[0], all(p.denominator == 1 for p in parts)
    if function in ("abs", "floor", "ceil"):
        return Fraction({"abs": abs, "floor": floor, "ceil": ceil}[function](x))
    if function == "factorial" and whole and 0 <= x <= 500:
        return Fraction(factorial(int(x)))
    if function == "binom" and whole and 0 <= parts[1] <= x <= MOST_BITS:
        return Fraction(comb(int(x), int(parts[1])))
    return None


# -- to thirty digits


def _mp() -> Any:
    """mpmath's own arithmetic; one per thread, since it holds state."""
    if not hasattr(_local, "mp"):
        from mpmath.ctx_mp import MPContext

        _local.mp = mp = MPContext()
        mp.dps = WORKING
        mp.tiny, mp.noise, mp.huge = mp.mpf(10) ** -40, mp.mpf(10) ** -60, mp.mpf(10) ** 10000
    return _local.mp


@lru_cache(maxsize=4096)
def _place(name: str, point: int) -> int:
    """2^258 times the value of a symbol."""
    low, high = RANGES[point]
    drawn = int.from_bytes(blake2b(f"{name} {point}".encode(), digest_size=32).digest(), "big")
    return (low << 256) + (high - low) * drawn


def _values(tree: tuple) -> list[Any]:
    mp = _mp()
    try:
        values = [mp.mpmathify(_evaluate(tree, mp, k)) for k in range(len(RANGES) if has_symbols(tree) else 1)]
    except (ArithmeticError, ValueError, TypeError) as error:
        raise NotAFormula(str(error)) from error
    if not all(mp.isfinite(v) and abs(v) < mp.huge for v in values):
        raise NotAFormula("no finite value")
    return [_real(v, mp) for v in values]


def _real(v: Any, mp: Any) -> Any:
    """A complex number without a part that is nothing but rounding."""
    if not v.imag:
        return v.real
    tiny = abs(v) * mp.tiny
    return mp.mpc(v.real if abs(v.real) > tiny else 0, v.imag) if abs(v.imag) > tiny else v.real


def _evaluate(tree: tuple, mp: Any, point: int) -> Any:
    kind = tree[0]
    if kind == "var":
        return mp.ldexp(_place(tree[1], point), -258)
    if kind == "num":
        return mp.mpf(tree[1].numerator) / tree[1].denominator
    if kind == "const":
        return {"pi": +mp.pi, "e": +mp.e, "i": mp.j}[tree[1]]
    parts = [_evaluate(t, mp, point) for t in tree[1:] if isinstance(t, tuple)]
    if kind == "neg":
        return -parts[0]
    if kind == "inv":
        return 1 / parts[0]
    if kind == "pow":
        return _power(*parts, mp)
    if kind == "call":
        return _call(tree[1], parts, mp)
    total = parts[0]
    for x in parts[1:]:
        total = total + x if kind == "add" else total * x
    if kind == "add" and abs(total) < max(map(abs, parts)) * mp.noise:
        return mp.mpf(0)  # what is left of a difference of equal values
    return total


def _power(base: Any, exponent: Any, mp: Any) -> Any:
    if base == 0:
        if exponent.real <= 0:
            raise NotAFormula("0 to a power that is not positive")
        return mp.mpf(0)
    if abs(exponent) * (1 + abs(mp.log(abs(base)))) > 10**5:
        raise NotAFormula("too large")
    if not base.imag and base.real < 0 and not exponent.imag:
        n = mp.nint(3 * exponent.real)
        if n % 3 and abs(3 * exponent.real - n) < mp.noise:  # the real cube root, as school has it
            return (-1) ** int(n) * (-base) ** exponent
    return base**exponent


def _call(function: str, parts: list, mp: Any) -> Any:
    x = parts[0]
    if max(map(abs, parts)) > (10**3 if function in ("factorial", "binom") else 10**6):
        raise NotAFormula("too large")
    if function == "log":
        return mp.log(x) / mp.log(parts[1] if len(parts) > 1 else 10)
    if function in ("factorial", "binom"):
        return mp.gamma(x + 1) if function == "factorial" else mp.binomial(*parts)
    names = {"abs": "fabs", "arcsin": "asin", "arccos": "acos", "arctan": "atan"}
    names |= {"arc" + f: "a" + f for f in ("cot", "sec", "csc", "sinh", "cosh", "tanh")}
    return getattr(mp, names.get(function, function))(x)


def _fraction(v: Any) -> Fraction | None:
    """The fraction of small height that a value is to 60 digits."""
    if v.imag or abs(v.real) > 10**15:
        return None
    sign, mantissa, exponent, _ = v.real._mpf_
    exactly = Fraction(int(mantissa) * (-1) ** sign) * Fraction(2) ** exponent
    near = exactly.limit_denominator(10**15)
    return near if abs(exactly - near) <= Fraction(1, 10**60) * max(1, abs(near)) else None


def _digits(v: Any) -> str:
    mp = _mp()
    text = mp.nstr(v.real, DIGITS)
    return f"{text} {mp.nstr(v.imag, DIGITS)}" if v.imag else text
