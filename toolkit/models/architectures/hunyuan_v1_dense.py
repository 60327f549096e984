"""HunYuan, dense (Tencent, 2025): Llama's decoder with a QK norm after the rotation."""

from typing import Any, ClassVar

from toolkit.models.architectures.llama import llama_layer
from toolkit.models.config.model_config import DecoderConfig, Size
from toolkit.models.describe import Decoder, HeadNorm, Layer
from toolkit.models.parts import decoder, rms_norm

ARCHITECTURES = ("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Model")


class Config(DecoderConfig, kw_only=True):
    fixed: ClassVar[dict[str, tuple[object, ...]]] = {
        "use_qk_norm": (True,),
        "use_rotary_pos_emb": (True,),
    }

    vocab_size: Size = 290943
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False

    def _completed(self, given: dict[str, Any]) -> dict[str, Any]:
        parameters, size = super()._completed(given), self.head_dim or 0
        if parameters["rope_type"] == "dynamic" and parameters.get("alpha"):
            # A fixed base, whatever the length.
            base = parameters["rope_theta"] * parameters["alpha"] ** (size / (size - 2))
            return {"rope_type": "default", "rope_theta": base}
        return parameters


def describe(config: Config) -> Decoder:
    def layer(name: str, index: int) -> Layer:
        q, k = (f"{name}.self_attn.{part}_layernorm" for part in ("query", "key"))
        norm, bias = HeadNorm(q, k, config.rms_norm_eps, is_last=True), config.attention_bias
        return llama_layer(config, name, bias=bias, out_bias=bias, norm=norm)

    return decoder(config, layer, rms_norm(config, "model.norm"))
