"""Llama 4, text only (Meta, 2025): attention in chunks, and experts whose inputs are weighed."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from toolkit.models.architectures.llama import llama_layer
from toolkit.models.config.model_config import DecoderConfig, Size, checked_layer_types
from toolkit.models.describe import Decoder, Experts, HeadNorm, Layer, QueryScaling, Rope
from toolkit.models.parts import (
    decoder,
    expert_stacks,
    gated_experts,
    gated_mlp,
    interleaved,
    rms_norm,
)
from toolkit.weights.source import Source

ARCHITECTURES = ("Llama4ForCausalLM", "Llama4TextModel")


class Config(DecoderConfig, kw_only=True):
    default_theta: ClassVar[float] = 500000.0
    reads_shapes: ClassVar[bool] = True

    vocab_size: Size = 202048
    hidden_size: Size = 5120
    intermediate_size: Size = 8192  # of an expert
    intermediate_size_mlp: Size = 16384  # of layers without experts
    num_hidden_layers: Size = 48
    num_attention_heads: Size = 40
    num_key_value_heads: Size | None = 8
    head_dim: Size | None = 128
    max_position_embeddings: Size = 131072
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    num_local_experts: Size = 16
    num_experts_per_tok: Size = 1
    moe_layers: list[int] | None = None  # layers with experts
    interleave_moe_layer_step: Size = 1  # distance of these layers, without such a list
    use_qk_norm: bool = True  # in layers that rotate
    no_rope_layers: list[int] | None = None  # 1 for layers that rotate, else 0
    no_rope_layer_interval: Size = 4
    attention_chunk_size: Size | None = 8192
    layer_types: list[str] | None = None  # `chunked_attention` or `full_attention`
    attn_temperature_tuning: bool | int = True  # queries of layers that do not rotate are scaled
    floor_scale: Size = 8192
    attn_scale: float = 0.1
    has_separate_experts: bool = False  # each has tensors of its own. Not in the file

    def __post_init__(self) -> None:
        super().__post_init__()
        every, count = self.no_rope_layer_interval, self.num_hidden_layers
        if not self.no_rope_layers:
            self.no_rope_layers = [int((i + 1) % every != 0) for i in range(count)]
        if len(self.no_rope_layers) < count:
            raise ValueError(
                f"no_rope_layers has {len(self.no_rope_layers)} entries for {count} layers"
            )
        if self.layer_types is None:
            kinds = "full_attention", "chunked_attention"
            self.layer_types = [kinds[bool(one)] for one in self.no_rope_layers[:count]]
        self.layer_types = checked_layer_types(self.layer_types, count, "chunked_attention")
        if self.moe_layers is None:
            step = self.interleave_moe_layer_step
            self.moe_layers = list(range(step - 1, count, step))

    def read_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.has_separate_experts = any(".feed_forward.experts.0." in name for name in shapes)


def describe(config: Config) -> Decoder:
    assert config.head_dim is not None
    rotates, kinds = config.no_rope_layers or [], config.layer_types or []
    scaled = None
    if config.attn_temperature_tuning:
        scaling = QueryScaling(config.attn_scale, config.floor_scale, offset=1)
        scaled = Rope.unrotated(config.head_dim, config.max_position_embeddings, scaling)

    def layer(name: str, index: int) -> Layer:
        options: dict[str, Any] = {"rope": scaled}
        if rotates[index]:
            options = {"rope": config.rope(), **interleaved(config, f"{name}.self_attn")}
            if config.use_qk_norm:
                options["norm"] = HeadNorm(None, None, config.rms_norm_eps, is_last=True)
        if kinds[index] == "chunked_attention":
            options["chunk"] = config.attention_chunk_size or 0
        block = f"{name}.feed_forward"
        mlp = replace(gated_mlp(config, block), size=config.intermediate_size_mlp)
        bias = config.attention_bias
        return llama_layer(
            config,
            name,
            mlp=_experts(config, block) if index in (config.moe_layers or []) else mlp,
            bias=bias,
            out_bias=bias,
            **options,
        )

    return decoder(config, layer, rms_norm(config, "model.norm"))


def _experts(config: Config, name: str) -> Experts:
    stacks = expert_stacks(f"{name}.experts", config.intermediate_size, transpose=True)
    return gated_experts(
        config,
        name,
        (config.num_local_experts, config.num_experts_per_tok),
        size=config.intermediate_size,
        router=Source(f"{name}.router"),
        scores="sigmoid",
        weighs_inputs=True,
        shared=gated_mlp(config, f"{name}.shared_expert"),
        **({} if config.has_separate_experts else stacks),
    )
