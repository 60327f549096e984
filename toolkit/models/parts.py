"""Parts of descriptions that many decoders share, under the names of their checkpoints."""

from collections.abc import Callable
from typing import Any

from toolkit.models.describe import (
    MLP,
    Attention,
    Branch,
    Decoder,
    DraftLayer,
    Experts,
    Layer,
    Mix,
    Norm,
)
from toolkit.weights.source import Source, by_head, consecutive, pairs_apart


def attention(config: Any, name: str, *, output: str = "o_proj", **options: Any) -> Attention:
    """Describe attention with separate projections named {q,k,v}_proj. `options`: other fields."""
    size = config.head_dim
    sources = {part: Source(f"{name}.{part}_proj") for part in "qkv"} | {
        "out": Source(f"{name}.{output}")
    }
    given = {"scale": size**-0.5, **sources, **options}
    return Attention(config.num_attention_heads, config.num_key_value_heads, size, **given)


def interleaved(config: Any, name: str, rotary_size: int | None = None) -> dict[str, Any]:
    """Return `q` and `k` of attention that rotates adjacent pairs of the first entries of a head.

    `rotary_size`: number of these entries; None: all."""
    entries = pairs_apart(config.head_dim, rotary_size)
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    return {
        part: Source(f"{name}.{part}_proj", by_head(None, number, entries))
        for part, number in heads.items()
    }


def gated_mlp(config: Any, name: str, *, bias: bool = False) -> MLP:
    """Describe an MLP with projections named gate_proj, up_proj and down_proj."""
    gate, up, down = (Source(f"{name}.{part}_proj") for part in ("gate", "up", "down"))
    return MLP(config.intermediate_size, config.hidden_act, up, down, gate, bias)


def gated_experts(config: Any, name: str, counts: tuple[int, int], **options: Any) -> Experts:
    """Describe experts with projections named gate_proj, up_proj and down_proj.

    `counts`: of all experts, and of those chosen for a token; `options`: other fields of `Experts`,
    and those with other values."""
    num_experts, num_chosen = counts
    given = {
        "num_experts": num_experts,
        "num_chosen": num_chosen,
        "activation": config.hidden_act,
        "router": Source(f"{name}.gate"),
        **{one: Source(f"{name}.experts.{{}}.{one}_proj") for one in ("gate", "up", "down")},
        **options,
    }
    return Experts(**given)


def expert_stacks(name: str, size: int, *, transpose: bool = False) -> dict[str, Source]:
    """Return the sources of experts of which all gates and ups are one tensor, and all downs.

    transpose: they are [in, out]."""
    gate, up = (
        Source(f"{name}.gate_up_proj", order, transpose, is_bare=True)
        for order in consecutive(size, size)
    )
    down = Source(f"{name}.down_proj", transpose=transpose, is_bare=True)
    return {"gate": gate, "up": up, "down": down}


def rms_norm(config: Any, name: str, **options: Any) -> Norm:
    return Norm(name, config.hidden_size, config.rms_norm_eps, **options)


def layer_norm(config: Any, name: str | None, eps: float, **options: Any) -> Norm:
    given = {"has_bias": True, **options}
    return Norm(name, config.hidden_size, eps, is_centered=True, **given)


def pre_norm(attn: Mix, attn_norm: Norm, mlp: Mix, mlp_norm: Norm) -> Layer:
    """Describe a layer of attention and MLP, each after a norm."""
    return ((Branch(attn, attn_norm),), (Branch(mlp, mlp_norm),))


def decoder(config: Any, layer: Callable[[str, int], Layer], norm: Norm, **options: Any) -> Decoder:
    """Describe a decoder with Llama's names. `layer`: describes one, given its name and index."""
    given = {
        "embed": "model.embed_tokens",
        "layers_name": "model.layers",
        "max_positions": config.max_positions,
        **options,
    }
    name = given["layers_name"]
    return Decoder(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=[layer(f"{name}.{i}", i) for i in range(config.num_hidden_layers)],
        norm=norm,
        is_tied=config.tie_word_embeddings,
        **given,
    )


def draft_layer(config: Any, name: str, layer: Layer) -> DraftLayer:
    """Describe a layer that drafts, with DeepSeek-V3's names."""
    return DraftLayer(
        name=name,
        layer=layer,
        embed_norm=rms_norm(config, f"{name}.enorm"),
        hidden_norm=rms_norm(config, f"{name}.hnorm"),
        product=Source(f"{name}.eh_proj"),
        norm=rms_norm(config, f"{name}.shared_head.norm"),
        unread=("embed_tokens.weight", "shared_head.head.weight"),
    )
