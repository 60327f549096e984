"""MiniMax M2 (MiniMax, 2025): experts chosen by balanced sigmoids, QK norm over all heads."""

from typing import ClassVar

from toolkit.models.architectures.llama import llama_layer
from toolkit.models.architectures.mixtral import mixtral_experts
from toolkit.models.config.model_config import DecoderConfig, Size
from toolkit.models.describe import Correction, Decoder, HeadNorm, Layer
from toolkit.models.parts import decoder, rms_norm

ARCHITECTURES = ("MiniMaxM2ForCausalLM", "MiniMaxM2Model")


class Config(DecoderConfig, kw_only=True):
    default_theta = 5e6
    fixed: ClassVar[dict[str, tuple[object, ...]]] = {
        "scoring_func": ("sigmoid",),
        "use_routing_bias": (True,),
        "use_qk_norm": (True,),
        "qk_norm_type": ("per_layer",),
        "layernorm_full_attention_beta": (1.0,),
        "layernorm_linear_attention_beta": (1.0,),
        "layernorm_mlp_beta": (1.0,),
        "shared_moe_mode": ("sigmoid",),  # of shared experts, which no layer has
    }

    vocab_size: Size = 200064
    hidden_size: Size = 3072
    intermediate_size: Size = 1536
    num_hidden_layers: Size = 62
    num_attention_heads: Size = 48
    num_key_value_heads: Size | None = 8
    head_dim: Size | None = 128
    max_position_embeddings: Size = 196608
    rotary_dim: Size | None = None  # rotated entries of a head; old spelling of a factor
    num_local_experts: Size = 256
    num_experts_per_tok: Size = 8
    attn_type_list: list[int] | None = None  # of each layer. 1: softmax
    mlp_intermediate_size: int | None = None  # of MLPs, which no layer has
    use_mtp: bool = False
    mtp_transformer_layers: int = 1
    num_mtp_modules: int = 0
    """Modules after the last layer, which only draft and are not read."""

    def __post_init__(self) -> None:
        if self.rotary_dim and self.head_dim and self.partial_rotary_factor is None:
            self.partial_rotary_factor = self.rotary_dim / self.head_dim
        super().__post_init__()
        if set(self.attn_type_list or ()) - {1}:
            raise ValueError(f"attn_type_list is {self.attn_type_list}, and tk supports type 1")


def describe(config: Config) -> Decoder:
    def layer(name: str, index: int) -> Layer:
        attn, block = f"{name}.self_attn", f"{name}.block_sparse_moe"
        experts = mixtral_experts(
            config,
            block,
            scores="sigmoid",
            correction=Correction(f"{block}.e_score_correction_bias", (config.num_local_experts,)),
            routes_in_float32=True,
        )
        norm = HeadNorm(f"{attn}.q_norm", f"{attn}.k_norm", config.rms_norm_eps, "all")
        return llama_layer(config, name, mlp=experts, norm=norm)

    first, count = config.num_hidden_layers, config.num_mtp_modules
    drafting = tuple(f"model.layers.{index}." for index in range(first, first + count))
    return decoder(config, layer, rms_norm(config, "model.norm"), unused=drafting)
