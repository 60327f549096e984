"""Granite 3 with experts, one of which computes every token."""

from toolkit.models.architectures import granitemoe
from toolkit.models.architectures.granite import granite_decoder
from toolkit.models.architectures.granitemoe import granite_experts
from toolkit.models.describe import MLP, Decoder, Experts
from toolkit.weights.source import Source, consecutive

ARCHITECTURES = ("GraniteMoeSharedForCausalLM", "GraniteMoeSharedModel")


class Config(granitemoe.Config, kw_only=True):
    shared_intermediate_size: int = 0  # 0: no expert is shared


def describe(config: Config) -> Decoder:
    size = config.shared_intermediate_size

    def experts(name: str) -> Experts:
        if not size:
            return granite_experts(config, name)
        gate, up = (
            Source(f"{name}.shared_mlp.input_linear", rows) for rows in consecutive(size, size)
        )
        down = Source(f"{name}.shared_mlp.output_linear")
        return granite_experts(config, name, MLP(size, config.hidden_act, up, down, gate))

    return granite_decoder(config, experts)
