"""The run config: a YAML or JSON file (and overrides) that names the arguments of ``fastcollab.train``."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

from fastcollab.config import CoRLConfig, GRPOConfig, MInTRLConfig, TandemConfig, TrainConfig, require

CONFIGS = {"grpo": GRPOConfig, "tandem": TandemConfig, "mintrl": MInTRLConfig, "corl": CoRLConfig}
ROLES = (  # arguments of train, but for method, args and callbacks
    "models",
    "train_dataset",
    "eval_dataset",
    "reward_funcs",
    "processing_class",
    "peft_config",
    "resume_from_checkpoint",
)


def load_run(path: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The config file with the overrides applied and checked: method, models, …, and ``args`` as the method's config.

    Raises ValueError for a missing or unreadable file, an unknown key (with the nearest name), a value of another
    type, or an import path that leads nowhere. Models and datasets are not loaded.
    """
    run = _read(path)
    for key, value in changes.items():
        _set(run, key, value)
    method = run.pop("method", None)
    require(method in CONFIGS, "method", method, " or ".join(CONFIGS))
    nested = run.pop("args", None) or {}
    require(isinstance(nested, Mapping), "args", nested, "a mapping of settings")
    parts = {key: run.pop(key) for key in ROLES if run.get(key) is not None}
    twice = sorted(run.keys() & nested.keys())
    require(not twice, "config", twice, "each setting once, flat or under args")
    for key in ("models", "train_dataset", *(() if method == "corl" else ("reward_funcs",))):
        require(key in parts, key, None, "a value in the config")
    require(isinstance(parts["models"], Mapping), "models", parts["models"], "a mapping of role to path")
    funcs = parts.get("reward_funcs", [])
    parts["reward_funcs"] = funcs if isinstance(funcs, list) else [funcs]
    for func in parts["reward_funcs"]:
        load_object(func["call"] if _is_call(func) else func)
    for value in (*parts["models"].values(), *parts.values()):
        if _is_call(value):
            load_object(value["call"])
    return {"method": method, **parts, "args": make_args(CONFIGS[method], {**nested, **run})}


def make_args(config: type[TrainConfig], given: Mapping[str, Any]) -> TrainConfig:
    """The config from plain values; a number may be text (YAML reads ``1e-4`` as text), a list stands for a tuple."""
    hints = get_type_hints(config)
    shown = {field.name: str(field.type) for field in fields(config)}
    for key in given:
        near = get_close_matches(key, [*hints, *ROLES, "method"], n=1)
        hint = f" (nearest: {near[0]!r})" if near else ""
        require(key in shown, "config", key, f"a field of {config.__name__} or an argument of train{hint}")
    return config(**{key: _coerce(key, resolve(value), hints[key], shown[key]) for key, value in given.items()})


def overrides(words: Sequence[str]) -> dict[str, Any]:
    """``--key value``, ``--key=value`` and bare ``--key`` (true) as a dict; values are read as YAML."""
    changes, i = {}, 0
    while i < len(words):
        word = words[i]
        require(word.startswith("--") and len(word) > 2, "arguments", word, "--key value")
        key, sign, value = word[2:].partition("=")
        if not sign and i + 1 < len(words) and not words[i + 1].startswith("--"):
            i, value, sign = i + 1, words[i + 1], "="
        changes[key.replace("-", "_")] = _parse(value, f"--{key}") if sign else True
        i += 1
    return changes


def load_object(path: Any) -> Any:
    """The object at ``module:name``. Raises ValueError where there is none; an error inside the module surfaces."""
    ok = isinstance(path, str) and path.count(":") == 1 and all(path.split(":"))
    require(ok, "import path", path, "module:name")
    module, name = path.split(":")
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, something that it imports is not
        raise ValueError(f"import path: got {path!r}, need a module on sys.path or beside the config") from error
    require(hasattr(loaded, name), "import path", path, f"a name that {module} defines")
    return getattr(loaded, name)


def plain(value: Any) -> Any:
    """The value in types that YAML and JSON write; configs become mappings, what has no such form its ``str``."""
    return json.loads(json.dumps(value, default=lambda v: v.to_dict() if isinstance(v, TrainConfig) else str(v)))


def to_yaml(run: Mapping[str, Any]) -> str:
    """The checked config as YAML that ``load_run`` reads to the same."""
    return yaml.safe_dump(plain(dict(run)), sort_keys=False)


def resolve(value: Any) -> Any:
    """``{call: module:name, **kwargs}`` becomes the result of that call; anything else is itself."""
    if not _is_call(value):
        return value
    kwargs = {key: item for key, item in value.items() if key != "call"}
    target = load_object(value["call"])
    try:
        inspect.signature(target).bind(**kwargs)
    except TypeError as error:
        raise ValueError(f"{value['call']}: got {kwargs}, need its own arguments ({error})") from error
    return target(**kwargs)


def _is_call(value: Any) -> bool:
    return isinstance(value, Mapping) and "call" in value


def _set(run: dict[str, Any], key: str, value: Any) -> None:
    """Set a (dotted) key where the config has it: under args only if it stands there already."""
    head, *inner = key.split(".")
    nested = run.get("args")
    if head != "args" and isinstance(nested, dict) and head in nested:
        run = nested
    for name in inner:
        run = run.setdefault(head, {})
        require(isinstance(run, dict), f"--{key}", value, f"{head} to be a mapping in the config")
        head = name
    run[head] = value


def _read(path: Path) -> dict[str, Any]:
    require(path.is_file(), "config", str(path), "a YAML or JSON file")
    run = _parse(path.read_text(encoding="utf-8"), str(path))
    require(isinstance(run, dict), str(path), type(run).__name__, "a mapping")
    return run


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: got invalid YAML ({' '.join(str(error).split())}), need YAML or JSON") from error


def _coerce(name: str, value: Any, hint: Any, shown: str) -> Any:
    """``value`` as the annotation ``hint``; ``shown`` is how the config writes it."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if Any in options or (value is None and NoneType in options):
        return value
    for option in options:
        kind = get_origin(option) or option
        if kind is tuple and isinstance(value, (list, tuple)):
            return tuple(_coerce(name, item, get_args(option)[0], shown) for item in value)
        if kind is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
            try:
                return float(value)
            except ValueError:
                continue
        if isinstance(value, kind) and isinstance(value, bool) == (kind is bool):
            return value
    raise ValueError(f"{name}: got {value!r}, need {shown}")
