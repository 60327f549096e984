"""Decoder of Qwen3-VL with experts (Bai et al., 2025): Qwen3-MoE's, whose experts are stacked."""

from collections.abc import Mapping
from typing import ClassVar

from toolkit.models.architectures import qwen3_moe
from toolkit.models.config.model_config import Size
from toolkit.models.describe import Decoder
from toolkit.models.parts import expert_stacks

ARCHITECTURES = ("Qwen3VLMoeForCausalLM",)


class Config(qwen3_moe.Config, kw_only=True):
    default_theta: ClassVar[float] = 500000.0
    intermediate_size: Size = 5632
    num_attention_heads: Size = 16
    num_key_value_heads: Size | None = 16
    num_experts: Size = 60
    num_experts_per_tok: Size = 4
    moe_intermediate_size: Size = 1408
    max_position_embeddings: Size = 128000
    tie_word_embeddings: bool = True
    norm_topk_prob: bool = True  # whatever the file says
    are_transposed: bool = True
    """Experts are [in, out], as in published files; Transformers also writes [out, in]. Not in the
    file."""

    reads_shapes: ClassVar[bool] = True

    def read_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        wanted = 2 * self.moe_intermediate_size, self.hidden_size
        for name, shape in shapes.items():
            if name.endswith("experts.gate_up_proj"):
                self.are_transposed = shape[1:] != wanted
                return


def describe(config: Config) -> Decoder:
    size, transpose = config.moe_intermediate_size, config.are_transposed
    return qwen3_moe.describe(config, lambda name: expert_stacks(name, size, transpose=transpose))
