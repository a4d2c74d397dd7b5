"""Who computes an operator: native (C++ and CUDA C++), triton, or the plain-torch reference. The one place to choose.

On CPU native comes first, on CUDA triton, then native; the reference takes what is left. The choice depends only on the
operator, the device and the dtypes. ``FASTCOLLAB_IMPL=reference|native|triton`` or ``with use_impl("reference")``
forces one for the operators that have it anywhere, and where it is absent there it raises; those that never had it keep
their automatic choice. :func:`impl_report` says who computes what, and why not another.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from fastcollab.config import require
from fastcollab.reference import attention, head, losses, packed, sampling

IMPLS = ("reference", "native", "triton")


class Op(NamedTuple):
    """One operator: the module with its reference, and its functions, named alike in fastcollab._C and in kernels."""

    reference: ModuleType
    functions: tuple[str, ...]
    any_dtype: bool = False  # else native takes float32 and bfloat16, triton float16 as well
    native: bool = True  # whether a native version was written, for any device


OPS: dict[str, Op] = {
    "paged_attention": Op(attention, ("paged_attention",)),
    "copy_blocks": Op(attention, ("copy_blocks",), any_dtype=True),
    "sample": Op(sampling, ("sample",)),
    "packed_attention": Op(packed, ("packed_attention_forward", "packed_attention_backward"), native=False),
    "linear_logprob": Op(head, ("linear_logprob_forward", "linear_logprob_backward")),
    "linear_policy_loss": Op(head, ("linear_policy_loss_forward",)),
    "policy_loss": Op(losses, ("policy_loss_forward",)),
    "advantage_regression": Op(losses, ("advantage_regression_forward",)),
}
DTYPES = {
    "native": (torch.float32, torch.bfloat16),
    "triton": (torch.float32, torch.bfloat16, torch.float16),
}


def _load_native() -> str | None:
    """Register the compiled operators; None, or the reason why they are absent."""
    if importlib.util.find_spec("fastcollab._C") is None:
        return f"no fastcollab._C beside {__file__}: built without a C++ compiler, or a source tree hides the install"
    try:
        importlib.import_module("fastcollab._C")
    except (ImportError, OSError) as error:
        return f"fastcollab._C does not load: {error}"
    missing = [name for name in ("paged_attention", "sample", "copy_blocks") if not _registered(name)]
    return f"fastcollab._C is of another version: it lacks {', '.join(missing)}" if missing else None


def _registered(function: str) -> bool:
    return hasattr(torch.ops.fastcollab, function)


def _native(functions: tuple[str, ...]) -> tuple[list[str], SimpleNamespace]:
    """An operator's devices and functions. Asked once, here: torch.compile cannot look into the dispatcher."""
    there = all(map(_registered, functions))
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    devices = [d for d in ("cpu", "cuda") if there and has_kernel(f"fastcollab::{functions[0]}", d.upper())]
    return devices, SimpleNamespace(**{f: getattr(torch.ops.fastcollab, f).default for f in functions if there})


NATIVE_ABSENT = _load_native()
NATIVE = {op: _native(OPS[op].functions) for op in OPS}
if NATIVE_ABSENT:
    warnings.warn(f"fastcollab runs in plain torch and Python, which is slower: {NATIVE_ABSENT}", stacklevel=2)

_forced = os.environ.get("FASTCOLLAB_IMPL") or None
require(_forced is None or _forced in IMPLS, "FASTCOLLAB_IMPL", _forced, " or ".join(IMPLS))


@contextmanager
def use_impl(name: str) -> Iterator[None]:
    """Force "reference", "native" or "triton" inside the block, for every operator that has it anywhere."""
    global _forced
    require(name in IMPLS, "impl", name, " or ".join(IMPLS))
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


def choose(op: str, device: torch.device, *dtypes: torch.dtype) -> tuple[str, Any]:
    """(name of the implementation, where the operator's functions are) for arguments of these dtypes."""
    return _choose(op, device.type, dtypes, _forced)


@lru_cache(maxsize=256)
def _choose(op: str, device: str, dtypes: tuple[torch.dtype, ...], forced: str | None) -> tuple[str, Any]:
    order = ("triton", "native", "reference") if device == "cuda" else ("native", "reference")
    if forced and written(forced, op):
        order = (forced,)
    reasons = [(impl, absent(impl, op, device, dtypes)) for impl in order]
    impl = next((impl for impl, reason in reasons if reason is None), None)
    if impl is None:
        raise RuntimeError(f"{op}: got the forced implementation {forced!r}, need one that is there: {reasons[0][1]}")
    if impl == "native":
        return impl, NATIVE[op][1]
    return impl, OPS[op].reference if impl == "reference" else importlib.import_module(f"fastcollab.kernels.{op}")


def written(impl: str, op: str) -> bool:
    """Whether ``op`` has this implementation at all, were it built, installed and given its device or not."""
    if impl == "triton":
        return importlib.util.find_spec(f"fastcollab.kernels.{op}") is not None
    return impl == "reference" or OPS[op].native


def absent(impl: str, op: str, device: str, dtypes: tuple[torch.dtype, ...]) -> str | None:
    """None where ``impl`` computes ``op`` for these arguments, or why it does not."""
    if impl == "reference":
        return None
    if impl == "native":
        if NATIVE_ABSENT:
            return NATIVE_ABSENT
        if device not in NATIVE[op][0]:
            return f"fastcollab._C has no {op} for {device}"
    else:
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        if not written(impl, op):
            return f"fastcollab.kernels has no {op}"
        if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return f"triton does not run on {device}"
    odd = [str(dtype) for dtype in dtypes if dtype not in DTYPES[impl]]
    known = " and ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES[impl])
    return f"{op} takes {known}, not {', '.join(odd)}" if odd and not OPS[op].any_dtype else None


def impl_report() -> dict[str, object]:
    """What is forced and for which operators it does not exist ("unforced"), why native and triton are absent (None:
    present), and who computes each operator in fp32."""
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    unforced = [op for op in OPS if _forced and not written(_forced, op)]
    report: dict[str, object] = {"forced": _forced, "unforced": unforced, "native": NATIVE_ABSENT}
    report["triton"] = None if importlib.util.find_spec("triton") else "triton is not installed"
    for op in OPS:
        report[op] = {}
        for device in devices:
            reason = _forced and op not in unforced and absent(_forced, op, device, (torch.float32,))
            report[op][device] = f"none: {reason}" if reason else _choose(op, device, (torch.float32,), _forced)[0]
    return report


def refuse_create_graph() -> None:
    """To be called in a backward that cannot itself be differentiated: else a second derivative would be silently 0."""
    need = "False: the gradient's own gradient is not known; plain torch operations have it"
    require(not torch.is_grad_enabled(), "create_graph", True, need)


def fake(function: str):
    """Decorator: register the shapes of a native function for torch.compile; nothing where native lacks it."""
    if NATIVE_ABSENT or not _registered(function):
        return lambda shapes: shapes
    return torch.library.register_fake(f"fastcollab::{function}")
