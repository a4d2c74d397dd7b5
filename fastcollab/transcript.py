"""The transcript: a rollout as its readers see it, runs of text by author, and what interventions took away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

from fastcollab.config import require
from fastcollab.tokens import decode
from fastcollab.types import Rollout

KINDS = ("", "dropped", "inserted")


class Piece(NamedTuple):
    """A run of text. JSON has it as a list, from two entries on."""

    text: str
    writer: str  # anything for dropped text: shown is that it was dropped
    kind: str = ""  # "dropped": no part of the response; "inserted": what an intervention put in its place
    tokens: int = 1


def piece(token: Sequence[Any]) -> Piece:
    """A Piece from (text, writer), (text, writer, kind) or (text, writer, kind, tokens)."""
    right = 2 <= len(token) <= 4 and (len(token) == 2 or token[2] in KINDS)
    require(right, "token", token, f"(text, writer), then optionally a kind of {KINDS} and a number of tokens")
    return Piece(*token)


def transcript(rollout: Rollout, tokenizer: Any) -> list[Piece]:
    """The response by author, special tokens included; dropped text stands before what was inserted for it.

    Without a tokenizer, ids stand for text.
    """
    alone = cache(lambda i: decode(tokenizer, [i], False))

    def said(ids: Sequence[int], before: Sequence[int]) -> str:
        """What ``ids`` write after ``before``: decoders drop the space before a first word."""
        if tokenizer is None:
            return "".join(f" {i}" for i in ids)
        last = list(before[-1:])
        head, text = "".join(map(alone, last)), decode(tokenizer, [*last, *ids], False)
        return text[len(head) :] if text.startswith(head) else decode(tokenizer, ids, False)

    ids, author, past = rollout.ids, rollout.author, len(rollout.prompt_ids)
    everything, cuts = [*rollout.prompt_ids, *ids], {i.position: i for i in rollout.interventions}
    edges = {0, *cuts, *(i.position + len(i.inserted) for i in cuts.values()), len(ids)}
    edges |= {t for t in range(1, len(ids)) if author[t] != author[t - 1]}
    found = []
    for a, b in pairwise(sorted(edges)):
        before = everything[max(0, past + a - 1) : past + a]
        if a in cuts:
            dropped = cuts[a].dropped
            found.append(Piece(said(dropped, before), "", "dropped", len(dropped)))
        found.append(Piece(said(ids[a:b], before), rollout.writers[author[a]], "inserted" if a in cuts else "", b - a))
    return found


def entry(rollout: Rollout, tokenizer: Any) -> dict[str, Any]:
    """The transcript as a row of completions.jsonl has it; ``interventions`` and ``reviews`` only where there are some.

    ``authors``: [writer, text, number of tokens] of each run; ``interventions``: position in the response, the text
    dropped there, how many tokens it had, and the text inserted; ``reviews``: [position, outcome].
    """
    found = transcript(rollout, tokenizer)
    row: dict[str, Any] = {"authors": [[p.writer, p.text, p.tokens] for p in found if p.kind != "dropped"]}
    dropped, inserted = ([p for p in found if p.kind == kind] for kind in ("dropped", "inserted"))
    if dropped:
        row["interventions"] = [
            {"position": i.position, "dropped": d.text, "dropped_tokens": d.tokens, "inserted": p.text}
            for i, d, p in zip(rollout.interventions, dropped, inserted, strict=True)
        ]
    if rollout.reviews:
        row["reviews"] = [list(review) for review in rollout.reviews]
    return row


def pieces(row: Mapping[str, Any]) -> list[Piece]:
    """The transcript that ``entry`` stored."""
    cuts = {i["position"]: i for i in row.get("interventions", ())}
    found, at = [], 0
    for writer, text, tokens in row["authors"]:
        if cut := cuts.get(at):
            found.append(Piece(cut["dropped"], "", "dropped", cut["dropped_tokens"]))
        found.append(Piece(text, writer, "inserted" if cut else "", tokens))
        at += tokens
    return found
