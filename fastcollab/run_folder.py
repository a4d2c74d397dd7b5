"""A run folder: the metrics, tables and rollouts that a run leaves there, and their report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastcollab.config import require
from fastcollab.report import Sample, cell, prompt_text, write_report
from fastcollab.transcript import pieces

SHOWN = 6  # rollouts of a run that are shown where none were chosen


def summarise(folder: str | Path) -> dict[str, list[dict[str, Any]]]:
    """Run name -> its metrics rows, of a run folder and of the runs in its direct subfolders.

    A run is named by ``"name"`` in its settings.json, else by its folder. Raises ValueError for a missing folder, a
    folder without metrics.jsonl, or a line that is not a JSON object.
    """
    return {name: list(_read_lines(place / "metrics.jsonl")) for name, place in _places(Path(folder)).items()}


def _places(folder: Path) -> dict[str, Path]:
    """Run name -> its folder."""
    require(folder.is_dir(), "report", str(folder), "a run folder")
    runs: dict[str, Path] = {}
    for place in (folder, *sorted(p for p in folder.iterdir() if p.is_dir())):
        if (place / "metrics.jsonl").is_file():
            settings = _read_json(place / "settings.json")
            name = str(settings.get("name") or place.resolve().name)
            runs[name if name not in runs else str(place)] = place
    require(len(runs) > 0, "report", str(folder), "a folder with metrics.jsonl, its own or of a direct subfolder")
    return runs


def save_inputs(
    folder: str | Path,
    table: Mapping[str, Any] | None = None,
    samples: Mapping[str, Sequence[Sample]] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Store what ``write_report`` takes beside metrics.jsonl, so that ``report_folder`` makes the same page again."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if table:
        (folder / "table.json").write_text(json.dumps(table, indent=1), encoding="utf-8")
    if settings:
        (folder / "settings.json").write_text(json.dumps(settings, indent=1, default=str), encoding="utf-8")
    if samples:
        with open(folder / "rollouts.jsonl", "w", encoding="utf-8") as sink:
            for run, shown in samples.items():
                for prompt, tokens, reward in shown:
                    row = {"run": run, "prompt": prompt, "tokens": [list(t) for t in tokens], "reward": reward}
                    sink.write(json.dumps(row) + "\n")


def report_folder(folder: str | Path, out: str | Path | None = None) -> Path:
    """The report of a run folder (metrics.jsonl, and table.json, rollouts.jsonl, settings.json where present).

    Without rollouts.jsonl a few rollouts of each run's completions.jsonl are shown.
    """
    folder = Path(folder)
    runs = summarise(folder)
    samples: dict[str, list[Sample]] = {}
    if (folder / "rollouts.jsonl").is_file():
        for i, row in enumerate(_read_lines(folder / "rollouts.jsonl"), 1):
            missing = {"prompt", "tokens"} - row.keys()
            require(not missing, f"{folder / 'rollouts.jsonl'} line {i}", sorted(row), f"also {sorted(missing)}")
            samples.setdefault(row.get("run", ""), []).append((row["prompt"], row["tokens"], row.get("reward")))
    else:
        for name, place in _places(folder).items():
            samples |= _logged(name, place / "completions.jsonl")
    table = _read_json(folder / "table.json")
    if table and all(isinstance(column, dict) for column in table.values()):  # column -> row -> figure
        keys = dict.fromkeys(key for column in table.values() for key in column)
        cells = [[key, *(cell(column.get(key)) for column in table.values())] for key in keys]
        table = {"header": ["", *table], "rows": cells}
    return write_report(out or folder / "report.html", runs, table, samples, _read_json(folder / "settings.json"))


def _logged(run: str, path: Path) -> dict[str, list[Sample]]:
    """``SHOWN`` rollouts of completions.jsonl for each model that wrote some: of the newest step with interventions
    those with them, then of the newest step."""
    newest: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])  # with interventions, without
    for row in _read_lines(path) if path.is_file() else ():
        kept = newest["interventions" not in row]
        if kept and row.get("step") != kept[0].get("step"):
            kept.clear()
        kept.append(row)
    found: dict[str, list[Sample]] = {}
    for row in newest[0] + newest[1]:
        title = ": ".join(filter(None, (run, row.get("model")))) + f", step {row.get('step')}"
        shown = found.setdefault(title, [])
        if "authors" in row and len(shown) < SHOWN:
            shown.append((prompt_text(row.get("prompt", "")), pieces(row), row.get("reward")))
    return {title: shown for title, shown in found.items() if shown}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: got invalid JSON ({error}), need an object") from error
    require(isinstance(value, dict), str(path), type(value).__name__, "a JSON object")
    return value


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    with open(path, encoding="utf-8") as source:
        for i, line in enumerate(source, 1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path} line {i}: got invalid JSON ({error}), need one object a line") from error
            require(isinstance(row, dict), f"{path} line {i}", type(row).__name__, "a JSON object")
            yield row
