"""Confidence: rewards without any answer, from how sure a model is of a text (corl spec 2.7, V9 and V10).

``self_certainty`` (Intuitor, arXiv 2505.19590) and ``entropy`` (RENT, 2505.22660) are a model's own and serve as
baselines; ``peer_likelihood`` (CME, 2605.29009) is what the peers think of the text, each in its own tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastcollab import ops
from fastcollab.config import TrainConfig, require
from fastcollab.labels import Ballots, Label
from fastcollab.model import Head
from fastcollab.packing import Item, micro_batches
from fastcollab.scoring import head_inputs, rollout_logprobs
from fastcollab.tokens import decode, encode_prompt
from fastcollab.types import Rollout
from fastcollab.voters import Voter

KINDS = ("self_certainty", "entropy", "peer_likelihood")
FLOOR = math.log(1e-10)  # of a token's log-prob under a peer
ROWS = 256  # whose capped logits are held at once


@dataclass(frozen=True)
class Confidence:
    """In a label provider's place, but there are no labels: ``rewards`` pays each rollout."""

    kind: str

    def __post_init__(self) -> None:
        require(self.kind in KINDS, "labels", self.kind, " or ".join(KINDS))

    def voters(self, students: Sequence[str]) -> list[str]:
        least = 2 if self.kind == "peer_likelihood" else 1
        require(len(students) >= least, f"models of {self.kind!r}", len(students), f">= {least}")
        return sorted(students)

    def __call__(
        self, step: int, uids: Sequence[str], students: Sequence[str], ballots: Ballots
    ) -> dict[tuple[str, str], Label]:
        return {(student, uid): Label(None) for student in students for uid in uids}

    def rewards(
        self, student: str, voters: Mapping[str, Voter], rows: Sequence[Mapping[str, Any]], args: TrainConfig
    ) -> np.ndarray:
        """fp64 [len(voters[student].rollouts)]; ``rows[r.group]`` is the question of rollout r."""
        own = voters[student]
        if self.kind == "peer_likelihood":
            peers = [voter for name, voter in voters.items() if name != student]
            scores = np.array([peer_likelihood(peer, own, rows, args) for peer in peers])
            return np.where(np.isnan(scores).any(0), np.nan, scores.sum(0) / len(peers))
        certainty, entropy = own_confidence(own, args)
        return certainty if self.kind == "self_certainty" else -entropy


@torch.no_grad()
def own_confidence(voter: Voter, args: TrainConfig) -> tuple[np.ndarray, np.ndarray]:
    """(self-certainty, entropy) of a voter's rollouts, fp64 [N], nats, means over each one's tokens.

    Self-certainty is KL(uniform || p) = logsumexp(z) - mean(z) - log V. The mean logit is linear in the hidden state
    and logsumexp(z) = z[target] - logprob, so neither quantity needs logits [N, V].
    """
    model, vocab_size, temperature = voter.model, voter.engine.vocab_size, args.temperature
    certainty, entropy = np.full((2, len(voter.rollouts)), np.nan)
    every = [Item(r, np.ones(len(r.ids), bool), float(i), r.logprob) for i, r in enumerate(voter.rollouts)]
    for batch in micro_batches(every, args.micro_batch_tokens, model.device):
        h, head = head_inputs(model, batch, vocab_size)
        settings = (temperature, head.softcap)
        logprob, spread = ops.linear_logprob(h, head.weight, head.bias, batch.target, *settings, True)
        target, mean = _target_and_mean_logit(h.float(), head, batch.target)
        sure = (target - mean) / temperature - logprob - math.log(vocab_size)
        owner = batch.segment_ids.cpu().numpy()
        for s, item in enumerate(batch.items):
            i = int(item.advantage)  # its place
            certainty[i], entropy[i] = (x.double().cpu().numpy()[owner == s].mean() for x in (sure, spread))
    return certainty, entropy


def _target_and_mean_logit(h: Tensor, head: Head, target: Tensor) -> tuple[Tensor, Tensor]:
    """(z[target], mean over the vocabulary of z), fp32 [N], before the temperature; h fp32 [N, D]."""
    weight, bias, softcap = head
    if softcap is None:
        mean_bias = 0.0 if bias is None else bias.float().mean()
        own = (h * weight[target].float()).sum(-1) + (0.0 if bias is None else bias[target].float())
        return own, h @ weight.mean(0, dtype=torch.float32) + mean_bias
    parts = []
    for rows, ids in zip(h.split(ROWS), target.split(ROWS), strict=True):
        z = torch.nn.functional.linear(rows, weight.float(), None if bias is None else bias.float())
        z = softcap * torch.tanh(z / softcap)
        parts.append((z.gather(1, ids[:, None])[:, 0], z.mean(1)))
    own, mean = (torch.cat(part) for part in zip(*parts, strict=True))
    return own, mean


def peer_likelihood(peer: Voter, writer: Voter, rows: Sequence[Mapping[str, Any]], args: TrainConfig) -> np.ndarray:
    """Mean log-prob per token of the writer's texts under the peer, fp64 [N]; a peer reads its own view and tokens.

    The text is without special tokens, so that its end is not scored. NaN where it is empty, or where the peer has no
    room for a token of it; what goes beyond the peer's longest text is not scored.
    """
    tokenizer = peer.engine.tokenizer
    require(tokenizer is not None, f"tokenizer of {peer.name!r}", None, "one, to read the texts of others")
    prompts = [encode_prompt(tokenizer, row[peer.view], i, args.chat_template_kwargs) for i, row in enumerate(rows)]
    read, longest = [], peer.model.max_length
    for r in writer.rollouts:
        text = decode(writer.engine.tokenizer, r.ids) or writer.text(r)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = ids if longest is None else ids[: max(0, longest - len(prompts[r.group]))]
        parts = (np.zeros(len(ids), np.uint8), (peer.name,), np.zeros(len(ids), np.float32), r.finish)
        read.append(Rollout(prompts[r.group], ids, *parts, group=r.group))
    masks = [np.ones(len(r.ids), bool) for r in read]
    settings = (peer.engine.vocab_size, args.temperature, args.micro_batch_tokens)
    scored = rollout_logprobs(peer.model, read, masks, *settings)
    return np.array([np.maximum(x, FLOOR).mean(dtype=np.float64) if len(x) else np.nan for x in scored])
