"""The report: one self-contained, escaped, accessible page, from arguments or from a run folder."""

from __future__ import annotations

import json
import math
import re
from html import unescape
from html.parser import HTMLParser

import pytest

from fastcollab.report import WRITERS, report_folder, save_inputs, summarise, write_report
from fastcollab.report_style import CSS
from fastcollab.report_svg import STYLES, Series, histogram, line_chart, number, smooth, thin, ticks

VOID = {"meta", "line", "path", "polyline"}  # closed by the parser's own event or never
TABLE = {
    "header": ["", "start", "Tandem"],
    "rows": [["team accuracy", "0.49", "0.83"], ["hand-offs", "1,200", "1,180"]],
}
SAMPLES = {
    "Tandem": [
        ("add 1 + 2 :", [("\n", "senior"), (" 1", "senior"), (" +", "junior"), (" 2  <eos>", "senior")], 1.0),
        ("add 3 + 4 :", [(" 7", "junior")], None),
    ]
}


def rows(n: int, tandem: bool = True) -> list[dict]:
    made = []
    for step in range(1, n + 1):
        row = {"step": step, "reward": step / n, "grad_norm": 1.0 + step % 3, "num_tokens": 100, "step_time": 0.5}
        if tandem:
            row |= {"tandem/senior_token_frac": 0.5, "handoff/count": 10, "handoff/latency_ms": 2.0 + step % 5}
        else:
            row |= {"handoff/count": 0, "handoff/latency_ms": None}
        made.append(row)
    return [*made, {"step": n, "eval/solo/reward": 0.9, "eval/team/reward": None}]


class Page(HTMLParser):
    """Checks nesting; collects tags, attributes, ids and the text of each element kind."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.attributes if key == name]


@pytest.fixture
def page(tmp_path):
    runs = {"Tandem": rows(40), "GRPO": rows(40, tandem=False)}
    settings = {"p": 0.5, "schedule": None, "top_k": 0}
    path = write_report(tmp_path / "deep" / "report.html", runs, TABLE, SAMPLES, settings)
    return path.read_text(encoding="utf-8")


def test_page_is_well_formed_and_self_contained(page):
    parsed = Page(page)
    assert page.startswith("<!doctype html>")
    assert not {"script", "link", "img", "iframe", "object"} & set(parsed.tags)
    assert not {"src", "href", "srcset", "xlink:href"} & {name for name, _ in parsed.attributes}
    assert not re.search(r"https?://|@import|url\(|\bon\w+=", page)
    ids = parsed.values("id")
    assert len(ids) == len(set(ids)) > 0


def test_charts_are_named_for_screen_readers_and_differ_without_colour(page):
    parsed = Page(page)
    labels = parsed.values("aria-labelledby")
    assert len(labels) == parsed.values("role").count("img") == 5  # reward, share, gradient, latency, its histogram
    assert {i for label in labels for i in label.split()} <= set(parsed.values("id"))
    assert "Tandem: 0.05 at step 1, 0.975 at step 40 (smoothed)" in parsed.text
    dashes = re.findall(r"^svg \.c\d \{ stroke: var\(--c\d\);(.*) \}$", CSS, re.M)
    underlines = re.findall(r"text-decoration-style: (\w+)", CSS)
    assert len(dashes) == len(set(dashes)) == STYLES and len(underlines) == len(set(underlines)) == WRITERS
    assert "prefers-color-scheme: dark" in CSS


def test_sections_hold_what_was_given(page):
    text = Page(page).text
    for word in ("Results", "Training", "Runs", "Evaluation", "Sample rollouts", "Settings"):
        assert f"<h2>{word}</h2>" in page
    for cell in ("team accuracy", "0.83", "1,180"):
        assert cell in text
    assert "Senior's share of the tokens" in text and "Hand-off latency, median per step" in text
    assert "<dt>schedule</dt><dd>null</dd>" in page
    assert "0.062 → 0.963" in text  # means of the first and the last 4 of 40 steps: 10 / 160 and 154 / 160


def test_tokens_carry_their_author_and_their_whitespace(page):
    body = page.split("<pre>")[1].split("</pre>")[0]
    pieces = re.findall(r'<span class="(w\d)" title="(\w+)">([^<]*)</span>', body)
    assert pieces == [
        ("w0", "senior", "\n"),
        ("w0", "senior", " 1"),
        ("w1", "junior", " +"),
        ("w0", "senior", " 2  &lt;eos&gt;"),
    ]
    assert body.count('class="sr"') == 3  # one spoken author at each change
    assert body.startswith('<span class="prompt">add 1 + 2 :</span>')
    assert "white-space: pre-wrap" in CSS
    text = Page(page).text
    assert "reward 1" in text and "no reward" in text and "4 tokens: senior 3 · junior 1" in text


def test_everything_is_escaped(tmp_path):
    evil = '<script>alert("1")</script>&\'"'
    sample = (evil, [(evil, evil)], 0.0)
    table = {"header": ["", evil], "rows": [[evil, evil]], "title": evil}
    settings = {evil: evil, "nested": {evil: [evil]}}
    path = write_report(tmp_path / "r.html", {evil: rows(3)}, table, {evil: [sample]}, settings)
    page = path.read_text(encoding="utf-8")
    assert "<script" not in Page(page).tags and "<script" not in page
    assert unescape(page).count("alert(") == page.count("alert(") >= 12


def test_a_single_step_and_missing_figures_make_a_page(tmp_path):
    page = write_report(tmp_path / "r.html", {"only": [{"step": 1, "reward": 0.25}]}).read_text(encoding="utf-8")
    assert 'class="dot c0" d="M50.00 ' in page and "1 step<" in page
    assert "Senior&#x27;s share" not in page and "Sample rollouts" not in page
    empty = write_report(tmp_path / "e.html", {"none yet": []}).read_text(encoding="utf-8")
    assert "<svg" not in empty and "none yet" in Page(empty).text
    holes = [{"step": i, "reward": y} for i, y in enumerate((None, math.nan, 0.5, 1.0))]
    assert "nan" not in write_report(tmp_path / "h.html", {"holes": holes}).read_text(encoding="utf-8").lower()


def test_bad_arguments_are_one_sentence_with_the_value(tmp_path):
    for runs, table, said in (
        ({}, None, r"runs: got \{\}, need at least one"),
        ({"a": []}, {"header": ["", "x"], "rows": [["only"]]}, "table row 0: got '1 cells', need 2"),
        ({"a": []}, {"columns": []}, r"table: got \['columns'\], need keys header and rows"),
    ):
        with pytest.raises(ValueError, match=said):
            write_report(tmp_path / "r.html", runs, table)
    assert not (tmp_path / "r.html").exists()


# -- folders


def write_metrics(folder, made):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")


def test_folder_with_metrics_alone(tmp_path):
    write_metrics(tmp_path / "out", rows(5))
    assert summarise(tmp_path / "out") == {"out": rows(5)}
    path = report_folder(tmp_path / "out")
    assert path == tmp_path / "out" / "report.html"
    assert "Mean reward" in path.read_text(encoding="utf-8")


def test_folder_makes_the_same_page_as_the_arguments(tmp_path):
    """What save_inputs stores is all that the page needs; a run in a subfolder is drawn beside its parent's."""
    out, settings = tmp_path / "demo", {"name": "Tandem", "p": 0.5, "weights": [1, 2]}
    write_metrics(out, rows(6))
    write_metrics(out / "GRPO", rows(6, tandem=False))
    (out / "senior").mkdir()
    save_inputs(out, TABLE, SAMPLES, settings)
    runs = summarise(out)
    assert list(runs) == ["Tandem", "GRPO"]
    direct = write_report(tmp_path / "direct.html", runs, TABLE, SAMPLES, settings)
    assert report_folder(out, tmp_path / "stored.html").read_bytes() == direct.read_bytes()


def test_a_table_of_figures_by_column_is_shown_too(tmp_path):
    write_metrics(tmp_path, rows(2))
    figures = {"start": {"team accuracy": 0.4921875, "hand-offs": 12000}, "Tandem": {"team accuracy": None}}
    (tmp_path / "table.json").write_text(json.dumps(figures), encoding="utf-8")
    page = report_folder(tmp_path).read_text(encoding="utf-8")
    assert '<th scope="row">team accuracy</th><td>0.4922</td><td>–</td>' in page
    assert '<th scope="row">hand-offs</th><td>12,000</td><td>–</td>' in page


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("metrics.jsonl", '{"step": 1}\n{"step": ', "metrics.jsonl line 2: got invalid JSON"),
        ("metrics.jsonl", "[1]\n", "metrics.jsonl line 1: got 'list', need a JSON object"),
        ("rollouts.jsonl", '{"prompt": "x"}\n', r"rollouts.jsonl line 1: got \['prompt'\], need also \['tokens'\]"),
        ("table.json", "{", "table.json: got invalid JSON"),
        ("settings.json", "3", "settings.json: got 'int', need a JSON object"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, content, said):
    write_metrics(tmp_path, rows(2))
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        report_folder(tmp_path)


def test_a_folder_without_metrics_is_named(tmp_path):
    with pytest.raises(ValueError, match="need a folder with metrics.jsonl"):
        summarise(tmp_path)
    with pytest.raises(ValueError, match="nowhere', need a run folder"):
        summarise(tmp_path / "nowhere")


# -- charts


@pytest.mark.parametrize(
    ("low", "high", "want"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0.03, 0.41, [0, 0.1, 0.2, 0.3, 0.4, 0.5]),
        (-3, 12, [-5, 0, 5, 10, 15]),
        (7, 7, [6, 8]),
        (0, 0, [0, 0.2]),
        (1e-7, 4e-7, [1e-7, 2e-7, 3e-7, 4e-7]),
    ],
)
def test_ticks_are_round_and_cover_the_values(low, high, want):
    got = ticks(low, high)
    assert got == pytest.approx(want, rel=1e-9, abs=1e-12)
    assert got[0] <= low <= high <= got[-1]


def test_numbers_are_short():
    values = [0, 0.12345, 12.5, 1e-6, 15201.4, -0.5, 999.96]
    assert [number(v) for v in values] == ["0", "0.1235", "12.5", "1.00e-06", "15,201", "-0.5", "1000"]


def test_smoothing_is_a_centred_mean():
    points = [(i, y) for i, y in enumerate([0.0, 3.0, 6.0, 3.0, 9.0])]
    assert smooth(points, 3) == [(0, 1.5), (1, 3.0), (2, 4.0), (3, 6.0), (4, 6.0)]
    assert smooth(points, 1) == points


def test_thinning_keeps_spikes_ends_and_order():
    points = [(i, 100.0 if i == 5003 else -100.0 if i == 7777 else math.sin(i)) for i in range(20_000)]
    kept = thin(points, 800)
    assert len(kept) <= 810 and kept == sorted(kept)
    assert {(0, 0.0), points[5003], points[7777], points[-1]} <= set(kept)


def test_the_curve_is_where_its_values_are():
    chart = line_chart("k", "t", [Series("a", 0, [(1, 0.0), (2, 0.5), (3, 1.0)])], y_range=(0.0, 1.0))
    assert 'points="0.00,100.00 50.00,50.00 100.00,0.00"' in chart


def test_outliers_are_cut_off_and_counted():
    points = [(i, 1.0 + i % 2) for i in range(100)] + [(100, 500.0)]
    chart = line_chart("k", "t", [Series("a", 0, points)])
    assert "1 value off the scale." in chart and "500" not in chart
    bars = histogram("k", "t", [Series("a", 0, points)], " ms")
    assert "1 value above 2 ms." in bars and "median 2 ms" in bars


def test_histogram_counts_every_value():
    values = [0.0, 0.1, 1.0, 1.2, 2.0, 2.0]
    bars = histogram("k", "t", [Series("a", 0, list(enumerate(values)))], bins=2)
    heights = re.search(r'class="bars c0" points="([^"]*)"', bars)[1]
    assert heights == "0.00,100.00 0.00,50.00 50.00,50.00 50.00,0.00 100.00,0.00 100.00,100.00"  # 2, then 4, of 4


def test_a_cohort_is_shown_model_by_model(tmp_path):
    rows = [{"step": s, "reward": 0.5, "a/reward": 0.1 * s, "b/reward": 0.9, "b/constancy": 0.25, "a/num_tokens": 7}
            for s in range(1, 4)]  # fmt: skip
    page = write_report(tmp_path / "r.html", {"out": [*rows, {"step": 3, "eval/a/reward": 1.0}]}).read_text()
    assert '<th scope="col">a</th><th scope="col">b</th>' in page and "Questions with the most frequent answer" in page
    assert "0.100 → 0.300" in page and "0.900 → 0.900" in page
