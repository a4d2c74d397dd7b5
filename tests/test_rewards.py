"""Reward functions: what they are given, what they may return, and how failures surface."""

import asyncio
import contextvars
import functools

import numpy as np
import pytest
import torch

from fastcollab.rewards import RewardFunctions

PROMPTS, COMPLETIONS = ["p0", "p1", "p2"], ["a", "bb", "ccc"]
COLUMNS = {"prompt": PROMPTS, "answer": [1, 2, 3], "level": ["x", "y", "z"]}


def length(completions, **kwargs):
    return [len(c) for c in completions]


def test_weighted_sum_and_metrics():
    def constant(completions):
        return [1.0, None, 1.0]

    scores = RewardFunctions([length, constant], [0.5, 2.0])(PROMPTS, COMPLETIONS)
    assert scores.rewards.tolist() == [2.5, 1.0, 3.5]
    assert scores.metrics == pytest.approx(
        {
            "rewards/length/mean": 2.0,
            "rewards/length/std": 1.0,
            "rewards/length/abstain_frac": 0.0,
            "rewards/constant/mean": 1.0,
            "rewards/constant/std": 0.0,
            "rewards/constant/abstain_frac": 1 / 3,
        }
    )


def test_functions_get_what_they_ask_for():
    seen = {}

    def everything(**kwargs):
        seen["everything"] = kwargs
        return [0] * 3

    def some(completions, answer, *, authors, optional=5, **_):
        seen["some"] = (completions, answer, authors, optional)
        return [0] * 3

    def columns_only(level):
        seen["columns_only"] = level
        return [0] * 3

    def own_only(log_metric, log_extra, trainer_state, completion_ids):
        log_metric("mine", 1.0)
        log_metric("mine", 3.0)
        log_extra("note", ["u", "v", "w"])
        seen["own_only"] = (trainer_state, completion_ids)
        return [0] * 3

    given = {"completion_ids": [[1], [2, 2], [3]], "authors": ["s", "j", "s"], "trainer_state": "state"}
    scores = RewardFunctions([everything, some, columns_only, own_only])(PROMPTS, COMPLETIONS, COLUMNS, **given)
    assert set(seen["everything"]) == {
        "prompts", "completions", "completion_ids", "authors", "interventions", "trainer_state",
        "log_metric", "log_extra", "answer", "level",
    }  # fmt: skip
    assert seen["some"] == (COMPLETIONS, [1, 2, 3], ["s", "j", "s"], 5)
    assert seen["columns_only"] == ["x", "y", "z"]
    assert seen["own_only"] == ("state", [[1], [2, 2], [3]])
    assert scores.metrics["mine"] == 2.0 and scores.extra == {"note": ["u", "v", "w"]}


@pytest.mark.parametrize(
    "values",
    [torch.tensor([1.0, 0.0, 2.0]), np.array([1, 0, 2]), (True, False, np.float32(2)), [torch.tensor(1), 0, 2.0]],
)
def test_kinds_of_numbers(values):
    assert RewardFunctions(lambda completions: values)(PROMPTS, COMPLETIONS).rewards.tolist() == [1.0, 0.0, 2.0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0, 2.0], "number of scores from reward function 'f': got 2, need 3, one per completion"),
        (1.0, "reward function 'f': got 'float', need a list of 3 numbers or None"),
        ("abc", "reward function 'f': got 'str'"),
        (None, "reward function 'f': got 'NoneType'"),
        ([1.0, float("nan"), 0], "reward function 'f', row 1: got nan"),
        ([1.0, 0, -float("inf")], "reward function 'f', row 2: got -inf"),
        (["1", 0, 0], "reward function 'f', row 0: got '1'"),
        ([[1.0], [1.0], [0.0]], r"reward function 'f', row 0: got \[1.0\]"),
    ],
)
def test_bad_returns(value, message):
    def f(completions):
        return value

    with pytest.raises(ValueError, match=message):
        RewardFunctions(f)(PROMPTS, COMPLETIONS)


def test_exceptions_carry_the_name():
    def broken(completions):
        return [1 / 0]

    async def broken_async(completions):
        raise KeyError("answer")

    with pytest.raises(
        RuntimeError, match="reward function 'broken' raised ZeroDivisionError: division by zero"
    ) as info:
        RewardFunctions(broken)(PROMPTS, COMPLETIONS)
    assert isinstance(info.value.__cause__, ZeroDivisionError)
    with pytest.raises(RuntimeError, match="reward function 'broken_async' raised KeyError: 'answer'") as info:
        RewardFunctions([length, broken_async])(PROMPTS, COMPLETIONS)
    assert isinstance(info.value.__cause__, KeyError)

    def interrupted(completions):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        RewardFunctions(interrupted)(PROMPTS, COMPLETIONS)


def test_missing_parameter_names_the_nearest():
    def wants(completions, anwser):
        return [0] * 3

    with pytest.raises(ValueError, match=r"'wants': got parameter 'anwser', need one of .*\(nearest: 'answer'\)"):
        RewardFunctions(wants)(PROMPTS, COMPLETIONS, COLUMNS)
    with pytest.raises(ValueError, match="'<lambda>': got parameter 'completions'"):
        RewardFunctions(lambda completions, /: [0] * 3)(PROMPTS, COMPLETIONS)


CONTEXT = contextvars.ContextVar("context", default="unset")


def test_async_functions_run_at_the_same_time():
    seen, ready = [], []

    async def meet(completions, name):
        ready.append(name)
        while len(ready) < 2:  # neither can finish alone
            await asyncio.sleep(0)
        seen.append(CONTEXT.get())
        return [float(len(ready))] * 3

    class Callable:
        async def __call__(self, completions):
            return await meet(completions, "object")

    async def function(completions):
        return await meet(completions, "function")

    funcs = RewardFunctions([function, length, Callable()])
    assert funcs.names == ["function", "length", "Callable"]
    run = functools.partial(funcs, PROMPTS, COMPLETIONS)
    CONTEXT.set("set")
    assert run().rewards.tolist() == [5.0, 6.0, 7.0]

    async def inside_a_loop():
        ready.clear()
        return run().rewards.tolist()

    assert asyncio.run(inside_a_loop()) == [5.0, 6.0, 7.0]
    assert seen == ["set"] * 4


def test_names_are_unique():
    named = functools.partial(length)
    assert RewardFunctions([length, named, length]).names == ["length", "length_2", "length_3"]


def test_bad_settings_and_columns():
    with pytest.raises(ValueError, match="reward_funcs: got 'none'"):
        RewardFunctions([])
    with pytest.raises(ValueError, match="reward_funcs: got 3, need callables"):
        RewardFunctions([length, 3])
    with pytest.raises(ValueError, match="reward_weights: got 1, need 2, one per function"):
        RewardFunctions([length, length], [1.0])
    with pytest.raises(ValueError, match="reward_weights"):
        RewardFunctions(length, [float("nan")])
    with pytest.raises(ValueError, match="column 'answer': got 2, need 3, one per completion"):
        RewardFunctions(length)(PROMPTS, COMPLETIONS, {"answer": [1, 2]})
    with pytest.raises(ValueError, match=r"dataset columns: got \['authors'\]"):
        RewardFunctions(length)(PROMPTS, COMPLETIONS, {"authors": [1, 2, 3]})
    with pytest.raises(RuntimeError, match="'<lambda>' raised ValueError: length of log_extra 'x': got 1, need 3"):
        RewardFunctions(lambda log_extra: log_extra("x", [1]))(PROMPTS, COMPLETIONS)
