"""Granite 3 with experts (Granite Team, 2024): each projection of all experts is one tensor."""

from toolkit.models.architectures import granite
from toolkit.models.architectures.granite import granite_decoder
from toolkit.models.config.model_config import Size, require
from toolkit.models.describe import MLP, Decoder, Experts
from toolkit.models.parts import gated_experts
from toolkit.weights.source import Source, consecutive

ARCHITECTURES = ("GraniteMoeForCausalLM", "GraniteMoeModel")


class Config(granite.Config, kw_only=True):
    num_local_experts: Size = 8
    num_experts_per_tok: Size = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, mlp_bias=(False,))


def describe(config: Config) -> Decoder:
    return granite_decoder(config, lambda name: granite_experts(config, name))


def granite_experts(config: Config, name: str, shared: MLP | None = None) -> Experts:
    """Describe the experts of a layer."""
    block, size = f"{name}.block_sparse_moe", config.intermediate_size
    gate, up = (Source(f"{block}.input_linear", rows) for rows in consecutive(size, size))
    return gated_experts(
        config,
        block,
        (config.num_local_experts, config.num_experts_per_tok),
        size=size,
        renormalizes=True,
        router=Source(f"{block}.router.layer"),
        gate=gate,
        up=up,
        down=Source(f"{block}.output_linear"),
        shared=shared,
    )
