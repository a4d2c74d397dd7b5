"""Random small models by family, for tests: fp32, evaluation mode, weights large enough that attention matters.

At the default initialisation (std 0.02) even uniform attention leaves greedy ids unchanged; here std is 0.2.
"""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 61
_BASE = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=128, initializer_range=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=2)  # fmt: skip
_HEAD = dict(_BASE, head_dim=8)
_GPT2 = dict(vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=128, initializer_range=0.2, bos_token_id=1, eos_token_id=2)
_MOE = dict(_HEAD, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1, norm_topk_prob=True)
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
    "gemma2": dict(_HEAD, sliding_window=8, layer_types=_SLIDING, query_pre_attn_scalar=8, final_logit_softcapping=5.0, attn_logit_softcapping=4.0),
    "granite": dict(_BASE, logits_scaling=4.0, residual_multiplier=0.7, embedding_multiplier=2.0, attention_multiplier=0.3),
    "cohere": dict(_BASE, logit_scale=0.25),
    "gpt_oss": dict(_HEAD, sliding_window=8, layer_types=_SLIDING, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3": dict(_BASE, num_key_value_heads=4, moe_intermediate_size=24, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1,
                        kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12, first_k_dense_replace=1),
}  # fmt: skip


def tiny_config(family: str, **overrides):
    """The config of a family (a ``model_type`` of transformers), small."""
    return AutoConfig.for_model(family, **{**(FAMILIES | EXTRA).get(family, _BASE), **overrides})


def tiny_model(family: str, seed: int = 0, **overrides) -> PreTrainedModel:
    """A random model of the family: the same weights for the same seed, fp32, evaluation mode, biases and norms random too."""
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **overrides)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # initialised to constants, behind which an error could hide
                parameter.add_(torch.randn_like(parameter) * 0.1)
    torch.random.set_rng_state(state)
    return model
