"""The README's code runs as it stands there, at a smaller size, and its config is a valid one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from fastcollab import cli, run_config, schedules

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SMALLER = {"max_steps=30": "max_steps=1", "prompts_per_step=16": "prompts_per_step=2", "problems(512": "problems(8"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (0, r"^(0|1)\.\d+ \d{6}\n$"),
        (1, r"^\S+ \S+\n$"),
        (2, r"^0\.\d+ \S+ (0|1)\.\d+\n$"),
        (3, r"answer.*\d+ hand-offs\n$"),
    ],
)
def test_example_runs(index, said, tmp_path, monkeypatch, capsys):
    code = blocks("python")[index]
    if index < 3:
        for full, small in SMALLER.items():
            assert code.count(full) == 1, full
            code = code.replace(full, small)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, f"README.md example {index}", "exec"), {"__name__": "example"})
    printed = capsys.readouterr().out
    assert re.search(said, printed.splitlines(True)[-1] if index < 3 else printed, re.S)
    written = {
        0: {"metrics.jsonl", "senior"},
        1: {"metrics.jsonl", "labels.jsonl", "a", "b"},
        2: {"metrics.jsonl", "policy"},
    }
    assert index == 3 or {p.name for p in (tmp_path / "out").iterdir()} == written[index]


def test_config_example_is_valid(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def correct(completions, **kwargs):\n    return None\n")
    (tmp_path / "config.yaml").write_text(blocks("yaml")[0], encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    run = run_config.load_run(tmp_path / "config.yaml", {"num_generations": 4})
    assert (run["method"], run["args"].learning_rate, run["args"].num_generations) == ("tandem", 1e-6, 4)
    assert set(yaml.safe_load(blocks("yaml")[0])["models"]) == {"senior", "junior"}


def test_every_schedule_make_target_and_command_named_there_exists(capsys):
    made = {name for name, kind in vars(schedules).items() if getattr(kind, "__module__", "") == schedules.__name__}
    named = set(re.findall(r"^\| `(\w+)\(|, `(\w+)\(writers\)`", README, re.M))
    assert {a or b for a, b in named} == {name for name in made if name[0].isupper()} - {"Schedule", "Call"}
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    used = {a or b for a, b in re.findall(r"`make (\w+)`|^make (\w+)", README, re.M)}
    assert {"demo", "test", "gpu"} <= used <= targets
    commands = set(re.findall(r"`fastcollab (\w+)", README))
    assert commands == {"train", "report", "env", "bench"}
    for command in commands:
        with pytest.raises(SystemExit) as stopped:
            cli.main([command, "--help"])
        assert stopped.value.code == 0 and "usage" in capsys.readouterr().out
