"""The command ``fastcollab``: train, report, env, demo, bench. What a command needs is imported when it runs."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastcollab.config import require


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status; a mistake in the input is one line on stderr and 2."""
    options, rest = _parser().parse_known_args(argv)
    try:
        return options.run(options, rest)
    except (ValueError, FileNotFoundError) as error:
        if not _raised_here(error):
            raise
        print(f"fastcollab: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fastcollab", description="Train language models that write together.")
    commands = parser.add_subparsers(required=True, metavar="command")

    train = commands.add_parser(
        "train",
        help="train from a YAML or JSON config; any --key value overrides it",
        usage=TRAIN_USAGE,
        epilog=TRAIN_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    train.add_argument("config", type=Path)
    train.add_argument("--dry-run", action="store_true", help="print the resolved config and stop")
    train.set_defaults(run=run_train)

    report = commands.add_parser("report", help="write report.html for a run folder")
    report.add_argument("folder", type=Path, help="holds metrics.jsonl")
    report.add_argument("--out", type=Path, help="default: report.html in the folder")
    report.set_defaults(run=run_report)

    env = commands.add_parser("env", help="versions, devices, and which implementations run here")
    env.set_defaults(run=run_env)

    for name, module, text in (
        ("demo", "fastcollab.demo", "Tandem RL and its GRPO control on the tiny pair"),
        ("bench", "fastcollab.bench.__main__", "measure the claims beside their baselines"),
    ):
        command = commands.add_parser(name, help=text, add_help=False)
        command.set_defaults(run=_passed_on(f"fastcollab {name}", module))
    return parser


TRAIN_USAGE = "fastcollab train config.yaml [--key value ...] [--dry-run]"
TRAIN_HELP = """\
The config names the arguments of fastcollab.train and the fields of the method's config, flat or under "args":

  method: tandem
  models: {senior: path/to/senior, junior: path/to/junior}
  train_dataset: train.jsonl              # column "prompt"; the others reach the reward functions
  reward_funcs: my_mod:correct            # one or a list; looked for beside the config, too
  num_generations: 8
  learning_rate: 1e-6

{call: my_mod:make, n: 4} stands for the result of my_mod.make(n=4), for a model, a dataset or a setting.
Overrides: --num_generations 4, --models.senior path, --shuffle false.
"""


def _passed_on(prog: str, module: str) -> Callable[[argparse.Namespace, list[str]], int]:
    """A command whose arguments belong to another module's ``main``."""

    def run(options: argparse.Namespace, rest: list[str]) -> int:
        before, sys.argv = sys.argv, [prog, *rest]
        try:
            return importlib.import_module(module).main() or 0
        finally:
            sys.argv = before

    return run


def _raised_here(error: BaseException) -> bool:
    """True if the package itself raised it: such a message speaks to the user, another needs its traceback."""
    trace = error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_globals.get("__name__", "").split(".")[0] == "fastcollab"


def _no_more(rest: Sequence[str]) -> None:
    require(not rest, "arguments", " ".join(rest), "none but those of --help")


# -- commands


def run_report(options: argparse.Namespace, rest: list[str]) -> int:
    from fastcollab.run_folder import report_folder

    _no_more(rest)
    print(report_folder(options.folder, options.out))
    return 0


def run_env(options: argparse.Namespace, rest: list[str]) -> int:
    from fastcollab.env import describe

    _no_more(rest)
    report = describe()
    width = max(map(len, report))
    for name, text in report.items():
        print(f"{name:<{width}}  {text}")
    return 0


def run_train(options: argparse.Namespace, rest: list[str]) -> int:
    from fastcollab.run_config import load_object, load_run, overrides, plain, resolve, to_yaml

    sys.path += [str(options.config.resolve().parent), str(Path.cwd())]  # last: they must not hide a package
    run = load_run(options.config, overrides(rest))
    if options.dry_run:
        print(to_yaml(run), end="")
        return 0
    from fastcollab.run_folder import save_inputs
    from fastcollab.trainer import train

    args = run["args"]
    models = {role: resolve(model) for role, model in run["models"].items()}
    data, held_out = resolve(run["train_dataset"]), resolve(run.get("eval_dataset"))
    funcs = [load_object(func) if isinstance(func, str) else resolve(func) for func in run["reward_funcs"]]
    peft_config = _each(_peft_config, run.get("peft_config"), models)
    tokenizer = _each(_tokenizer, run.get("processing_class"), models)
    save_inputs(args.output_dir, settings={"method": run["method"], **plain(args)})
    result = train(
        run["method"],
        models,
        data,
        funcs or None,
        args,
        peft_config=peft_config,
        processing_class=tokenizer,
        eval_dataset=held_out,
        resume_from_checkpoint=run.get("resume_from_checkpoint", False),
    )
    print(f"{result.output_dir}: metrics.jsonl and the trained model; fastcollab report {result.output_dir}")
    return 0


def _each(make: Callable[[Any], Any], value: Any, models: Mapping[str, Any]) -> Any:
    """One for all models, or a mapping of model to its own."""
    from fastcollab.run_config import resolve

    if isinstance(value, Mapping) and value and set(value) <= set(models):
        return {name: make(resolve(own)) for name, own in value.items()}
    return make(resolve(value))


def _peft_config(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    from peft import LoraConfig

    return LoraConfig(**value)


def _tokenizer(value: Any) -> Any:
    if not isinstance(value, (str, Path)):
        return value
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(value)


if __name__ == "__main__":
    sys.exit(main())
