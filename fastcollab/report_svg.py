"""Charts of the report: inline SVG that stretches to any width, its labels HTML that stays one size.

The SVG draws in percent (``preserveAspectRatio="none"``, strokes that don't scale); ticks are positioned text around
it. Series differ by colour and by dash, so that colour alone never carries meaning.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from html import escape
from statistics import fmean, median
from typing import NamedTuple

STYLES = 8  # colours and dashes that the style sheet has; further series repeat them
MAX_POINTS = 800


class Series(NamedTuple):
    """One line: its name, the index of its style and its points (x, y), x ascending, all finite."""

    name: str
    style: int
    points: list[tuple[float, float]]


def number(value: float, digits: int = 4) -> str:
    """A short form: ``digits`` significant digits, thousands separated."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}" if abs(value) >= 1e-4 else f"{value:.2e}"


def ticks(low: float, high: float, count: int = 5, whole: bool = False) -> list[float]:
    """Round numbers, about ``count``, that cover [low, high]; steps are 1, 2 or 5 times a power of ten."""
    span = (high - low) or abs(high) or 1.0
    rough = span / count
    power = 10 ** math.floor(math.log10(rough))
    step = next(k * power for k in (1, 2, 5, 10) if k * power >= rough * 0.999)
    step = max(1.0, step) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, max(last, first + 1) + 1)]


def smooth(points: Sequence[tuple[float, float]], window: int, middle: Callable = fmean) -> list[tuple[float, float]]:
    """Centred moving ``middle`` (mean, or median where outliers are noise) of ``window`` points, one-sided at ends."""
    half, ys = window // 2, [y for _, y in points]
    return [(x, middle(ys[max(0, i - half) : i + half + 1])) for i, (x, _) in enumerate(points)]


def thin(points: list[tuple[float, float]], limit: int = MAX_POINTS) -> list[tuple[float, float]]:
    """At most about ``limit`` points: the lowest and the highest of each stretch, so that spikes stay."""
    if len(points) <= limit:
        return points
    size = math.ceil(2 * len(points) / limit)
    kept = [points[0]]
    for start in range(0, len(points), size):
        part = points[start : start + size]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return [*kept, points[-1]]


def window_of(length: int) -> int:
    """Points that the smoothed line averages: odd, about a tenth of the run, at most 201."""
    return max(1, min(length // 10, 200)) | 1


def line_chart(
    key: str,
    title: str,
    series: Sequence[Series],
    unit: str = "",
    y_range: tuple[float, float] | None = None,
    note: str = "",
    middle: Callable = fmean,
) -> str:
    """A figure with each series raw (light) and smoothed by ``middle``, axes with ticks and a legend.

    ``key`` makes the ids, ``y_range`` fixes the axis, else it starts at 0 for values that do and ends near the highest
    smoothed value; the few points beyond are cut off and counted below.
    """
    series = [s for s in series if s.points]
    smoothed = [smooth(s.points, window_of(len(s.points)), middle) for s in series]
    low, high = y_range or _y_range(series, smoothed)
    y_ticks = ticks(low, high)
    low, high = min(low, y_ticks[0]), max(high, y_ticks[-1])
    x_all = [x for s in series for x, _ in s.points]
    x_low, x_high = min(x_all), max(x_all)
    x_ticks = [x for x in ticks(x_low, x_high, whole=True) if x_low <= x <= x_high]
    x_span = (x_low, x_high) if x_high > x_low else (x_low - 1, x_high + 1)  # one step alone stands in the middle
    y_span = (low, high)

    lines, legend, words = [], [], []
    for s, mean in zip(series, smoothed, strict=True):
        style = f"c{s.style % STYLES}"
        said = f"{s.name}: {number(mean[0][1])} at step {mean[0][0]:g}"
        if len(mean) == 1:
            at = _place(mean, x_span, y_span).replace(",", " ")
            lines.append(f'<path class="dot {style}" d="M{at}l.001 0"/>')
        else:
            said += f", {number(mean[-1][1])} at step {mean[-1][0]:g} (smoothed)"
            lines.append(f'<polyline class="raw {style}" points="{_place(thin(s.points), x_span, y_span)}"/>')
            where = _place(thin(mean), x_span, y_span)
            lines.append(f'<polyline class="{style}" points="{where}"><title>{escape(said)}</title></polyline>')
        words.append(said)
        values = " → ".join(number(y, 3) for y in dict.fromkeys((mean[0][1], mean[-1][1])))
        legend.append(f"<li>{_swatch(style)}{escape(s.name)} <b>{values}</b></li>")
    above = sum(y > high or y < low for s in series for _, y in s.points)
    cut = f"{above} value{'s' * (above > 1)} off the scale." if above else ""
    plot = _plot(key, title, "; ".join(words), lines, y_ticks, y_span, x_ticks, x_span, "step")
    return _figure(title, unit, legend, plot, " ".join(filter(None, (note, cut))))


def histogram(key: str, title: str, series: Sequence[Series], unit: str = "", note: str = "", bins: int = 20) -> str:
    """A figure that counts how many y values of each series fall in each of about ``bins`` equal bins.

    The highest 3 % may lie beyond the axis: it ends near the 97th percentile, and the note counts what is above.
    """
    series = [s for s in series if s.points]
    values = sorted(y for s in series for _, y in s.points)
    edges = ticks(values[0], _high(values), bins)
    width = edges[1] - edges[0]
    last = len(edges) - 2
    table = [Counter(min(int((y - edges[0]) / width), last) for _, y in s.points if y <= edges[-1]) for s in series]
    y_ticks = ticks(0, max(max(counts.values()) for counts in table), whole=True)
    x_span, y_span = (edges[0], edges[-1]), (0.0, y_ticks[-1])
    lines, legend, words = [], [], []
    for s, counts in zip(series, table, strict=True):
        style, middle = f"c{s.style % STYLES}", number(median(y for _, y in s.points), 3)
        steps = [(x, counts[i]) for i in range(last + 1) for x in (edges[i], edges[i + 1])]
        where = _place([(edges[0], 0.0), *steps, (edges[-1], 0.0)], x_span, y_span)
        lines.append(f'<polyline class="bars {style}" points="{where}"/>')
        words.append(f"{s.name}: median {middle}{unit} of {len(s.points)} values")
        legend.append(f"<li>{_swatch(style)}{escape(s.name)} <b>median {middle}{escape(unit)}</b></li>")
    above = sum(y > edges[-1] for y in values)
    cut = f"{above} value{'s' * (above > 1)} above {number(edges[-1])}{unit}." if above else ""
    x_ticks = [x for x in ticks(*x_span) if x_span[0] <= x <= x_span[1]]
    plot = _plot(key, title, "; ".join(words), lines, y_ticks, y_span, x_ticks, x_span, unit.strip())
    return _figure(title, "", legend, plot, " ".join(filter(None, (note, cut))))


def _high(ascending: Sequence[float]) -> float:
    """The 97th percentile, or the maximum where that is not far above it."""
    high = ascending[int(0.97 * (len(ascending) - 1))]
    return ascending[-1] if ascending[-1] - ascending[0] <= 1.5 * (high - ascending[0]) else high


def _y_range(series: Sequence[Series], smoothed: Sequence[Sequence[tuple[float, float]]]) -> tuple[float, float]:
    raw = sorted(y for s in series for _, y in s.points)
    means = [y for mean in smoothed for _, y in mean]
    low = -max(*(-y for y in means), _high([-y for y in reversed(raw)]))
    return (0.0 if raw[0] >= 0 else low), max(*means, _high(raw))


def _percent(value: float, low: float, high: float) -> float:
    return 100 * (value - low) / (high - low)


def _place(points: Sequence[tuple[float, float]], x_span: tuple[float, float], y_span: tuple[float, float]) -> str:
    """Points as SVG coordinates in percent of the plot, y downwards."""
    return " ".join(f"{_percent(x, *x_span):.2f},{100 - _percent(y, *y_span):.2f}" for x, y in points)


def _swatch(style: str) -> str:
    line = f'<line class="{style}" x1="1" x2="29" y1="5" y2="5"/>'
    return f'<svg class="swatch" width="30" height="10" aria-hidden="true">{line}</svg>'


def _plot(key, title, words, lines, y_ticks, y_span, x_ticks, x_span, x_label) -> str:
    """The plot area: grid and lines in an SVG of 100 x 100, tick labels as positioned text."""
    y_at = [(t, 100 - _percent(t, *y_span)) for t in y_ticks if y_span[0] <= t <= y_span[1]]
    x_at = [(t, _percent(t, *x_span)) for t in x_ticks]
    grid = "".join(f'<line class="grid" x1="0" x2="100" y1="{y:.2f}" y2="{y:.2f}"/>' for _, y in y_at)
    y_text = "".join(f'<span style="top:{y:.2f}%">{number(t)}</span>' for t, y in y_at)
    x_text = "".join(f'<span style="left:{x:.2f}%">{number(t)}</span>' for t, x in x_at)
    return (
        f'<div class="plot"><div class="y" aria-hidden="true">{y_text}</div>'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" '
        f'aria-labelledby="{key}-title {key}-desc"><title id="{key}-title">{escape(title)}</title>'
        f'<desc id="{key}-desc">{escape(words)}</desc>{grid}{"".join(lines)}</svg>'
        f'<div class="x" aria-hidden="true">{x_text}</div>'
        f'<div class="xl" aria-hidden="true">{escape(x_label)}</div></div>'
    )


def _figure(title: str, unit: str, legend: Sequence[str], plot: str, note: str) -> str:
    unit = f' <span class="unit">{escape(unit.strip())}</span>' if unit.strip() else ""
    below = f'<p class="note">{escape(note)}</p>' if note else ""
    head = f'<figcaption>{escape(title)}{unit}</figcaption><ul class="legend">{"".join(legend)}</ul>'
    return f"<figure>{head}{plot}<div>{below}</div></figure>"
