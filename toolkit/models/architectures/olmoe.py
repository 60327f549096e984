"""OLMoE (Muennighoff et al., 2024, arXiv:2409.02060): experts, QK norm over all heads, clipping."""

from toolkit.models.architectures.llama import llama_layer
from toolkit.models.config.model_config import DecoderConfig, Size
from toolkit.models.describe import Decoder, HeadNorm, Layer
from toolkit.models.parts import decoder, gated_experts, rms_norm

ARCHITECTURES = ("OlmoeForCausalLM", "OlmoeModel")


class Config(DecoderConfig, kw_only=True):
    vocab_size: Size = 50304
    hidden_size: Size = 2048
    intermediate_size: Size = 2048
    num_hidden_layers: Size = 16
    num_attention_heads: Size = 16
    max_position_embeddings: Size = 4096
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    clip_qkv: float | None = None
    num_experts: Size = 64
    num_local_experts: Size | None = None  # other spelling of `num_experts`; read that
    num_experts_per_tok: Size = 8
    norm_topk_prob: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_experts = self.num_local_experts = self.num_local_experts or self.num_experts


def describe(config: Config) -> Decoder:
    def layer(name: str, index: int) -> Layer:
        attn, bias = f"{name}.self_attn", config.attention_bias
        experts = gated_experts(
            config,
            f"{name}.mlp",
            (config.num_experts, config.num_experts_per_tok),
            size=config.intermediate_size,
            renormalizes=config.norm_topk_prob,
        )
        return llama_layer(
            config,
            name,
            mlp=experts,
            bias=bias,
            out_bias=bias,
            norm=HeadNorm(f"{attn}.q_norm", f"{attn}.k_norm", config.rms_norm_eps, "all"),
            clip=config.clip_qkv or 0.0,
        )

    return decoder(config, layer, rms_norm(config, "model.norm"))
