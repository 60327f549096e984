"""LFM2 with experts (Liquid AI, 2025)."""

from toolkit.models.architectures.lfm2 import Lfm2Fields, lfm2_decoder, mlp
from toolkit.models.config.model_config import Size
from toolkit.models.describe import Correction, Decoder, Mix
from toolkit.models.parts import gated_experts
from toolkit.weights.source import Source

ARCHITECTURES = ("Lfm2MoeForCausalLM",)


class Config(Lfm2Fields, kw_only=True):
    hidden_size: Size = 2048
    intermediate_size: Size = 7168
    moe_intermediate_size: Size = 1792
    num_dense_layers: int = 2
    """The first layers have an MLP, the others experts."""
    num_experts: Size = 32
    num_experts_per_tok: Size = 4
    norm_topk_prob: bool = True
    use_expert_bias: bool = True
    routed_scaling_factor: float = 1.0


def describe(config: Config) -> Decoder:
    def feed_forward(name: str, index: int) -> Mix:
        if index < config.num_dense_layers:
            return mlp(name, config.intermediate_size)
        count = config.num_experts
        bias = Correction(f"{name}.expert_bias", (count,)) if config.use_expert_bias else None
        parts = {"gate": 1, "down": 2, "up": 3}
        sources = {one: Source(f"{name}.experts.{{}}.w{n}") for one, n in parts.items()}
        return gated_experts(
            config,
            name,
            (count, config.num_experts_per_tok),
            size=config.moe_intermediate_size,
            scores="sigmoid",
            renormalizes=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
            correction=bias,
            **sources,
        )

    return lfm2_decoder(config, feed_forward)
