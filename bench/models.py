"""The pair that the rollout benches run on: random Qwen3-shaped models, and random prompts for them."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

VOCAB = 16384


def random_model(seed: int, vocab: int = VOCAB, hidden: int = 384, layers: int = 8, heads: int = 6,
                 kv_heads: int = 2, std: float = 0.05) -> PreTrainedModel:  # fmt: skip
    """fp32, tied, heads of 64, 20.1 M parameters by default. The larger the weights' ``std``, the longer it takes
    until greedy text falls into a loop: at 0.05 some of 32 rows do so by 1,300 tokens, at 0.07 one by 2,048."""
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    config = Qwen3Config(vocab_size=vocab, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
                         num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=64, tie_word_embeddings=True,
                         initializer_range=std, max_position_embeddings=4096, pad_token_id=0, bos_token_id=None,
                         eos_token_id=None)  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    torch.random.set_rng_state(state)
    return model


def random_prompts(rows: int, length: int, vocab: int = VOCAB, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocab, (rows, length), generator=generator).tolist()


def word_starts(vocab: int = VOCAB, share: float = 0.5, seed: int = 0) -> list[int]:
    """Random ids that open a word. With share 0.5 a word has 2 tokens, and under ``Word(p=0.5)`` a turn has 4."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(vocab, generator=generator)[: int(share * vocab)].tolist()


def read_flops(model: PreTrainedModel) -> float:
    """Flops that one token costs without the head (attention over the context left out)."""
    return 2.0 * (sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel())


def head_flops(model: PreTrainedModel) -> float:
    return 2.0 * model.get_output_embeddings().weight.numel()


def weight_bytes(model: PreTrainedModel) -> int:
    return sum(p.nbytes for p in model.parameters())
