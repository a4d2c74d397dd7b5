"""The problems of training: the head, the losses and packed attention, forward and forward + backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastcollab import losses, ops
from fastcollab.bench import op_baselines as peers
from fastcollab.bench.op_cases import OURS, Case, Outputs, Problem
from fastcollab.reference import losses as reference_losses
from fastcollab.reference.packed import Segments


def _grad(loss: Tensor, inputs: Sequence[Tensor], upstream: Tensor | None = None) -> tuple[Tensor, ...]:
    grads = torch.autograd.grad(loss, inputs, None if upstream is None else upstream.to(loss.dtype))
    return loss.detach(), *grads


def _leaf(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.detach().requires_grad_() for x in tensors)


# -- the head


def _head_inputs(case: Case, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    N, D, V = (case.shape[name] for name in "NDV")
    h = torch.randn(N, D, device=device).to(case.dtype)
    weight = torch.randn(V, D, device=device).mul_(1.5 * D**-0.5).to(case.dtype)
    return h, weight, torch.randint(V, (N,), device=device)


def linear_logprob(case: Case, device: torch.device) -> Iterator[Problem]:
    h, weight, target = _head_inputs(case, device)
    upstream = torch.randn(len(h), device=device)
    found, missing = peers.logprobs(device, case.dtype)
    functions = {OURS: lambda h, weight, target: ops.linear_logprob(h, weight, None, target)[0], **found}

    def forward(function: peers.Logprob) -> Tensor:
        with torch.no_grad():
            return function(h, weight, target)

    def both(function: peers.Logprob, *inputs: Tensor) -> Outputs:
        leaves = _leaf(*inputs)
        return _grad(function(*leaves, target), leaves, upstream)

    def true_forward() -> Outputs:
        with torch.no_grad():
            return (peers.chunked_logprob(h.float(), weight.float(), target),)

    work, moved = 2.0 * h.numel() * len(weight), float(h.nbytes + weight.nbytes)
    calls = {name: partial(forward, function) for name, function in functions.items()}
    yield Problem(case, "forward", work, moved, true_forward, calls, missing)
    truth = partial(both, peers.chunked_logprob, h.float(), weight.float())
    calls = {name: partial(both, function, h, weight) for name, function in functions.items()}
    yield Problem(case, "forward + backward", 3 * work, 2 * moved, truth, calls, missing)


def _loss_inputs(B: int, T: int, logprob: Tensor, foreign: float) -> dict[str, Tensor]:
    device = logprob.device
    mask = torch.rand(B, T, device=device) >= foreign
    return {
        "old": logprob.view(B, T).float() + 0.2 * torch.randn(B, T, device=device),
        "advantage": torch.randn(B, device=device),
        "mask": mask,
        "segment_ids": torch.arange(B, device=device).repeat_interleave(T),
    }


def linear_policy_loss(case: Case, device: torch.device) -> Iterator[Problem]:
    h, weight, target = _head_inputs(case, device)
    N = len(h)
    B = next(b for b in (8, 4, 2, 1) if N % b == 0)
    with torch.no_grad():
        given = _loss_inputs(B, N // B, peers.chunked_logprob(h, weight, target), case.foreign)
    old, advantage, mask, ids = given.values()
    found, missing = peers.head_losses(device, case.dtype)

    def ours(h: Tensor, weight: Tensor, mask: Tensor = mask) -> Tensor:
        return ops.linear_policy_loss(h, weight, target, old.flatten(), advantage, mask.flatten(), ids,
                                      clip_low=peers.CLIP_LOW, clip_high=peers.CLIP_HIGH)[0]  # fmt: skip

    def recompute(h: Tensor, weight: Tensor) -> Tensor:
        logprob = ops.linear_logprob(h, weight, None, target)[0]
        return losses.policy_loss(logprob, old.flatten(), advantage, mask.flatten(), ids, clip_low=peers.CLIP_LOW,
                                  clip_high=peers.CLIP_HIGH)[0]  # fmt: skip

    def theirs(function: Callable[..., Tensor], h: Tensor, weight: Tensor) -> Tensor:
        return function(h, weight, target, old, advantage, mask)

    def both(function: Callable[..., Tensor]) -> Outputs:
        leaves = _leaf(h, weight)
        return _grad(function(*leaves), leaves)

    def truth() -> Outputs:
        leaves = _leaf(h.float(), weight.float())
        logprob = peers.chunked_logprob(*leaves, target).view(old.shape)
        return _grad(peers.policy_loss(logprob, old, None, advantage, mask)[0], leaves)

    functions: dict[str, Callable[..., Tensor]] = {OURS: ours, "linear_logprob + policy_loss": recompute}
    functions |= {name: partial(theirs, function) for name, function in found.items()}
    calls = {name: partial(both, function) for name, function in functions.items()}
    view = {}
    if case.foreign:
        everyone = torch.ones_like(mask)
        calls["fastcollab, no row foreign"] = partial(both, partial(ours, mask=everyone))
        view["fastcollab, no row foreign"] = lambda result: (None, None, None)
    work = 6.0 * int(mask.sum()) * weight.numel()
    yield Problem(case, "forward + backward", work, 2.0 * (h.nbytes + weight.nbytes), truth, calls, missing, view)


# -- the losses


def _loss_problems(case: Case, inputs: Sequence[Tensor], ours: Callable, eager: Callable, truth: Callable,
                   view: Callable, device: torch.device) -> Iterator[Problem]:  # fmt: skip
    """``inputs``: the log-probs [B, T] first. Each function takes them and returns (loss, metrics)."""
    logprob, others = inputs[0], inputs[1:]
    found, missing = peers.losses(eager, device)
    functions = {OURS: ours, **found}

    def forward(function: Callable) -> tuple[Outputs, Any]:
        with torch.no_grad():
            loss, metrics = function(logprob, *others)
        return (loss,), metrics

    def both(function: Callable) -> tuple[Outputs, Any]:
        (leaf,) = _leaf(logprob)
        loss, metrics = function(leaf, *others)
        return _grad(loss, (leaf,)), metrics

    def true(run: Callable, *ignored: Any) -> Outputs:
        with_double = [x.double() if x.is_floating_point() else x for x in inputs]
        leaf, rest = with_double[0].requires_grad_(), with_double[1:]
        loss, metrics = truth(leaf, *rest)
        values, named = (_grad(loss, (leaf,)) if run is both else (loss.detach(),)), view(metrics)
        return *values, *named

    def flat(metrics_of: Callable, result: tuple[Outputs, Any]) -> Outputs:
        return *result[0], *metrics_of(result[1])

    views = {name: partial(flat, view if name == OURS else _stacked) for name in functions}
    moved = float(sum(x.nbytes for x in inputs))
    for phase, run, bytes in (("forward", forward, moved), ("forward + backward", both, moved + logprob.nbytes)):
        calls = {name: partial(run, function) for name, function in functions.items()}
        yield Problem(case, phase, 0.0, bytes, partial(true, run), calls, missing, views, 1e-4)


def _stacked(metrics: Sequence[Tensor]) -> Outputs:
    return (torch.stack(list(metrics)),)


def policy_loss(case: Case, device: torch.device) -> Iterator[Problem]:
    B, T = case.shape["B"], case.shape["T"]
    logprob = -torch.rand(B, T, device=device) * 3
    old, advantage, mask, ids = _loss_inputs(B, T, logprob, 0.1).values()
    ref = logprob + 0.1 * torch.randn_like(logprob)

    def flat(policy_loss: Callable, logprob, old, ref, advantage, mask) -> tuple:
        return policy_loss(logprob.flatten(), old.flatten(), advantage, mask.flatten(), ids, clip_low=peers.CLIP_LOW,
                           clip_high=peers.CLIP_HIGH, ref_logprob=ref.flatten(), beta=peers.BETA)  # fmt: skip

    def means(metrics: dict[str, Tensor]) -> Outputs:
        n = metrics["count/tokens"]
        clip = [f"clip_ratio/{name}_mean" for name in ("low", "high", "region")]
        head = [metrics["token_sum/ratio"] / n, metrics["min/ratio"], metrics["max/ratio"]]
        return _stacked([*head, *(metrics[f"token_sum/{name}"] / n for name in ("approx_kl", *clip, "kl"))])

    inputs = (logprob, old, ref, advantage, mask)
    ours, truth = partial(flat, losses.policy_loss), partial(flat, reference_losses.policy_loss)
    yield from _loss_problems(case, inputs, ours, peers.policy_loss, truth, means, device)


def advantage_regression(case: Case, device: torch.device) -> Iterator[Problem]:
    B, T = case.shape["B"], case.shape["T"]
    logprob = -torch.rand(B, T, device=device) * 3
    anchor, advantage, mask, ids = _loss_inputs(B, T, logprob, 0.1).values()

    def flat(regression: Callable, logprob, anchor, advantage, mask) -> tuple:
        return regression(logprob.flatten(), anchor.flatten(), advantage, mask.flatten(), ids, 0.1)

    def means(metrics: dict[str, Tensor]) -> Outputs:
        names = ("residual_sq", "log_ratio", "log_ratio_sq", "abs_fit", "abs_advantage")
        return _stacked([metrics[f"segment_sum/{name}"] / metrics["count/segments"] for name in names])

    inputs = (logprob, anchor, advantage, mask)
    ours, truth = partial(flat, losses.advantage_regression), partial(flat, reference_losses.advantage_regression)
    yield from _loss_problems(case, inputs, ours, partial(peers.advantage_regression, beta=0.1), truth, means, device)


# -- packed attention


def _packings(G: int, prompt: int, completion: int) -> tuple[Segments, Segments, Tensor]:
    """A group with one copy of its prompt; with one a member; and where the second's tokens lie in the first."""
    starts = prompt + completion * torch.arange(G)
    shared = Segments(
        start=torch.cat([torch.zeros(1, dtype=torch.int64), starts]),
        length=torch.tensor([prompt] + [completion] * G),
        prefix_start=torch.zeros(G + 1, dtype=torch.int64),
        prefix_length=torch.tensor([0] + [prompt] * G),
    )
    length = prompt + completion
    unshared = Segments(start=length * torch.arange(G), length=torch.full((G,), length))
    within = torch.arange(length)
    index = torch.where(within < prompt, within, starts[:, None] + within - prompt)
    return shared, unshared, index.flatten()


def packed_attention(case: Case, device: torch.device) -> Iterator[Problem]:
    """A group's prompt stored once against copied for each member.

    The unshared rows get the output's gradient of the prompt on the first copy alone; then the sums of the copies'
    gradients are the shared ones.
    """
    G, prompt, completion, heads, kv_heads, width = case.shape.values()
    scale, length = width**-0.5, prompt + completion
    shared, unshared, index = _packings(G, prompt, completion)
    index = index.to(device)
    T = shared.num_tokens
    q, k, v, upstream = (
        torch.randn(T, n, width, device=device).to(case.dtype) for n in (heads, kv_heads, kv_heads, heads)
    )
    copies = tuple(x[index] for x in (q, k, v))
    repeated = upstream[index].view(G, length, heads, width)
    repeated[1:, :prompt] = 0
    repeated = repeated.flatten(0, 1)

    def ours(q: Tensor, k: Tensor, v: Tensor, segments: Segments = shared) -> Tensor:
        return ops.packed_attention(q, k, v, segments, scale)

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.view(G, length, -1, width).transpose(1, 2) for x in (q, k, v))
        return peers.causal_sdpa(q, k, v, scale).transpose(1, 2).flatten(0, 1)

    functions: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], Tensor]] = {
        OURS: (ours, (q, k, v), upstream),
        "fastcollab, unshared": (partial(ours, segments=unshared), copies, repeated),
        "SDPA, unshared": (sdpa, copies, repeated),
    }
    missing = {}
    if reason := peers.no_flash(device, case.dtype):
        missing["flash-attn, unshared"] = reason
    else:
        ends = torch.arange(0, G * length + 1, length, dtype=torch.int32, device=device)
        functions["flash-attn, unshared"] = (peers.flash_packed(ends, length, scale), copies, repeated)

    def folded(results: Outputs) -> Outputs:
        """Outputs as they lie in the shared packing, gradients summed over the copies."""
        out, *grads = results
        sums = [empty_rows(x).index_add_(0, index, x.float()) for x in grads]
        return empty_rows(out).index_copy_(0, index, out.float()), *sums

    def empty_rows(x: Tensor) -> Tensor:
        return x.new_zeros((T, *x.shape[1:]), dtype=torch.float32)

    def forward(name: str) -> Outputs:
        function, inputs, _ = functions[name]
        with torch.no_grad():
            return (function(*inputs),)

    def both(name: str) -> Outputs:
        function, inputs, given = functions[name]
        leaves = _leaf(*inputs)
        return _grad(function(*leaves), leaves, given)

    def truth(phase: str) -> Outputs:
        leaves = _leaf(*(x.float() for x in copies))
        return folded(_grad(sdpa(*leaves), leaves, repeated.float())[: 1 if phase == "forward" else None])

    pairs = prompt * (prompt + 1) / 2 + G * completion * (prompt + (completion + 1) / 2)
    work, moved = 4.0 * heads * width * pairs, float(2 * q.nbytes + k.nbytes + v.nbytes)
    view = {name: folded for name in functions if name != OURS}
    for phase, run, times in (("forward", forward, 1.0), ("forward + backward", both, 3.5)):
        calls = {name: partial(run, name) for name in functions}
        yield Problem(case, phase, times * work, 2 * moved if run is both else moved, partial(truth, phase), calls,
                      missing, view)  # fmt: skip
