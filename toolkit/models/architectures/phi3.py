"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al., 2024): Llama's decoder with fused projections.

LongRoPE (Ding et al., 2024) uses its long factors if --max-model-len is above the length that the
model was first trained for, else the short ones."""

from typing import Any, ClassVar

from toolkit.models.config.model_config import Size, WindowedConfig
from toolkit.models.describe import MLP, Attention, Decoder, Layer
from toolkit.models.parts import decoder, pre_norm, rms_norm
from toolkit.weights.source import Source, consecutive

ARCHITECTURES = ("Phi3ForCausalLM", "Phi3Model")


class Config(WindowedConfig, kw_only=True):
    fixed: ClassVar[dict[str, tuple[object, ...]]] = {
        "full_attn_mod": (1,),
        "interpolate_factor": (1,),
    }

    vocab_size: Size = 32064
    hidden_size: Size = 3072
    intermediate_size: Size = 8192
    max_position_embeddings: Size = 4096
    original_max_position_embeddings: Size | None = 4096
    rms_norm_eps: float = 1e-5
    partial_rotary_factor: float | None = 1.0
    attention_bias: bool = False

    def _completed(self, given: dict[str, Any]) -> dict[str, Any]:
        kind = given.get("rope_type", given.get("type", "default"))
        if kind in ("su", "yarn"):  # names that LongRoPE had
            given = {**given, "rope_type": "longrope"}
        return super()._completed(given)


def describe(config: Config) -> Decoder:
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    assert kv_heads is not None
    assert size is not None

    def layer(name: str, index: int) -> Layer:
        parts = consecutive(heads * size, kv_heads * size, kv_heads * size)
        q, k, v = (Source(f"{name}.self_attn.qkv_proj", part) for part in parts)
        out, scale = Source(f"{name}.self_attn.o_proj"), size**-0.5
        options: dict[str, Any] = {"rope": config.rope(), "window": config.window(index)}
        return pre_norm(
            Attention(heads, kv_heads, size, q, k, v, out, scale, **options),
            rms_norm(config, f"{name}.input_layernorm"),
            fused_mlp(config, f"{name}.mlp"),
            rms_norm(config, f"{name}.post_attention_layernorm"),
        )

    return decoder(config, layer, rms_norm(config, "model.norm"))


def fused_mlp(config: Any, name: str) -> MLP:
    """Describe a gated MLP whose gate and up are one tensor, gate_up_proj."""
    inner = config.intermediate_size
    gate, up = (Source(f"{name}.gate_up_proj", part) for part in consecutive(inner, inner))
    return MLP(inner, config.hidden_act, up, Source(f"{name}.down_proj"), gate)
