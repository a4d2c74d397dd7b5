"""Datasets and the resumable schedule."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fastcollab.data import Cursor, load_dataset

ROOT = Path(__file__).parent.parent
CASES = {c["id"]: c for c in json.loads((Path(__file__).parent / "cases.json").read_text())}
ROWS = [
    {"prompt": "a", "answer": 1},
    {"prompt": [{"role": "user", "content": "b"}], "answer": 2},
    {"prompt": [5, 6], "extra": 3},
]


class FakeDataset:
    """What datasets.Dataset offers: rows by iteration."""

    column_names = ["prompt", "answer", "extra"]

    def __len__(self):
        return len(ROWS)

    def __iter__(self):
        return iter(ROWS)


def test_sources(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in ROWS) + "\n\n")
    for source in (ROWS, tuple(ROWS), (r for r in ROWS), FakeDataset(), path, str(path)):
        rows = load_dataset(source)  # a column that a row lacks is None there, never dropped
        assert [r["prompt"] for r in rows] == [r["prompt"] for r in ROWS]
        assert [r["answer"] for r in rows] == [1, 2, None] and [r["extra"] for r in rows] == [None, None, 3]
    assert load_dataset(ROWS)[0] is not ROWS[0]


def test_uids_are_whole():
    with pytest.raises(ValueError, match="column 'uid': got 'only some rows', need all rows"):
        load_dataset([{"prompt": "a", "uid": 1}, {"prompt": "b"}])
    with pytest.raises(ValueError, match="row 0, 'uid': got 1.5, need an int or a string"):
        load_dataset([{"prompt": "a", "uid": 1.5}])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "number of rows in train_dataset: got 0, need >= 1"),
        (3, "train_dataset: got 'int', need a list of dicts"),
        ({"train": [], "test": []}, r"train_dataset: got \"dict with keys \['train', 'test'\]\", need .*one split"),
        (["a"], "train_dataset row 0: got 'str', need a dict with a 'prompt'"),
        (
            [ROWS[0], {"promt": "x", "answer": 1}],
            r"row 1: got columns \['promt', 'answer'\], need 'prompt' \(nearest: 'promt'\)",
        ),
        ([{"question": "x"}], r"row 0: got columns \['question'\], need 'prompt'$"),
        ([ROWS[0], {"prompt": ""}], "row 1, 'prompt': got '', need a non-empty string"),
        ([{"prompt": None}], "row 0, 'prompt': got None"),
        ([{"prompt": []}], r"row 0, 'prompt': got \[\]"),
        ([{"prompt": [{"role": "user"}]}], "row 0, 'prompt': got .*messages with 'role' and 'content'"),
        ([{"prompt": [1.5]}], r"row 0, 'prompt': got \[1.5\]"),
    ],
)
def test_bad_sources(source, message):
    with pytest.raises(ValueError, match=message):
        load_dataset(source)


def test_bad_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="eval_dataset: got 'nowhere.jsonl', need an existing JSONL file"):
        load_dataset("nowhere.jsonl", "eval_dataset")
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": \n')
    with pytest.raises(ValueError, match=r"rows.jsonl:3: got Expecting value.*need one JSON object a line"):
        load_dataset(path)
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match="rows.jsonl:1: got 'list', need a dict"):
        load_dataset(path)


def test_epochs_are_permutations_and_batches_are_full():
    cursor = Cursor(7, 3, seed=1)
    drawn = [x for _ in range(14) for x in cursor.next_batch()]
    assert len(drawn) == 42
    for epoch in range(6):
        order = [i for i, e in drawn if e == epoch]
        assert sorted(order) == list(range(7)) and order == cursor.order(epoch)
    assert len({tuple(cursor.order(e)) for e in range(20)}) == 20
    assert cursor.order(0) != Cursor(7, 3, seed=2).order(0)
    assert cursor.order(0) == [5, 2, 1, 6, 3, 0, 4]  # part of the format: a resume on another machine needs it
    assert Cursor(3, 2, shuffle=False).next_batch() == [(0, 0), (1, 0)]


def test_small_dataset_and_step_count():
    cursor = Cursor(2, 5, shuffle=False)
    assert cursor.next_batch() == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]
    assert Cursor(7, 2).num_steps(1) == 4 and Cursor(7, 2).num_steps(2) == 7 and Cursor(8, 2).num_steps(0.5) == 2


def test_another_batch_size_continues_the_same_sequence():
    whole = [x for cursor in [Cursor(7, 2, 5)] for _ in range(12) for x in cursor.next_batch()]
    first, rest = Cursor(7, 2, 5), Cursor(7, 3, 5)
    drawn = first.next_batch() + first.next_batch()
    rest.load_state_dict(first.state_dict())
    assert drawn + [x for _ in range(6) for x in rest.next_batch()] == whole[:22]


@pytest.mark.parametrize("change", [{"n": 8}, {"seed": 1}, {"shuffle": False}, {"position": -1}])
def test_foreign_state_is_refused(change):
    cursor = Cursor(7, 2)
    with pytest.raises(ValueError, match=f"data state '{next(iter(change))}': got"):
        cursor.load_state_dict(cursor.state_dict() | change)
    with pytest.raises(ValueError, match="data state: got"):
        cursor.load_state_dict({"position": 3})


def test_c50_resumed_order_is_the_rest_of_the_uninterrupted_one():
    case = CASES["C50"]["input"]
    n, size, seed = case["n"], case["batch"], 2024
    steps = -(-3 * n // size)
    cursor = Cursor(n, size, seed)
    whole = [[list(x) for x in cursor.next_batch()] for _ in range(steps)]
    for epoch in range(3):
        assert sorted(i for batch in whole for i, e in batch if e == epoch) == list(range(n))
    first, second = ([i for batch in whole for i, e in batch if e == k] for k in (0, 1))
    assert first != second  # a later epoch does not repeat the first order
    states = []
    for stop in case["stop_after_batches"]:
        cursor = Cursor(n, size, seed)
        for _ in range(stop):
            cursor.next_batch()
        states.append(cursor.state_dict())
    program = (
        "import json, sys; from fastcollab.data import Cursor\n"
        "for state in json.loads(sys.argv[1]):\n"
        f"    cursor = Cursor({n}, {size}, {seed}); cursor.load_state_dict(state)\n"
        f"    print(json.dumps([cursor.next_batch() for _ in range({steps} - state['position'] // {size})]))\n"
    )
    command = [sys.executable, "-c", program, json.dumps(states)]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for stop, line in zip(case["stop_after_batches"], lines, strict=True):
        assert json.loads(line) == whole[stop:]
