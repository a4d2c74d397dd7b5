"""Training data: rows with a ``prompt``, and the resumable schedule that says which rows a step takes."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fastcollab.config import require

Row = dict[str, Any]


def load_dataset(source: Any, name: str = "train_dataset") -> list[Row]:
    """Rows as dicts, every column kept, from a list of dicts, a JSONL path, a datasets.Dataset or an iterable.

    ``prompt`` is a non-empty string, a list of chat messages (dicts with ``role`` and ``content``) or a list of token
    ids. Other columns reach the reward functions by name. An iterable is read to its end.
    Raises: FileNotFoundError; ValueError with the row's index (the line for JSONL) for an empty source, a row that is
    not a dict, a missing ``prompt`` (columns found and the nearest match) or a prompt of another form. ``name``
    begins the message.
    """
    if isinstance(source, (str, Path)):
        rows = list(_read_jsonl(Path(source), name))
    else:
        is_rows = isinstance(source, Iterable) and not isinstance(source, Mapping)
        got = type(source).__name__ + (f" with keys {list(source)[:8]}" if isinstance(source, Mapping) else "")
        require(is_rows, name, got, "a list of dicts, a JSONL path, one split of a datasets.Dataset, or an iterable")
        rows = [_to_dict(row, f"{name} row {i}") for i, row in enumerate(source)]
    require(len(rows) > 0, f"number of rows in {name}", 0, ">= 1")
    for i, row in enumerate(rows):
        _check_prompt(row, f"{name} row {i}")
        uid = row.get("uid", 0)
        require(isinstance(uid, (int, str)), f"{name} row {i}, 'uid'", uid, "an int or a string, in every row")
    names = dict.fromkeys(key for row in rows for key in row)
    require(
        "uid" not in names or all("uid" in row for row in rows), f"{name} column 'uid'", "only some rows", "all rows"
    )
    return [{key: row.get(key) for key in names} for row in rows]


class Cursor:
    """Which rows each step takes: a permutation of range(n) per epoch, drawn from (seed, epoch), read in batches.

    Every batch is full: it runs over an epoch's end into the next one, no row is dropped, and each index comes with
    its epoch so that a row met twice in one batch stays two rows. With ``once`` no row is: what is left of an epoch and
    makes no batch is dropped. The state is one number, so a resumed schedule is the rest of the uninterrupted one, with
    another ``prompts_per_step`` too.
    """

    def __init__(self, n: int, prompts_per_step: int, seed: int = 0, shuffle: bool = True, once: bool = False) -> None:
        require(n >= 1, "n", n, ">= 1 rows")
        most = n if once else math.inf
        need = f"1 to {n}, the number of questions" if once else ">= 1"
        require(1 <= prompts_per_step <= most, "prompts_per_step", prompts_per_step, need)
        self.once = once
        self.n, self.prompts_per_step, self.seed, self.shuffle = n, prompts_per_step, seed, shuffle
        self.position = 0  # rows handed out since the start
        self._cached: tuple[int, list[int]] = (-1, [])

    def next_batch(self) -> list[tuple[int, int]]:
        """(row index, epoch) of the next ``prompts_per_step`` rows."""
        batch = []
        if self.once and self.position % self.n + self.prompts_per_step > self.n:
            self.position += self.n - self.position % self.n
        for position in range(self.position, self.position + self.prompts_per_step):
            epoch, i = divmod(position, self.n)
            batch.append((self.order(epoch)[i], epoch))
        self.position += self.prompts_per_step
        return batch

    def order(self, epoch: int) -> list[int]:
        """The epoch's permutation of range(n)."""
        if self._cached[0] != epoch:
            order = list(range(self.n))
            if self.shuffle:
                # sorted by random() keys: the one stream whose values Python keeps across versions
                draw = random.Random(f"{self.seed}:{epoch}").random
                keys = [draw() for _ in order]
                order.sort(key=keys.__getitem__)
            self._cached = (epoch, order)
        return self._cached[1]

    def num_steps(self, num_epochs: float) -> int:
        """Steps that cover ``num_epochs`` epochs, the last one rounded up (with ``once`` down, to one at least)."""
        if self.once:
            return max(1, math.floor(self.n // self.prompts_per_step * num_epochs))
        return math.ceil(self.n * num_epochs / self.prompts_per_step)

    def state_dict(self) -> dict[str, int | bool]:
        """JSON-ready state."""
        return {"n": self.n, "seed": self.seed, "shuffle": self.shuffle, "position": self.position}

    def load_state_dict(self, state: Mapping[str, int | bool]) -> None:
        """Continue from ``state``. Raises ValueError where it belongs to other data or another order."""
        mine = self.state_dict()
        require(set(state) == set(mine), "data state", sorted(state), f"keys {sorted(mine)}")
        for key in ("n", "seed", "shuffle"):
            require(state[key] == mine[key], f"data state {key!r}", state[key], f"{mine[key]!r}, as this run has")
        require(state["position"] >= 0, "data state 'position'", state["position"], ">= 0")
        self.position = int(state["position"])


def _read_jsonl(path: Path, name: str) -> Iterator[Row]:
    if not path.is_file():
        raise FileNotFoundError(f"{name}: got {str(path)!r}, need an existing JSONL file")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{name} {path}:{number}: got {error}, need one JSON object a line") from error
            yield _to_dict(row, f"{name} {path}:{number}")


def _to_dict(row: Any, where: str) -> Row:
    require(isinstance(row, Mapping), where, type(row).__name__, "a dict with a 'prompt'")
    return dict(row)


def _check_prompt(row: Row, where: str) -> None:
    if "prompt" not in row:
        near = get_close_matches("prompt", [str(key) for key in row], n=1, cutoff=0.5)
        hint = f" (nearest: {near[0]!r})" if near else ""
        raise ValueError(f"{where}: got columns {list(row)}, need 'prompt'{hint}")
    prompt = row["prompt"]
    if isinstance(prompt, str):
        ok = bool(prompt)
    else:
        ok = isinstance(prompt, Sequence) and len(prompt) > 0 and (_are_messages(prompt) or _are_ids(prompt))
    require(ok, f"{where}, 'prompt'", prompt, "a non-empty string, messages with 'role' and 'content', or token ids")


def _are_messages(prompt: Sequence[Any]) -> bool:
    return all(isinstance(m, Mapping) and isinstance(m.get("role"), str) and "content" in m for m in prompt)


def _are_ids(prompt: Sequence[Any]) -> bool:
    return all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in prompt)
