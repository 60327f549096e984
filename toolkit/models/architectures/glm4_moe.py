"""GLM-4.5 and 4.6 (GLM-4.5 Team, 2025, arXiv:2508.06471): experts chosen by balanced sigmoids."""

from dataclasses import replace
from typing import Any

from toolkit.models.architectures.llama import llama_layer
from toolkit.models.config.model_config import DecoderConfig, Size
from toolkit.models.describe import Correction, Decoder, HeadNorm, Layer
from toolkit.models.parts import decoder, draft_layer, gated_experts, gated_mlp, rms_norm

ARCHITECTURES = ("Glm4MoeForCausalLM", "Glm4MoeModel")


class Config(DecoderConfig, kw_only=True):
    vocab_size: Size = 151552
    intermediate_size: Size = 10944
    num_hidden_layers: Size = 46
    num_attention_heads: Size = 96
    num_key_value_heads: Size | None = 8
    max_position_embeddings: Size = 131072
    rms_norm_eps: float = 1e-5
    partial_rotary_factor: float | None = 0.5
    attention_bias: bool = False
    use_qk_norm: bool = False
    n_routed_experts: Size = 128
    num_experts_per_tok: Size = 8
    moe_intermediate_size: Size = 1408
    n_shared_experts: Size = 1
    first_k_dense_replace: int = 1  # first layers, which have an MLP
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_group: Size = 1
    topk_group: Size = 1
    num_nextn_predict_layers: int = 1
    num_mtp_layers: int | None = None
    """Layers after the last, which only draft: the method mtp reads one. Two spellings."""

    def __post_init__(self) -> None:
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        if self.num_mtp_layers is None:
            self.num_mtp_layers = self.num_nextn_predict_layers
        self.num_nextn_predict_layers = self.num_mtp_layers
        super().__post_init__()


def describe(config: Config) -> Decoder:
    def layer(name: str, index: int) -> Layer:
        attn, mlp = f"{name}.self_attn", f"{name}.mlp"
        options: dict[str, Any] = {"bias": config.attention_bias}
        if config.use_qk_norm:
            options["norm"] = HeadNorm(f"{attn}.q_norm", f"{attn}.k_norm", config.rms_norm_eps)
        if index >= config.first_k_dense_replace:
            shared = gated_mlp(config, f"{mlp}.shared_experts")
            options["mlp"] = gated_experts(
                config,
                mlp,
                (config.n_routed_experts, config.num_experts_per_tok),
                size=config.moe_intermediate_size,
                scores="sigmoid",
                renormalizes=config.norm_topk_prob,
                scale=config.routed_scaling_factor,
                num_groups=config.n_group,
                num_chosen_groups=config.topk_group,
                correction=Correction(
                    f"{mlp}.gate.e_score_correction_bias", (config.n_routed_experts,)
                ),
                routes_in_float32=True,
                shared=replace(shared, size=config.moe_intermediate_size * config.n_shared_experts),
            )
        return llama_layer(config, name, **options)

    index = config.num_hidden_layers
    name, drafting = f"model.layers.{index}", None
    if config.num_nextn_predict_layers:
        drafting = draft_layer(config, name, layer(name, index))
    norm = rms_norm(config, "model.norm")
    return decoder(config, layer, norm, unused=(f"{name}.",), draft_layer=drafting)
