"""Gemma 4 (Gemma Team, 2026): larger heads without windows, inputs of layers, shared memory."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from toolkit.models.architectures.qwen3_next import find_stacks
from toolkit.models.config.model_config import Size, WindowedConfig
from toolkit.models.describe import (
    Attention,
    Branch,
    Decoder,
    ExpertsAndMLP,
    Head,
    HeadNorm,
    Layer,
    LayerInput,
    LayerInputs,
    Mix,
    Norm,
    Table,
)
from toolkit.models.parts import (
    attention,
    decoder,
    expert_stacks,
    gated_experts,
    gated_mlp,
    rms_norm,
)
from toolkit.weights.source import Source

ARCHITECTURES = ("Gemma4ForCausalLM", "Gemma4TextModel")
ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
    },
}
"""Rotations of configs that have none."""


class Config(WindowedConfig, kw_only=True):
    overflows_float16: bool = True

    vocab_size: Size = 262144
    hidden_size: Size = 2304
    intermediate_size: Size = 9216
    num_hidden_layers: Size = 30
    num_attention_heads: Size = 8
    num_key_value_heads: Size | None = 4
    head_dim: Size | None = 256
    hidden_activation: str = "gelu_pytorch_tanh"
    max_position_embeddings: Size = 131072
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    sliding_window: int | None = 512
    final_logit_softcapping: float | None = None
    global_head_dim: Size | None = 512
    num_global_key_value_heads: Size | None = None
    per_layer_config: dict[str, dict[str, Any]] | None = None
    """Fields of single layers, by an index that may begin with zeros. Transformers writes the two
    before so."""

    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: int = 256  # 0: layers have no inputs
    vocab_size_per_layer_input: Size = 262144
    enable_moe_block: bool = False
    num_experts: Size | None = None
    top_k_experts: Size | None = None
    moe_intermediate_size: Size | None = None
    are_stacked: bool = True
    """All experts of a layer are one tensor. Not in the file."""

    reads_shapes: ClassVar[bool] = True

    def read_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.are_stacked, _ = find_stacks(shapes)

    def __post_init__(self) -> None:
        self.hidden_act = self.hidden_activation
        if self.use_bidirectional_attention == "vision":  # of pictures alone
            self.use_bidirectional_attention = None
        if self.layer_types is None:
            kinds = ["sliding_attention"] * 5 + ["full_attention"]
            self.layer_types = [kinds[i % 6] for i in range(self.num_hidden_layers)]
        self.layer_types = [*self.layer_types[:-1], "full_attention"]
        if self.rope_parameters is None:
            self.rope_parameters = {kind: dict(rope) for kind, rope in ROPE.items()}
        super().__post_init__()
        if self.per_layer_config is None:
            larger: dict[str, Any] = {"head_dim": self.global_head_dim}
            if self.attention_k_eq_v and self.num_global_key_value_heads is not None:
                larger["num_key_value_heads"] = self.num_global_key_value_heads
            self.per_layer_config = {
                str(index): larger
                for index, kind in enumerate(self.layer_types)
                if kind == "full_attention"
            }
        self.per_layer_config = {
            index.lstrip("0") or "0": own for index, own in self.per_layer_config.items()
        }
        unknown = {name for own in self.per_layer_config.values() for name in own}
        if unknown := unknown - {"head_dim", "num_key_value_heads"}:
            raise ValueError(f"per_layer_config has {min(unknown)}, which tk does not know")
        if self.hidden_size_per_layer_input and self.vocab_size_per_layer_input < self.vocab_size:
            raise ValueError(
                f"vocab_size_per_layer_input ({self.vocab_size_per_layer_input}) is less than "
                f"vocab_size ({self.vocab_size})"
            )
        sizes = self.num_experts, self.top_k_experts, self.moe_intermediate_size
        if self.enable_moe_block and None in sizes:
            raise ValueError(
                "enable_moe_block is true without num_experts, top_k_experts or "
                "moe_intermediate_size"
            )

    def of_layer(self, index: int, name: str) -> int:
        """Return a field of a layer."""
        assert self.per_layer_config is not None
        value: int = self.per_layer_config.get(str(index), {}).get(name) or getattr(self, name)
        return value

    def source(self, index: int) -> int | None:
        """Return the layer whose keys and values a layer reads; None: its own."""
        assert self.layer_types is not None
        first = self.num_hidden_layers - self.num_kv_shared_layers
        if index < first:
            return None
        kind = self.layer_types[index]
        if kind not in self.layer_types[: max(0, first)]:
            raise ValueError(
                f"num_kv_shared_layers is {self.num_kv_shared_layers}: no layer before them has "
                f"{kind}"
            )
        return max(i for i in range(first) if self.layer_types[i] == kind)


def describe(config: Config) -> Decoder:
    eps = config.rms_norm_eps

    def layer(name: str, index: int) -> Layer:
        before, after, mlp_before, mlp_after = (
            rms_norm(config, f"{name}.{part}_layernorm")
            for part in ("input", "post_attention", "pre_feedforward", "post_feedforward")
        )
        mlp, steps = _mlp(config, name, index, mlp_before), []
        steps.append(Branch(_attention(config, f"{name}.self_attn", index), before, after))
        steps.append(Branch(mlp, None if config.enable_moe_block else mlp_before, mlp_after))
        if size := config.hidden_size_per_layer_input:
            gate, out = f"{name}.per_layer_input_gate", f"{name}.per_layer_projection"
            mix = LayerInput(index, size, config.hidden_act, Source(gate), Source(out))
            steps.append(Branch(mix, None, rms_norm(config, f"{name}.post_per_layer_input_norm")))
        steps[-1] = replace(steps[-1], factor=f"{name}.layer_scalar")
        return tuple((one,) for one in steps)

    inputs = None
    if size := config.hidden_size_per_layer_input:
        # The product is divided by √hidden before the norm: that is a larger epsilon.
        inputs = LayerInputs(
            size,
            Table("model.embed_tokens_per_layer", config.vocab_size_per_layer_input),
            Source("model.per_layer_model_projection"),
            Norm("model.per_layer_projection_norm", size, eps * config.hidden_size),
            factor=size**0.5,
            scale=2**-0.5,
        )
    readers = [i for i in range(config.num_hidden_layers) if config.source(i) is not None]
    return decoder(
        config,
        layer,
        rms_norm(config, "model.norm"),
        head=Head(soft_cap=config.final_logit_softcapping or 0.0),
        embed_scale=config.hidden_size**0.5,
        layer_inputs=inputs,
        unused=tuple(
            f"model.layers.{index}.self_attn.{part}"
            for index in readers
            for part in ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
        ),
    )


def _attention(config: Config, name: str, index: int) -> Attention:
    assert config.layer_types is not None
    size, kind = config.of_layer(index, "head_dim"), config.layer_types[index]
    source = config.source(index)
    given: dict[str, Any] = {
        "norm": HeadNorm(f"{name}.q_norm", f"{name}.k_norm", config.rms_norm_eps, norms_values=True)
    }
    if source is not None:
        given = {
            "k": None,
            "v": None,
            "shares": source,
            "norm": HeadNorm(f"{name}.q_norm", None, config.rms_norm_eps),
        }
    elif config.attention_k_eq_v and kind == "full_attention":
        given["v"] = Source(f"{name}.k_proj")
    return replace(
        attention(config, name, scale=1.0, **given),
        num_kv_heads=config.of_layer(index, "num_key_value_heads"),
        head_size=size,
        bias=config.attention_bias,
        out_bias=config.attention_bias,
        rope=replace(config.rope(kind), head_size=size),
        window=config.window(index),
    )


def _mlp(config: Config, name: str, index: int, norm: Norm) -> Mix:
    mlp = gated_mlp(config, f"{name}.mlp")
    if config.use_double_wide_mlp and config.source(index) is not None:
        mlp = replace(mlp, size=2 * mlp.size)
    if not config.enable_moe_block:
        return mlp
    size = config.moe_intermediate_size
    assert config.num_experts is not None
    assert config.top_k_experts is not None
    assert size is not None
    router, are_stacked = f"{name}.router", config.are_stacked
    post, sparse, sparse_post = (
        rms_norm(config, f"{name}.{part}")
        for part in (
            "post_feedforward_layernorm_1",
            "pre_feedforward_layernorm_2",
            "post_feedforward_layernorm_2",
        )
    )
    return ExpertsAndMLP(
        mlp,
        gated_experts(
            config,
            name,
            (config.num_experts, config.top_k_experts),
            size=size,
            router=Source(f"{router}.proj"),
            renormalizes=True,
            factors=f"{router}.per_expert_scale",
            **(expert_stacks(f"{name}.experts", size) if are_stacked else {}),
        ),
        (norm, post),
        (sparse, sparse_post),
        rms_norm(config, f"{router}.scale", factor=config.hidden_size**-0.5, is_bare=True),
    )
