"""Mixtral (Jiang et al., 2024, arXiv:2401.04088): Mistral's decoder with experts."""

from toolkit.models.architectures import mistral
from toolkit.models.architectures.llama import llama_layer
from toolkit.models.describe import Decoder, Layer
from toolkit.models.model_config import Size
from toolkit.models.parts import decoder, gated_experts, rms_norm
from toolkit.weights.source import Source

ARCHITECTURES = ("MixtralForCausalLM", "MixtralModel")


class Config(mistral.Config, kw_only=True):
    default_theta = 1e6

    rms_norm_eps: float = 1e-5
    sliding_window: int | None = None
    num_local_experts: Size = 8
    num_experts_per_tok: Size = 2


def describe(config: Config) -> Decoder:
    def layer(name: str, index: int) -> Layer:
        block = f"{name}.block_sparse_moe"
        names = {"gate": "w1", "down": "w2", "up": "w3"}
        sources = {part: Source(f"{block}.experts.{{}}.{own}") for part, own in names.items()}
        experts = gated_experts(
            config,
            block,
            (config.num_local_experts, config.num_experts_per_tok),
            size=config.intermediate_size,
            renormalizes=True,
            **sources,
        )
        return llama_layer(config, name, mlp=experts, window=config.window(index))

    return decoder(config, layer, rms_norm(config, "model.norm"))
