"""The attention function that drives any causal LM of ``transformers``: it reads the batch from a keyword argument.

``model(..., fastcollab=context)`` reaches :func:`attend` once per layer, untouched by the model's code. The context
says what to do with the layer's q, k, v: :class:`PagedContext` appends to pages and attends over them (generation),
:class:`PackedContext` attends within packed segments, with autograd (training). :class:`using` switches a model to
this function around one forward and back, so that nobody else ever meets it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fastcollab import ops
from fastcollab.reference.packed import Segments

NAME = "fastcollab"
_FIELD = "_attn_implementation_internal"  # the field under the property, whose setter walks every sub-config
_UNSET: Any = object()


class UnsupportedModelError(ValueError):
    """A model whose architecture can't be driven by one attention function; the message names it and says why."""


class Context(Protocol):
    """What the keyword ``fastcollab`` holds: the batch of one forward."""

    def attend(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int,
        softcap: float,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attention of one layer: q [T,H,Dk], k [T,Hkv,Dk], v [T,Hkv,Dv] (strided views) -> [T,H,Dv]."""
        ...


@dataclass(slots=True)
class PagedContext:
    """One generation forward over block pools. R rows, T new tokens, arguments of ``ops.paged_attention``."""

    pools: Any  # .k[layer], .v[layer]: Tensor [num_blocks, block_size, Hkv, D]
    slot_mapping: Tensor  # int32 [T]
    block_table: Tensor  # int32 [R, B]
    q_indptr: Tensor  # int32 [R+1]
    kv_len: Tensor  # int32 [R], counted after the append

    def attend(self, module, q, k, v, scale, window, softcap, sinks):
        layer = module.layer_idx
        return ops.paged_attention(
            q,
            k,
            v,
            self.pools.k[layer],
            self.pools.v[layer],
            self.slot_mapping,
            self.block_table,
            self.q_indptr,
            self.kv_len,
            scale,
            window,
            softcap,
            sinks,
        )


@dataclass(slots=True)
class PackedContext:
    """One training forward over packed segments. No side effect: gradient checkpointing calls it twice."""

    segments: Segments

    def attend(self, module, q, k, v, scale, window, softcap, sinks):
        return ops.packed_attention(q, k, v, self.segments, scale, window, softcap, sinks)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = _UNSET,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    fastcollab: Context | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """The function behind ``attn_implementation="fastcollab"``.

    query [1,H,T,Dk], key [1,Hkv,T,Dk], value [1,Hkv,T,Dv] -> (output [1,T,H,Dv], None); with a batch above 1 and a
    context, ``ValueError``. Dropout is ignored: our forwards run in evaluation mode. A call without a context is not
    ours and goes to SDPA, unless it comes from inside :class:`using`, where it means that the model lost the keyword.
    """
    if fastcollab is None:
        if using.depth:
            raise UnsupportedModelError(
                f"{type(module).__name__}: called attention without the keyword fastcollab, need it passed through"
            )
        given = {k: v for k, v in (("softcap", softcap), ("s_aux", s_aux), ("sinks", sinks)) if v is not None}
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **given, **kwargs)
    if query.shape[0] != 1:
        raise ValueError(f"input_ids: got a batch of {query.shape[0]}, need one packed row [1, T]")
    if sliding_window is _UNSET:
        sliding_window = getattr(module, "sliding_window", None)
    out = fastcollab.attend(
        module,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window or 0,
        softcap or 0.0,
        sinks if s_aux is None else s_aux,
    )
    return out.unsqueeze(0), None


# No mask function is registered: without one, create_causal_mask returns None early instead of building [T, T].
AttentionInterface.register(NAME, attend)


class using:
    """Context manager: ``hf_model`` attends through :func:`attend` inside, and as before outside, even after an error.

    Only a private field of each of its config objects is written (2 us), so a second model that shares a config object,
    ``generate`` and ``save_pretrained`` meet the user's implementation. May be nested and used again. Not for two
    threads that share a config object. ``implementation`` names another registered function, for comparisons.
    """

    __slots__ = ("_configs", "_ours", "_implementation", "_saved")
    depth = 0  # forwards of ours in flight, over all models
    _cache: WeakKeyDictionary[nn.Module, list[dict]] = WeakKeyDictionary()

    def __init__(self, hf_model: nn.Module, implementation: str = NAME):
        configs = using._cache.get(hf_model)
        if configs is None:
            found = {
                id(c): c for m in hf_model.modules() if isinstance(c := getattr(m, "config", None), PreTrainedConfig)
            }
            configs = [vars(c) for c in found.values() if _FIELD in vars(c)]
            if not configs:
                raise UnsupportedModelError(
                    f"{type(hf_model).__name__}: got no config with an attention implementation, need one"
                )
            using._cache[hf_model] = configs
        self._configs, self._implementation, self._ours = configs, implementation, implementation == NAME
        self._saved: list[list[Any]] = []

    def __enter__(self) -> using:
        self._saved.append([config[_FIELD] for config in self._configs])
        for config in self._configs:
            config[_FIELD] = self._implementation
        using.depth += self._ours
        return self

    def __exit__(self, *error: object) -> None:
        using.depth -= self._ours
        for config, value in zip(self._configs, self._saved.pop(), strict=True):
            config[_FIELD] = value
