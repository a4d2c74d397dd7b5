"""The command: configs, overrides, one-line errors, env, report, and a training run from a YAML file."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import yaml

from fastcollab import cli, env, tiny
from fastcollab.config import GRPOConfig, TandemConfig
from fastcollab.run_config import load_object, load_run, make_args, overrides, resolve

REWARDS = """
def correct(completions, **kwargs):
    return [0.0] * len(completions)

def make(weight):
    return correct

def not_ready():
    raise ValueError("the user's own")
"""
TANDEM = """
method: tandem
models: {senior: a, junior: b}
train_dataset: rows.jsonl
reward_funcs: rewards_for_cli:correct
learning_rate: 1e-4
reward_weights: [1, 0.5]
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Path of a valid config with its reward module beside it; sys.path is put back afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "rewards_for_cli", raising=False)
    (tmp_path / "rewards_for_cli.py").write_text(REWARDS)
    path = tmp_path / "config.yaml"
    path.write_text(TANDEM)
    return path


def run(*words) -> int:
    return cli.main([str(word) for word in words])


# -- dry run and overrides


def test_dry_run_prints_the_resolved_config_that_reads_back_the_same(config, capsys, tmp_path):
    words = "--num_generations 4 --max_steps=-1 --shuffle false --models.senior c --log-completions".split()
    assert run("train", config, "--dry-run", *words) == 0
    said = capsys.readouterr().out
    shown = yaml.safe_load(said)
    assert shown["method"] == "tandem" and shown["models"] == {"senior": "c", "junior": "b"}
    assert shown["reward_funcs"] == ["rewards_for_cli:correct"]
    want = TandemConfig(
        num_generations=4, shuffle=False, learning_rate=1e-4, reward_weights=(1, 0.5), log_completions=True
    )
    assert shown["args"] == json.loads(json.dumps(want.to_dict()))
    (tmp_path / "again.yaml").write_text(said)
    assert run("train", tmp_path / "again.yaml", "--dry-run") == 0
    assert capsys.readouterr().out == said


def test_dry_run_needs_neither_torch_nor_the_models(config, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "fastcollab.trainer", None)
    assert run("train", config, "--dry-run") == 0
    assert "learning_rate: 0.0001" in capsys.readouterr().out


def test_json_and_nested_args_are_read(config):
    content = {**yaml.safe_load(TANDEM), "args": {"seed": 3, "p": 1}}
    config.write_text(json.dumps(content))
    sys.path.append(str(config.parent))
    args = load_run(config, {"seed": 4, "args.p": 0.25})["args"]
    assert (args.seed, args.p, args.learning_rate) == (4, 0.25, 1e-4)


def test_overrides_are_read_as_yaml():
    words = ["--a", "1", "--b=x=y", "--c", "--d", "-1", "--e-f", "[1, two]", "--g.h", "null", "--i"]
    assert overrides(words) == {"a": 1, "b": "x=y", "c": True, "d": -1, "e_f": [1, "two"], "g.h": None, "i": True}


def test_values_take_the_type_of_their_field():
    given = {"learning_rate": "3e-5", "beta": 1, "epsilon_high": None, "reward_weights": ["1e-1", 2]}
    args = make_args(GRPOConfig, {**given, "report_to": ["wandb"], "chat_template_kwargs": {"x": 1}})
    assert (args.learning_rate, args.beta, args.epsilon_high) == (3e-5, 1.0, None)
    assert isinstance(args.beta, float)
    assert (args.report_to, args.reward_weights, args.chat_template_kwargs) == (("wandb",), (0.1, 2.0), {"x": 1})


def test_a_setting_or_model_can_be_the_result_of_a_call():
    args = make_args(TandemConfig, {"schedule": {"call": "fastcollab:Chunk", "n": 4}})
    assert args.schedule.n == 4 and args.schedule.writers == ("senior", "junior")
    rows = resolve({"call": "fastcollab.tiny:problems", "n": 3, "seed": 1})
    assert len(rows) == 3 and set(rows[0]) == {"prompt", "answer"}
    assert resolve("path/to/model") == "path/to/model"


# -- errors


MISTAKES = {
    "--num_generation 4": "config: got 'num_generation', need a field of TandemConfig or an argument of train"
    " (nearest: 'num_generations')",
    "--num_generations 1": "num_generations: got 1, need >= 2: advantages are relative",
    "--num_generations four": "num_generations: got 'four', need int",
    "--num_generations 4.5": "num_generations: got 4.5, need int",
    "--shuffle 7": "shuffle: got 7, need bool",
    "--seed true": "seed: got True, need int",
    "--learning_rate fast": "learning_rate: got 'fast', need float",
    "--reward_weights 1": "reward_weights: got 1, need tuple[float, ...] | None",
    "--method ppo": "method: got 'ppo', need grpo or tandem or mintrl or corl",
    "--models null": "models: got None, need a value in the config",
    "--models x": "models: got 'x', need a mapping of role to path",
    "--method.x 1": "--method.x: got 1, need method to be a mapping in the config",
    "--reward_funcs correct": "import path: got 'correct', need module:name",
    "--reward_funcs gone:f": "import path: got 'gone:f', need a module on sys.path or beside the config",
    "--reward_funcs rewards_for_cli:f": "import path: got 'rewards_for_cli:f',"
    " need a name that rewards_for_cli defines",
    "--train_dataset.call x": "--train_dataset.call: got 'x', need train_dataset to be a mapping in the config",
    "--eval_dataset.call rewards_for_cli:f": "import path: got 'rewards_for_cli:f',"
    " need a name that rewards_for_cli defines",
    "--schedule.call fastcollab:Chunk --schedule.k 2": "fastcollab:Chunk: got {'k': 2}, need its own arguments"
    " (missing a required argument: 'n')",
    "loose": "arguments: got 'loose', need --key value",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_line_and_status_2(config, capsys, words):
    assert run("train", config, "--dry-run", *words.split()) == 2
    captured = capsys.readouterr()
    assert captured.err == f"fastcollab: {MISTAKES[words]}\n" and captured.out == ""


def test_files_that_are_not_there_or_not_readable(config, capsys, tmp_path):
    bad, both = tmp_path / "bad.yaml", tmp_path / "both.yaml"
    bad.write_text("method: [")
    both.write_text(TANDEM + "seed: 1\nargs: {seed: 2}\n")
    for path, said in (
        (tmp_path / "none.yaml", "need a YAML or JSON file"),
        (bad, "got invalid YAML"),
        (both, "config: got ['seed'], need each setting once, flat or under args"),
    ):
        assert run("train", path) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1, error
    assert run("report", tmp_path) == 2
    assert "need a folder with metrics.jsonl" in capsys.readouterr().err
    assert run("env", "--all") == 2
    assert capsys.readouterr().err == "fastcollab: arguments: got '--all', need none but those of --help\n"


def test_what_is_not_the_users_input_keeps_its_traceback(config, monkeypatch):
    """A ValueError of foreign code and an import that fails inside the user's module are shown whole."""
    with pytest.raises(ValueError, match="the user's own"):
        run("train", config, "--train_dataset", "{call: rewards_for_cli:not_ready}")
    assert not (config.parent / "out").exists()
    (config.parent / "rewards_for_cli.py").write_text("import no_such_dependency\n")
    monkeypatch.delitem(sys.modules, "rewards_for_cli", raising=False)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        run("train", config, "--dry-run")


def test_a_local_module_does_not_hide_a_package(config, monkeypatch, capsys):
    """The repository itself has a kernels/, which must never become the top-level package of that name."""
    (config.parent / "json.py").write_text("raise RuntimeError('shadowed')\n")
    monkeypatch.delitem(sys.modules, "json")
    assert run("train", config, "--dry-run") == 0
    assert load_object("json:dumps")([1]) == "[1]"


# -- the other commands


def test_env_says_who_computes_what_and_why_not(capsys):
    assert run("env") == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    lines = {name: text.strip() for name, text in lines.items()}
    assert {"fastcollab", "python", "torch", "transformers", "triton", "cuda", "c++ compiler", "nvcc"} <= set(lines)
    assert lines["op paged_attention"].split(", ")[0] in ("native on cpu", "reference on cpu")
    assert lines["ops native"] == "present" or lines["ops native"].startswith("absent: ")
    assert lines["scheduler"] == "native" or lines["scheduler"].startswith("python: ")


def test_env_gives_the_reason_of_what_is_absent():
    report = {"forced": "reference", "unforced": [], "native": "no fastcollab._C", "triton": None}
    assert env._operators(report | {"sample": {"cpu": "reference"}}) == {
        "op sample": "reference on cpu",
        "ops native": "absent: no fastcollab._C",
        "ops triton": "present",
        "ops forced": "reference (FASTCOLLAB_IMPL or use_impl)",
    }
    forced = env._operators(report | {"forced": "triton", "unforced": ["copy_blocks", "sample"]})["ops forced"]
    assert forced == "triton (FASTCOLLAB_IMPL or use_impl), but no such version exists of copy_blocks, sample"
    assert env._scheduler(SimpleNamespace(NATIVE_ABSENT="no module")) == "python: no module"
    assert env._compiler(["no-such-compiler-here"]) == "none (no-such-compiler-here)"
    assert env._version("no-such-distribution-here") == "not installed"


def test_report_of_a_folder(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    assert run("report", tmp_path, "--out", tmp_path / "page.html") == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize(("command", "module"), [("demo", "fastcollab.demo"), ("bench", "fastcollab.bench.__main__")])
def test_demo_and_bench_get_their_arguments(monkeypatch, command, module):
    seen = []
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(main=lambda: seen.append(sys.argv) or 3))
    before = sys.argv
    assert run(command, "--steps", "5", "-h", "rollout") == 3
    assert seen == [[f"fastcollab {command}", "--steps", "5", "-h", "rollout"]] and sys.argv is before


def test_help_and_unknown_commands(capsys):
    for words, status in ((["--help"], 0), (["train", "--help"], 0), (["nothing"], 2), ([], 2)):
        with pytest.raises(SystemExit) as stopped:
            run(*words)
        assert stopped.value.code == status
    assert "{call: my_mod:make, n: 4}" in capsys.readouterr().out


TINY = """
method: tandem
models:
  senior: {call: fastcollab.tiny:senior}
  junior: {call: fastcollab.tiny:junior}
train_dataset: {call: fastcollab.tiny:problems, n: 8, seed: 0, digits: 2}
eval_dataset: {call: fastcollab.tiny:problems, n: 4, seed: 1, digits: 2}
reward_funcs: fastcollab.tiny:correct
max_steps: 2
prompts_per_step: 2
num_generations: 2
max_completion_length: 32
kv_memory: 16MiB
"""


def test_train_from_a_config(config, tmp_path, capsys):
    config.write_text(TINY)
    assert run("train", config, "--output_dir", tmp_path / "out", "--disable_tqdm") == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward" in line]
    assert [line["step"] for line in steps] == [1, 2] and "tandem/senior_token_frac" in steps[0]
    assert (tmp_path / "out" / "senior" / "config.json").is_file()
    settings = json.loads((tmp_path / "out" / "settings.json").read_text())
    assert (settings["method"], settings["num_generations"]) == ("tandem", 2)
    assert run("train", config, "--output_dir", tmp_path / "out", "--max_steps", 3, "--resume_from_checkpoint") == 2
    assert "checkpoint" in capsys.readouterr().err  # none was saved
    assert run("report", tmp_path / "out") == 0
    assert "Senior&#x27;s share" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_a_cohort_from_a_file_with_a_tokenizer_for_each(tmp_path, capsys):
    rows = [{"prompt": row["prompt"]} for row in tiny.problems(4, seed=1)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    places = {"a": str(tiny.senior()), "b": str(tiny.junior())}
    given = {"method": "corl", "models": places, "processing_class": places}
    given |= {
        "train_dataset": str(tmp_path / "rows.jsonl"),
        "output_dir": str(tmp_path / "out"),
        "prompts_per_step": 2,
        "num_generations": 2,
        "max_steps": 1,
    }
    given |= {"max_completion_length": 4, "labels": "peer_likelihood", "kv_memory": "8MiB", "disable_tqdm": True}
    (tmp_path / "run.json").write_text(json.dumps(given))
    assert cli.main(["train", str(tmp_path / "run.json")]) == 0
    assert (tmp_path / "out" / "a" / "tokenizer.json").exists() and (tmp_path / "out" / "labels.jsonl").exists()
    given["peft_config"] = {"a": {"r": 2, "target_modules": ["q_proj"]}}
    (tmp_path / "run.json").write_text(json.dumps(given | {"output_dir": str(tmp_path / "lora")}))
    assert cli.main(["train", str(tmp_path / "run.json")]) == 0
    assert (tmp_path / "lora" / "a" / "adapter_config.json").exists() and (tmp_path / "lora/b/config.json").exists()


def test_a_verifier_and_its_steps_from_a_file(tmp_path, capsys):
    (tmp_path / "judge.py").write_text(
        "import fastcollab as fc\n"
        "def make(line):\n"
        "    first = lambda prompt, accepted, new: None if accepted else fc.Revise(0)\n"
        "    return fc.FunctionVerifier(first, lambda prompt, accepted, dropped: line)\n"
    )
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tiny.problems(2, seed=1)))
    verifier = {"call": "judge:make", "line": " 2 + 2 = 4\n"}
    given = {"method": "mintrl", "models": {"policy": str(tiny.senior()), "verifier": verifier}}
    given |= {"train_dataset": str(tmp_path / "rows.jsonl"), "output_dir": str(tmp_path / "out"), "max_steps": 1}
    given |= {"reward_funcs": "fastcollab.tiny:correct", "prompts_per_step": 2, "num_generations": 4, "num_controls": 2}
    given |= {
        "max_completion_length": 40,
        "chunk": 8,
        "kv_memory": "8MiB",
        "steps": {"call": "re:compile", "pattern": "\n"},
    }
    (tmp_path / "run.json").write_text(json.dumps(given | {"disable_tqdm": True}))
    assert cli.main(["train", str(tmp_path / "run.json")]) == 0
    (row,) = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert row["mintrl/interventions"] == 1.0 and 0 < row["mintrl/external_share_micro"] < 1
