"""ERNIE 4.5 with experts (Baidu, 2025): the dense model's decoder, with a balanced router."""

from dataclasses import replace
from typing import ClassVar

from toolkit.models.architectures import ernie4_5
from toolkit.models.architectures.llama import llama_layer
from toolkit.models.config.model_config import Size
from toolkit.models.describe import Correction, Decoder, Head, Layer
from toolkit.models.parts import decoder, gated_experts, gated_mlp, interleaved, rms_norm

ARCHITECTURES = ("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeModel")


class Config(ernie4_5.Config, kw_only=True):
    fixed: ClassVar[dict[str, tuple[object, ...]]] = {
        **ernie4_5.Config.fixed,
        "moe_gate": ("topk",),
        "moe_use_aux_free": (True,),
        "moe_norm_min": (1e-12,),  # of the sum that scores are divided by
    }

    hidden_size: Size = 2560
    intermediate_size: Size = 12288
    num_hidden_layers: Size = 28
    num_attention_heads: Size = 20
    num_key_value_heads: Size | None = 4
    head_dim: Size | None = None
    moe_num_experts: Size = 64
    moe_k: Size = 6
    moe_intermediate_size: Size = 1536
    moe_num_shared_experts: int = 2
    moe_layer_start_index: int = 1
    moe_layer_end_index: int = -1  # -1: the last
    moe_layer_interval: Size = 1
    moe_capacity: list[int] | None = None  # of training

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.moe_layer_end_index == -1:
            self.moe_layer_end_index = self.num_hidden_layers - 1

    def has_experts(self, index: int) -> bool:
        is_inside = self.moe_layer_start_index <= index <= self.moe_layer_end_index
        return is_inside and (index + 1) % self.moe_layer_interval == 0


def describe(config: Config) -> Decoder:
    def layer(name: str, index: int) -> Layer:
        bias, mlp, shared = config.use_bias, f"{name}.mlp", None
        if config.moe_num_shared_experts:
            size = config.moe_intermediate_size * config.moe_num_shared_experts
            shared = replace(gated_mlp(config, f"{mlp}.shared_experts", bias=bias), size=size)
        experts = gated_experts(
            config,
            mlp,
            (config.moe_num_experts, config.moe_k),
            size=config.moe_intermediate_size,
            renormalizes=True,
            correction=Correction(
                f"{mlp}.moe_statics.e_score_correction_bias", (1, config.moe_num_experts)
            ),
            routes_in_float32=True,
            shared=shared,
        )
        return llama_layer(
            config,
            name,
            mlp=experts if config.has_experts(index) else None,
            mlp_bias=bias,
            bias=bias,
            out_bias=bias,
            **interleaved(config, f"{name}.self_attn"),
        )

    norm, head = rms_norm(config, "model.norm"), Head(bias=config.use_bias)
    return decoder(config, layer, norm, head=head, unused=("mtp_",))
