"""What the start-up probe refuses, by name and with the reason, and what it lets pass."""

from __future__ import annotations

import pytest
import torch
from tiny_models import EXTRA, FAMILIES, one_thread, tiny_config, tiny_model  # noqa: F401

from fastcollab.attention import NAME, UnsupportedModelError, using
from fastcollab.model import Model

ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
}
PER_LAYER = {"full_attention": ROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}


@pytest.mark.parametrize(
    "family, overrides, reason",
    [
        ("bloom", {}, "interface"),
        ("mpt", {}, "interface"),
        ("rwkv", {}, "interface"),
        ("stablelm", {}, "interface"),
        ("falcon", {}, "interface"),
        ("nemotron", {}, "keyword|interface"),
        ("mamba", {}, "state"),
        ("qwen3_next", {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}, "state"),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "state"),
        ("falcon_h1", {}, "state"),
        ("llama4_text", {"head_dim": 8}, "chunked_attention"),
        ("diffllama", {}, "calls from layers|interface"),
        ("doge", {}, "not its own"),
        ("llama", {"rope_parameters": ROPE}, "dynamic"),
        ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 64}, "longrope"),
        ("gemma3_text", {"rope_parameters": PER_LAYER}, "dynamic"),
    ],
)
def test_refused_by_name_with_the_reason(family, overrides, reason):
    module = tiny_model(family, **overrides)
    with pytest.raises(UnsupportedModelError, match=reason) as error:
        Model("m", module)
    name = type(module).__name__.removesuffix("ForCausalLM")
    assert name in str(error.value) and "\n" not in str(error.value)
    assert module.config._attn_implementation != NAME and using.depth == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_that_leaks_across_packed_rows_is_refused(dtype):
    module = tiny_model("qwen3").to(dtype)
    module.model.layers[1].register_forward_hook(lambda m, args, out: out + 0.3 * out.roll(1, dims=1))
    with pytest.raises(UnsupportedModelError, match="neighbours"):
        Model("m", module)


def test_a_window_that_the_model_does_not_ask_for_is_refused():
    module = tiny_model("mistral")
    module.config.sliding_window = None
    module.model.layers[1].self_attn.config = tiny_config("mistral", sliding_window=8, attn_implementation="sdpa")
    with pytest.raises(UnsupportedModelError, match="layer 1 .* window 8"):
        Model("m", module)


def test_a_head_that_is_not_linear_in_hidden_is_refused():
    module = tiny_model("qwen3")
    module.lm_head.register_forward_hook(lambda m, args, out: out * 1.5)
    with pytest.raises(UnsupportedModelError, match=r"not head\(hidden\)"):
        Model("m", module)


def test_bfloat16_models_pass_the_probe():
    for family in [*FAMILIES, *EXTRA]:
        assert Model(family, tiny_model(family).bfloat16()).dtype == torch.bfloat16
