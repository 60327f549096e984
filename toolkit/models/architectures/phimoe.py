"""Phi-3.5-MoE (Abdin et al., 2024): experts chosen by SparseMixer, layer norms, LongRoPE."""

from typing import ClassVar

from toolkit.models.architectures.mixtral import mixtral_experts
from toolkit.models.config.model_config import Size, WindowedConfig, require
from toolkit.models.describe import Decoder, Head, Layer
from toolkit.models.parts import attention, decoder, layer_norm, pre_norm

ARCHITECTURES = ("PhimoeForCausalLM", "PhiMoEForCausalLM", "PhimoeModel")


class Config(WindowedConfig, kw_only=True):
    default_theta = 1e6
    fixed: ClassVar[dict[str, tuple[object, ...]]] = {"router_jitter_noise": (0.01,)}

    vocab_size: Size = 32064
    intermediate_size: Size = 6400
    num_key_value_heads: Size | None = 8
    max_position_embeddings: Size = 131072
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    lm_head_bias: bool = False
    num_local_experts: Size = 16
    num_experts_per_tok: Size = 2
    input_jitter_noise: float = 0.0  # of training

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, num_experts_per_tok=(2,))


def describe(config: Config) -> Decoder:
    eps = config.rms_norm_eps

    def layer(name: str, index: int) -> Layer:
        bias, window = config.attention_bias, config.window(index)
        return pre_norm(
            attention(
                config,
                f"{name}.self_attn",
                bias=bias,
                out_bias=bias,
                rope=config.rope(),
                window=window,
            ),
            layer_norm(config, f"{name}.input_layernorm", eps),
            mixtral_experts(
                config, f"{name}.block_sparse_moe", scores="sparsemixer", renormalizes=False
            ),
            layer_norm(config, f"{name}.post_attention_layernorm", eps),
        )

    head = Head(bias=config.lm_head_bias)
    return decoder(config, layer, layer_norm(config, "model.norm", eps), head=head)
