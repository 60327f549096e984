"""Mixtral (Jiang et al., 2024, arXiv:2401.04088): Mistral's decoder with experts."""

from typing import Any

from toolkit.models.architectures import mistral
from toolkit.models.architectures.llama import llama_layer
from toolkit.models.config.model_config import Size
from toolkit.models.describe import Decoder, Experts, Layer
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
        experts = mixtral_experts(config, f"{name}.block_sparse_moe")
        return llama_layer(config, name, mlp=experts, window=config.window(index))

    return decoder(config, layer, rms_norm(config, "model.norm"))


def mixtral_experts(config: Any, name: str, **options: Any) -> Experts:
    """Describe experts with Mixtral's names. `options`: other fields of `Experts`."""
    names = {"gate": "w1", "down": "w2", "up": "w3"}
    sources = {part: Source(f"{name}.experts.{{}}.{own}") for part, own in names.items()}
    return gated_experts(
        config,
        name,
        (config.num_local_experts, config.num_experts_per_tok),
        **{"size": config.intermediate_size, "renormalizes": True, **sources, **options},
    )
