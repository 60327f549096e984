"""StarCoder and SantaCoder (Li et al., 2023): GPT-2 with one head of keys and values."""

from typing import ClassVar

from toolkit.models.architectures import gpt2
from toolkit.models.config.model_config import Size, require
from toolkit.models.describe import Decoder
from toolkit.weights.source import consecutive, grouped

ARCHITECTURES = ("GPTBigCodeForCausalLM", "GPTBigCodeModel")


class Config(gpt2.Config, kw_only=True):
    fixed: ClassVar[dict[str, tuple[object, ...]]] = {"validate_runner_input": (True, False)}

    activation_function: str = "gelu_pytorch_tanh"
    multi_query: bool = True
    num_key_value_heads: Size | None = None  # follows from multi_query


def describe(config: Config) -> Decoder:
    require(config, add_cross_attention=(False,), scale_attn_by_inverse_layer_idx=(False,))
    heads, size = config.n_head, config.n_embd // config.n_head
    require(config, num_key_value_heads=(None, 1 if config.multi_query else heads))
    if config.multi_query:
        return gpt2.gpt2_decoder(config, 1, consecutive(heads * size, size, size))
    return gpt2.gpt2_decoder(config, heads, grouped(heads, size, size, size))
