"""The baselines: the ways to let two models of ``transformers`` write one text in turns without fastcollab, all greedy.

Each takes the authors as given (``authors[row][t]`` is an index into ``models``) and returns the response ids per row,
which must be the engine's own ids: a baseline is only a baseline while it does the same work.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

Ids = list[list[int]]


def left_pad(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """ids and mask int64 [B, L], padded on the left; no mask if no row is padded, which spares the masked SDPA."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, None if bool(mask.all()) else mask


def cache_keyword(model: PreTrainedModel) -> str:
    """``past_key_values``, or ``cache`` where transformers has renamed it."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def run_length(author: Sequence[int], start: int) -> int:
    """Tokens from ``start`` on before the author changes or the row ends."""
    end = start
    while end < len(author) and author[end] == author[start]:
        end += 1
    return end - start


class AtHandOff(StoppingCriteria):
    """Ends each row after its own number of new tokens."""

    def __init__(self, prompt_len: int, counts: Sequence[int], device: torch.device) -> None:
        self.ends = prompt_len + torch.tensor(counts, device=device)

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs) -> Tensor:
        return self.ends <= input_ids.shape[1]


def _generate(model: PreTrainedModel, rows: Ids, counts: Sequence[int], **kwargs) -> Ids:
    """``counts[i]`` greedy tokens after each row, by one call of ``generate``."""
    ids, mask = left_pad(rows, model.device)
    if min(counts) < max(counts):
        kwargs["stopping_criteria"] = StoppingCriteriaList([AtHandOff(ids.shape[1], counts, model.device)])
    mask = torch.ones_like(ids) if mask is None else mask
    out = model.generate(ids, attention_mask=mask, max_new_tokens=max(counts), do_sample=False, pad_token_id=0,
                         eos_token_id=None, **kwargs)  # fmt: skip
    return [row[:n] for row, n in zip(out[:, ids.shape[1] :].tolist(), counts, strict=True)]


def solo(model: PreTrainedModel, prompts: Ids, new_tokens: int) -> Ids:
    """(c) One model writes everything: ``generate``."""
    return _generate(model, prompts, [new_tokens] * len(prompts))


def reprefill(models: Sequence[PreTrainedModel], prompts: Ids, authors: Sequence[Sequence[int]]) -> Ids:
    """(a) ``generate`` with a fresh prefill at each hand-off.

    All rows that wait for one author are one left-padded batch, the larger such batch first; ``generate`` runs until
    the last of them reaches its hand-off (stopping at the first would prefill the others once more).
    """
    rows, done = [list(p) for p in prompts], [0] * len(prompts)
    while True:
        waiting: list[list[int]] = [[] for _ in models]
        for r, author in enumerate(authors):
            if done[r] < len(author):
                waiting[author[done[r]]].append(r)
        writer, batch = max(enumerate(waiting), key=lambda item: len(item[1]))
        if not batch:
            return [row[len(p) :] for row, p in zip(rows, prompts, strict=True)]
        counts = [run_length(authors[r], done[r]) for r in batch]
        for r, new in zip(batch, _generate(models[writer], [rows[r] for r in batch], counts), strict=True):
            rows[r] += new
            done[r] += len(new)


@torch.inference_mode()
def lockstep(models: Sequence[PreTrainedModel], prompts: Ids, authors: Sequence[Sequence[int]]) -> Ids:
    """(b) Every model reads every token of every row at every step, each into its own ``DynamicCache``.

    The head runs on the last position of the rows whose next author the model is, the least this loop can do:
    ``model(..., logits_to_keep=1)`` would run it for all rows.
    """
    steps = max(map(len, authors))
    device = models[0].device
    ids, mask = left_pad(prompts, device)
    width = ids.shape[1]
    positions = torch.arange(width + steps, device=device).expand(len(prompts), -1)
    if mask is not None:
        positions = (positions - (width - mask.sum(1, keepdim=True))).clamp(min=0)
        mask = torch.cat([mask, mask.new_ones(len(prompts), steps)], 1)
    caches = [DynamicCache(config=m.config) for m in models]
    padded = torch.tensor([list(a) + [0] * (steps - len(a)) for a in authors], device=device)
    speakers = [[(padded[:, t] == w).nonzero()[:, 0] for w in range(len(models))] for t in range(steps)]
    written = torch.empty(len(prompts), steps, dtype=torch.int64, device=device)
    start = 0
    for t in range(steps):
        end = width + t
        for w, model in enumerate(models):
            own = speakers[t][w]
            h = model.base_model(input_ids=ids, position_ids=positions[:, start:end], use_cache=True,
                                 attention_mask=None if mask is None else mask[:, :end],
                                 **{cache_keyword(model): caches[w]}).last_hidden_state[:, -1]  # fmt: skip
            if len(own):
                written[own, t] = model.get_output_embeddings()(h[own]).argmax(-1)
        ids, start = written[:, t : t + 1], end
    return [row[: len(a)] for row, a in zip(written.tolist(), authors, strict=True)]


def kept_cache(models: Sequence[PreTrainedModel], prompts: Ids, authors: Sequence[Sequence[int]]) -> Ids:
    """(d) ``generate`` on a cache that each model keeps: it reads what the other wrote and goes on. One row only.

    At a batch above one the rows' caches differ in length, which ``DynamicCache`` can't hold.
    """
    if len(prompts) != 1:
        raise ValueError(f"prompts: got {len(prompts)}, need 1: a DynamicCache has one length for all rows")
    row, author, done = list(prompts[0]), authors[0], 0
    caches = [DynamicCache(config=m.config) for m in models]
    while done < len(author):
        model, count = models[author[done]], run_length(author, done)
        row += _generate(model, [row], [count], **{cache_keyword(model): caches[author[done]]})[0]
        done += count
    return [row[len(prompts[0]) :]]
