"""Qwen3.5's and 3.6's decoder with experts (Qwen Team, 2026)."""

from collections.abc import Mapping
from typing import ClassVar

from toolkit.models.architectures.qwen3_5_text import plain_net
from toolkit.models.architectures.qwen3_next import (
    HybridConfig,
    find_stacks,
    hybrid_decoder,
    shared_experts,
)
from toolkit.models.config.model_config import Size
from toolkit.models.describe import Decoder

ARCHITECTURES = ("Qwen3_5MoeForCausalLM",)


class Config(HybridConfig, kw_only=True):
    vocab_size: Size = 248320
    num_hidden_layers: Size = 40
    num_experts: Size = 256
    num_experts_per_tok: Size = 8
    moe_intermediate_size: Size = 512
    shared_expert_intermediate_size: Size = 512
    norm_topk_prob: bool = True  # whatever the file says
    are_stacked: bool = True
    """All experts of a layer are one tensor. Not in the file."""
    drafts_are_stacked: bool = True  # those of layers that draft. Not in the file

    reads_shapes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.norm_topk_prob = True

    def read_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.are_stacked, self.drafts_are_stacked = find_stacks(shapes)


def describe(config: Config) -> Decoder:
    return hybrid_decoder(
        config, lambda name: plain_net(config, name), lambda name, _: shared_experts(config, name)
    )
