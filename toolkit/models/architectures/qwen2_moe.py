"""Qwen1.5-MoE and Qwen2-MoE (Yang et al., 2024): Qwen2's decoder with experts, one is shared."""

from dataclasses import replace

from toolkit.models.architectures import qwen2
from toolkit.models.architectures.llama import llama_layer
from toolkit.models.config.model_config import Size
from toolkit.models.describe import Decoder, Layer
from toolkit.models.parts import decoder, gated_experts, gated_mlp, rms_norm
from toolkit.weights.source import Source

ARCHITECTURES = ("Qwen2MoeForCausalLM", "Qwen2MoeModel")


class Config(qwen2.Config, kw_only=True):
    hidden_size: Size = 2048
    intermediate_size: Size = 5632
    num_hidden_layers: Size = 24
    num_attention_heads: Size = 16
    num_key_value_heads: Size | None = 16
    qkv_bias: bool = True
    num_experts: Size = 60
    num_local_experts: Size | None = None  # other spelling of `num_experts`; read that
    num_experts_per_tok: Size = 4
    moe_intermediate_size: Size = 1408
    shared_expert_intermediate_size: Size = 5632
    norm_topk_prob: bool = False
    decoder_sparse_step: Size = 1
    """Every so manyth layer has experts, the others an MLP. So do those of `mlp_only_layers`."""
    mlp_only_layers: list[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_experts = self.num_local_experts = self.num_local_experts or self.num_experts

    def is_windowed(self, index: int) -> bool:
        return index % 2 == 0 and index < self.max_window_layers

    def has_experts(self, index: int) -> bool:
        is_dense = index in (self.mlp_only_layers or ())
        return not is_dense and (index + 1) % self.decoder_sparse_step == 0


def describe(config: Config) -> Decoder:
    def layer(name: str, index: int) -> Layer:
        mlp = f"{name}.mlp"
        experts = gated_experts(
            config,
            mlp,
            (config.num_experts, config.num_experts_per_tok),
            size=config.moe_intermediate_size,
            renormalizes=config.norm_topk_prob,
            shared=replace(
                gated_mlp(config, f"{mlp}.shared_expert"),
                size=config.shared_expert_intermediate_size,
            ),
            shared_gate=Source(f"{mlp}.shared_expert_gate"),
        )
        return llama_layer(
            config,
            name,
            mlp=experts if config.has_experts(index) else None,
            bias=config.qkv_bias,
            window=config.window(index),
        )

    return decoder(config, layer, rms_norm(config, "model.norm"))
