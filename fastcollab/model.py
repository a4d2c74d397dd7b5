"""The model: a causal LM of ``transformers``, unmodified, driven token by token or packed, and left as it was."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from fastcollab.attention import Context, PackedContext, UnsupportedModelError, using
from fastcollab.config import require
from fastcollab.probe import LayerSpec, check_config, probe, refuse
from fastcollab.reference.packed import Segments

__all__ = ["Head", "LayerSpec", "Model", "UnsupportedModelError"]


class Head(NamedTuple):
    """What ``linear_logprob`` needs: logits = h @ weight.T + bias, then softcap * tanh(logits / softcap)."""

    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    softcap: float | None


class Quiet:
    """Context manager: every submodule in evaluation mode (no dropout, no router jitter), adapters off if asked.

    Each is back as it was afterwards. Cheap when nothing has to change. May be nested.
    """

    def __init__(self, module: nn.Module, adapters: list[nn.Module]):
        self._modules, self._adapters = list(module.modules()), adapters
        self._saved: list[tuple[list[nn.Module], list[nn.Module]]] = []

    def __enter__(self) -> Quiet:
        training = [m for m in self._modules if m.training]
        active = [m for m in self._adapters if not m._disable_adapters]
        self._saved.append((training, active))
        for m in training:
            vars(m)["training"] = False  # nn.Module.__setattr__ takes ten times as long
        for m in active:
            vars(m)["_disable_adapters"] = True
        return self

    def __exit__(self, *error: object) -> None:
        training, active = self._saved.pop()
        for m in training:
            vars(m)["training"] = True
        for m in active:
            vars(m)["_disable_adapters"] = False


class Driven:
    """Context manager: :class:`Quiet` and ``using`` together, what every forward of ours runs in."""

    def __init__(self, quiet: Quiet, attention: using):
        self._quiet, self._attention = quiet, attention

    def __enter__(self) -> Driven:
        self._quiet.__enter__()
        self._attention.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._attention.__exit__()
        self._quiet.__exit__()

    def replay(self, function, *args):
        """Call ``function`` driven, whenever that is: a checkpointed layer runs again in the backward."""
        with self:
            return function(*args)


class Model:
    """One set of weights that generates (:meth:`decode`) and trains (:meth:`hidden`, :meth:`head`).

    Args:
        name: what errors and statistics call it.
        source: a path or hub id, a ``PreTrainedModel``, or a ``peft`` model. Several Models may share one.
        tokenizer: kept as an attribute; default: the one saved beside a path, or None. Its EOS id counts where neither
            the generation config nor the config names one.
        device: where to move it; default: where it is, or for a path CUDA if present.
        adapter: "on", or "off" for the same weights without their LoRA (the frozen base of a trained senior).
        init_kwargs: for ``from_pretrained``, where source is a path; the dtype is the checkpoint's unless given.

    Attributes: module (the HF model), peft (its wrapper or None), tokenizer, layers (one LayerSpec each), eos_ids,
    max_length (None: unlimited), vocab_size (logit width), weight_bytes, dtype, device.
    Raises ``UnsupportedModelError`` naming the architecture and the reason.
    """

    def __init__(
        self,
        name: str,
        source: str | os.PathLike | nn.Module,
        *,
        tokenizer: Any = None,
        device: torch.device | str | None = None,
        adapter: str = "on",
        init_kwargs: dict | None = None,
    ):
        require(adapter in ("on", "off"), "adapter", adapter, '"on" or "off"')
        self.name, self.adapter = name, adapter
        if not isinstance(source, nn.Module):
            if tokenizer is None and _has_tokenizer(source):
                tokenizer = AutoTokenizer.from_pretrained(source)
            source = AutoModelForCausalLM.from_pretrained(source, **{"dtype": "auto", **(init_kwargs or {})})
            device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if device is not None:
            source.to(device)
        self.peft = source if hasattr(source, "get_base_model") and hasattr(source, "peft_config") else None
        self.module: PreTrainedModel = source.get_base_model() if self.peft is not None else source
        require(isinstance(self.module, PreTrainedModel), name, type(self.module).__name__, "a transformers causal LM")
        check_config(self.module)
        self.tokenizer = tokenizer

        self._base = self.module.base_model
        self._head = _linear_head(self.module)
        config = self.module.config.get_text_config(decoder=True)
        self._scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
        self._softcap = getattr(config, "final_logit_softcapping", None)
        self.vocab_size: int = self._head.weight.shape[0]
        self.dtype, self.device = self.module.dtype, self.module.device
        self.max_length: int | None = getattr(config, "max_position_embeddings", None)
        self.eos_ids = _eos_ids(self.module, tokenizer)

        adapters = [m for m in self.module.modules() if hasattr(m, "_disable_adapters")]
        if self.peft is not None and not adapters:
            kinds = sorted(str(c.peft_type.value) for c in self.peft.peft_config.values())
            raise refuse(
                self.module, f"got a peft model of type {kinds}, need one whose layers sit inside it, such as LoRA"
            )
        if adapter == "off":
            require(
                len(adapters) > 0, "adapter", "off", f"a model with an adapter, not {type(self.module).__name__} alone"
            )
            merged = any(getattr(m, "merged", False) for m in adapters)
            require(not merged, "adapter", "off with merged weights", "unmerge_adapter() first")
        self._foreign = _adapter_parameters(adapters) if adapter == "off" else frozenset()
        self._bumps = 0
        self._tuned = [m for m in adapters if adapter == "on" and hasattr(m, "merged")]
        self._adapters_seen = self._adapter_state()
        _LIVE.add(self)
        self.quiet = Quiet(self.module, adapters if adapter == "off" else [])
        self.driven = Driven(self.quiet, using(self.module))
        self._checkpointable = [m for m in self.module.modules() if isinstance(m, GradientCheckpointingLayer)]
        self.layers: list[LayerSpec] = probe(self)

    def __repr__(self) -> str:
        size = f"{self.weight_bytes / 1e6:.1f} MB"
        return f"Model({self.name!r}, {type(self.module).__name__}, {size}, adapter={self.adapter!r})"

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a forward may read, tied ones once."""
        return sum(p.nbytes for p in self.parameters())

    @property
    def version(self) -> int:
        """Grows with every change of a weight in place (optimiser step, ``load_state_dict``) and every :meth:`bump`."""
        adapters = self._adapter_state()
        if adapters != self._adapters_seen:  # another adapter, or a merged one: other weights without a write
            self._adapters_seen = adapters
            self._bumps += 1
        return self._bumps + sum(p._version for p in self.parameters())

    def _adapter_state(self) -> tuple:
        return tuple((tuple(m.active_adapters), m.merged) for m in self._tuned[:1])

    def bump(self) -> None:
        """Say that the weights changed in a way that torch does not count (``param.data = ...``)."""
        self._bumps += 1

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that this model's output depends on (without the adapter's where it is off)."""
        return [p for p in self.module.parameters() if id(p) not in self._foreign]

    def last_hidden(self, input_ids: Tensor, position_ids: Tensor, context: Context | None = None) -> Tensor:
        """The decoder alone: ids, positions int64 [T] -> what the head takes [T, D]. Call it inside ``self.driven``."""
        out = self._base(
            input_ids=input_ids.unsqueeze(0),
            position_ids=position_ids.unsqueeze(0),
            use_cache=False,
            fastcollab=context,
        )
        h = out[0].squeeze(0)
        return h if self._scale == 1 else h * self._scale

    def logits(self, h: Tensor) -> Tensor:
        """The head alone: [n, D] -> [n, vocab_size], from the same weights as :meth:`head`."""
        z = nn.functional.linear(h, self._head.weight, self._head.bias)
        return z if self._softcap is None else torch.tanh(z / self._softcap) * self._softcap

    def decode(
        self, input_ids: Tensor, position_ids: Tensor, context: Context, logit_index: Tensor | None = None
    ) -> Tensor:
        """One generation forward, without autograd, in evaluation mode.

        input_ids, position_ids: int64 [T], the new tokens of all rows, packed. context: a ``PagedContext``, whose pools
        receive their K/V. logit_index: int64 [n], the tokens whose logits are wanted (None: all). -> [n, vocab_size] in
        the model's dtype (an inference tensor).
        """
        with torch.inference_mode(), self.driven:
            h = self.last_hidden(input_ids, position_ids, context)
            return self.logits(h if logit_index is None else h.index_select(0, logit_index))

    def hidden(self, input_ids: Tensor, position_ids: Tensor, segments: Segments) -> Tensor:
        """One training forward over packed segments: ids, positions int64 [T] -> h [T, D] with autograd.

        ``head()`` turns h into log-probs. Every module is in evaluation mode meanwhile, so that dropout and router
        jitter are off and the arithmetic is that of :meth:`decode`; gradient checkpointing, which transformers ties to
        training mode, is applied here to the layers where it is enabled, and replays them in the same state.
        """
        marked = [m for m in self._checkpointable if m.gradient_checkpointing] if torch.is_grad_enabled() else []
        with self.driven:
            own = [vars(layer).get("forward") for layer in marked]  # None unless somebody hooked the instance
            for layer in marked:
                vars(layer)["forward"] = partial(self._checkpointed, layer, layer.forward)
            try:
                return self.last_hidden(input_ids, position_ids, PackedContext(segments))
            finally:
                for layer, forward in zip(marked, own, strict=True):
                    del vars(layer)["forward"]
                    if forward is not None:
                        vars(layer)["forward"] = forward

    def _checkpointed(self, layer: GradientCheckpointingLayer, forward, *args, **kwargs):
        run = partial(forward, **kwargs)
        return layer._gradient_checkpointing_func(partial(self.driven.replay, run), *args)

    def head(self) -> Head:
        """The live head weights, for ``linear_logprob``; that they give the model's own logits is probed at load."""
        return Head(self._head.weight, self._head.bias, self._softcap)


_LIVE: WeakSet[Model] = WeakSet()


def _count_fused_steps(optimiser: torch.optim.Optimizer, *_: object) -> None:
    # Fused optimisers write parameters without counting it in their _version.
    stepped = {id(p) for group in optimiser.param_groups if group.get("fused") for p in group["params"]}
    for model in _LIVE if stepped else ():
        if not stepped.isdisjoint(map(id, model.parameters())):
            model.bump()


register_optimizer_step_post_hook(_count_fused_steps)


def _has_tokenizer(source: str | os.PathLike) -> bool:
    folder = os.fspath(source)
    return not os.path.isdir(folder) or any(
        os.path.exists(os.path.join(folder, f"tokenizer{end}")) for end in (".json", "_config.json", ".model")
    )


def _linear_head(module: PreTrainedModel) -> nn.Linear:
    head = module.get_output_embeddings()
    if hasattr(head, "_disable_adapters"):
        raise refuse(
            module,
            f"got an adapter on its head ({type(head).__name__}), need lm_head in no target_modules or modules_to_save",
        )
    if not isinstance(head, nn.Linear):
        raise refuse(module, f"got a head of type {type(head).__name__}, need nn.Linear")
    return head


def _eos_ids(module: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    for holder in (module.generation_config, module.config.get_text_config(decoder=True), tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)
    return ()


def _adapter_parameters(adapters: list[nn.Module]) -> frozenset[int]:
    """Ids of the parameters that adapters add to the module."""
    kept = {
        id(p)
        for m in adapters
        for part in ("base_layer", "original_module")
        if hasattr(m, part)
        for p in getattr(m, part).parameters()
    }
    return frozenset(id(p) for m in adapters for p in m.parameters()) - kept
