"""Descriptions of drafters that read a model's hidden states. Imports no torch.

EAGLE (Li et al., 2024, arXiv:2401.15077) and EAGLE-3 (Li et al., 2025, arXiv:2503.01840). Position
p is computed from token p + 1 and the model's hidden states at p; for drafts, from what the network
itself computed for the position before."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from toolkit.models.architectures.llama import Config
from toolkit.models.describe import (
    Attention,
    Branch,
    Decoder,
    DraftLayer,
    Layer,
    Norm,
    Rope,
    memory_of,
    mixes_of,
)
from toolkit.models.memory import Memory
from toolkit.models.parts import attention, gated_mlp, pre_norm, rms_norm

TAPS = "eagle_aux_hidden_state_layer_ids"
EAGLE_TENSORS = frozenset({"fc.weight"})
EAGLE3_TENSORS = frozenset({"fc.weight", "midlayer.hidden_norm.weight", "d2t"})
"""Tensors by which a layout is known. Random weights have these."""
_NESTED = "transformer_layer_config", "eagle_config"
"""Objects in config.json that have some of its fields: the speculators library and NVIDIA's Model
Optimizer write them."""


@dataclass(frozen=True, slots=True)
class Eagle:
    """The network of a drafter: fc, layers and, in EAGLE-3, a norm and an output head."""

    hidden_size: int
    vocab_size: int  # of the model
    layers: tuple[Layer, ...]
    has_bias: bool  # of fc

    @property
    def memory(self) -> list[Memory]:
        return memory_of(self.layers)

    @property
    def ropes(self) -> list[Rope]:
        return [rope for mix in mixes_of(self.layers) for rope in mix.ropes]


@dataclass(frozen=True, slots=True)
class OwnLayer(Eagle):
    """A layer of the model's own checkpoint, which drafts. fc is its product."""

    own: DraftLayer
    others: tuple[str, ...]  # parts of the names of the checkpoint's other tensors
    axes: tuple[int, ...]  # see `Decoder.axes`


@dataclass(frozen=True, slots=True)
class Eagle3(Eagle):
    """Its layer reads the norms of embedding and hidden state, one after the other."""

    taps: tuple[int, ...]  # layers of the model before which it reads the residual stream
    embed_norm: Norm
    hidden_norm: Norm
    norm: Norm
    draft_vocab_size: int
    has_embedding: bool  # False: it reads the model's
    has_map: bool  # from its tokens to the model's
    residual_is_norm: bool  # the residual stream begins with the norm of the hidden state


def describe_own_layer(model: Decoder) -> OwnLayer | None:
    """Describe the layer of a model that drafts, as a network. None if it has none."""
    own = model.draft_layer
    if own is None:
        return None
    layers = (f"{model.layers_name}.{index}." for index in range(len(model.layers)))
    unused = (name for name in model.unused if not f"{own.name}.".startswith(name))
    others = f"{model.embed}.", f"{model.norm.name}.", *layers, *own.others, *unused
    return OwnLayer(
        model.hidden_size, model.vocab_size, (own.layer,), False, own, others, model.axes
    )


def describe_eagle(
    raw: Mapping[str, Any], tensors: Collection[str], num_layers: int, *, is_third: bool
) -> Eagle:
    """Describe a drafter by its config.json and the names of its tensors.

    `num_layers`: of the model. Raises ValueError if it is unsupported."""
    fields = dict(raw)
    for name in _NESTED:
        if isinstance(nested := raw.get(name), dict):
            fields = {**fields, "architectures": raw.get("architectures"), **nested}
    fields["architectures"] = list(fields.get("architectures") or ["Eagle"])
    try:
        config = msgspec.convert(fields, Config)
    except msgspec.ValidationError as error:
        raise ValueError(str(error).replace("`$.", "`")) from None
    found_third = any(name.endswith(".hidden_norm.weight") for name in tensors)
    if "fc.weight" not in tensors:
        raise ValueError("it has no tensor fc.weight: its layout is not that of EAGLE")
    if is_third != found_third:
        versions = ("EAGLE", "eagle"), ("EAGLE-3", "eagle3")
        name, method = versions[found_third]
        raise ValueError(f"it is a drafter of {name}: use the method {method}")
    return _eagle3(config, fields, tensors, num_layers) if is_third else _eagle(config, tensors)


def _attention(config: Config, name: str, tensors: Collection[str]) -> Attention:
    return attention(
        config,
        f"{name}.self_attn",
        rope=config.rope(),
        bias=f"{name}.self_attn.q_proj.bias" in tensors,
        out_bias=f"{name}.self_attn.o_proj.bias" in tensors,
    )


def _eagle(config: Config, tensors: Collection[str]) -> Eagle:
    def layer(name: str, norm: Norm | None) -> Layer:
        attn, mlp = _attention(config, name, tensors), gated_mlp(config, f"{name}.mlp")
        after = rms_norm(config, f"{name}.post_attention_layernorm")
        return ((Branch(attn, norm),), (Branch(mlp, after),))

    names = [f"layers.{index}" for index in range(config.num_hidden_layers)]
    norms = [None, *(rms_norm(config, f"{name}.input_layernorm") for name in names[1:])]
    layers = tuple(layer(name, norm) for name, norm in zip(names, norms, strict=True))
    return Eagle(config.hidden_size, config.vocab_size, layers, "fc.bias" in tensors)


def _eagle3(
    config: Config, fields: Mapping[str, Any], tensors: Collection[str], num_layers: int
) -> Eagle3:
    if config.num_hidden_layers != 1:
        raise ValueError(f"num_hidden_layers is {config.num_hidden_layers}, and tk supports 1")
    name = "midlayer" if any(one.startswith("midlayer.") for one in tensors) else "layers.0"
    taps = fields.get(TAPS) or (2, num_layers // 2, num_layers - 3)
    if not all(isinstance(one, int) and 0 <= one < num_layers for one in taps):
        raise ValueError(f"it reads layers {list(taps)}, and the model has {num_layers}")
    hidden_norm = rms_norm(config, f"{name}.hidden_norm")
    layer = pre_norm(
        _attention(config, name, tensors),
        hidden_norm,
        gated_mlp(config, f"{name}.mlp"),
        rms_norm(config, f"{name}.post_attention_layernorm"),
    )
    draft_size, has_map = fields.get("draft_vocab_size") or config.vocab_size, "d2t" in tensors
    if draft_size != config.vocab_size and not has_map:
        raise ValueError("it has no tensor d2t, the model's tokens for its own")
    return Eagle3(
        config.hidden_size,
        config.vocab_size,
        (layer,),
        "fc.bias" in tensors,
        taps=tuple(taps),
        embed_norm=rms_norm(config, f"{name}.input_layernorm"),
        hidden_norm=hidden_norm,
        norm=rms_norm(config, "norm"),
        draft_vocab_size=int(draft_size),
        has_embedding="embed_tokens.weight" in tensors,
        has_map=has_map,
        residual_is_norm=bool(fields.get("norm_before_residual")),
    )
