"""gpt-oss (OpenAI, 2025, arXiv:2508.10925): sinks, windows in turn, experts with clamped gates."""

import math
from typing import ClassVar

from toolkit.kernels.gates import ClampedSwiGLU
from toolkit.models.architectures.llama import llama_layer
from toolkit.models.config.model_config import Size, WindowedConfig, require
from toolkit.models.describe import Decoder, Layer
from toolkit.models.parts import decoder, gated_experts, rms_norm
from toolkit.weights.source import RowOrder, Source

ARCHITECTURES = ("GptOssForCausalLM", "GptOssModel")
ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Rotation of configs that have none."""


class Config(WindowedConfig, kw_only=True):
    default_theta = 150000.0
    fixed: ClassVar[dict[str, tuple[object, ...]]] = {"initial_context_length": (4096,)}

    vocab_size: Size = 201088
    hidden_size: Size = 2880
    intermediate_size: Size = 2880
    num_hidden_layers: Size = 36
    num_attention_heads: Size = 64
    num_key_value_heads: Size | None = 8
    head_dim: Size | None = 64
    max_position_embeddings: Size = 131072
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = 128
    attention_bias: bool = True
    num_local_experts: Size = 128
    num_experts_per_tok: Size = 4
    experts_per_token: Size | None = None  # old spelling
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    has_separate_experts: bool = False  # each has tensors of its own, as in GGUF

    def __post_init__(self) -> None:
        if not (self.rope_parameters or self.rope_scaling):
            self.rope_parameters = dict(ROPE)
        super().__post_init__()
        self.num_experts_per_tok = self.experts_per_token or self.num_experts_per_tok
        require(self, hidden_act=("silu",))
        if not 0 < self.swiglu_limit < math.inf:
            raise ValueError(f"swiglu_limit must be positive; it is {self.swiglu_limit:g}")
        if self.layer_types is None:
            kinds = ("sliding_attention", "full_attention")
            self.layer_types = [kinds[index % 2] for index in range(self.num_hidden_layers)]


def describe(config: Config) -> Decoder:
    def layer(name: str, index: int) -> Layer:
        block, attn = f"{name}.mlp", f"{name}.self_attn"
        stacks = {} if config.has_separate_experts else _stacks(config, f"{block}.experts")
        experts = gated_experts(
            config,
            block,
            (config.num_local_experts, config.num_experts_per_tok),
            size=config.intermediate_size,
            activation=ClampedSwiGLU(config.swiglu_limit, config.swiglu_alpha),
            renormalizes=True,
            bias=True,
            router=Source(f"{block}.router"),
            **stacks,
        )
        return llama_layer(
            config,
            name,
            mlp=experts,
            bias=config.attention_bias,
            out_bias=config.attention_bias,
            sinks=f"{attn}.sinks",
            window=config.window(index),
        )

    return decoder(config, layer, rms_norm(config, "model.norm"))


def _stacks(config: Config, name: str) -> dict[str, Source]:
    """Return the sources of all experts: rows of gate and up are in turn, in one tensor."""
    both = 2 * config.intermediate_size
    gate, up = (
        Source(f"{name}.gate_up_proj", RowOrder(both, range(nth, both, 2)), True, is_bare=True)
        for nth in range(2)
    )
    down = Source(f"{name}.down_proj", transpose=True, is_bare=True)
    return {"gate": gate, "up": up, "down": down}
