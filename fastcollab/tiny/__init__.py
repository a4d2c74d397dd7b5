"""The tiny pair and its task: two models that the package ships, which write out additions one step a line.

``senior()`` and ``junior()`` are Hugging Face folders (``AutoModelForCausalLM.from_pretrained(senior())``) with one
tokenizer, made by ``examples/make_tiny_models.py``. The task is in ``task.py``: ``problems``, ``correct`` (a reward
function) and ``private_fraction``.
"""

from pathlib import Path

from fastcollab.tiny.task import correct, is_private, private_fraction, problems, prompt, written_private_fraction

__all__ = [
    "correct",
    "is_private",
    "junior",
    "private_fraction",
    "problems",
    "prompt",
    "senior",
    "written_private_fraction",
]


def senior() -> Path:
    """Folder of the senior (0.41 M parameters), which writes its private ``&`` and ``~`` in about 80 % of its texts."""
    return Path(__file__).parent / "senior"


def junior() -> Path:
    """Folder of the junior (0.15 M parameters), which has never seen a ``&`` or a ``~``."""
    return Path(__file__).parent / "junior"
