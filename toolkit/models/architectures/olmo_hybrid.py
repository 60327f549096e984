"""OLMo Hybrid (OLMo Team, 2025): gated delta nets, every fourth layer attention of OLMo 2."""

from collections.abc import Mapping
from typing import ClassVar

from toolkit.models.architectures.qwen3_next import FULL, LINEAR, DeltaNetConfig, delta_net
from toolkit.models.config.model_config import Size
from toolkit.models.describe import Branch, Decoder, DeltaNet, HeadNorm, Layer
from toolkit.models.parts import attention, decoder, gated_mlp, pre_norm, rms_norm
from toolkit.weights.source import Source

ARCHITECTURES = ("OlmoHybridForCausalLM",)


class Config(DeltaNetConfig, kw_only=True):
    vocab_size: Size = 100352
    hidden_size: Size = 3840
    intermediate_size: Size = 11008
    num_hidden_layers: Size = 32
    num_attention_heads: Size = 30
    max_position_embeddings: Size = 65536
    linear_num_key_heads: Size = 30
    linear_num_value_heads: Size = 30
    linear_key_head_dim: Size = 96
    linear_value_head_dim: Size = 192
    linear_allow_neg_eigval: bool = True
    linear_a_log_min: float | None = None
    linear_a_log_max: float | None = None
    linear_dt_min: float | None = None
    linear_dt_max: float | None = None
    linear_dt_init_floor: float | None = None
    """The last five choose random weights, and change no others."""
    rotates: bool = True
    """Attention rotates queries and keys. Not in the file: else, its `rope_theta` is null."""
    is_renamed: bool = False
    """Norms before MLPs have one name in all layers, as Transformers writes. Not in the file."""

    reads_shapes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.rotates = (self.rope_parameters or {}).get("rope_theta", 0.0) is not None
        if self.layer_types is None and self.num_hidden_layers < self.full_attention_interval:
            self.layer_types = [LINEAR] * (self.num_hidden_layers - 1) + [FULL]
        super().__post_init__()
        assert self.layer_types is not None

        if FULL not in self.layer_types or LINEAR not in self.layer_types:
            raise ValueError("layer_types must have layers of both kinds")

    def read_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.is_renamed = not any(
            name.endswith(".post_attention_layernorm.weight") for name in shapes
        )


def describe(config: Config) -> Decoder:
    def layer(name: str, index: int) -> Layer:
        mlp = gated_mlp(config, f"{name}.mlp")
        if (config.layer_types or [])[index] == LINEAR:
            return pre_norm(
                _net(config, f"{name}.linear_attn"),
                rms_norm(config, f"{name}.attention_layer_norm"),
                mlp,
                rms_norm(config, f"{name}.feedforward_layer_norm"),
            )
        after = "feedforward_layer_norm" if config.is_renamed else "post_attention_layernorm"
        norms = (rms_norm(config, f"{name}.{one}") for one in (after, "post_feedforward_layernorm"))
        attn, bias = f"{name}.self_attn", config.attention_bias
        mix = attention(
            config,
            attn,
            bias=bias,
            out_bias=bias,
            norm=HeadNorm(f"{attn}.q_norm", f"{attn}.k_norm", config.rms_norm_eps, "all"),
            rope=config.rope() if config.rotates else None,
        )
        pairs = zip((mix, mlp), norms, strict=True)
        return tuple((Branch(one, None, norm),) for one, norm in pairs)

    return decoder(config, layer, rms_norm(config, "model.norm"))


def _net(config: Config, name: str) -> DeltaNet:
    parts = {part: Source(f"{name}.{part}_proj") for part in "qkvba"}
    return delta_net(
        config,
        name,
        **parts,
        z=Source(f"{name}.g_proj"),
        out=Source(f"{name}.o_proj"),
        convolutions=tuple(f"{name}.{part}_conv1d" for part in "qkv"),
        norm=f"{name}.o_norm",
        eps=1e-5,
        rate=2.0 if config.linear_allow_neg_eigval else 1.0,
    )
