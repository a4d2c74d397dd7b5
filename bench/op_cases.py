"""The operators' case table, and what a problem is: one case and phase with its truth and the calls to be timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

OURS = "fastcollab"


@dataclass(frozen=True)
class Case:
    """One line of the table. ``quick`` replaces sizes; ``foreign`` is the share of rows with mask False."""

    op: str
    shape: dict[str, int]
    dtype: torch.dtype = torch.float32
    quick: dict[str, int] = field(default_factory=dict)
    foreign: float = 0.0

    def sized(self, quick: bool) -> Case:
        return replace(self, shape=self.shape | self.quick) if quick else self

    @property
    def label(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in self.shape.items())
        foreign = f" foreign={self.foreign:g}" if self.foreign else ""
        return f"{sizes} {str(self.dtype).removeprefix('torch.')}{foreign}"


_HEAD, _HEAD_QUICK = {"N": 2048, "D": 1024, "V": 151936}, {"N": 512, "V": 32768}
_LOSS = {"B": 64, "T": 1024}
_CACHE = {"rows": 32, "cached": 1000, "heads": 16, "kv_heads": 8, "width": 128}
_GROUP = {"G": 8, "prompt": 512, "completion": 128, "heads": 16, "kv_heads": 8, "width": 128}
_VOCAB = {"rows": 32, "V": 151936, "top_k": 0}
_POOLS = {"pools": 16, "blocks": 128, "pairs": 32, "kv_heads": 8, "width": 128}
FP32, BF16 = torch.float32, torch.bfloat16
CASES = (
    *(Case("linear_logprob", _HEAD, dtype, _HEAD_QUICK) for dtype in (FP32, BF16)),
    *(Case("linear_policy_loss", _HEAD, dtype, _HEAD_QUICK) for dtype in (FP32, BF16)),
    Case("linear_policy_loss", _HEAD, FP32, _HEAD_QUICK, foreign=0.5),
    Case("policy_loss", _LOSS),
    Case("advantage_regression", _LOSS),
    *(Case("paged_attention", _CACHE, dtype) for dtype in (FP32, BF16)),
    *(Case("handoff", _CACHE, dtype) for dtype in (FP32, BF16)),
    *(Case("packed_attention", _GROUP, dtype, {"G": 4}) for dtype in (FP32, BF16)),
    Case("sample", _VOCAB, quick={"V": 32768}),
    Case("sample", _VOCAB | {"top_k": 50}, quick={"V": 32768}),
    Case("copy_blocks", _POOLS, BF16),
)
Outputs = Sequence[Tensor | None]


@dataclass
class Problem:
    """Calls that do the same work, on the same inputs.

    ``view[name]`` turns what a call returns into the truth's form, with None for what is not compared.
    """

    case: Case
    phase: str
    flops: float  # the least that the definition needs; every variant's rate is told by it
    bytes: float
    truth: Callable[[], Outputs]
    calls: dict[str, Callable[[], Any]]
    absent: dict[str, str] = field(default_factory=dict)
    view: dict[str, Callable[[Any], Outputs]] = field(default_factory=dict)
    tolerance: float | None = None  # relative to the truth's largest; None: by dtype

    def outputs(self, name: str, result: Any) -> Outputs:
        return self.view.get(name, _tuple)(result)


def _tuple(result: Any) -> Outputs:
    return (result,) if isinstance(result, Tensor) else result
