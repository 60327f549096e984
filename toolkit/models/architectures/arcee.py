"""AFM (Arcee AI, 2025): Llama's decoder with an MLP of squared ReLU, without a gate."""

from toolkit.models.config.model_config import DecoderConfig, Size
from toolkit.models.describe import MLP, Decoder, Layer
from toolkit.models.parts import attention, decoder, pre_norm, rms_norm
from toolkit.weights.source import Source

ARCHITECTURES = ("ArceeForCausalLM", "ArceeModel")


class Config(DecoderConfig, kw_only=True):
    hidden_size: Size = 2560
    intermediate_size: Size = 18432
    hidden_act: str = "relu2"
    max_position_embeddings: Size = 4096
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False


def describe(config: Config) -> Decoder:
    def layer(name: str, index: int) -> Layer:
        bias = config.attention_bias
        up, down = (Source(f"{name}.mlp.{part}_proj") for part in ("up", "down"))
        return pre_norm(
            attention(config, f"{name}.self_attn", bias=bias, out_bias=bias, rope=config.rope()),
            rms_norm(config, f"{name}.input_layernorm"),
            MLP(config.intermediate_size, config.hidden_act, up, down, bias=config.mlp_bias),
            rms_norm(config, f"{name}.post_attention_layernorm"),
        )

    return decoder(config, layer, rms_norm(config, "model.norm"))
