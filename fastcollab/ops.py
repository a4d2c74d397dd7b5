"""The operators as everybody calls them, and the one place that chooses who computes them.

Three implementations: ``native`` (C++ and CUDA C++, fastcollab._C), ``triton`` (fastcollab.kernels) and ``reference``
(plain torch). On CPU native comes first, on CUDA triton, then native; the reference takes what is left. The choice
depends only on the operator, the device and the dtypes. ``FASTCOLLAB_IMPL=reference|native|triton`` or ``with
use_impl("reference")`` forces one, and a forced one that is absent raises. :func:`impl_report` says who computes what,
and why not another. The operators of training have a reference only so far and are handed through.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

from fastcollab.config import require
from fastcollab.reference import attention, sampling
from fastcollab.reference.head import linear_logprob
from fastcollab.reference.losses import advantage_regression, policy_loss
from fastcollab.reference.packed import packed_attention

__all__ = ["advantage_regression", "copy_blocks", "impl_report", "linear_logprob", "packed_attention",
           "paged_attention", "policy_loss", "sample", "use_impl"]  # fmt: skip

IMPLS = ("reference", "native", "triton")
REFERENCE: dict[str, Callable] = {
    "paged_attention": attention.paged_attention,
    "copy_blocks": attention.copy_blocks,
    "sample": sampling.sample,
}
NATIVE_DTYPES = (torch.float32, torch.bfloat16)


def _load_native() -> str | None:
    """Register the compiled operators; None, or the reason why they are absent."""
    if importlib.util.find_spec("fastcollab._C") is None:
        return f"no fastcollab._C beside {__file__}: built without a C++ compiler, or a source tree hides the install"
    try:
        importlib.import_module("fastcollab._C")
    except (ImportError, OSError) as error:
        return f"fastcollab._C does not load: {error}"
    missing = [name for name in REFERENCE if not hasattr(torch.ops.fastcollab, name)]
    return f"fastcollab._C is of another version: it lacks {', '.join(missing)}" if missing else None


NATIVE_ABSENT = _load_native()
if NATIVE_ABSENT:
    warnings.warn(f"fastcollab runs in plain torch and Python, which is slower: {NATIVE_ABSENT}", stacklevel=2)
else:

    @torch.library.register_fake("fastcollab::paged_attention")
    def _(q, k, v, *indices_and_settings, **settings):
        return q.new_empty(q.shape[0], q.shape[1], v.shape[2])

    @torch.library.register_fake("fastcollab::sample")
    def _(logits, temperature, top_k, top_p, min_p, key, position, epoch):
        return torch.empty_like(key), torch.empty_like(temperature), torch.empty_like(temperature)

    @torch.library.register_fake("fastcollab::copy_blocks")
    def _(pools, pairs, stream=0):
        return None


_forced = os.environ.get("FASTCOLLAB_IMPL") or None
require(_forced is None or _forced in IMPLS, "FASTCOLLAB_IMPL", _forced, " or ".join(IMPLS))


@contextmanager
def use_impl(name: str) -> Iterator[None]:
    """Force one implementation of every operator inside the block: "reference", "native" or "triton"."""
    global _forced
    require(name in IMPLS, "impl", name, " or ".join(IMPLS))
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


def _absent(impl: str, op: str, device: str, dtypes: tuple[torch.dtype, ...]) -> str | None:
    """None where ``impl`` computes ``op`` for these arguments, or why it does not."""
    if impl == "native":
        if NATIVE_ABSENT:
            return NATIVE_ABSENT
        key = {"cpu": "CPU", "cuda": "CUDA"}.get(device)
        if key is None or not torch._C._dispatch_has_kernel_for_dispatch_key(f"fastcollab::{op}", key):
            return f"fastcollab._C has no {op} for {device}"
        odd = [str(dtype) for dtype in dtypes if dtype not in NATIVE_DTYPES]
        return f"{op} takes float32 and bfloat16, not {', '.join(odd)}" if odd and op != "copy_blocks" else None
    if impl == "triton":
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        if importlib.util.find_spec(f"fastcollab.kernels.{op}") is None:
            return f"fastcollab.kernels has no {op}"
        runs = device == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
        return None if runs else f"triton does not run on {device}"
    return None


@lru_cache(maxsize=256)
def _choose(op: str, device: str, dtypes: tuple[torch.dtype, ...], forced: str | None) -> tuple[str, Callable]:
    order = (forced,) if forced else ("triton", "native", "reference") if device == "cuda" else ("native", "reference")
    reasons = [(impl, _absent(impl, op, device, dtypes)) for impl in order]
    impl = next((impl for impl, reason in reasons if reason is None), None)
    if impl is None:
        raise RuntimeError(f"{op}: got the forced implementation {forced!r}, need one that is there: {reasons[0][1]}")
    if impl == "native":
        return impl, getattr(torch.ops.fastcollab, op).default
    if impl == "triton":
        return impl, getattr(importlib.import_module(f"fastcollab.kernels.{op}"), op)
    return impl, REFERENCE[op]


def impl_report() -> dict[str, object]:
    """What is forced, why native and triton are absent (None: present), and who computes each operator in fp32."""
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    report: dict[str, object] = {"forced": _forced, "native": NATIVE_ABSENT}
    report["triton"] = None if importlib.util.find_spec("triton") else "triton is not installed"
    for op in REFERENCE:
        report[op] = {}
        for device in devices:
            absent = _forced and _absent(_forced, op, device, (torch.float32,))
            chosen = f"none: {absent}" if absent else _choose(op, device, (torch.float32,), _forced)[0]
            report[op][device] = chosen
    return report


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    q_indptr: Tensor,
    kv_len: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Append new K/V rows to pages, then causal attention: see :func:`fastcollab.reference.attention.paged_attention`.

    q, k, v may be strided views with unit stride in the last dimension. native: float32 and bfloat16, computed in fp32;
    a row's result has the same bits alone, in any batch and however its tokens are split over calls.
    """
    run = _choose("paged_attention", q.device.type, (q.dtype, k_pool.dtype), _forced)[1]
    return run(q, k, v, k_pool, v_pool, slot_mapping, block_table, q_indptr, kv_len, scale, window, softcap, sinks)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    key: Tensor,
    position: Tensor,
    epoch: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per row: id [R] int64 (-1: no valid law), logprob and kept_mass [R] fp32.

    See :func:`fastcollab.reference.sampling.sample`; every implementation draws the same ids.
    """
    run = _choose("sample", logits.device.type, (logits.dtype,), _forced)[1]
    return run(logits, temperature, top_k, top_p, min_p, key, position, epoch)


def copy_blocks(pools: list[Tensor], pairs: Tensor) -> None:
    """pools[i][destination] = pools[i][source] for each (source, destination) of pairs [P, 2] int64, in order."""
    if not pools:
        return
    device = pools[0].device
    impl, run = _choose("copy_blocks", device.type, (pools[0].dtype,), _forced)
    if impl == "native" and device.type == "cuda":
        if not pairs.is_cuda and len(pairs):
            size = min(len(pool) for pool in pools)
            inside = 0 <= int(pairs.min()) and int(pairs.max()) < size
            require(inside, "pairs", pairs.tolist(), f"blocks in [0, {size})")
        run(pools, pairs.to(device), torch.cuda.current_stream(device).cuda_stream)
    else:
        run(pools, pairs)
