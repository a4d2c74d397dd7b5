"""The report: one self-contained, escaped, accessible page, from arguments or from a run folder."""

from __future__ import annotations

import json
import math
import re
from html import unescape
from html.parser import HTMLParser

import numpy as np
import pytest

from fastcollab.report import LONG, WRITERS, sample_of, write_report
from fastcollab.report_style import CSS
from fastcollab.report_svg import STYLES, Series, histogram, line_chart, number, smooth, thin, ticks
from fastcollab.run_folder import SHOWN, report_folder, save_inputs, summarise
from fastcollab.transcript import entry
from fastcollab.types import Intervention, Rollout

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


WORDS = ["", "first\n", " wrong <script>alert(1)</script>\n", " right\n", " then", " worse", " end", "<eos>"]


class Words:
    """A tokenizer that drops the space before a first word, as SentencePiece's do."""

    def decode(self, ids, **kwargs):
        return "".join(WORDS[i] for i in ids).removeprefix(" ")


def corrected() -> Rollout:
    """Two interventions; the second cuts right behind the first's insertion and takes the policy's EOS away."""
    log = [Intervention(1, (2, 2), (3, 3)), Intervention(3, (4, 5, 7), (6,))]
    author = np.array([0, 1, 1, 1, 0, 0], np.uint8)
    ids, writers = [1, 3, 3, 6, 4, 7], ("policy", "verifier")
    return Rollout([1], ids, author, writers, np.zeros(6, np.float32), "eos", interventions=log)


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


def shown(page: str) -> str:
    return re.search(r"<pre[^>]*>(.*?)</pre>", page, re.S)[1]


def test_dropped_text_is_struck_through_before_what_was_inserted(tmp_path):
    sample = sample_of(corrected(), Words(), [{"role": "user", "content": "<b>?"}], 1.0)
    page = write_report(tmp_path / "r.html", {"a": rows(2)}, samples={"a": [sample]}).read_text(encoding="utf-8")
    said, evil = '<span class="sr"> [{}] </span>', " wrong &lt;script&gt;alert(1)&lt;/script&gt;\n"
    begin, end = said.format("dropped:"), said.format("end of dropped")
    wanted = [
        '<span class="prompt">user: &lt;b&gt;?\n\n</span>',
        said.format("policy") + '<span class="w0" title="policy">first\n</span>',
        f'<del title="dropped">{begin}{evil}{evil}{end}</del>',
        said.format("verifier inserts") + '<ins class="w1" title="verifier inserts"> right\n right\n</ins>',
        f'<del title="dropped">{begin} then worse&lt;eos&gt;{end}</del>',
        said.format("verifier inserts") + '<ins class="w1" title="verifier inserts"> end</ins>',
        said.format("policy") + '<span class="w0" title="policy"> then&lt;eos&gt;</span>',
    ]
    assert shown(page) == "".join(wanted)
    Page(page)
    assert "6 tokens: policy 3 · verifier 3</span> <span>5 dropped</span>" in page
    assert "<li><del>dropped, not part of the response</del></li>" in page


def test_only_dropped_text_has_a_legend_and_only_long_text_scrolls(page, tmp_path):
    assert "<del" not in page and "<pre>" in page and "<pre " not in page
    samples = {"a": [("p", [("x" * (LONG + 1), "policy")], 1.0)]}
    long = write_report(tmp_path / "r.html", {"a": rows(2)}, samples=samples).read_text(encoding="utf-8")
    assert '<pre class="scroll" tabindex="0" role="region" aria-label="rollout">' in long


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_has_the_contrast_that_it_needs(scheme):
    """Struck text and the prompt are soft, each author has a tint: at least 4.5 with what is behind them (WCAG 2)."""
    colours = dict(re.findall(r"--(\w+): (#\w{6});", CSS.split(":root {")[1 + scheme]))

    def luminance(name: str) -> float:
        parts = (int(colours[name][i : i + 2], 16) / 255 for i in (1, 3, 5))
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    pairs = [("soft", "bg"), ("soft", "card"), *((f"c{i}", f"t{i}") for i in range(WRITERS))]
    for text, ground in pairs:
        high, low = sorted((luminance(text), luminance(ground)), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ground)
    assert "del { color: var(--soft); text-decoration: line-through" in CSS


@pytest.mark.parametrize("token", [("alone",), ("a", "policy", "droped"), ("a", "policy", "", 1, 2)])
def test_a_token_of_no_known_form_is_named(tmp_path, token):
    with pytest.raises(ValueError, match=r"token: got .*need \(text, writer\)"):
        write_report(tmp_path / "r.html", {"a": rows(2)}, samples={"a": [("p", [token], None)]})


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


def test_rollouts_come_from_the_completions_where_none_were_chosen(tmp_path):
    """Those of the newest step, with interventions first, as a page made from the rollout itself shows them."""
    plain = Rollout([1], [1, 7], np.zeros(2, np.uint8), ("policy",), np.zeros(2, np.float32), "eos")
    kept = [plain] * SHOWN + [corrected()]
    lines = [{"step": s, "prompt": f"step {s}?", "reward": 0.5} | entry(r, Words()) for s in (1, 2) for r in kept]
    write_metrics(tmp_path / "out", rows(2))
    write_metrics(tmp_path / "out" / "old", rows(2))
    (tmp_path / "out" / "completions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "out" / "old" / "completions.jsonl").write_text('{"completion": "of an earlier version", "step": 2}\n')
    page = report_folder(tmp_path / "out").read_text(encoding="utf-8")
    sample = sample_of(corrected(), Words(), "step 2?", 0.5)
    direct = write_report(tmp_path / "d.html", {"a": rows(2)}, samples={"a": [sample]}).read_text(encoding="utf-8")
    assert shown(page) == shown(direct)
    assert page.count("<article>") == SHOWN and "step 1?" not in page and "<h3>out, step 2</h3>" in page
    later = [{"step": 9, "prompt": "later?", "reward": 0.5} | entry(plain, Words())]  # interventions had stopped
    (tmp_path / "out" / "completions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines + later))
    page = report_folder(tmp_path / "out").read_text(encoding="utf-8")
    assert page.count("<article>") == 2 and page.index("<h3>out, step 2</h3>") < page.index("<h3>out, step 9</h3>")
    save_inputs(tmp_path / "out", samples={"out": [sample]})
    assert report_folder(tmp_path / "out").read_text(encoding="utf-8").count("<article>") == 1


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


def test_interventions_are_charted_beside_their_controls(tmp_path):
    """Both arms in one panel, under the run's name where there are several; they are no models of a cohort."""
    made = [{"step": s, "reward": 0.5, "mintrl/control/reward": 0.2 * s, "mintrl/reviewed/reward": 0.3 * s,
             "mintrl/external_share_micro": 0.03, "mintrl/interventions": 1.25} for s in (1, 2)]  # fmt: skip
    page = Page(write_report(tmp_path / "r.html", {"run": made}).read_text(encoding="utf-8")).text
    assert "reviewed: 0.3 at step 1, 0.6 at step 2 (smoothed); controls: 0.2 at step 1, 0.4 at" in page
    for said in ("External tokens, share in reviewed rollouts", "interventions per reviewed rollout1.250"):
        assert said in page
    assert "mintrl" not in page and "Prompts that only" not in page
    two = write_report(tmp_path / "r.html", {"run": made, "plain": rows(2)}).read_text(encoding="utf-8")
    assert "run: controls" in two and "interventions per reviewed rollout</th><td>1.250</td><td>–</td>" in two
