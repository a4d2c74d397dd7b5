"""Code rewards: model-written Python run against tests in a sandbox, judged by values that it cannot forge."""

from __future__ import annotations

import ast
import builtins
import functools
import math
import os
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from fastcollab import sandbox as sandboxes
from fastcollab.config import parse_memory, require

FENCE = re.compile(r"^[ \t]*```(?:python|python3|py)[ \t]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE | re.I)
SETUP = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
Test = str | tuple[str, str]


class Failure(NamedTuple):
    """A test that a program failed, to show to a verifier."""

    test: Test  # as it was given
    reason: str  # the calls that the test made and what they gave, or the error; written by the program in part


def code(
    completions: Sequence[str],
    tests: Sequence[Sequence[Test]],
    timeout: float = 5.0,
    memory: str | int = "512MiB",
    mode: str = "all",
    sandbox: bool = True,
) -> list[float]:
    """Scores of N programs in [0, 1]; see ``code_failures``, which also says what failed."""
    return code_failures(completions, tests, timeout, memory, mode, sandbox)[0]


def code_failures(
    completions: Sequence[str],
    tests: Sequence[Sequence[Test]],
    timeout: float = 5.0,
    memory: str | int = "512MiB",
    mode: str = "all",
    sandbox: bool = True,
) -> tuple[list[float], list[list[Failure]]]:
    """Run N completions against their tests: N scores, and per completion the tests that it failed.

    The program is the last ```` ```python ```` fence of a completion, or all of it. It may use the standard library,
    threads, 8 MiB of output and 64 MiB of files in its own folder; no process, no network, no other file, no
    installed package.

    ``tests`` holds per completion strings of Python or (stdin, stdout) pairs. A string is one test (``assert f(2) ==
    4``); one with nothing but imports, definitions and assignments prepares those after it. Names that the tests
    neither bind nor find among Python's builtins and modules are the program's. Tests run in a process without the
    program: calls go there as data, plain values (numbers, str, bytes, containers, deque, Decimal, Fraction) come
    back, and the test computes with those. Another object can be called, read and iterated, but comparing it or
    taking it as true fails the test. For a pair the program runs as a script, must exit with 0, and its output is
    compared but for space at the end of lines.

    Args:
        timeout: seconds of wall clock per completion, loading and all its tests together.
        memory: address space of one program, bytes or "512MiB"; at least 64 MiB.
        mode: "all" scores 1 if every test passes, else 0; "fraction" the share that passes.
        sandbox: False runs them with limits but with your rights on your files, for a machine where no sandbox works.

    Raises: ValueError for tests that do not parse, import an installed package, or let the program judge itself (its
    own ``np.allclose`` or ``close(f(2), 4)``); RuntimeError where no sandbox works and ``sandbox`` is true.
    """
    N = len(completions)
    require(len(tests) == N, "number of tests", len(tests), f"{N}, one list per completion")
    require(timeout > 0 and math.isfinite(timeout), "timeout", timeout, "seconds > 0")
    require(mode in ("all", "fraction"), "mode", mode, "all or fraction")
    size = parse_memory(memory, "memory")
    require(size >= 64 << 20, "memory", memory, "at least 64MiB, which Python itself takes")
    for i, text in enumerate(completions):
        require(isinstance(text, str), f"completions[{i}]", type(text).__name__, "a string")
    plans = [_plan(f"tests[{i}]", row) for i, row in enumerate(tests)]
    limits = sandboxes.Limits(timeout, size)
    if sandbox and N:
        sandboxes.kind()

    def judge(text: str, plan: _Plan) -> list[Failure]:
        return plan.failures(program(text), limits, sandbox)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()) as p:
        failed = list(p.map(judge, completions, plans))
    shares = [1 - len(f) / plan.count for f, plan in zip(failed, plans, strict=True)]
    return [share if mode == "fraction" else float(share == 1) for share in shares], failed


def program(completion: str) -> str:
    """The code of a completion: its last python fence (to the end, if it was cut off there), or all of it."""
    fences = FENCE.findall(completion)
    return fences[-1] if fences else completion


class _Plan(NamedTuple):
    """What the tests of one completion ask for."""

    tests: tuple[Test, ...]
    counted: tuple[int, ...] = ()  # which of them are tests; the others prepare
    job: dict | None = None  # what the judge runs; None for pairs

    @property
    def count(self) -> int:
        return len(self.counted) if self.job else len(self.tests)

    def failures(self, code: str, limits: sandboxes.Limits, sandbox: bool) -> list[Failure]:
        if self.job:
            records, late = sandboxes.run({"code": code}, self.job, limits, sandbox)
            why = {i: reason for i, reason in records}
        else:
            stdins = [stdin for stdin, _ in self.tests]
            records, late = sandboxes.run({"code": code, "stdins": stdins}, None, limits, sandbox)
            why = {i: reason or _difference(out, self.tests[i][1]) for i, (out, reason) in records}
        missing = f"no answer within {limits.timeout:g} s" if late else "over a limit of memory or CPU"
        reasons = [(i, why.get(i, missing)) for i in (self.counted if self.job else range(len(self.tests)))]
        return [Failure(self.tests[i], reason) for i, reason in reasons if reason is not None]


def _difference(got: str, want: str) -> str | None:
    lines, wanted = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (got, want))
    if lines == wanted:
        return None
    k = next((k for k, (a, b) in enumerate(zip(lines, wanted)) if a != b), min(len(lines), len(wanted)))  # noqa: B905
    line, need = (repr(text[k][:200]) if k < len(text) else "the end" for text in (lines, wanted))
    return f"stdout line {k + 1}: got {line}, need {need}"


def _plan(name: str, row: Sequence[Test]) -> _Plan:
    is_list = isinstance(row, Sequence) and not isinstance(row, str) and len(row) > 0
    require(is_list, name, row, "a list of at least one assert statement or (stdin, stdout) pair")
    if all(isinstance(test, str) for test in row):
        return _asserts(tuple(row))
    for i, pair in enumerate(row):
        is_pair = isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2
        need = "a (stdin, stdout) pair of strings, as the others, or strings of Python alone"
        require(is_pair and all(isinstance(text, str) for text in pair), f"{name}[{i}]", pair, need)
    return _Plan(tuple((stdin, stdout) for stdin, stdout in row))


@functools.lru_cache(maxsize=1 << 12)
def _asserts(texts: tuple[str, ...]) -> _Plan:
    trees = []
    for text in texts:
        try:
            trees.append(ast.parse(text))
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"tests: got {text!r}, need Python ({error})") from None
    nodes = [node for tree in trees for node in ast.walk(tree)]
    bound = set().union(*map(_binds, nodes))
    loaded = {node.id for node in nodes if isinstance(node, ast.Name)}
    bases = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    free = loaded - bound - set(dir(builtins))
    modules = free & bases & sys.stdlib_module_names
    names = free - modules
    values = names | _tainted(nodes, names)
    for text, tree in zip(texts, trees, strict=True):
        _check_safe(text, tree, names, values)
    counted = [i for i, tree in enumerate(trees) if not all(isinstance(s, SETUP) for s in tree.body)]
    require(bool(counted), "tests", list(texts), "at least one assert statement outside a definition")
    tests = [[text, len(tree.body) == 1 and isinstance(tree.body[0], ast.Assert)] for text, tree in zip(texts, trees)]  # noqa: B905
    return _Plan(texts, tuple(counted), {"tests": tests, "names": sorted(names), "modules": sorted(modules)})


def _binds(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Name):
        return set() if isinstance(node.ctx, ast.Load) else {node.id}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    if isinstance(node, ast.arg):
        return {node.arg}
    return {node.name} if isinstance(getattr(node, "name", None), str) else set()


def _tainted(nodes: list[ast.AST], names: set[str]) -> set[str]:
    """Names of the tests that may hold something of the program's: parameters, and what its names were assigned to."""
    kinds = ast.Assign | ast.AnnAssign | ast.NamedExpr
    assigned = [m for n in nodes if isinstance(n, kinds) and _mentions([n], names) for m in ast.walk(n)]
    return set().union(*map(_binds, assigned), (n.arg for n in nodes if isinstance(n, ast.arg)))


def _mentions(nodes: Sequence[ast.AST], names: set[str]) -> bool:
    return any(isinstance(m, ast.Name) and m.id in names for node in nodes for m in ast.walk(node))


def _check_safe(text: str, tree: ast.AST, names: set[str], values: set[str]) -> None:
    """ValueError for a test that needs an installed package, or asks the program whether its own value is right."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            wanted = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            known = all(name.split(".")[0] in sys.stdlib_module_names for name in wanted)
            require(known, "tests", text, "imports of the standard library alone")
        for call in _calls(node, names) if isinstance(node, ast.expr) else ():
            arguments = [*call.args, *(k.value for k in call.keywords)]
            is_module = isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name)
            if is_module and _mentions(arguments, values):
                _refuse(text, call)
        for loose in _loose(node.test) if isinstance(node, ast.Assert) else ():
            for call in (c for part in ast.walk(loose) for c in _calls(part, names)):
                arguments = [*call.args, *(k.value for k in call.keywords)]
                if len(arguments) > 1 and _mentions(arguments, values):
                    _refuse(text, call)


def _calls(node: ast.AST, names: set[str]) -> list[ast.Call]:
    """``node`` if it calls something that starts with one of ``names``."""
    root = node
    while isinstance(root, ast.Attribute | ast.Call | ast.Subscript):
        root = root.func if isinstance(root, ast.Call) else root.value
    return [node] if isinstance(node, ast.Call) and isinstance(root, ast.Name) and root.id in names else []


def _loose(test: ast.expr) -> list[ast.expr]:
    """Parts of a condition that hold by more than one value: all but ``==`` and ``is``."""
    if isinstance(test, ast.BoolOp):
        return [part for value in test.values for part in _loose(value)]
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _loose(test.operand)
    strict = isinstance(test, ast.Compare) and all(isinstance(op, ast.Eq | ast.Is) for op in test.ops)
    is_flag = strict and any(isinstance(c, ast.Constant) and isinstance(c.value, bool) for c in test.comparators)
    return [] if strict and not is_flag else [test]


def _refuse(text: str, call: ast.Call) -> None:
    judge = ast.unparse(call.func)
    require(False, "tests", text, f"{judge!r} imported or defined in the tests: a program would bring its own")
