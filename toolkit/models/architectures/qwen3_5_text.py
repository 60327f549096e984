"""Qwen3.5's and 3.6's dense decoder (Qwen Team, 2026): Qwen3-Next's layers with MLPs."""

from typing import Any

from toolkit.models.architectures.qwen3_next import (
    HybridConfig,
    delta_net,
    hybrid_decoder,
    split_inputs,
)
from toolkit.models.config.model_config import Size
from toolkit.models.describe import Decoder, DeltaNet
from toolkit.models.parts import gated_mlp
from toolkit.weights.source import Source

ARCHITECTURES = ("Qwen3_5ForCausalLM",)


class Config(HybridConfig, kw_only=True):
    vocab_size: Size = 248320
    hidden_size: Size = 4096
    intermediate_size: Size = 12288
    num_key_value_heads: Size | None = 4


def describe(config: Config) -> Decoder:
    return hybrid_decoder(
        config, lambda name: plain_net(config, name), lambda name, _: gated_mlp(config, name)
    )


def plain_net(config: Any, name: str) -> DeltaNet:
    """Describe a delta net whose rates and gates are tensors of their own."""
    rates = {part: Source(f"{name}.in_proj_{part}") for part in "ba"}
    return delta_net(config, name, **split_inputs(config, name), **rates)
