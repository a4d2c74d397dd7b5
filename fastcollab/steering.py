"""Steering: keeps the share of tokens that a verifier writes in its band, by two knobs (mintrl spec 3.2, 6.15)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastcollab.config import require

PATIENCE = 4  # batches that a share is measured over before a knob is turned
LEAST = 8  # tokens of a correction that still says something


class Steering:
    """``reviews`` (R) and ``tokens`` (H) are at first, and at most, what the settings say.

    Over the last PATIENCE batches the share is pooled; outside ``band`` H is scaled towards the band's middle, and
    where H has reached a bound (LEAST or its setting) R moves by one; H goes below LEAST only with one review left. No
    single rollout is cut to force the share.
    """

    def __init__(self, reviews: int, tokens: int, band: Sequence[float] | None) -> None:
        require(tokens >= 1, "tokens", tokens, ">= 1")
        self.band, self.most = band, (reviews, tokens)
        self.reviews, self.tokens = reviews, tokens
        self.external = self.written = self.batches = 0

    def update(self, external: int, written: int) -> None:
        """Take in a batch of reviewed rollouts: ``external`` of its ``written`` tokens were the verifier's."""
        self.external, self.written, self.batches = self.external + external, self.written + written, self.batches + 1
        if self.band is None or self.batches < PATIENCE or not self.written:
            return
        share, (low, high) = self.external / self.written, self.band
        self.external = self.written = self.batches = 0
        if low <= share <= high:
            return
        middle, tokens = (low + high) / 2, self.tokens
        wanted = self.most[1] if not share else round(self.tokens * min(2.0, max(0.5, middle / share)))
        self.tokens = min(self.most[1], max(LEAST if self.reviews > 1 else 1, wanted))
        if self.tokens == tokens:
            self.reviews = min(self.most[0], max(1, self.reviews + (1 if share < low else -1)))

    def state_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("reviews", "tokens", "external", "written", "batches")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self.state_dict():
            setattr(self, name, int(state[name]))
        self.reviews, self.tokens = min(self.reviews, self.most[0]), min(self.tokens, self.most[1])  # new settings
