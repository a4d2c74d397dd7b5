"""Reward functions: called with what they ask for, checked row by row, combined by weight. None means "no score"."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastcollab.code_rewards import Failure, code, code_failures
from fastcollab.config import require

__all__ = ["Failure", "RewardFunctions", "Scores", "code", "code_failures"]

OWN_NAMES = (
    "prompts",
    "completions",
    "completion_ids",
    "authors",
    "interventions",
    "trainer_state",
    "log_metric",
    "log_extra",
)


class Scores(NamedTuple):
    """What a batch scored."""

    rewards: Tensor  # fp64 [N], weighted sum over the functions that answered; NaN where none did
    metrics: dict[str, float]  # rewards/<function>/{mean,std,abstain_frac}, and what log_metric was given
    extra: dict[str, list]  # name -> N values, from log_extra


class RewardFunctions:
    """One or more reward functions with weights.

    A function gets keyword arguments by name: ``prompts``, ``completions``, ``completion_ids``, ``authors``,
    ``interventions``, ``trainer_state``, ``log_metric(name, value)``, ``log_extra(name, values)`` and every column of
    the dataset; all of them if it takes ``**kwargs``, else those that its signature names. It returns one finite
    number or None (no score) per completion. Async functions run concurrently.
    """

    def __init__(
        self,
        funcs: Callable | Sequence[Callable],
        weights: Sequence[float] | None = None,
        nonfinite: str = "error",
    ) -> None:
        """``weights`` default to 1; ``nonfinite="abstain"`` takes NaN and inf as None instead of raising."""
        self.funcs = list(funcs) if isinstance(funcs, Sequence) else [funcs]
        require(len(self.funcs) > 0, "reward_funcs", "none", "at least one function")
        for func in self.funcs:
            require(callable(func), "reward_funcs", func, "callables")
        self.weights = [1.0] * len(self.funcs) if weights is None else [float(w) for w in weights]
        F = len(self.funcs)
        require(len(self.weights) == F, "number of reward_weights", len(self.weights), f"{F}, one per function")
        require(all(map(math.isfinite, self.weights)), "reward_weights", self.weights, "finite numbers")
        require(nonfinite in ("error", "abstain"), "nonfinite", nonfinite, "error or abstain")
        self.nonfinite = nonfinite
        self.names = _unique_names(self.funcs)

    def check(self, names: Iterable[str]) -> None:
        """Raise ValueError unless every parameter of every function is one of ours or a dataset column of ``names``."""
        given = dict.fromkeys([*OWN_NAMES, *(name for name in names if name != "prompt")])
        for name, func in zip(self.names, self.funcs, strict=True):
            _accepted(name, func, given)

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        columns: Mapping[str, Sequence[Any]] | None = None,
        *,
        completion_ids: Sequence[Sequence[int]] | None = None,
        authors: Sequence[Any] | None = None,
        interventions: Sequence[Any] | None = None,
        trainer_state: Any = None,
    ) -> Scores:
        """Scores of N completions. ``columns`` holds N values per dataset column (``prompt`` itself is not passed on).

        Raises: ValueError for a wrong number of scores (both lengths) or a score that is not a finite number (its
        row), each with the function's name; RuntimeError from whatever a function raised, with its name.
        """
        N = len(completions)
        columns = {k: v for k, v in (columns or {}).items() if k != "prompt"}
        clash = [k for k in columns if k in OWN_NAMES]
        require(not clash, "dataset columns", clash, f"names other than {', '.join(OWN_NAMES)}")
        require(len(prompts) == N, "number of prompts", len(prompts), f"{N}, one per completion")
        for name, values in columns.items():
            require(len(values) == N, f"length of column {name!r}", len(values), f"{N}, one per completion")
        logged: dict[str, list[float]] = {}
        extra: dict[str, list] = {}

        def log_metric(name: str, value: float) -> None:
            logged.setdefault(name, []).append(float(value))

        def log_extra(name: str, values: Sequence[Any]) -> None:
            require(len(values) == N, f"length of log_extra {name!r}", len(values), f"{N}, one per completion")
            extra[name] = list(values)

        own = (prompts, completions, completion_ids, authors, interventions, trainer_state, log_metric, log_extra)
        given = {**dict(zip(OWN_NAMES, own, strict=True)), **columns}
        table = torch.tensor(self._scores(given, N), dtype=torch.float64).reshape(len(self.funcs), N)

        answered = ~table.isnan()
        weights = torch.tensor(self.weights, dtype=torch.float64)[:, None]
        total = torch.where(answered, weights * table, 0).sum(0)
        rewards = torch.where(answered.any(0), total, float("nan"))
        metrics = {name: sum(values) / len(values) for name, values in logged.items()}
        for name, row, ok in zip(self.names, table, answered, strict=True):
            metrics[f"rewards/{name}/abstain_frac"] = float((~ok).double().mean()) if N else 0.0
            if ok.any():
                metrics[f"rewards/{name}/mean"] = float(row[ok].mean())
                metrics[f"rewards/{name}/std"] = float(row[ok].std(correction=min(1, int(ok.sum()) - 1)))
        return Scores(rewards, metrics, extra)

    def _scores(self, given: dict[str, Any], N: int) -> list[list[float]]:
        calls = [partial(f, **_accepted(name, f, given)) for name, f in zip(self.names, self.funcs, strict=True)]
        results: list[Any] = [None] * len(calls)
        waiting = [i for i, func in enumerate(self.funcs) if _is_async(func)]
        for i in (i for i in range(len(calls)) if i not in waiting):
            with _named(self.names[i]):
                results[i] = calls[i]()
        if waiting:
            finished = _run_all([(self.names[i], calls[i]) for i in waiting])
            for i, result in zip(waiting, finished, strict=True):
                results[i] = result
        return [self._check(name, result, N) for name, result in zip(self.names, results, strict=True)]

    def _check(self, name: str, result: Any, N: int) -> list[float]:
        values = result.tolist() if hasattr(result, "tolist") else result
        is_list = isinstance(values, Sequence) and not isinstance(values, str)
        require(is_list, f"reward function {name!r}", type(result).__name__, f"a list of {N} numbers or None")
        require(
            len(values) == N, f"number of scores from reward function {name!r}", len(values), f"{N}, one per completion"
        )
        scores = []
        for row, value in enumerate(values):
            value = value.item() if hasattr(value, "item") else value
            if value is not None and not (isinstance(value, Real) and math.isfinite(value)):
                drop = self.nonfinite == "abstain" and isinstance(value, Real)
                require(drop, f"reward function {name!r}, row {row}", value, "a finite number, or None for no score")
                value = None
            scores.append(float("nan") if value is None else float(value))
        return scores


class _named:
    """Whatever a function raises inside the block surfaces with the function's name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Exception):
            raise RuntimeError(f"reward function {self.name!r} raised {kind.__name__}: {error}") from error


def _is_async(func: Callable) -> bool:
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(getattr(func, "__call__", None))  # noqa: B004


def _run_all(calls: list[tuple[str, Callable]]) -> list[Any]:
    """Results of named async calls, run concurrently; in another thread where this one's loop is already running."""

    async def answer(name: str, call: Callable) -> Any:
        with _named(name):
            return await call()

    async def gather() -> list[Any]:
        return await asyncio.gather(*(answer(name, call) for name, call in calls))

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(gather())
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(contextvars.copy_context().run, lambda: asyncio.run(gather())).result()


def _accepted(name: str, func: Callable, given: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments that ``func`` takes."""
    parameters = inspect.signature(func).parameters
    for key, p in parameters.items():
        is_needed = p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        if is_needed and (key not in given or p.kind is p.POSITIONAL_ONLY):
            near = get_close_matches(key, given, n=1)
            hint = f" (nearest: {near[0]!r})" if near else ""
            raise ValueError(f"reward function {name!r}: got parameter {key!r}, need one of {sorted(given)}{hint}")
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(given)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {key: given[key] for key, p in parameters.items() if key in given and p.kind in by_name}


def _unique_names(funcs: Sequence[Callable]) -> list[str]:
    names: list[str] = []
    for func in funcs:
        func = func.func if isinstance(func, partial) else func
        base = name = getattr(func, "__name__", type(func).__name__)
        count = 1
        while name in names:
            count += 1
            name = f"{base}_{count}"
        names.append(name)
    return names
