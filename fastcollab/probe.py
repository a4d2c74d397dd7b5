"""The start-up probe: whether a model really goes where our attention function sends it, or a refusal with the reason.

Four forwards of at most 12 tokens, without gradient. What is read off the config alone is checked first.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from fastcollab.attention import PackedContext, UnsupportedModelError, using
from fastcollab.reference.packed import Segments

TOLERANCE = 1e-5  # of log-probs in fp32
_BATCH_ROPE = ("dynamic", "longrope")
_STATE = ("conv", "linear_attention", "mamba", "hybrid", "hybrid_sliding", "recurrent")
_PLAIN = ("full_attention", "sliding_attention", "attention")


class LayerSpec(NamedTuple):
    """What one layer asks of its pages and of the attention operator."""

    kv_heads: int
    k_width: int
    v_width: int
    window: int  # 0: full attention


@dataclass
class _Recorder(PackedContext):
    """A packed batch that also writes down which layer asked for what."""

    calls: list[tuple[int, LayerSpec]] = field(default_factory=list)

    def attend(self, module, q, k, v, scale, window, softcap, sinks):
        self.calls.append((getattr(module, "layer_idx", -1), LayerSpec(k.shape[1], k.shape[2], v.shape[2], window)))
        return super().attend(module, q, k, v, scale, window, softcap, sinks)


def refuse(module: torch.nn.Module, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{type(module).__name__}: {reason}")


def check_config(module: torch.nn.Module) -> None:
    """Refuse what the config and the signature already tell: batch-dependent rope, state, chunks, no positions."""
    config: PreTrainedConfig = module.config.get_text_config(decoder=True)
    for kind in _rope_types(config):
        if kind in _BATCH_ROPE:
            raise refuse(
                module,
                f"got rope_type {kind!r}, whose frequencies depend on the longest row of the batch; need a fixed one",
            )
    for kind in getattr(config, "layer_types", None) or ():
        if kind in _STATE:
            raise refuse(
                module,
                f"got a layer of type {kind!r}, whose recurrent or convolutional state leaks across packed rows",
            )
        if kind not in _PLAIN:
            raise refuse(module, f"got a layer of type {kind!r}, need full_attention or sliding_attention")
    if not module._supports_attention_backend:
        raise refuse(
            module,
            "it does not support transformers' attention interface (its class says so), so ours would be bypassed",
        )
    parameters = inspect.signature(module.forward).parameters
    if "position_ids" not in parameters or not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise refuse(
            module,
            "its forward takes no position_ids or no extra keywords, so packed rows can't be told to its attention",
        )
    if module.base_model is module:
        raise refuse(
            module,
            f"got no decoder under {module.base_model_prefix!r}, need one that returns the last hidden state",
        )


def probe(model: Any) -> list[LayerSpec]:
    """Drive ``model`` (a ``Model`` being loaded); return what each layer needs or raise :class:`UnsupportedModelError`.

    Shows, on its own weights: the decoder and our head equal the model's own logits; one attention call per layer with
    our keyword; a row packed second equals the row alone and the model's own forward. Nothing in the module changes.
    """
    module, device = model.module, model.device
    a, b = (torch.arange(n, device=device) * 7919 % model.vocab_size for n in (5, 7))
    b = b.flip(0)
    first, second = (torch.arange(len(x), device=device) for x in (a, b))

    # eager is each architecture's definition: SDPA drops soft caps and sinks in some versions
    with torch.no_grad(), model.quiet, using(module, "eager"):
        own = module(input_ids=b[None], position_ids=second[None])[0].squeeze(0).float()
        headed = model.logits(model.last_hidden(b, second)).float()
    _compare(module, headed, own, "its logits are not head(hidden)")

    with torch.no_grad(), model.driven:
        recorder = _Recorder(_segments(5, 7))
        packed = model.logits(model.last_hidden(torch.cat([a, b]), torch.cat([first, second]), recorder))[5:].float()
        layers = _layers(module, recorder.calls)
        alone = model.logits(model.last_hidden(b, second, PackedContext(_segments(7)))).float()

    own, alone, packed = (x.log_softmax(-1) for x in (own, alone, packed))
    _compare(module, alone, own, "its log-probs through our attention function are not its own")
    _compare(module, packed, alone, "a packed row sees its neighbours through a state or lost positions")
    return layers


def _compare(module: torch.nn.Module, got: Tensor, need: Tensor, reason: str) -> None:
    """Refuse unless both [n, V] agree: in the largest difference; with 16-bit noise in the tails, in each row's RMS."""
    eps, diff = torch.finfo(module.dtype).eps, got - need
    if eps < 1e-6:
        gap, limit = diff.abs().max().item(), TOLERANCE * need.abs().max().clamp(min=1).item()
    else:
        gap, limit = diff.square().mean(-1).max().sqrt().item(), 16 * eps * need.std().item()
    if not gap <= limit:
        raise refuse(module, f"{reason}: got a difference of {gap:.3g}, need <= {limit:.3g}")


def _layers(module: torch.nn.Module, calls: list[tuple[int, LayerSpec]]) -> list[LayerSpec]:
    """One call per layer, in any order, and the window that the config announces."""
    config = module.config.get_text_config(decoder=True)
    need, got = config.num_hidden_layers, sorted(layer for layer, _ in calls)
    if not got:
        raise refuse(module, "its attention bypasses transformers' attention interface: got 0 calls of ours")
    if got != list(range(need)):
        raise refuse(module, f"got attention calls from layers {got}, need exactly one from each of {need} layers")
    specs = [spec for _, spec in sorted(calls)]
    window = getattr(config, "sliding_window", None) or 0
    types = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * need
    for layer, (spec, kind) in enumerate(zip(specs, types, strict=True)):
        if spec.window != (window if kind == "sliding_attention" else 0):
            raise refuse(
                module,
                f"layer {layer} ({kind}) asked for window {spec.window}, need the config's sliding_window {window}",
            )
    return specs


def _segments(*lengths: int) -> Segments:
    length = torch.tensor(lengths)
    zero = torch.zeros_like(length)
    return Segments(length.cumsum(0) - length, length, zero, zero)


def _rope_types(config: PreTrainedConfig) -> Iterator[str]:
    """Every rope type of a config: flat, or one per layer type."""
    stack = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            yield str(item.get("rope_type", item.get("type", "default")))
            stack.extend(item.values())
