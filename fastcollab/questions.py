"""Questions: the rows of a dataset by uid, with the right answers cut away before anything that trains sees them."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from typing import Any

from fastcollab.config import require

Row = dict[str, Any]


def without_gold(rows: Sequence[Row], column: str) -> tuple[dict[str, Any], list[Row]]:
    """(uid -> right answer where there is one, rows without that column); a row without a uid is named by its place.

    Raises: ValueError for a uid that occurs twice.
    """
    uids = [str(row.get("uid", i)) for i, row in enumerate(rows)]
    kept = [{k: v for k, v in row.items() if k != column} | {"uid": uid} for uid, row in zip(uids, rows, strict=True)]
    twice = sorted({uid for uid in uids if uids.count(uid) > 1}) if len(set(uids)) < len(uids) else []
    require(not twice, "uid", twice[:4], "one per question")
    gold = {uid: row[column] for uid, row in zip(uids, rows, strict=True) if row.get(column) is not None}
    return gold, kept


def without_gaps(rows: Sequence[Row], views: Collection[str], drop: bool) -> list[Row]:
    """The rows that every view (a column) has; a row that lacks one is an error unless ``drop``."""
    for view in sorted(views):
        require(view in rows[0], "views", view, f"a column of the data: {sorted(rows[0])}")
    gaps = [row["uid"] for row in rows if any(row[view] in (None, "", []) for view in views)]
    need = f"a text in each of {sorted(views)} for every question, or drop_missing=True"
    require(drop or not gaps, "views", f"none for {gaps[:4]}{' and more' * (len(gaps) > 4)}", need)
    return _left(rows, set(gaps), "lack a view")


def _left(rows: Sequence[Row], gone: Collection[str], why: str) -> list[Row]:
    """Rows without those named, which is announced; raises ValueError where none is left."""
    if gone:
        warnings.warn(f"{len(gone)} of {len(rows)} questions {why} and are left out", stacklevel=3)
    left = [row for row in rows if row["uid"] not in gone]
    require(len(left) > 0, "questions", f"0 of {len(rows)}: all {why}", ">= 1")
    return left


def readable(rows: Sequence[Row], lengths: Sequence[Sequence[tuple[int, int | None]]]) -> list[Row]:
    """The rows that fit every voter; ``lengths[row]`` holds (tokens of the question, the voter's limit) pairs.

    A question that one voter can't read is left out for all: the schedule is shared (corl spec section 6).
    """
    gone = {
        row["uid"]
        for row, pairs in zip(rows, lengths, strict=True)
        if any(limit is not None and tokens >= limit for tokens, limit in pairs)
    }
    return _left(rows, gone, "are too long for a model")
