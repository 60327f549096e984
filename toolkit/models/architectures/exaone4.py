"""EXAONE 4 (LG AI Research, 2025): norms after attention and MLP, global layers do not rotate."""

from toolkit.models.config.model_config import Size, WindowedConfig
from toolkit.models.describe import Branch, Decoder, HeadNorm, Layer
from toolkit.models.parts import attention, decoder, gated_mlp, rms_norm

ARCHITECTURES = ("Exaone4ForCausalLM", "Exaone4Model")


class Config(WindowedConfig, kw_only=True):
    vocab_size: Size = 102400
    intermediate_size: Size = 16384
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = 4096
    sliding_window_pattern: str | int | None = 4

    def __post_init__(self) -> None:
        every = self.sliding_window_pattern if self.sliding_window else 0
        every = len(every) if isinstance(every, str) else every  # such as "LLLG"
        if self.layer_types is None:
            self.layer_types = [
                "sliding_attention" if every and (i + 1) % every else "full_attention"
                for i in range(self.num_hidden_layers)
            ]
        super().__post_init__()


def describe(config: Config) -> Decoder:
    def layer(name: str, index: int) -> Layer:
        attn, window = f"{name}.self_attn", config.window(index)
        rope = config.rope() if window or not config.sliding_window else None
        norm = HeadNorm(f"{attn}.q_norm", f"{attn}.k_norm", config.rms_norm_eps)
        mix = attention(config, attn, norm=norm, rope=rope, window=window)
        after = rms_norm(config, f"{name}.post_attention_layernorm")
        mlp_after = rms_norm(config, f"{name}.post_feedforward_layernorm")
        mlp = gated_mlp(config, f"{name}.mlp")
        return ((Branch(mix, None, after),), (Branch(mlp, None, mlp_after),))

    return decoder(config, layer, rms_norm(config, "model.norm"))
