"""Figures of reviewed rollouts beside their controls: what a verifier wrote, and whether it helped (mintrl spec 3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from fastcollab.corrections import REASONS
from fastcollab.types import Rollout

WINDOW = 16  # tokens before and behind a correction whose log-probs are compared
IMPROBABLE = -10.0  # nats


def share(part: float, whole: float) -> float | None:
    """part / whole, None where there is nothing to divide by (it becomes null in metrics.jsonl)."""
    return float(part / whole) if whole else None


def mean(values: Sequence[float] | np.ndarray) -> float | None:
    return float(np.mean(values)) if len(values) else None


def review_metrics(rollouts: Sequence[Rollout], verifier_tokens: int | None = None) -> dict[str, float | list | None]:
    """What the verifier did to ``rollouts``, all of them reviewed; ``verifier_tokens`` is what it read and wrote."""
    lengths = np.array([len(r.ids) for r in rollouts])
    external = np.array([sum(len(i.inserted) for i in r.interventions) for r in rollouts])
    made = np.array([len(r.interventions) for r in rollouts])
    reviews = [review.outcome for r in rollouts for review in r.reviews]
    found, asked = Counter(reviews), len(reviews)
    dropped = sum(len(i.dropped) for r in rollouts for i in r.interventions)
    unread = sum(r.unread for r in rollouts)
    followed = [b.outcome == "intervention" for r in rollouts for a, b in zip(r.reviews, r.reviews[1:], strict=False)
                if a.outcome == "intervention"]  # fmt: skip
    row = {
        "external_share_micro": share(external.sum(), lengths.sum()),
        "external_share_macro": mean(external / np.maximum(lengths, 1)),
        "reviews": asked / len(rollouts),
        "revise_rate": share(asked - found["keep"] - found["malformed"], asked),
        "malformed_rate": share(found["malformed"], asked),
        "out_of_range_rate": share(found["out_of_range"], asked),
        "rejected_rate": share(sum(found[reason] for reason in (*REASONS, "cap")), asked),
        "interventions": float(made.mean()),
        "interventions_histogram": np.bincount(made).tolist(),
        "position": mean([i.position / len(r.ids) for r in rollouts for i in r.interventions]),
        "dropped_share": share(dropped, dropped + lengths.sum()),
        "unread_share": share(unread, unread + dropped + lengths.sum()),
        "re_revise_rate": mean(followed),
        "copy_back_rate": mean([_copies_back(r, k) for r in rollouts for k in range(len(r.interventions))]),
        "verifier_tokens_per_token": None if verifier_tokens is None else share(verifier_tokens, lengths.sum()),
    }
    return row | {f"{reason}_rate": share(found[reason], asked) for reason in ("noop", "leak")}


def _copies_back(rollout: Rollout, k: int) -> bool:
    """Whether the writer goes on from a correction with the very ids that were dropped, as many as it wrote."""
    at, dropped, inserted = rollout.interventions[k]
    later = [i.position for i in rollout.interventions[k + 1 :]]
    written = rollout.ids[at + len(inserted) : min(later, default=len(rollout.ids))][: len(dropped)]
    return bool(written) and list(dropped[: len(written)]) == written


def outcome_metrics(
    rollouts: Sequence[Rollout], rewards: np.ndarray, reviewed: Sequence[bool]
) -> dict[str, float | None]:
    """Rewards [N] by arm (control, reviewed); success is a reward >= 1, rows without one count nowhere."""
    scored = [(r, x, x >= 1, arm) for r, x, arm in zip(rollouts, rewards, reviewed, strict=True) if not np.isnan(x)]
    fixed = [right for r, _, right, _ in scored if r.interventions]
    groups: dict[int, tuple[list[bool], list[bool]]] = {}
    for r, _, right, arm in scored:
        groups.setdefault(r.group, ([], []))[arm].append(right)
    both = [(c, s) for c, s in groups.values() if c and s]
    easy = {g for g, (c, _) in groups.items() if c and 2 * sum(c) > len(c)}
    row = {
        "resume_success": mean(fixed),
        "lift": mean([np.mean(s) - np.mean(c) for c, s in both]),
        "rescue_hard": mean([any(s) and not any(c) for c, s in both]),
        "harm": mean([x <= 0 for r, x, _, _ in scored if r.interventions and r.group in easy]),
    }
    for arm, name in enumerate(("control", "reviewed")):
        row[f"{name}/reward"] = mean([x for _, x, _, a in scored if a == arm])
        row[f"{name}/pass_any"] = mean([any(g[arm]) for g in groups.values() if g[arm]])
    return row


def logprob_metrics(
    rollouts: Sequence[Rollout], old: Sequence[np.ndarray], foreign: Sequence[np.ndarray]
) -> dict[str, float | None]:
    """How learnable the corrections are: the policy's own log-probs ``old`` (per rollout fp32 [len(ids)], NaN where not
    computed) on its tokens and on ``foreign`` ones (bool), around each correction, and against the sampler's."""
    alien = np.concatenate([lp[f] for lp, f in zip(old, foreign, strict=True)])
    own = np.concatenate([lp[~f] for lp, f in zip(old, foreign, strict=True)])
    said = np.concatenate([r.logprob[~f] for r, f in zip(rollouts, foreign, strict=True)])
    gaps = np.abs(said - own)
    surprise, before, behind = [], [], []
    for r, lp in zip(rollouts, old, strict=True):
        for at, _, inserted in r.interventions:
            end = at + len(inserted)
            surprise.append(-lp[at:end].sum())
            before.append(lp[max(0, at - WINDOW) : at])
            behind.append(lp[end : end + WINDOW])
    around = {name: mean(_known(parts)) for name, parts in (("before", before), ("behind", behind))}
    return {
        "logprob/own": mean(_known([own])),
        "logprob/external": mean(_known([alien])),
        "logprob/external_improbable": mean(_known([alien]) < IMPROBABLE),
        "logprob/surprise": mean(_known([np.array(surprise)])),
        "logprob/before_correction": around["before"],
        "logprob/behind_correction": around["behind"],
        "logprob/sampler_gap": float(_known([gaps]).max(initial=0.0)),
    }


def _known(parts: Sequence[np.ndarray]) -> np.ndarray:
    whole = np.concatenate(parts) if len(parts) else np.empty(0)
    return whole[~np.isnan(whole)]


def named(row: Mapping[str, float | None], prefix: str = "mintrl/") -> dict[str, float | None]:
    """The figures under the method's name, those that are not defined left out."""
    return {prefix + name: value for name, value in row.items() if value is not None}
