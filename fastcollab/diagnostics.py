"""What a step says about its cohort: metrics from ballots, labels and rewards, alarms, a score for checkpoints.

Pure functions; NaN where a value has no meaning (no label, no answer). Source: corl spec section 3. Students are named
as in the ballots, pairs as "a,b" in the order of their names. Whoever needs the right answers is in
:func:`gold_metrics`, which nothing that trains calls.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from fastcollab.ballots import Ballot, tally
from fastcollab.labels import Label

Ballots = Mapping[tuple[str, str], Ballot]  # (voter, uid)
Votes = list["str | None"]  # the plurality answer to each question; None: no answer, or a tie


def cohort_metrics(
    uids: Sequence[str],
    students: Sequence[str],
    ballots: Ballots,
    labels: Mapping[tuple[str, str], Label],
    rewards: Mapping[str, np.ndarray],
) -> dict[str, float]:
    """Metrics of a step by "<student>/<name>", "<name>/<a>,<b>" and "unanimous".

    ``rewards`` [prompts, G] by student, NaN where there is no label. The reward's std is the mean of the groups'
    (ddof 1); ``eff_group`` is the part of the prompts whose rewards differ, the only ones with a gradient.
    """
    row = {}
    votes = {s: _votes(uids, s, ballots) for s in students}
    for s in students:
        own = [ballots[s, uid] for uid in uids]
        counts = [sorted(b.counts.values(), reverse=True) + [0, 0] for b in own]
        V = np.array([max(1, b.num_votes) for b in own])
        m = np.array([b.num_parsed for b in own])
        top, second = (np.array([c[k] for c in counts]) for k in (0, 1))
        labelled = [labels[s, uid].scores is not None for uid in uids]
        r = rewards[s][~np.isnan(rewards[s]).all(1)]  # paid at all: without labels by a scalar
        row |= {
            f"{s}/{name}": float(value)
            for name, value in {
                "parse_rate": m.sum() / V.sum(),
                "majority_ratio": np.mean(top / V),
                "majority_ratio_parsed": _mean((top / np.maximum(1, m))[m > 0]),
                "margin": np.mean((top - second) / V),
                "tie_rate": np.mean((top == second) & (top > 0)),
                "distinct": np.mean([len(b.counts) for b in own]),
                "answer_entropy": _mean([_entropy(_shares(b)) for b in own if b.counts]),
                "label_rate": np.mean(labelled),
                "eff_group": np.sum(np.nanmax(r, 1) > np.nanmin(r, 1)) / len(uids) if len(r) else 0.0,
                "reward": _mean(r[~np.isnan(r)]),
                "reward_std": _mean(np.nanstd(r, 1, ddof=1)) if len(r) and r.shape[1] > 1 else np.nan,
                "constancy": _constancy(votes[s]),
            }.items()
        }
    for a, b in combinations(sorted(students), 2):
        row[f"agree/{a},{b}"], row[f"kappa/{a},{b}"] = _agreement(votes[a], votes[b])
        shares = [(_shares(ballots[a, uid]), _shares(ballots[b, uid])) for uid in uids]
        row[f"jsd/{a},{b}"] = _mean([_jsd(p, q) for p, q in shares if p and q])
        row[f"tv/{a},{b}"] = _mean([_total_variation(p, q) for p, q in shares if p and q])
    for s in students:
        for name in ("agree", "kappa"):
            pairs = [row[key] for key in row if key.startswith(f"{name}/") and s in key.partition("/")[2].split(",")]
            if pairs:
                row[f"{s}/{name}"] = _mean([value for value in pairs if value == value])
    if len(students) > 1:
        together = zip(*votes.values(), strict=True)
        row["unanimous"] = float(np.mean([None not in said and len(set(said)) == 1 for said in together]))
    return row


def gold_metrics(
    uids: Sequence[str],
    students: Sequence[str],
    ballots: Ballots,
    labels: Mapping[tuple[str, str], Label],
    rewards: Mapping[str, np.ndarray],
    gold_keys: Mapping[str, str],
    same: Callable[[str | None, str | None], bool] = operator.eq,
) -> dict[str, float]:
    """What only the right answers tell, by "<student>/<name>" and "<name>/<a>,<b>"; ``gold_keys`` maps a uid to a key.

    ``same``: whether a key is a right answer's.
    ``vote_acc``: the student's own majority is right. ``label_acc``: what its labels would pay the right answer.
    ``reward_acc``: rewards that are on the right side of 1/2. ``false_pos``: mean reward of wrong rollouts,
    ``false_neg``: what right ones miss of 1, ``skew`` the former over both. ``coupling``: correlation of an answer's
    own share with the error of its reward. ``double_fault``: both votes wrong, ``same_wrong``: and equal, ``phi``: the
    correlation of their being right, over the questions on which both voted.
    """
    row, votes = {}, {s: _votes(uids, s, ballots) for s in students}
    gold = [gold_keys.get(uid) for uid in uids]
    known = [k for k, key in enumerate(gold) if key is not None]
    for s in students:
        paid = [_paid(labels[s, uids[k]], gold[k], same) for k in known]
        G = rewards[s].shape[1]
        r = rewards[s][known].ravel()
        said = [(ballots[s, uids[k]], key, gold[k]) for k in known for key in ballots[s, uids[k]].keys[:G]]
        right = np.array([same(key, answer) for _, key, answer in said], dtype=float)
        share = np.array([b.counts.get(key, 0) / b.num_votes for b, key, _ in said])
        scored = ~np.isnan(r)
        r, right, share = r[scored], right[scored], share[scored]
        wrong_paid, right_unpaid = _mean(r[right == 0]), 1 - _mean(r[right == 1])
        faults = np.nan_to_num([wrong_paid, right_unpaid])
        row |= {
            f"{s}/vote_acc": _mean([same(votes[s][k], gold[k]) for k in known]),
            f"{s}/label_acc": _mean([p for p in paid if p is not None]),
            f"{s}/reward_acc": _mean((r > 0.5) == (right > 0.5)),
            f"{s}/false_pos": wrong_paid,
            f"{s}/false_neg": right_unpaid,
            f"{s}/skew": float(faults[0] / faults.sum()) if faults.sum() else np.nan,
            f"{s}/coupling": _correlation(share, r - right),
        }
    for a, b in combinations(sorted(students), 2):
        both = [
            (votes[a][k], votes[b][k], gold[k]) for k in known if votes[a][k] is not None and votes[b][k] is not None
        ]
        row[f"double_fault/{a},{b}"] = _mean([not same(x, g) and not same(y, g) for x, y, g in both])
        row[f"same_wrong/{a},{b}"] = _mean([same(x, y) and not same(x, g) for x, y, g in both])
        row[f"phi/{a},{b}"] = _correlation([same(x, g) for x, _, g in both], [same(y, g) for _, y, g in both])
    return row


def accuracy(
    uids: Sequence[str],
    voter: str,
    ballots: Ballots,
    gold_keys: Mapping[str, str],
    same: Callable[[str | None, str | None], bool] = operator.eq,
) -> dict[str, float]:
    """``accuracy``: a voter's answers that are right; ``majority``: its votes, no vote being wrong."""
    known = [uid for uid in uids if uid in gold_keys]
    votes = _votes(known, voter, ballots)
    return {
        "accuracy": _mean([same(key, gold_keys[uid]) for uid in known for key in ballots[voter, uid].keys]),
        "majority": _mean([same(vote, gold_keys[uid]) for uid, vote in zip(known, votes, strict=True)]),
    }


def selection_score(ballots: Ballots) -> float:
    """A score of a checkpoint without any right answer: the higher, the better.

    The mean over models of (agreement of their votes with each peer's) times (1 - constancy), so that a constant answer
    of all earns nothing, plus the models' agreement with themselves on another wording where there are ballots of
    voters "<model>@<view>". ``ballots``: of every voter on every question of a fixed probe set.
    """
    uids = sorted({uid for _, uid in ballots})
    votes = {voter: _votes(uids, voter, ballots) for voter in sorted({voter for voter, _ in ballots})}
    models = [name for name in votes if "@" not in name]
    views = [(votes[name.partition("@")[0]], votes[name]) for name in votes if "@" in name]

    def same(a: Votes, b: Votes) -> float:
        return _mean([x is not None and x == y for x, y in zip(a, b, strict=True)])

    peers = [
        _mean([same(votes[name], votes[peer]) for peer in models if peer != name]) * (1 - _constancy(votes[name]))
        for name in models
    ]
    return float(np.nan_to_num(_mean(peers)) + (_mean([same(*pair) for pair in views]) if views else 0.0))


# -- alarms. All thresholds are starting points (corl spec 3), none is from a paper.

SMOOTH = 5  # looks over which a value is averaged; the start is the mean of the first of them
PATIENCE = 20  # looks that a lack of signal must last
CONSTANCY = 0.3  # of one answer, or four times the start where that is more; never above 0.9
LEAST_SIGNAL = 0.1  # eff_group
DRIFT = 0.1  # majority_ratio up and kappa down by this much
ENTROPY_LEFT, LENGTH_LEFT = 0.2, 0.3  # of the start
DUPLICATES, TRUNCATED = 0.3, 0.5


class Alarms:
    """Watches the metrics of each model for collapse; a model whose alarm is raised stays paused.

    Reads "<name>/" constancy, eff_group, majority_ratio, answer_entropy, dup, completions/mean_length and
    completions/clipped_ratio, "kappa/…" of its pairs and "agree/…" of its own views; what a row lacks is not watched.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.raised: dict[str, str] = {}
        self._seen: dict[str, dict[str, list[float]]] = {name: {} for name in names}  # the first and the last values

    def look(self, row: Mapping[str, Any]) -> dict[str, str]:
        """Take in a step's metrics; the models whose alarm this raises, with the reason."""
        found = {}
        for name, seen in self._seen.items():
            for signal, values in _signals(name, row).items():
                if values:
                    kept = seen.setdefault(signal, [])
                    kept.append(float(np.mean(values)))
                    del kept[SMOOTH:-PATIENCE]
            if name not in self.raised and (reason := _reason(seen)):
                found[name] = reason
        self.raised |= found
        return found

    def paused(self, name: str) -> bool:
        return name in self.raised

    def state_dict(self) -> dict[str, Any]:
        seen = {name: {signal: list(v) for signal, v in values.items()} for name, values in self._seen.items()}
        return {"raised": dict(self.raised), "seen": seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.raised = dict(state["raised"])
        self._seen = {name: {k: list(v) for k, v in values.items()} for name, values in state["seen"].items()}


def _signals(name: str, row: Mapping[str, Any]) -> dict[str, list[float]]:
    """The finite values of each signal of a model; several for kappa."""
    own = ("constancy", "eff_group", "majority_ratio", "answer_entropy", "dup")
    keys = {signal: [f"{name}/{signal}"] for signal in own}
    keys |= {"length": [f"{name}/completions/mean_length"], "truncated": [f"{name}/completions/clipped_ratio"]}
    keys["kappa"] = [k for k in row if k.startswith("kappa/") and name in k[6:].split(",")]
    keys["own_views"] = [k for k in row if k.startswith(f"agree/{name},{name}@")]
    return {
        signal: [row[k] for k in found if row.get(k) is not None and np.isfinite(row[k])]
        for signal, found in keys.items()
    }


def _reason(seen: Mapping[str, list[float]]) -> str | None:
    now = {k: float(np.mean(v[-SMOOTH:])) for k, v in seen.items() if len(v) > SMOOTH}
    start = {k: float(np.mean(seen[k][:SMOOTH])) for k in now}
    limit = min(0.9, max(CONSTANCY, 4 * start.get("constancy", 0.0)))
    if now.get("constancy", 0.0) > limit:
        return f"constancy {now['constancy']:.2f} > {limit:.2f}: one answer to many questions"
    signal = seen.get("eff_group", [])
    if len(signal) >= PATIENCE and max(signal[-PATIENCE:]) < LEAST_SIGNAL:
        return f"eff_group < {LEAST_SIGNAL} for {PATIENCE} steps: hardly a prompt has a gradient"
    if {"majority_ratio", "kappa"} <= set(now):
        rise, fall = now["majority_ratio"] - start["majority_ratio"], start["kappa"] - now["kappa"]
        if rise > DRIFT and fall > DRIFT:
            return f"majority_ratio rose by {rise:.2f} while kappa fell by {fall:.2f}: sure of what others deny"
    if {"answer_entropy", "own_views"} <= set(now):
        left = now["answer_entropy"] / start["answer_entropy"] if start["answer_entropy"] else 1.0
        if left < ENTROPY_LEFT and now["own_views"] < start["own_views"]:
            return f"answer_entropy at {left:.0%} of its start while its views agree less"
    if start.get("length") and now["length"] < LENGTH_LEFT * start["length"]:
        return f"mean length {now['length']:.0f} tokens, < {LENGTH_LEFT:.0%} of its start"
    for signal, most in (("dup", DUPLICATES), ("truncated", TRUNCATED)):
        if now.get(signal, 0.0) > most:
            return f"{signal} {now[signal]:.2f} > {most}"
    return None


# -- parts


def _votes(uids: Sequence[str], voter: str, ballots: Ballots) -> Votes:
    return [tally(ballots[voter, uid], min_votes=1).key for uid in uids]


def _paid(label: Label, gold: str, same: Callable[[str | None, str | None], bool]) -> float | None:
    if label.scores is None:
        return None
    return max((score for key, score in label.scores.items() if same(key, gold)), default=0.0)


def _constancy(votes: Votes) -> float:
    """The part of the questions that the most frequent vote answers."""
    said = Counter(v for v in votes if v is not None)
    return max(said.values(), default=0) / max(1, len(votes))


def _agreement(a: Votes, b: Votes) -> tuple[float, float]:
    """(share of equal votes where both voted, kappa: what of it goes beyond chance, 0 where chance explains all)."""
    both = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    if not both:
        return np.nan, np.nan
    agree = _mean([x == y for x, y in both])
    first, second = (Counter(side) for side in zip(*both, strict=True))
    chance = sum(n * second[key] for key, n in first.items()) / len(both) ** 2
    return agree, (agree - chance) / (1 - chance) if chance < 1 else 0.0


def _shares(ballot: Ballot) -> dict[str, float]:
    return {key: n / ballot.num_parsed for key, n in ballot.counts.items()}


def _entropy(p: Mapping[str, float]) -> float:
    return -sum(x * np.log(x) for x in p.values())


def _jsd(p: Mapping[str, float], q: Mapping[str, float]) -> float:
    middle = {key: (p.get(key, 0.0) + q.get(key, 0.0)) / 2 for key in sorted({*p, *q})}
    return (_entropy(middle) - (_entropy(p) + _entropy(q)) / 2) / np.log(2)


def _total_variation(p: Mapping[str, float], q: Mapping[str, float]) -> float:
    return sum(abs(p.get(key, 0.0) - q.get(key, 0.0)) for key in sorted({*p, *q})) / 2


def _correlation(a: Sequence[float], b: Sequence[float]) -> float:
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    if len(a) < 2 or not a.std() or not b.std():
        return np.nan
    return float(((a - a.mean()) * (b - b.mean())).mean() / (a.std() * b.std()))


def _mean(values: Any) -> float:
    values = np.asarray(values, dtype=float)
    return float(values.mean()) if values.size else np.nan
