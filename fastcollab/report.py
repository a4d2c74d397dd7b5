"""The report: one self-contained HTML file (inline SVG and CSS, no script, no network) of runs' metrics and samples."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from fastcollab.config import require
from fastcollab.report_style import CSS
from fastcollab.report_svg import Series, histogram, line_chart, number
from fastcollab.transcript import Piece, piece, transcript
from fastcollab.types import Rollout

Rows = Sequence[Mapping[str, Any]]
Sample = tuple[str, Sequence[Sequence[Any]], float | None]  # prompt, (text, writer[, kind[, tokens]]), reward

WRITERS = 5  # styles of authors; further ones repeat them
LONG = 2000  # characters of a rollout from which it scrolls in its card
ROLES = ("policy", "senior", "junior", "verifier")  # authors take their styles in this order; others follow by name


class Panel(NamedTuple):
    """A chart of one metric: its key, title, unit, the axis' fixed range (or None) and what smooths it.

    ``lines``: where a run has several, the label and the metric of each.
    """

    key: str
    title: str
    unit: str = ""
    y_range: tuple[float, float] | None = None
    middle: Callable = fmean
    lines: tuple[tuple[str, str], ...] = ()


REWARD = Panel("reward", "Mean reward of each step's rollouts")
ACCURACY = Panel("accuracy", "Accuracy on held-out questions", "", (0.0, 1.0))
LATENCY = Panel("handoff/latency_ms", "Hand-off latency, median per step", " ms", middle=median)
PANELS = (
    Panel("tandem/senior_token_frac", "Senior's share of the tokens", "", (0.0, 1.0)),
    Panel(
        "mintrl/reward",
        "Reward by kind of rollout",
        lines=(("reviewed", "mintrl/reviewed/reward"), ("controls", "mintrl/control/reward")),
    ),
    Panel("mintrl/external_share_micro", "External tokens, share in reviewed rollouts"),
    Panel("mintrl/interventions", "Interventions per reviewed rollout"),
    Panel("mintrl/resume_success", "Corrected rollouts that succeed", "", (0.0, 1.0)),
    Panel("mintrl/rescue_hard", "Prompts that only reviewed rollouts solve", "", (0.0, 1.0)),
    Panel("mintrl/sign_flip_rate", "Corrected rollouts whose advantage turns"),
    Panel("grad_norm", "Gradient norm, before clipping", middle=median),
    Panel("reward_std", "Reward's deviation within a group"),
    LATENCY,
    Panel("completions/mean_length", "Length of the responses", " tokens"),
    Panel("tokens_per_s/rollout", "Rollout speed", " tokens/s"),
    Panel("majority_ratio", "Votes for the majority's answer", "", (0.0, 1.0)),
    Panel("agree", "Agreement with its peers' votes", "", (0.0, 1.0)),
    Panel("kappa", "Agreement beyond chance, kappa"),
    Panel("answer_entropy", "Entropy of a question's answers", " nats"),
    Panel("constancy", "Questions with the most frequent answer", "", (0.0, 1.0)),
    Panel("label_acc", "Labels that are right (monitored)", "", (0.0, 1.0)),
)


def write_report(
    path: str | Path,
    runs: Mapping[str, Rows],
    table: Mapping[str, Any] | None = None,
    samples: Mapping[str, Sequence[Sample]] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Write the report and return its path.

    ``runs``: name -> rows of metrics.jsonl. ``table``: {"header": [...], "rows": [[...], ...]}, optionally "title";
    cells are shown as they are. ``samples``: name -> (prompt, text, reward or None), the text as (text, writer) pairs
    or longer ones (``fastcollab.transcript.Piece``); ``sample_of`` makes one. ``settings``: name -> value. Raises
    ValueError for no run, a table whose rows are not as wide as its header, or a piece of no known form.
    """
    require(len(runs) > 0, "runs", dict(runs), "at least one")
    evaluations, runs, samples = _evaluations(runs), _by_model(runs), samples or {}
    steps = max((row.get("step", 0) for rows in runs.values() for row in rows), default=0)
    about = f"{' · '.join(runs)} · {steps:,} step{'s' * (steps != 1)}"
    sections = [
        _section("Results", _table(table) if table else ""),
        _section("Training", _charts(runs)),
        _section("Runs", _table(_overview(runs))),
        _section("Evaluation", "".join(_table(t) for t in evaluations)),
        _section("Sample rollouts", _samples(samples)),
        _section("Settings", _settings(settings or {})),
    ]
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width, initial-scale=1"><title>fastcollab report: '
        f"{escape(', '.join(runs))}</title><style>\n{CSS}</style></head><body><main>"
        f"<header><h1>fastcollab report</h1><p>{escape(about)}</p></header>"
        f"{''.join(sections)}</main></body></html>\n"
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def sample_of(rollout: Rollout, tokenizer: Any, prompt: Any, reward: float | None) -> Sample:
    """What ``write_report`` shows of a rollout; ``prompt`` as the dataset has it (text, messages or ids)."""
    return prompt_text(prompt), transcript(rollout, tokenizer), reward


def prompt_text(prompt: Any) -> str:
    """A prompt of a dataset (text, messages or ids) as text."""
    if isinstance(prompt, str):
        return prompt
    if prompt and isinstance(prompt[0], Mapping):
        return "".join(f"{m['role']}: {m['content']}\n\n" for m in prompt)
    return " ".join(map(str, prompt))


# -- figures


def _by_model(runs: Mapping[str, Rows]) -> dict[str, Rows]:
    """A run that trains several models (keys ``<model>/reward``) as one run for each of them; others as they are."""
    result: dict[str, Rows] = {}
    for name, rows in runs.items():
        owned = {key.split("/")[0] for row in rows for key in row if key.endswith("/reward") and key.count("/") == 1}
        models = sorted(owned - {"eval"})
        for model in models:
            shown = f"{name}: {model}" if len(runs) > 1 else model
            result[shown] = [row | {k.removeprefix(f"{model}/"): v for k, v in row.items() if k.startswith(f"{model}/")}
                             for row in rows]  # fmt: skip
        if not models:
            result[name] = rows
    return result


def _series(runs: Mapping[str, Rows], panel: Panel) -> list[Series]:
    """The panel's lines of the runs that have them, each run's first in its own style; missing and non-finite values
    are left out."""
    result = []
    for i, (name, rows) in enumerate(runs.items()):
        for j, (label, key) in enumerate(panel.lines or ((name, panel.key),)):
            points = [(row["step"], row[key]) for row in rows if "step" in row and _is_finite(row.get(key))]
            shown = f"{name}: {label}" if panel.lines and len(runs) > 1 else label
            if points:
                result.append(Series(shown, i + j * len(runs), points))
    return result


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _charts(runs: Mapping[str, Rows]) -> str:
    lead = next((panel for panel in (REWARD, ACCURACY) if _series(runs, panel)), REWARD)
    series = _series(runs, lead)
    low, high = _extent(series)
    unit_range = (0.0, 1.0) if 0 <= low and high <= 1 else None
    note = "Thin: each step. Thick: its centred mean over a tenth of the run (200 steps at most)."
    big = line_chart(lead.key, lead.title, series, y_range=unit_range, note=note) if series else ""
    small = []
    for panel in PANELS:
        series = _series(runs, panel)
        if series:
            key = "chart-" + panel.key.replace("/", "-")
            small.append(line_chart(key, panel.title, series, panel.unit, panel.y_range, "", panel.middle))
    latency = [s for s in _series(runs, LATENCY) if len(s.points) > 4]
    if latency:
        small.append(histogram("latency-histogram", "Hand-off latency, steps by their median", latency, " ms"))
    grid = f'<div class="charts">{"".join(small)}</div>' if small else ""
    return f'<div class="wide">{big}</div>{grid}' if big else grid


def _extent(series: Sequence[Series]) -> tuple[float, float]:
    values = [y for s in series for _, y in s.points]
    return (min(values), max(values)) if values else (0.0, 0.0)


def _overview(runs: Mapping[str, Rows]) -> dict[str, Any]:
    """A table of figures that metrics.jsonl alone gives, a column per run."""

    def column(rows: Rows) -> dict[str, str]:
        def values(key: str) -> list[float]:
            return [row[key] for row in rows if _is_finite(row.get(key))]

        reward, part = values("reward"), max(1, len(values("reward")) // 10)
        ends = f"{fmean(reward[:part]):.3f} → {fmean(reward[-part:]):.3f}" if reward else "–"
        latency, seconds = values("handoff/latency_ms"), values("step_time")

        def mean(key: str) -> str:
            return f"{fmean(values(key)):.3f}" if values(key) else "–"

        return {
            "steps": f"{max((row.get('step', 0) for row in rows), default=0):,}",
            "reward, first → last tenth of the steps": ends,
            "senior's share of the tokens": mean("tandem/senior_token_frac"),
            "external tokens, share in reviewed rollouts": mean("mintrl/external_share_micro"),
            "interventions per reviewed rollout": mean("mintrl/interventions"),
            "tokens sampled": f"{sum(values('num_tokens')):,.0f}",
            "hand-offs": f"{sum(values('handoff/count')):,.0f}",
            "hand-off latency, median of the steps": f"{number(median(latency), 3)} ms" if latency else "–",
            "time in steps": f"{sum(seconds):,.1f} s" if seconds else "–",
        }

    columns = [column(rows) for rows in runs.values()]
    rows = [[name, *(cells[name] for cells in columns)] for name in columns[0]]
    return {"header": ["", *runs], "rows": [row for row in rows if set(row[1:]) - {"–", "0"}]}


def _evaluations(runs: Mapping[str, Rows]) -> list[dict[str, Any]]:
    """Per run with evaluation rows (keys ``eval/...``): each figure at the first and at the last evaluation."""
    tables = []
    for name, rows in runs.items():
        evaluated = [row for row in rows if any(k.startswith("eval/") for k in row)]
        if not evaluated:
            continue
        shown = evaluated if len(evaluated) == 1 else [evaluated[0], evaluated[-1]]
        keys = dict.fromkeys(k for row in shown for k in row if k.startswith("eval/") and row[k] is not None)
        cells = [[k.removeprefix("eval/"), *(cell(row.get(k)) for row in shown)] for k in keys]
        tables.append({"title": name, "header": ["", *(f"step {row.get('step', 0)}" for row in shown)], "rows": cells})
    return tables


def cell(value: Any) -> str:
    """A figure as a table shows it; a dash for none."""
    return number(value) if _is_finite(value) else "–"


# -- parts of the page


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def _table(table: Mapping[str, Any]) -> str:
    missing = {"header", "rows"} - table.keys()
    require(not missing, "table", sorted(table), "keys header and rows")
    header, title = list(table["header"]), str(table.get("title", ""))
    for i, row in enumerate(table["rows"]):
        require(len(row) == len(header), f"table row {i}", f"{len(row)} cells", f"{len(header)}, one per column")
    head = "".join(f'<th scope="col">{escape(str(c))}</th>' if str(c) else "<td></td>" for c in header)
    body = "".join(
        f'<tr><th scope="row">{escape(str(first))}</th>{"".join(f"<td>{escape(str(c))}</td>" for c in cells)}</tr>'
        for first, *cells in table["rows"]
    )
    caption = f"<caption>{escape(title)}</caption>" if title else ""
    label = escape(title or "table", quote=True)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{label}"><table>{caption}'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _samples(samples: Mapping[str, Sequence[Sample]]) -> str:
    samples = {name: [(p, [piece(t) for t in text], r) for p, text, r in shown] for name, shown in samples.items()}
    said = [p for shown in samples.values() for _, text, _ in shown for p in text]
    writers = {p.writer for p in said if p.kind != "dropped"}
    order = [w for w in ROLES if w in writers] + sorted(writers.difference(ROLES))
    style = {writer: f"w{i % WRITERS}" for i, writer in enumerate(order)}
    if not order:
        return ""
    legend = "".join(f'<li><span class="{style[w]}">{escape(w)}</span></li>' for w in order)
    if any(p.kind == "dropped" for p in said):
        legend += "<li><del>dropped, not part of the response</del></li>"
    parts = [f'<ul class="legend authors">{legend}</ul>']
    for name, shown in samples.items():
        cards = "".join(_sample(*sample, style) for sample in shown)
        parts.append(f'<h3>{escape(name)}</h3><div class="cards">{cards}</div>')
    return "".join(parts)


def _sample(prompt: str, text: Sequence[Piece], reward: float | None, style: Mapping[str, str]) -> str:
    """One rollout: the prompt, then each piece in its author's style, or struck through; a change of author, and where
    dropped text begins and ends, is said to screen readers."""
    spans, last = [], None
    for p in text:
        if p.kind == "dropped":
            begin, end = '<span class="sr"> [dropped:] </span>', '<span class="sr"> [end of dropped] </span>'
            spans.append(f'<del title="dropped">{begin}{escape(p.text)}{end}</del>')
            continue
        tag, act = ("ins", " inserts") if p.kind == "inserted" else ("span", "")
        said = f'<span class="sr"> [{escape(p.writer)}{act}] </span>' if p.writer != last or act else ""
        title = escape(p.writer + act, quote=True)
        spans.append(f'{said}<{tag} class="{style[p.writer]}" title="{title}">{escape(p.text)}</{tag}>')
        last = p.writer
    counts = {w: sum(p.tokens for p in text if p.writer == w and p.kind != "dropped") for w in style}
    shares = " · ".join(f"{escape(w)} {n}" for w, n in counts.items() if n)
    dropped = sum(p.tokens for p in text if p.kind == "dropped")
    also = f" <span>{dropped} dropped</span>" if dropped else ""
    scored = "no reward" if reward is None else f"reward {number(reward)}"
    is_long = sum(len(p.text) for p in text) > LONG
    box = ' class="scroll" tabindex="0" role="region" aria-label="rollout"' if is_long else ""
    return (
        f'<article><p class="facts"><b>{scored}</b> <span>{sum(counts.values())} tokens: {shares}</span>{also}</p>'
        f'<pre{box}><span class="prompt">{escape(prompt)}</span>{"".join(spans)}</pre></article>'
    )


def _settings(settings: Mapping[str, Any]) -> str:
    def shown(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value, default=str)

    items = "".join(f"<div><dt>{escape(str(k))}</dt><dd>{escape(shown(v))}</dd></div>" for k, v in settings.items())
    return f"<dl>{items}</dl>" if items else ""
