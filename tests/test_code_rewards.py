"""Code rewards: what honest programs score, and that no hostile one escapes, lingers or forges a pass."""

import os
import sysconfig
import time
from pathlib import Path

import pytest
from hostile_programs import HOSTILE

import fastcollab as fc
from fastcollab import code_rewards, sandbox

HONEST = ("def f(x): return x * x", ["assert f(2) == 4"])
TIMEOUT = 1.0


def left_over() -> list[str]:
    """Processes that still run the sandbox's boot code; bwrap takes a moment to go."""
    found, until = ["?"], time.perf_counter() + 1
    while found and time.perf_counter() < until:
        found = [p.name for p in Path("/proc").glob("[0-9]*") if b"'fastcollab.' + name" in command(p)]
    return found


def command(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:  # gone
        return b""


def placed(code: str, here: Path) -> str:
    """The program with the paths that it attacks, a folder of the host and its installed packages."""
    return f"HERE, PACKAGES = {str(here)!r}, {sysconfig.get_path('purelib')!r}\n{code}"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """name -> (score, seconds, what failed), all in one call with honest ones among them, which must pass."""
    os.environ["FASTCOLLAB_SECRET"] = "secret"
    here, seconds = tmp_path_factory.mktemp("here"), {}
    hostile = [(placed(code, here), tests) for code, tests in HOSTILE.values()]
    rows = [row for i in range(0, len(hostile), 4) for row in (*hostile[i : i + 4], HONEST)]
    run, patch = sandbox.run, pytest.MonkeyPatch()

    def timed(job, *args):
        start = time.perf_counter()
        result = run(job, *args)
        seconds[job["code"]] = time.perf_counter() - start
        return result

    patch.setattr(code_rewards.sandboxes, "run", timed)
    scores, failed = fc.rewards.code_failures(*map(list, zip(*rows, strict=True)), timeout=TIMEOUT)
    patch.undo()
    del os.environ["FASTCOLLAB_SECRET"]
    assert not list(here.iterdir())
    after = [score for score, row in zip(scores, rows, strict=True) if row is HONEST]
    assert after == [1.0] * len(after) and not left_over()
    return {
        name: (scores[rows.index(row)], seconds[code_rewards.program(row[0])], failed[rows.index(row)])
        for name, row in zip(HOSTILE, hostile, strict=True)
    }


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name, outcomes):
    score, seconds, failed = outcomes[name]
    assert score == 0 and failed
    assert seconds < TIMEOUT + 1


RIGHT = [
    ("def f(x): return x * x", ["assert f(2) == 4", "assert 4 == f(-2)", "assert f(2) is not None and not f(0)"]),
    ("```python\nbroken(\n```\nthen\n```python\ndef f(x): return [x]\n```\ndone", ["assert f('ä') == ['ä']"]),
    ("thoughts\n```py\ndef f(x):\n    return (x, {'a': {1.5, 2}})", ["assert f(None) == (None, {'a': {2, 1.5}})"]),
    ("def f(): return 0.1 + 0.2", ["assert abs(f() - 0.3) < 1e-9 and f() != 0.3", "assert math.isclose(f(), 0.3)"]),
    ("def f(): return float('nan'), -float('inf'), -0.0, 1j", ["assert str(f()) == '(nan, -inf, -0.0, 1j)'"]),
    ("def f(n): return n ** 5000", ["assert f(10) == 10 ** 5000"]),
    ("def f(n): return bytes([n]), bytearray(b'a'), frozenset({n})", ["assert f(1) == (b'\\1', bytearray(b'a'), {1})"]),
    ("def f(n):\n  while n: n -= 1; yield n", ["assert list(f(3)) == [2, 1, 0]", "assert 1 in list(f(2))"]),
    (
        "from collections import *\ndef f(s): return Counter(s), deque(s), defaultdict(int, a=1), OrderedDict(b=2)",
        ["import collections\nassert f('aab') == ({'a': 2, 'b': 1}, collections.deque('aab'), {'a': 1}, {'b': 2})"],
    ),
    (
        "from fractions import Fraction\nfrom decimal import Decimal\ndef f(): return Fraction(1, 3), Decimal('0.1')",
        ["from fractions import *", "from decimal import *", "assert f() == (Fraction(1, 3), Decimal('0.1'))"],
    ),
    ("class S:\n  def add(self, a, b=1): return a + b", ["assert S().add(2) == 3 == S().add(1, b=2)"]),
    (
        "class Stack:\n  def __init__(s): s.x = []\n  def push(s, v): s.x.append(v)\n"
        "  def __len__(s): return len(s.x)\n  def __getitem__(s, i): return s.x[i]\n  def __str__(s): return str(s.x)",
        ["s = Stack()", "s.push(4); assert len(s) == 1 and s[0] == 4", "assert str(s) == '[4]' and s.x == [4]"],
    ),
    (
        "class Node:\n  def __init__(s, v, next=None): s.v, s.next = v, next\n"
        "def total(n): return n.v + total(n.next) if n else 0",
        ["assert total(Node(1, Node(2))) == 3", "a = Node(1); a.next = Node(5); assert total(a) == 6"],
    ),
    ("def sort(x): x.sort()", ["x = [3, 1, 2]", "sort(x)", "assert x == [1, 2, 3]"]),
    ("def apply(g, x): return [g(v) for v in x]", ["assert apply(lambda v: v + 1, [1, 2]) == [2, 3]"]),
    ("def each(g, x):\n  for v in x: g(v)", ["seen = []", "each(seen.append, [1, 2])", "assert seen == [1, 2]"]),
    (
        "def f(x):\n  if x < 0: raise ValueError('negative')\n  return x",
        ["try:\n  f(-1)\n  assert False\nexcept ValueError as e:\n  assert 'negative' in str(e)"],
    ),
    ("def has(x, t):\n  return t in x", ["def check(g):\n  assert g([1], 1)\n  assert not g([1], 2)\ncheck(has)"]),
    ("def f(x): return x[::-1]", ["assert all(f(f(s)) == s for s in ('ab', 'c'))", "assert set(f([4, 5])) == {4, 5}"]),
    ("def prime(n): return n > 1 and all(n % k for k in range(2, n))", ["assert prime(7)", "assert prime(8) == False"]),
    (
        "import dataclasses\nLIMIT = 7\n@dataclasses.dataclass\nclass P:\n  x: int",
        ["assert LIMIT == 7", "assert P(3).x == 3"],
    ),
    (
        "from concurrent.futures import ThreadPoolExecutor as T\ndef f(x):\n"
        "  with T(4) as p: return list(p.map(abs, x))",
        ["assert f([-1, 2]) == [1, 2]"],
    ),
    ("import asyncio\nasync def g(x): return x\ndef f(x): return asyncio.run(g(x))", ["assert f(3) == 3"]),
    ("import tempfile\ndef f(x):\n  with tempfile.TemporaryFile() as t: return t.write(x)", ["assert f(b'abc') == 3"]),
    ("print(int(input()) + int(input()))", [("1\n2\n", "3\n"), ("5\n5", "10")]),
    ("import sys\nfor line in sys.stdin: print(line.upper(), end='')\nexit()", [("ä\nb\n", "Ä  \nB\n\n")]),
    ("def main():\n  print(2)\nif __name__ == '__main__':\n  main()", [("", "2")]),
    ("import threading\nthreading.Thread(target=lambda: print(input())).start()", [("x", "x")]),
    ("import atexit\natexit.register(print, 'late')\nprint('early')", [("", "early\nlate")]),
    ("print('x' * 5000000)", [("", "x" * 5000000)]),
]


def test_honest_programs():
    scores, failed = fc.rewards.code_failures(*map(list, zip(*RIGHT, strict=True)))
    assert [(RIGHT[i][0], why) for i, why in enumerate(failed) if why] == []
    assert scores == [1.0] * len(RIGHT)


def test_fraction_and_failures():
    tests = ["assert f(1) == 1", "bound = 5", "assert f(2) == 4", "assert f(3) < bound", "assert g(1)"]
    completions = ["def f(x): return x"] * 2 + ["def f(x): return 1 / 0", "oh no"]
    scores, failed = fc.rewards.code_failures(completions, [tests] * 4, mode="fraction")
    assert scores == [0.5, 0.5, 0.0, 0.0] and failed[0] == failed[1]
    assert failed[0] == [
        ("assert f(2) == 4", "f(2) gave 2"),
        ("assert g(1)", "NameError: name 'g' is not defined"),
    ]
    assert failed[2][0].reason == "f(1) raised ZeroDivisionError: division by zero"
    assert failed[3][0].reason.startswith("the program did not load: SyntaxError: invalid syntax")
    assert fc.rewards.code(completions, [tests] * 4) == [0.0] * 4


def test_pairs_say_what_differs():
    tests = [("3", "6"), ("4", "8"), ("x", "0"), ("5", "10\n11")]
    code = "x = int(input())\nprint(2 * x if x < 4 else 0)"
    scores, failed = fc.rewards.code_failures([code], [tests], mode="fraction")
    assert scores == [0.25]
    assert [reason for _, reason in failed[0]] == [
        "stdout line 1: got '0', need '8'",
        "exit status 1: ValueError: invalid literal for int() with base 10: 'x'",
        "stdout line 1: got '0', need '10'",
    ]


def test_time_out_keeps_the_verdicts_before_it():
    tests = ["assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3"]
    code = "def f(x):\n  while x == 2: pass\n  return x"
    scores, failed = fc.rewards.code_failures([code], [tests], timeout=0.5, mode="fraction")
    assert scores == [pytest.approx(1 / 3)]
    assert failed == [[(test, "no answer within 0.5 s") for test in tests[1:]]]


def test_memory_is_an_argument():
    code = ["def f(): return len(bytearray(200 << 20))"]
    assert fc.rewards.code(code, [["assert f() == 200 << 20"]]) == [1.0]
    assert fc.rewards.code(code, [["assert f() == 200 << 20"]], memory="128MiB") == [0.0]


def test_same_program_same_score():
    """Hash seeds are fixed, so a set prints in one order."""
    code = "def f(): return list({'a', 'b', 'c', 'd', 'e', 'f', 'g'})"
    _, failed = fc.rewards.code_failures([code] * 4, [["assert f() == 0"]] * 4)
    assert len({row[0].reason for row in failed}) == 1


BAD = [
    ({"tests": []}, r"number of tests: got 0, need 1, one list per completion"),
    ({"tests": [[]]}, r"tests\[0\]: got \[\], need a list of at least one assert"),
    ({"tests": ["assert f(2)"]}, r"tests\[0\]: got 'assert f\(2\)', need a list of at least one assert"),
    ({"tests": [["assert f("]]}, r"tests: got 'assert f\(', need Python"),
    ({"tests": [["def test(): assert f(2) == 4"]]}, "at least one assert statement outside a definition"),
    ({"tests": [["import numpy as np\nassert f(2) == np.pi"]]}, "imports of the standard library alone"),
    ({"tests": [["assert np.allclose(f(2), 4)"]]}, "'np.allclose' imported or defined in the tests"),
    ({"tests": [["assert np.abs(f(2) - 4) < 1"]]}, "'np.abs' imported or defined in the tests"),
    ({"tests": [["x = f(2)", "assert np.allclose(x, 4)"]]}, "'np.allclose' imported or defined"),
    ({"tests": [["assert close(f(2), 4)"]]}, "'close' imported or defined in the tests"),
    ({"tests": [["assert close(f(2), 4) == True"]]}, "'close' imported or defined in the tests"),
    ({"tests": [[("1", "2"), "x"]]}, r"tests\[0\]\[1\]: got 'x', need a \(stdin, stdout\) pair"),
    ({"tests": [[(1, 2)]]}, r"tests\[0\]\[0\]: got \(1, 2\), need"),
    ({"timeout": 0}, r"timeout: got 0, need seconds > 0"),
    ({"timeout": float("nan")}, r"timeout: got nan, need"),
    ({"memory": "lots"}, r"memory: got 'lots', need a positive size"),
    ({"memory": "1MiB"}, r"memory: got '1MiB', need at least 64MiB"),
    ({"mode": "some"}, r"mode: got 'some', need all or fraction"),
    ({"completions": [None]}, r"completions\[0\]: got 'NoneType', need a string"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_input(change, message):
    good = {"completions": ["def f(x): return 4"], "tests": [["assert f(2) == 4"]]}
    with pytest.raises(ValueError, match=message):
        fc.rewards.code(**{**good, **change})


def test_as_a_reward_function():
    functions = fc.rewards.RewardFunctions([fc.rewards.code])
    scores = functions(["p", "q"], ["def f(x): return 4", "x"], {"tests": [["assert f(2) == 4"]] * 2})
    assert scores.rewards.tolist() == [1.0, 0.0]
    assert fc.rewards.code([], []) == []


def test_refuses_without_a_sandbox(monkeypatch):
    """What is missing, what to install, which argument overrides."""
    monkeypatch.setattr(sandbox, "kind", sandbox.kind.__wrapped__)
    monkeypatch.setattr(sandbox, "KINDS", ("bwrap", "forbidden"))
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    monkeypatch.setattr(sandbox, "_command", lambda *args: ["sh", "-c", "echo unshare: not permitted >&2"])
    with pytest.raises(RuntimeError, match=r"bwrap is not installed; forbidden: unshare: not permitted.*sandbox=False"):
        fc.rewards.code([HONEST[0]], [HONEST[1]])


@pytest.mark.parametrize("how", ["bwrap", "namespaces", "landlock", "limits"])
def test_every_kind(how, monkeypatch, tmp_path):
    """Forgeries fail in each, escapes in each that is a sandbox; Landlock alone does not bound the disk."""
    if how != "limits":
        monkeypatch.setattr(sandbox, "KINDS", (how,))
        try:
            sandbox.kind.__wrapped__()
        except RuntimeError as error:
            pytest.skip(str(error))
        monkeypatch.setattr(sandbox, "kind", lambda: how)
    names = ["__eq__", "exits when called", "prints the verdict", "fork bomb in C", "memory bomb", "leaves a daemon"]
    names += ["kills its parent", "kills all", "traces its parent", "raw socket by number", "endless sleep"]
    names += ["leaves a thread", "searches its memory", "alarms"]
    if how != "limits":
        names += [
            "reads passwd",
            "reads installed packages",
            "reads its parent's environment",
            "writes the library",
            "changes modes",
        ]
    rows = [*((placed(code, tmp_path), tests) for code, tests in map(HOSTILE.get, names)), HONEST]
    scores = fc.rewards.code(*map(list, zip(*rows, strict=True)), timeout=TIMEOUT, sandbox=how != "limits")
    assert scores == [0.0] * len(names) + [1.0]
    assert not left_over()


@pytest.mark.slow
def test_two_hundred_programs():
    """20 a second on two cores: 0.1 s of CPU each."""
    completions = [f"def f(x): return x * x + {i}" for i in range(200)]
    tests = [[f"assert f({i}) == {i * i + i}", f"assert f(0) == {i}"] for i in range(200)]
    before = os.times()
    assert fc.rewards.code(completions, tests) == [1.0] * 200
    assert sum(os.times()[:4]) - sum(before[:4]) < 200 * 0.1
