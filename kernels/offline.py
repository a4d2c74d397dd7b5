"""What is compiled offline: a Triton kernel with the argument types and block sizes that it is launched with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """One compilation. Each module of kernels lists its own in ``offline_cases(target)``.

    ``target`` is "sm_80", "sm_90", "sm_100" or "gfx942": a launch may take other block sizes there.
    """

    kernel: Any  # the triton.jit function
    signature: dict[str, str]  # every argument: "*fp32", "*bf16", "i64", "i32", "fp32", or "constexpr"
    constants: dict[str, Any]  # values of the constexpr arguments
    num_warps: int = 4
    num_stages: int = 2
