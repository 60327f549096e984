"""Qwen3-Next (Qwen Team, 2025): gated delta nets, every fourth layer gated attention; experts."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from toolkit.models.config.model_config import DecoderConfig, Size, require
from toolkit.models.describe import (
    MLP,
    Attention,
    Decoder,
    DeltaNet,
    DraftLayer,
    Experts,
    HeadNorm,
    Layer,
    Mix,
    Norm,
)
from toolkit.models.parts import (
    attention,
    decoder,
    expert_stacks,
    gated_experts,
    gated_mlp,
    pre_norm,
    rms_norm,
)
from toolkit.weights.source import Source, consecutive, grouped

ARCHITECTURES = ("Qwen3NextForCausalLM",)
LINEAR, FULL = "linear_attention", "full_attention"
_DRAFTS = "mtp."
"""Beginning of the names of the tensors of layers that draft."""


class DeltaNetConfig(DecoderConfig, kw_only=True):
    """Fields of decoders with gated delta nets and attention."""

    attention_bias: bool = False
    layer_types: list[str] | None = None
    full_attention_interval: Size = 4
    """Every so manyth layer has attention. Not read if `layer_types` is given."""
    linear_conv_kernel_dim: Size = 4
    linear_key_head_dim: Size = 128
    linear_value_head_dim: Size = 128
    linear_num_key_heads: Size = 16
    linear_num_value_heads: Size = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, hidden_act=("silu",))
        every, count = self.full_attention_interval, self.num_hidden_layers
        if self.layer_types is None:
            self.layer_types = [FULL if not (i + 1) % every else LINEAR for i in range(count)]
        if unknown := sorted(set(self.layer_types) - {LINEAR, FULL}):
            raise ValueError(f"unsupported layer_types: {', '.join(unknown)}")
        if len(self.layer_types) != count:
            raise ValueError(f"layer_types has {len(self.layer_types)} entries for {count} layers")
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError(
                f"linear_num_value_heads ({self.linear_num_value_heads}) is not a multiple of "
                f"linear_num_key_heads ({self.linear_num_key_heads})"
            )
        if self.linear_conv_kernel_dim < 2:
            raise ValueError("linear_conv_kernel_dim is 1, and tk supports 2 and more")


class HybridConfig(DeltaNetConfig, kw_only=True):
    """Fields of decoders with gated delta nets and gated attention."""

    fixed: ClassVar[dict[str, tuple[object, ...]]] = {
        "attn_output_gate": (True,),
        "mamba_ssm_dtype": ("float32",),
    }

    hidden_size: Size = 2048
    num_attention_heads: Size = 16
    num_key_value_heads: Size | None = 2
    head_dim: Size | None = 256
    max_position_embeddings: Size = 32768
    partial_rotary_factor: float | None = 0.25
    mtp_num_hidden_layers: int = 1
    """Layers after the last, which only draft: the method mtp reads the first."""
    mtp_use_dedicated_embeddings: bool = False
    """True: layers that draft have an embedding table of their own."""


class Config(HybridConfig, kw_only=True):
    vocab_size: Size = 151936
    intermediate_size: Size = 5632
    num_hidden_layers: Size = 48
    num_experts: int = 512
    num_experts_per_tok: Size = 10
    moe_intermediate_size: Size = 512
    shared_expert_intermediate_size: Size = 512
    norm_topk_prob: bool = True
    decoder_sparse_step: Size = 1
    """Every so manyth layer has experts, the others an MLP. So do those of `mlp_only_layers`."""
    mlp_only_layers: list[int] | None = None
    num_nextn_predict_layers: int | None = None  # other spelling of `mtp_num_hidden_layers`
    has_split_inputs: bool = False
    """Inputs of delta nets are two tensors, q | k | v and z, by part (GGUF). Not in the file."""
    are_stacked: bool = False
    """All experts of a layer are one tensor, as Transformers has them. Not in the file."""
    drafts_are_stacked: bool = False  # those of layers that draft. Not in the file

    reads_shapes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_nextn_predict_layers is not None:
            self.mtp_num_hidden_layers = self.num_nextn_predict_layers

    def read_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.are_stacked, self.drafts_are_stacked = find_stacks(shapes)

    def has_experts(self, index: int) -> bool:
        is_dense = index in (self.mlp_only_layers or ()) or not self.num_experts
        return not is_dense and (index + 1) % self.decoder_sparse_step == 0


def describe(config: Config) -> Decoder:
    def mlp(name: str, index: int) -> MLP | Experts:
        return (
            shared_experts(config, name) if config.has_experts(index) else gated_mlp(config, name)
        )

    def net(name: str) -> DeltaNet:
        heads, group = config.linear_num_key_heads, _group(config)
        key, values = config.linear_key_head_dim, group * config.linear_value_head_dim
        if config.has_split_inputs:
            sources = split_inputs(config, name)
        else:
            orders = zip("qkvz", grouped(heads, key, key, values, values), strict=True)
            sources = {part: Source(f"{name}.in_proj_qkvz", order) for part, order in orders}
        b, a = (Source(f"{name}.in_proj_ba", order) for order in grouped(heads, group, group))
        return delta_net(config, name, **sources, b=b, a=a)

    return hybrid_decoder(config, net, mlp)


def hybrid_decoder(config: Any, net: Any, mlp: Any) -> Decoder:
    """Describe a decoder. net(name): a delta net; mlp(name, index): what follows."""

    def norm(name: str) -> Norm:
        return rms_norm(config, name, offset=1.0)

    def layer_of(name: str, mix: Mix, index: int) -> Layer:
        norms = norm(f"{name}.input_layernorm"), norm(f"{name}.post_attention_layernorm")
        return pre_norm(mix, norms[0], mlp(f"{name}.mlp", index), norms[1])

    def layer(name: str, index: int) -> Layer:
        is_linear = config.layer_types[index] == LINEAR
        mix = net(f"{name}.linear_attn") if is_linear else gated_attention(config, name)
        return layer_of(name, mix, index)

    drafting, name = None, f"{_DRAFTS}layers.0"
    if config.mtp_num_hidden_layers > 0:
        drafting = DraftLayer(
            name=_DRAFTS.rstrip("."),
            layer=layer_of(name, gated_attention(config, name), 0),
            embed_norm=norm(f"{_DRAFTS}pre_fc_norm_embedding"),
            hidden_norm=norm(f"{_DRAFTS}pre_fc_norm_hidden"),
            product=Source(f"{_DRAFTS}fc"),
            norm=norm(f"{_DRAFTS}norm"),
            unread=(),
            others=tuple(
                f"{_DRAFTS}layers.{nth}." for nth in range(1, config.mtp_num_hidden_layers)
            ),
            embed=f"{_DRAFTS}embed_tokens" if config.mtp_use_dedicated_embeddings else None,
            passes_norm=True,
        )
    return decoder(config, layer, norm("model.norm"), unused=(_DRAFTS,), draft_layer=drafting)


def gated_attention(config: Any, name: str) -> Attention:
    """Describe attention whose gate is in one tensor with the queries, head by head."""
    attn, bias = f"{name}.self_attn", config.attention_bias
    q, gate = grouped(config.num_attention_heads, config.head_dim, config.head_dim)
    norm = HeadNorm(f"{attn}.q_norm", f"{attn}.k_norm", config.rms_norm_eps, offset=1.0)
    return attention(
        config,
        attn,
        q=Source(f"{attn}.q_proj", q),
        gate=Source(f"{attn}.q_proj", gate),
        rope=config.rope(),
        norm=norm,
        bias=bias,
        out_bias=bias,
    )


def split_inputs(config: Any, name: str) -> dict[str, Source]:
    """Return the sources of a delta net whose queries, keys and values are one tensor."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    orders = zip("qkv", consecutive(keys, keys, values), strict=True)
    sources = {part: Source(f"{name}.in_proj_qkv", order) for part, order in orders}
    return sources | {"z": Source(f"{name}.in_proj_z")}


def delta_net(config: Any, name: str, **options: Any) -> DeltaNet:
    """Describe a gated delta net. `options`: sources of its inputs, and other fields."""
    given = {
        "out": Source(f"{name}.out_proj"),
        "convolutions": (f"{name}.conv1d",),
        "norm": f"{name}.norm",
        "eps": config.rms_norm_eps,
        **options,
    }
    return DeltaNet(
        num_k_heads=config.linear_num_key_heads,
        num_v_heads=config.linear_num_value_heads,
        k_size=config.linear_key_head_dim,
        v_size=config.linear_value_head_dim,
        width=config.linear_conv_kernel_dim,
        decay=f"{name}.A_log",
        time=f"{name}.dt_bias",
        **given,
    )


def shared_experts(config: Any, name: str) -> Experts:
    """Describe experts, and a gated one for all tokens."""
    size, is_draft = config.shared_expert_intermediate_size, name.startswith(_DRAFTS)
    is_stacked = config.drafts_are_stacked if is_draft else config.are_stacked
    return gated_experts(
        config,
        name,
        (config.num_experts, config.num_experts_per_tok),
        size=config.moe_intermediate_size,
        renormalizes=config.norm_topk_prob,
        shared=replace(gated_mlp(config, f"{name}.shared_expert"), size=size),
        shared_gate=Source(f"{name}.shared_expert_gate"),
        **(expert_stacks(f"{name}.experts", config.moe_intermediate_size) if is_stacked else {}),
    )


def find_stacks(names: Iterable[str]) -> tuple[bool, bool]:
    """Return whether all experts of a layer are one tensor: in the decoder, in layers that draft.

    names: of a checkpoint's tensors."""
    found = [name for name in names if name.endswith(".experts.gate_up_proj")]
    drafts = [name for name in found if name.startswith(_DRAFTS)]
    return len(found) > len(drafts), bool(drafts)


def _group(config: Any) -> int:
    return int(config.linear_num_value_heads // config.linear_num_key_heads)
