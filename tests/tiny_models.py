"""Random small models by family, for tests: fp32, evaluation mode, weights large enough that attention matters.

At the default initialisation (std 0.02) even uniform attention leaves greedy ids unchanged; here std is 0.2.
"""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from fastcollab.attention import PagedContext
from fastcollab.model import Model
from fastcollab.pools import Pools

VOCAB = 61
IDS = torch.arange(200).mul(7919).remainder(VOCAB - 3).add(3)  # a text without special ids
_BASE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    initializer_range=0.2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_HEAD = dict(_BASE, head_dim=8)
_GPT2 = dict(
    vocab_size=VOCAB,
    n_embd=32,
    n_layer=3,
    n_head=4,
    n_positions=128,
    initializer_range=0.2,
    bos_token_id=1,
    eos_token_id=2,
)
_MOE = dict(
    _HEAD, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1, norm_topk_prob=True
)
_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]

FAMILIES: dict[str, dict] = {
    "qwen2": _BASE,
    "qwen3": _HEAD,
    "llama": _HEAD,
    "mistral": dict(_HEAD, sliding_window=8),
    "gemma3_text": dict(_HEAD, sliding_window=8, layer_types=_SLIDING, query_pre_attn_scalar=8),
    "gpt2": _GPT2,
    "gpt_neox": {k: v for k, v in _BASE.items() if k != "num_key_value_heads"},
    "phi3": _BASE,
    "smollm3": dict(_BASE, no_rope_layers=[1, 0, 1]),
    "olmo2": _BASE,
    "qwen3_moe": _MOE,
}
EXTRA: dict[str, dict] = {
    "gemma2": dict(
        _HEAD,
        attn_implementation="eager",
        sliding_window=8,
        layer_types=_SLIDING,
        query_pre_attn_scalar=8,
        final_logit_softcapping=5.0,
        attn_logit_softcapping=4.0,
    ),
    "granite": dict(
        _BASE, logits_scaling=4.0, residual_multiplier=0.7, embedding_multiplier=2.0, attention_multiplier=0.3
    ),
    "cohere": dict(_BASE, logit_scale=0.25),
    "gpt_oss": dict(_HEAD, sliding_window=8, layer_types=_SLIDING, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3": dict(
        _BASE,
        num_key_value_heads=4,
        moe_intermediate_size=24,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        first_k_dense_replace=1,
    ),
}


@pytest.fixture(autouse=True)
def one_thread():
    """Import it where models are tiny: two threads only wait for each other, and for other processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny_config(family: str, **overrides):
    """The config of a family (a ``model_type`` of transformers), small."""
    return AutoConfig.for_model(family, **{**(FAMILIES | EXTRA).get(family, _BASE), **overrides})


def tiny_model(family: str, seed: int = 0, **overrides) -> PreTrainedModel:
    """A random model of the family, fp32, evaluation mode, biases and norms random too; a function of the seed."""
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **overrides)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # initialised to constants, behind which an error could hide
                parameter.add_(torch.randn_like(parameter) * 0.1)
    torch.random.set_rng_state(state)
    return model


class Pages:
    """The smallest driver of ``Model.decode``: rows with scattered blocks in pools that start as NaN."""

    def __init__(self, model: Model, rows: int, block_size: int = 4, blocks: int = 12):
        self.model, self.kv_len = model, [0] * rows
        self.pools = Pools(model.layers, rows * blocks, block_size, model.dtype, model.device)
        for pool in self.pools.k + self.pools.v:
            pool.fill_(float("nan"))
        order = list(range(rows * blocks))
        random.Random(0).shuffle(order)
        self.table = torch.tensor(order, dtype=torch.int32).view(rows, blocks)

    def feed(self, rows: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """New ids per row, one forward -> log-probs [len(ids), V] per row."""
        ids, index, size = list(rows.values()), list(rows), self.pools.block_size
        positions = [torch.arange(self.kv_len[r], self.kv_len[r] + len(x)) for r, x in rows.items()]
        slots = [self.table[r][p // size] * size + p % size for r, p in zip(index, positions, strict=True)]
        for r, x in rows.items():
            self.kv_len[r] += len(x)
        lengths = [len(x) for x in ids]
        context = PagedContext(
            self.pools,
            torch.cat(slots).int(),
            self.table[index],
            torch.tensor([0, *lengths]).cumsum(0).int(),
            torch.tensor([self.kv_len[r] for r in index], dtype=torch.int32),
        )
        logits = self.model.decode(torch.cat(ids), torch.cat(positions), context, torch.arange(sum(lengths)))
        return list(logits.log_softmax(-1).split(lengths))


@torch.no_grad()
def plain(module, ids: torch.Tensor) -> torch.Tensor:
    return module(input_ids=ids[None]).logits[0].log_softmax(-1)
